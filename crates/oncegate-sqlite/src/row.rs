//! A record as a row with readable columns.

mod columns;

use std::collections::HashMap;

use oncegate_core::key::{Scope, StoreKey};
use oncegate_core::record::{Record, State, StoreTime, Token};
use oncegate_core::rules::{Operation, Reply, apply};
use oncegate_core::store::Command;
use rusqlite::{CachedStatement, Connection, Error, OptionalExtension, params};

use self::columns::{Columns, decode, millis, number};
use super::clock::{self, Remembered};
use super::errors::Trouble;

/// The tables.
///
/// Keys have no order. In a table sorted by key, a batch of 64 would rewrite 64 pages for its
/// claims and the same 64 for its completions. Rows in insertion order are adjacent: only the index
/// of the keys is changed in many places, and only by claims. The expiry column precedes the
/// result, so that a purge never reads long results.
///
/// The checks do not use `IN`, because SQLite makes a temporary table for it each time a row is
/// written.
pub(super) const SCHEMA: &str = "
CREATE TABLE records (
    id            INTEGER NOT NULL PRIMARY KEY,   -- the order of arrival
    key           TEXT    NOT NULL UNIQUE,
    state         TEXT    NOT NULL CHECK (state = 'pending' OR state = 'released'
                                          OR state = 'completed' OR state = 'failed'),
    expires_at_ms INTEGER NOT NULL,               -- a lease or delay ends 30 days before
    owner         BLOB    NOT NULL,               -- pending: the token; otherwise the tag of who ended it
    attempt       INTEGER NOT NULL,               -- 0 for completed: it does not matter any more
    recovery      TEXT    NOT NULL CHECK (recovery = 'none' OR recovery = 'earlier' OR recovery = 'takeover'),
    fencing_token INTEGER,
    fingerprint   BLOB,
    handed_over   INTEGER NOT NULL CHECK (handed_over IN (0, 1)),
    reason        TEXT    NOT NULL,
    result        BLOB                            -- completed alone
) STRICT;

CREATE TABLE descriptors (
    scope      TEXT NOT NULL PRIMARY KEY,
    descriptor TEXT NOT NULL
) STRICT, WITHOUT ROWID;

CREATE TABLE clock (
    id         INTEGER NOT NULL PRIMARY KEY CHECK (id = 1),
    -- the store's clock never goes back behind this; the year 3000, beyond which only damage can be
    reached_us INTEGER NOT NULL CHECK (reached_us BETWEEN 0 AND 32503680000000000),
    -- how far it is ahead of the machine's
    ahead_us   INTEGER NOT NULL CHECK (ahead_us BETWEEN -32503680000000000 AND 32503680000000000)
) STRICT;

INSERT INTO clock (id, reached_us, ahead_us) VALUES (1, 0, 0);
";

const READ: &str = "SELECT state, expires_at_ms, owner, attempt, recovery, fencing_token, fingerprint, handed_over, \
                    reason, result, id FROM records WHERE key = ?1";

const INSERT: &str = "INSERT INTO records (key, state, expires_at_ms, owner, attempt, recovery, fencing_token, \
                      fingerprint, handed_over, reason, result) \
                      VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11) ON CONFLICT (key) DO NOTHING";

const UPDATE: &str = "UPDATE records SET state = ?2, expires_at_ms = ?3, owner = ?4, attempt = ?5, recovery = ?6, \
                      fencing_token = ?7, fingerprint = ?8, handed_over = ?9, reason = ?10, result = ?11 WHERE id = ?1";

/// Inserts the claim of a key that has no row, as the rules do for an absent record; does nothing
/// if there is a row.
const CLAIM_ABSENT: &str = "INSERT INTO records (key, state, expires_at_ms, owner, attempt, recovery, fencing_token, \
                            fingerprint, handed_over, reason) \
                            VALUES (?1, 'pending', ?2, ?3, 1, 'none', ?4, ?5, 0, '') ON CONFLICT (key) DO NOTHING";

/// Completes the record of a row if the owner token matches; does nothing otherwise.
const COMPLETE_OWN: &str = "UPDATE records SET state = 'completed', expires_at_ms = ?3, owner = ?4, attempt = 0, \
                            recovery = 'none', fencing_token = NULL, handed_over = 0, reason = '', result = ?5 \
                            WHERE id = ?7 AND key = ?1 AND owner = ?2 AND state = 'pending' AND expires_at_ms >= ?6";

