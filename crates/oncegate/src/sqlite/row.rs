//! A record as a row that people can read.

use bytes::Bytes;
use oncegate_core::key::{Fingerprint, Scope, StoreKey};
use oncegate_core::record::{Fence, Record, Recovery, State, StoreTime, Token, TokenTag};
use rusqlite::types::FromSql;
use rusqlite::{Connection, OptionalExtension, Row, params};

use super::clock::{self, Remembered};
use super::errors::Trouble;

/// The tables. A record's own end comes before its result, so that a purge never reads long results.
pub(super) const SCHEMA: &str = "
CREATE TABLE records (
    key           TEXT    NOT NULL PRIMARY KEY,
    state         TEXT    NOT NULL CHECK (state IN ('pending', 'released', 'completed', 'failed')),
    expires_at_ms INTEGER NOT NULL,               -- a lease or delay ends 30 days before
    owner         BLOB    NOT NULL,               -- pending: the token; otherwise the tag of who ended it
    attempt       INTEGER NOT NULL,               -- 0 for completed: it does not matter any more
    recovery      TEXT    NOT NULL CHECK (recovery IN ('none', 'earlier', 'takeover')),
    fence         INTEGER,
    fingerprint   BLOB,
    handed_over   INTEGER NOT NULL CHECK (handed_over IN (0, 1)),
    reason        TEXT    NOT NULL,
    result        BLOB                            -- completed alone
) STRICT, WITHOUT ROWID;

CREATE TABLE descriptors (
    scope      TEXT NOT NULL PRIMARY KEY,
    descriptor TEXT NOT NULL
) STRICT, WITHOUT ROWID;

CREATE TABLE clock (
    id         INTEGER NOT NULL PRIMARY KEY CHECK (id = 1),
    reached_us INTEGER NOT NULL,                  -- the store's clock never goes back behind this
    ahead_us   INTEGER NOT NULL                   -- how far it is ahead of the machine's
) STRICT;

INSERT INTO clock (id, reached_us, ahead_us) VALUES (1, 0, 0);
";

const READ: &str = "SELECT state, expires_at_ms, owner, attempt, recovery, fence, fingerprint, handed_over, \
                    reason, result FROM records WHERE key = ?1";

/// An upsert would open a temporary table each time; on a table whose only index is its key, this overwrites
/// the row in place.
const WRITE: &str = "REPLACE INTO records (key, state, expires_at_ms, owner, attempt, recovery, fence, \
                     fingerprint, handed_over, reason, result) \
                     VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11)";

/// The record of a key, if there is a row for it. It may have expired.
pub(super) fn read(connection: &Connection, key: &StoreKey) -> Result<Option<Record>, Trouble> {
    let mut statement = connection.prepare_cached(READ)?;
    let mut rows = statement.query(params![key.as_str()])?;
    let Some(row) = rows.next()? else { return Ok(None) };
    let decoded = decode(row).map_err(|reason| Trouble::Unreadable { key: key.clone(), reason })?;
    Ok(Some(decoded))
}

/// Puts a record in the place of whatever row the key has.
pub(super) fn write(connection: &Connection, key: &StoreKey, record: &Record) -> rusqlite::Result<()> {
    let columns = Columns::of(&record.state);
    connection.prepare_cached(WRITE)?.execute(params![
        key.as_str(),
        columns.state,
        i64::try_from(record.expires_at.millis()).unwrap_or(i64::MAX),
        columns.owner,
        columns.attempt,
        columns.recovery,
        columns.fence.map(|Fence(fence)| i64::try_from(fence).unwrap_or(i64::MAX)),
        record.fingerprint.as_ref().map(|fingerprint| fingerprint.as_bytes().as_slice()),
        columns.handed_over,
        columns.reason,
        columns.result,
    ])?;
    Ok(())
}

/// A state, spread over its columns.
struct Columns<'a> {
    state: &'static str,
    owner: &'a [u8],
    attempt: u8,
    recovery: &'static str,
    fence: Option<Fence>,
    handed_over: bool,
    reason: &'a str,
    result: Option<&'a [u8]>,
}

impl<'a> Columns<'a> {
    fn of(state: &'a State) -> Self {
        let (name, owner) = match state {
            State::Pending { token, .. } => ("pending", token.as_bytes().as_slice()),
            State::Released { by, .. } => ("released", by.0.as_slice()),
            State::Completed { by, .. } => ("completed", by.0.as_slice()),
            State::Failed { by, .. } => ("failed", by.0.as_slice()),
        };
        let columns = Self {
            state: name,
            owner,
            attempt: 0,
            recovery: "none",
            fence: None,
            handed_over: false,
            reason: "",
            result: None,
        };
        match state {
            &State::Pending { attempt, recovery, fence, .. } => {
                let recovery = match recovery {
                    Recovery::None => "none",
                    Recovery::Earlier => "earlier",
                    Recovery::Takeover => "takeover",
                };
                Self { attempt, recovery, fence, ..columns }
            }
            State::Released { attempt, recovered, fence, reason, .. } => {
                let recovery = if *recovered { "earlier" } else { "none" };
                Self { attempt: *attempt, recovery, fence: *fence, reason, ..columns }
            }
            State::Completed { result, .. } => Self { result: Some(result), ..columns },
            State::Failed { attempt, handed_over, reason, .. } => {
                Self { attempt: *attempt, handed_over: *handed_over, reason, ..columns }
            }
        }
    }
}

/// Reads a row that may hold anything: nothing is guessed, and what is wrong is said without the data.
fn decode(row: &Row<'_>) -> Result<Record, String> {
    let expires_at_ms: i64 = column(row, "expires_at_ms")?;
    let fingerprint: Option<[u8; Fingerprint::BYTES]> = column(row, "fingerprint")?;
    let fence: Option<i64> = column(row, "fence")?;
    let fence = fence.map(|fence| u64::try_from(fence).map(Fence).map_err(|_| "fence is negative"));
    let fence = fence.transpose()?;
    let attempt: u8 = column(row, "attempt")?;
    let recovery: String = column(row, "recovery")?;
    let recovery = match recovery.as_str() {
        "none" => Recovery::None,
        "earlier" => Recovery::Earlier,
        "takeover" => Recovery::Takeover,
        _ => return Err("recovery is of no known kind".to_owned()),
    };
    let state: String = column(row, "state")?;
    let state = match state.as_str() {
        "pending" => {
            let token: [u8; 16] = column(row, "owner")?;
            State::Pending { token: Token::from(token), attempt, recovery, fence }
        }
        "released" => {
            let (by, reason) = (TokenTag(column(row, "owner")?), column(row, "reason")?);
            State::Released { by, attempt, recovered: recovery.recovered(), fence, reason }
        }
        "completed" => {
            let result: Vec<u8> = column(row, "result")?;
            State::Completed { by: TokenTag(column(row, "owner")?), result: Bytes::from(result) }
        }
        "failed" => {
            let (by, reason) = (TokenTag(column(row, "owner")?), column(row, "reason")?);
            State::Failed { by, attempt, handed_over: column(row, "handed_over")?, reason }
        }
        _ => return Err("state is of no known kind".to_owned()),
    };
    // A record that expired before 1970 has expired, as one of 1970 has.
    let expires_at = StoreTime::from_millis(u64::try_from(expires_at_ms).unwrap_or_default());
    Ok(Record { expires_at, fingerprint: fingerprint.map(Fingerprint::from_bytes), state })
}

fn column<T: FromSql>(row: &Row<'_>, name: &str) -> Result<T, String> {
    row.get(name).map_err(|_| format!("column {name} holds something else"))
}

/// What time it is; within a transaction that writes, `keep` what the file must remember of it.
pub(super) fn now(connection: &Connection, keep: bool) -> rusqlite::Result<StoreTime> {
    let remembered = connection
        .prepare_cached("SELECT reached_us, ahead_us FROM clock WHERE id = 1")?
        .query_row([], |row| Ok(Remembered { reached_us: row.get(0)?, ahead_us: row.get(1)? }))?;
    let (now, change) = clock::now(clock::wall_us(), remembered);
    if let (Some(change), true) = (change, keep) {
        connection
            .prepare_cached("UPDATE clock SET reached_us = ?1, ahead_us = ?2 WHERE id = 1")?
            .execute([change.reached_us, change.ahead_us])?;
    }
    Ok(now)
}

/// Keeps a scope's descriptor if it is the expected one that is there; returns what is there afterwards.
pub(super) fn describe(
    connection: &Connection,
    scope: &Scope,
    expected: Option<&str>,
    proposed: &str,
) -> rusqlite::Result<String> {
    let held = descriptor(connection, scope)?;
    if held.as_deref() != expected {
        return Ok(held.unwrap_or_else(|| expected.unwrap_or_default().to_owned()));
    }
    connection.execute(
        "INSERT INTO descriptors (scope, descriptor) VALUES (?1, ?2) \
         ON CONFLICT (scope) DO UPDATE SET descriptor = ?2",
        [scope.as_str(), proposed],
    )?;
    Ok(proposed.to_owned())
}

/// A scope's descriptor.
pub(super) fn descriptor(connection: &Connection, scope: &Scope) -> rusqlite::Result<Option<String>> {
    connection
        .query_row("SELECT descriptor FROM descriptors WHERE scope = ?1", [scope.as_str()], |row| row.get(0))
        .optional()
}

/// Lets time pass for a key.
#[cfg(feature = "testing")]
pub(super) fn pass(
    connection: &Connection,
    key: &StoreKey,
    time: std::time::Duration,
) -> rusqlite::Result<()> {
    let time_ms = i64::try_from(time.as_millis()).unwrap_or(i64::MAX);
    let pass = "UPDATE records SET expires_at_ms = expires_at_ms - ?2 WHERE key = ?1";
    connection.execute(pass, params![key.as_str(), time_ms]).map(|_| ())
}