/// The rows of claims that are not completed yet, so that their completions need not search the
/// index of the keys.
///
/// These are hints. The transaction of a claim may have been rolled back, and its row id may belong
/// to another record by now, so key and token are compared.
///
/// Benchmark: `scripts/bench sqlite`. With completions that search the index of the keys instead,
/// its workload took 1.08 and 1.11 times the processor time with 1,024 in flight and 200,000
/// records held (medians of eight and of seven pairs of runs on a busy machine, 0.91 to 1.26), and
/// 0.99 to 1.04 times with 256 in flight.
#[derive(Default)]
pub(super) struct Claimed {
    ids: HashMap<Token, i64>,
}

impl Claimed {
    /// Claims that are never completed leave their hints behind; at this many hints, all are
    /// dropped.
    const MOST: usize = 65_536;

    fn add(&mut self, token: Token, id: i64) {
        if self.ids.len() == Self::MOST {
            self.ids.clear();
        }
        self.ids.insert(token, id);
    }

    fn take(&mut self, token: &Token) -> Option<i64> {
        self.ids.remove(token)
    }
}

/// Accesses the rows of records, with statements that are prepared once for many keys.
pub(super) struct Rows<'c> {
    read: CachedStatement<'c>,
    insert: CachedStatement<'c>,
    update: CachedStatement<'c>,
    claim_absent: CachedStatement<'c>,
    complete_own: CachedStatement<'c>,
}

impl<'c> Rows<'c> {
    pub(super) fn of(connection: &'c Connection) -> rusqlite::Result<Self> {
        Ok(Self {
            read: connection.prepare_cached(READ)?,
            insert: connection.prepare_cached(INSERT)?,
            update: connection.prepare_cached(UPDATE)?,
            claim_absent: connection.prepare_cached(CLAIM_ABSENT)?,
            complete_own: connection.prepare_cached(COMPLETE_OWN)?,
        })
    }

    /// Runs a command on the row of its key, inside the caller's transaction.
    ///
    /// Nearly every claim finds no row, and nearly every completion finds its own claim. For these,
    /// one statement implements the rules without a read before. All other commands read the record
    /// and apply the rules.
    pub(super) fn execute(
        &mut self,
        now: StoreTime,
        command: &Command,
        claimed: &mut Claimed,
    ) -> Result<Reply, Trouble> {
        let settled = match command.operation {
            Operation::Claim { .. } => self.claim_absent(now, command, claimed)?,
            Operation::Complete { .. } => self.complete_own(now, command, claimed)?,
            _ => None,
        };
        settled.map_or_else(|| self.by_the_rules(now, command), Ok)
    }

    fn claim_absent(
        &mut self,
        now: StoreTime,
        command: &Command,
        claimed: &mut Claimed,
    ) -> rusqlite::Result<Option<Reply>> {
        let (granted, reply) = apply(now, None, &command.operation);
        let Some(Record {
            expires_at,
            fingerprint,
            state:
                State::Pending {
                    token,
                    fencing_token,
                    ..
                },
        }) = granted
        else {
            return Ok(None);
        };
        let inserted = self.claim_absent.insert(params![
            command.key.as_str(),
            millis(expires_at),
            token.as_bytes().as_slice(),
            fencing_token.map(number),
            fingerprint
                .as_ref()
                .map(|fingerprint| fingerprint.as_bytes().as_slice()),
        ]);
        match inserted {
            Ok(id) => {
                claimed.add(token, id);
                Ok(Some(reply))
            }
            Err(Error::StatementChangedRows(0)) => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn complete_own(
        &mut self,
        now: StoreTime,
        command: &Command,
        claimed: &mut Claimed,
    ) -> rusqlite::Result<Option<Reply>> {
        let Operation::Complete {
            token,
            result,
            retention,
            ..
        } = &command.operation
        else {
            return Ok(None);
        };
        let Some(id) = claimed.take(token) else {
            return Ok(None);
        };
        let rows = self.complete_own.execute(params![
            command.key.as_str(),
            token.as_bytes().as_slice(),
            millis(now + *retention),
            token.tag().0.as_slice(),
            &result[..],
            millis(now),
            id,
        ])?;
        Ok((rows == 1).then_some(Reply::Applied { recreated: false }))
    }

    fn by_the_rules(&mut self, now: StoreTime, command: &Command) -> Result<Reply, Trouble> {
        let Command { key, operation } = command;
        let (id, before) = self.find(key)?.unzip();
        let (after, reply) = apply(now, before.clone(), operation);
        match (after, id) {
            (Some(after), Some(id)) if before.as_ref() != Some(&after) => {
                self.update(id, &after)?;
            }
            (Some(after), None) => _ = self.insert(key, &after)?,
            // Unchanged, or expired: the purge removes expired rows.
            _ => {}
        }
        Ok(reply)
    }

    /// The record of a key, if there is a row for it. It may have expired.
    pub(super) fn read(&mut self, key: &StoreKey) -> Result<Option<Record>, Trouble> {
        Ok(self.find(key)?.map(|(_, record)| record))
    }

    /// The row of a key and the record in it, if there is one. It may have expired.
    fn find(&mut self, key: &StoreKey) -> Result<Option<(i64, Record)>, Trouble> {
        let mut rows = self.read.query([key.as_str()])?;
        let Some(row) = rows.next()? else {
            return Ok(None);
        };
        let decoded = decode(row).map_err(|reason| Trouble::Unreadable {
            key: key.clone(),
            reason,
        })?;
        Ok(Some((row.get(10)?, decoded)))
    }

    /// Inserts a row for the record; `false` when the key already has one, which is left unchanged.
    pub(super) fn insert(&mut self, key: &StoreKey, record: &Record) -> rusqlite::Result<bool> {
        Columns::of(record)
            .run(&mut self.insert, &key.as_str())
            .map(|rows| rows == 1)
    }

    fn update(&mut self, id: i64, record: &Record) -> rusqlite::Result<()> {
        Columns::of(record).run(&mut self.update, &id).map(|_| ())
    }
}

/// The record of a key, if there is a row for it. It may have expired.
#[allow(
    dead_code,
    reason = "for a completion inside a transaction of the user's own, and for tests"
)]
pub(super) fn read(connection: &Connection, key: &StoreKey) -> Result<Option<Record>, Trouble> {
    Rows::of(connection)?.read(key)
}

/// Inserts or replaces the row of the key.
#[allow(
    dead_code,
    reason = "for a completion inside a transaction of the user's own, and for tests"
)]
pub(super) fn write(
    connection: &Connection,
    key: &StoreKey,
    record: &Record,
) -> rusqlite::Result<()> {
    let mut rows = Rows::of(connection)?;
    if rows.insert(key, record)? {
        return Ok(());
    }
    let id = "SELECT id FROM records WHERE key = ?1";
    let id = connection
        .prepare_cached(id)?
        .query_row([key.as_str()], |row| row.get(0))?;
    rows.update(id, record)
}

/// The store's time. Within a transaction that writes, `keep` also stores the clock's state in the
/// file.
pub(super) fn now(connection: &Connection, keep: bool) -> rusqlite::Result<StoreTime> {
    let remembered = connection
        .prepare_cached("SELECT reached_us, ahead_us FROM clock WHERE id = 1")?
        .query_row([], |row| {
            Ok(Remembered {
                reached_us: row.get(0)?,
                ahead_us: row.get(1)?,
            })
        })?;
    let (now, change) = clock::now(clock::wall_us(), remembered);
    if let (Some(change), true) = (change, keep) {
        connection
            .prepare_cached("UPDATE clock SET reached_us = ?1, ahead_us = ?2 WHERE id = 1")?
            .execute([change.reached_us, change.ahead_us])?;
    }
    Ok(now)
}

/// Stores a scope's descriptor if the current one is the expected one; returns the descriptor
/// afterwards.
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
pub(super) fn descriptor(
    connection: &Connection,
    scope: &Scope,
) -> rusqlite::Result<Option<String>> {
    connection
        .query_row(
            "SELECT descriptor FROM descriptors WHERE scope = ?1",
            [scope.as_str()],
            |row| row.get(0),
        )
        .optional()
}

/// Moves the expiry of a key's record earlier, as if time had passed.
#[cfg(feature = "testing")]
pub(super) fn pass(
    connection: &Connection,
    key: &StoreKey,
    time: std::time::Duration,
) -> rusqlite::Result<()> {
    let time_ms = i64::try_from(time.as_millis()).unwrap_or(i64::MAX);
    let pass = "UPDATE records SET expires_at_ms = max(expires_at_ms - ?2, 0) WHERE key = ?1";
    connection
        .execute(pass, params![key.as_str(), time_ms])
        .map(|_| ())
}
