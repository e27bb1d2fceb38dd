//! A record as a row with readable columns, and rows as the parameters of one statement.

use bytes::Bytes;
use oncegate_core::key::{Fingerprint, StoreKey};
use oncegate_core::record::{
    FencingToken, Record, Recovery, State, StoreTime, Token, TokenTag, whole_millis,
};
use oncegate_runtime::transaction::Completing;
use tokio_postgres::Row;
use tokio_postgres::types::{FromSql, ToSql};

/// The property of a transaction that shows that it was begun here. Without `READ ONLY` it has no
/// other effect.
pub(super) const MARK: &str = "DEFERRABLE";

/// An expression that is 0 in a transaction that was begun with [`MARK`], and an error everywhere
/// else.
///
/// A statement that is sent behind a BEGIN is executed, and commits by itself, if only the BEGIN
/// fails: because a cancellation arrives late, or because a pooler answers an error and goes on.
/// The server gives every transaction that is not begun with a property its default, so this cannot
/// be left of an earlier one.
macro_rules! zero_if_begun {
    () => {
        "0 / (current_setting('transaction_deferrable') = 'on' \
         AND current_setting('default_transaction_deferrable') = 'off')::int"
    };
}

/// Locks the rows of the keys in the order of the keys, and inserts those that are missing; returns
/// the inserted ones, which hold nothing yet.
///
/// `WHERE false` keeps an existing row as it is, but locks it: PostgreSQL locks a row before it
/// looks at the condition. One pass in one order is why crossing batches do not deadlock. It fails
/// outside of the transaction that was begun for it.
pub(super) const LOCK: &str = concat!(
    "INSERT INTO oncegate_records AS r (key, state, expires_at_ms, owner, attempt, recovery, handed_over, reason) \
     SELECT k, 'pending', (SELECT ",
    zero_if_begun!(),
    "), ''::bytea, 0, 'none', false, '' FROM unnest($1::text[]) AS k ORDER BY k COLLATE \"C\" \
     ON CONFLICT (key) DO UPDATE SET state = r.state WHERE false RETURNING key"
);

/// Finds the keys whose row another transaction has locked.
pub(super) const HELD: &str = "\
WITH free AS (SELECT key FROM oncegate_records WHERE key = ANY($1::text[]) FOR UPDATE SKIP LOCKED) \
SELECT key FROM oncegate_records WHERE key = ANY($1::text[]) AND key NOT IN (SELECT key FROM free)";

/// Reads rows and the server's clock. There is always a row; one without a key contains only the
/// clock.
///
/// A standby is marked as such, because its data may be old. `waits` is whether commits wait for
/// standbys.
pub(super) const READ: &str = "\
SELECT c.now_us, pg_is_in_recovery() AS standby, current_setting('synchronous_standby_names') <> '' \
AND current_setting('synchronous_commit') NOT IN ('off', 'local') AS waits, r.* \
FROM (SELECT floor(extract(epoch FROM clock_timestamp()) * 1000000)::bigint AS now_us) AS c \
LEFT JOIN (SELECT key, state, expires_at_ms, owner, attempt, recovery, fencing_token, fingerprint, \
handed_over, reason, result FROM oncegate_records WHERE key = ANY($1::text[])) AS r ON true";

/// Reads a scope's descriptor. There is always a row. A standby is marked as such: an old
/// descriptor looks like a loss.
pub(super) const DESCRIPTOR: &str = "\
SELECT (SELECT descriptor FROM oncegate_descriptors WHERE scope = $1) AS descriptor, pg_is_in_recovery() AS standby";

/// Waits until the synchronous standbys have everything that was committed before; does nothing
/// where there are none.
///
/// A commit is visible once its wait has ended, also when the wait was interrupted. A transaction
/// that writes is behind it in the log, so a wait for this one covers that one. The message itself
/// has no meaning.
pub(super) const CONFIRM: &str = "\
SELECT pg_logical_emit_message(true, 'oncegate', ''::text) WHERE current_setting('synchronous_standby_names') <> '' \
AND current_setting('synchronous_commit') NOT IN ('off', 'local')";

/// Reads one row and the server's clock.
pub(super) const READ_ONE: &str = "\
SELECT floor(extract(epoch FROM clock_timestamp()) * 1000000)::bigint AS now_us, \
key, state, expires_at_ms, owner, attempt, recovery, fencing_token, fingerprint, handed_over, reason, result \
FROM oncegate_records WHERE key = $1";

/// Writes records into existing rows, and removes other rows.
pub(super) const WRITE: &str = "\
WITH gone AS (DELETE FROM oncegate_records WHERE key = ANY($12::text[])) \
UPDATE oncegate_records AS r SET state = n.state, expires_at_ms = n.expires_at_ms, owner = n.owner, \
attempt = n.attempt, recovery = n.recovery, fencing_token = n.fencing_token, fingerprint = n.fingerprint, \
handed_over = n.handed_over, reason = n.reason, result = n.result \
FROM unnest($1::text[], $2::text[], $3::bigint[], $4::bytea[], $5::smallint[], $6::text[], $7::bigint[], \
$8::bytea[], $9::boolean[], $10::text[], $11::bytea[]) \
AS n(key, state, expires_at_ms, owner, attempt, recovery, fencing_token, fingerprint, handed_over, reason, result) \
WHERE r.key = n.key";

/// Claims the keys that have no row, in the order of the keys, and skips the others. Returns the
/// claimed ones, all in one row, which is less to send and to read than one row each. It writes
/// what the rules give for an absent record. The clock is read once, not for each row.
pub(super) const CLAIM_ABSENT: &str = "\
WITH c AS MATERIALIZED (SELECT floor(extract(epoch FROM clock_timestamp()) * 1000000)::bigint AS now_us), \
done AS (INSERT INTO oncegate_records AS r (key, state, expires_at_ms, owner, attempt, recovery, fencing_token, \
fingerprint, handed_over, reason) \
SELECT n.key, 'pending', c.now_us / 1000 + n.expires_in_ms, n.token, 1, 'none', \
CASE WHEN n.fenced THEN c.now_us END, n.fingerprint, false, '' \
FROM c, unnest($1::text[], $2::bytea[], $3::bigint[], $4::bytea[], $5::boolean[]) \
AS n(key, token, expires_in_ms, fingerprint, fenced) ORDER BY n.key COLLATE \"C\" \
ON CONFLICT (key) DO NOTHING RETURNING key, fencing_token) \
SELECT array_agg(key) AS keys, array_agg(fencing_token) AS fencing_tokens FROM done";

/// Completes the records whose owner token matches, as [`COMPLETE`] does, and skips the others.
/// Returns the completed ones, all in one row.
pub(super) const COMPLETE_OWN: &str = "\
WITH c AS MATERIALIZED (SELECT floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint AS now_ms), \
done AS (UPDATE oncegate_records AS r SET state = 'completed', owner = substring(r.owner FOR 4), attempt = 0, \
recovery = 'none', fencing_token = NULL, handed_over = false, reason = '', result = n.result, \
expires_at_ms = c.now_ms + n.retention_ms \
FROM c, unnest($1::text[], $2::bytea[], $3::bytea[], $4::bigint[]) AS n(key, token, result, retention_ms) \
WHERE r.key = n.key AND r.state = 'pending' AND r.owner = n.token AND r.expires_at_ms >= c.now_ms \
RETURNING r.key) \
SELECT array_agg(key) AS keys, NULL::bigint[] AS fencing_tokens FROM done";

/// Completes one record if the owner token matches, in the user's transaction: exactly those
/// records that [`Completing::apply`](oncegate_runtime::Completing::apply) completes.
pub(super) const COMPLETE: &str = "\
UPDATE oncegate_records SET state = 'completed', owner = substring(owner FOR 4), attempt = 0, recovery = 'none', \
fencing_token = NULL, handed_over = false, reason = '', result = $3, \
expires_at_ms = floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint + $4 \
WHERE key = $1 AND state = 'pending' AND owner = $2 \
AND expires_at_ms >= floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint";

/// Writes COMPLETED without a result for a key that has no record, in a transaction that the
/// runtime opens: what the rules give for a claim and its completion at this instant. Returns where
/// the row is, and in which transaction. It fails outside of the transaction that was begun for it.
pub(super) const COMPLETE_ABSENT: &str = concat!(
    "INSERT INTO oncegate_records AS r (key, state, expires_at_ms, owner, attempt, recovery, fingerprint, handed_over, \
     reason, result) \
     VALUES ($1, 'completed', floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint + $2 + ",
    zero_if_begun!(),
    ", $3, 0, 'none', $4, false, '', ''::bytea) ON CONFLICT (key) DO NOTHING \
     RETURNING r.ctid::text AS ctid, pg_current_xact_id()::text AS xid, \
     current_setting('synchronous_commit') = 'off' AS asynchronous"
);

/// Adds the result to a row that the same transaction has inserted.
pub(super) const ADD_RESULT: &str =
    "UPDATE oncegate_records SET result = $3 WHERE ctid = $1::text::tid AND key = $2";

/// Does what [`COMPLETE_ABSENT`] does for many keys, in the order of the keys, and skips those that
/// have a record. Returns the keys that it has taken and where their rows are, all in one row.
pub(super) const COMPLETE_ALL_ABSENT: &str = concat!(
    "WITH c AS MATERIALIZED (SELECT floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint + ",
    zero_if_begun!(),
    " AS now_ms), \
     done AS (INSERT INTO oncegate_records AS r (key, state, expires_at_ms, owner, attempt, recovery, fingerprint, \
     handed_over, reason, result) \
     SELECT n.key, 'completed', c.now_ms + n.retention_ms, n.tag, 0, 'none', n.fingerprint, false, '', ''::bytea \
     FROM c, unnest($1::text[], $2::bigint[], $3::bytea[], $4::bytea[]) AS n(key, retention_ms, tag, fingerprint) \
     ORDER BY n.key COLLATE \"C\" ON CONFLICT (key) DO NOTHING RETURNING r.key, r.ctid::text AS place) \
     SELECT array_agg(key) AS keys, array_agg(place) AS places, pg_current_xact_id()::text AS xid, \
     current_setting('synchronous_commit') = 'off' AS asynchronous FROM done"
);

/// Adds results to rows that the same transaction has inserted. Never prepare it: the plan for a
/// small table would read all of a large one.
pub(super) const ADD_RESULTS: &str = "\
UPDATE oncegate_records AS r SET result = n.result \
FROM unnest($1::text[], $2::text[], $3::bytea[]) AS n(place, key, result) \
WHERE r.ctid = n.place::tid AND r.key = n.key";

/// The parameters of [`COMPLETE_ALL_ABSENT`]: one array for each column.
pub(super) struct Completions<'a> {
    pub(super) keys: Vec<&'a str>,
    pub(super) retentions_ms: Vec<i64>,
    pub(super) tags: Vec<Vec<u8>>,
    pub(super) fingerprints: Vec<Option<Vec<u8>>>,
}

impl<'a> Completions<'a> {
    pub(super) fn of(batch: &'a [Completing]) -> Self {
        Self {
            keys: batch.iter().map(|one| one.key().as_str()).collect(),
            retentions_ms: batch.iter().map(retention_ms).collect(),
            tags: batch
                .iter()
                .map(|one| one.token().tag().0.to_vec())
                .collect(),
            fingerprints: batch
                .iter()
                .map(|one| one.fingerprint().map(|digest| digest.as_bytes().to_vec()))
                .collect(),
        }
    }
}

/// The retention of a completed record, in whole milliseconds.
pub(super) fn retention_ms(completing: &Completing) -> i64 {
    i64::try_from(whole_millis(completing.retention())).unwrap_or(i64::MAX / 2)
}

/// The parameters of [`WRITE`]: one array for each column.
#[derive(Default)]
pub(super) struct Columns {
    keys: Vec<String>,
    states: Vec<&'static str>,
    expiries_ms: Vec<i64>,
    owners: Vec<Vec<u8>>,
    attempts: Vec<i16>,
    recoveries: Vec<&'static str>,
    fencing_tokens: Vec<Option<i64>>,
    fingerprints: Vec<Option<Vec<u8>>>,
    handed_over: Vec<bool>,
    reasons: Vec<String>,
    results: Vec<Option<Vec<u8>>>,
    gone: Vec<String>,
}

impl Columns {
    /// Returns whether there is nothing to write.
    pub(super) fn is_empty(&self) -> bool {
        self.keys.is_empty() && self.gone.is_empty()
    }

    /// The number of rows that [`WRITE`] must update.
    pub(super) fn updates(&self) -> u64 {
        self.keys.len() as u64
    }

    /// Removes the key's row.
    pub(super) fn remove(&mut self, key: &StoreKey) {
        self.gone.push(key.as_str().to_owned());
    }

    /// Writes this record into the key's row.
    pub(super) fn put(&mut self, key: &StoreKey, record: &Record) {
        let mut attempt = 0;
        let mut recovery = Recovery::None;
        let mut fencing_token = None;
        let mut handed_over = false;
        let mut reason = "";
        let mut result = None;
        let (state, owner) = match &record.state {
            State::Pending {
                token,
                attempt: number,
                recovery: kind,
                fencing_token: last,
            } => {
                attempt = *number;
                recovery = *kind;
                fencing_token = *last;
                ("pending", token.as_bytes().as_slice())
            }
            State::Released {
                by,
                attempt: number,
                recovery: kind,
                fencing_token: last,
                reason: why,
            } => {
                attempt = *number;
                recovery = *kind;
                fencing_token = *last;
                reason = why;
                ("released", by.0.as_slice())
            }
            State::Completed { by, result: bytes } => {
                result = Some(bytes.to_vec());
                ("completed", by.0.as_slice())
            }
            State::Failed {
                by,
                attempt: number,
                handed_over: marked,
                reason: why,
            } => {
                attempt = *number;
                handed_over = *marked;
                reason = why;
                ("failed", by.0.as_slice())
            }
        };
        self.keys.push(key.as_str().to_owned());
        self.states.push(state);
        self.expiries_ms.push(expiry_ms(record));
        self.owners.push(owner.to_vec());
        self.attempts.push(i16::from(attempt));
        self.recoveries.push(recovery.as_str());
        self.fencing_tokens.push(
            fencing_token.map(|FencingToken(number)| i64::try_from(number).unwrap_or(i64::MAX)),
        );
        self.fingerprints.push(
            record
                .fingerprint
                .map(|fingerprint| fingerprint.as_bytes().to_vec()),
        );
        self.handed_over.push(handed_over);
        // The one character that PostgreSQL's text cannot hold.
        self.reasons.push(reason.replace('\0', "\u{fffd}"));
        self.results.push(result);
    }

    /// The parameters of [`WRITE`].
    pub(super) fn parameters(&self) -> [&(dyn ToSql + Sync); 12] {
        [
            &self.keys,
            &self.states,
            &self.expiries_ms,
            &self.owners,
            &self.attempts,
            &self.recoveries,
            &self.fencing_tokens,
            &self.fingerprints,
            &self.handed_over,
            &self.reasons,
            &self.results,
            &self.gone,
        ]
    }
}

/// The record's expiry as its column holds it.
pub(super) fn expiry_ms(record: &Record) -> i64 {
    i64::try_from(record.expires_at.millis()).unwrap_or(i64::MAX)
}

/// The server's clock in a row of [`READ`].
pub(super) fn now(row: &Row) -> Result<StoreTime, String> {
    let now_us: i64 = column(row, "now_us")?;
    Ok(StoreTime::from_micros(
        u64::try_from(now_us).unwrap_or_default(),
    ))
}

/// The key of a row of [`READ`]; `None` in the row that contains only the clock.
pub(super) fn key(row: &Row) -> Result<Option<&str>, String> {
    row.try_get("key")
        .map_err(|_| "column key holds something else".to_owned())
}

/// A row's columns, as a client has read them. They may contain anything.
pub(super) struct Fields<'a> {
    pub(super) state: &'a str,
    pub(super) expires_at_ms: i64,
    pub(super) owner: &'a [u8],
    pub(super) attempt: i16,
    pub(super) recovery: &'a str,
    pub(super) fencing_token: Option<i64>,
    pub(super) fingerprint: Option<&'a [u8]>,
    pub(super) handed_over: bool,
    pub(super) reason: &'a str,
    pub(super) result: Option<&'a [u8]>,
}

/// Returns whether a row of [`READ`] is one that [`LOCK`] has inserted: it has no owner, and such a
/// record is never written.
pub(super) fn is_stand_in(row: &Row) -> bool {
    row.try_get::<_, &str>("state")
        .is_ok_and(|state| state == "pending")
        && row.try_get::<_, &[u8]>("owner").is_ok_and(<[u8]>::is_empty)
        && row
            .try_get::<_, i64>("expires_at_ms")
            .is_ok_and(|expires_at_ms| expires_at_ms == 0)
}

/// Decodes a row, which may contain anything.
pub(super) fn decode(row: &Row) -> Result<Record, String> {
    let fields = Fields {
        state: column(row, "state")?,
        expires_at_ms: column(row, "expires_at_ms")?,
        owner: column(row, "owner")?,
        attempt: column(row, "attempt")?,
        recovery: column(row, "recovery")?,
        fencing_token: column(row, "fencing_token")?,
        fingerprint: column(row, "fingerprint")?,
        handed_over: column(row, "handed_over")?,
        reason: column(row, "reason")?,
        result: column(row, "result")?,
    };
    fields.record()
}

impl Fields<'_> {
    /// Decodes the record. Nothing is guessed, and errors do not contain the data.
    pub(super) fn record(&self) -> Result<Record, String> {
        let fingerprint = self
            .fingerprint
            .map(<[u8; Fingerprint::BYTES]>::try_from)
            .transpose();
        let fingerprint = fingerprint.map_err(|_| "fingerprint has another length")?;
        let fencing_token = self
            .fencing_token
            .map(|fencing_token| u64::try_from(fencing_token).map(FencingToken))
            .transpose();
        let fencing_token = fencing_token.map_err(|_| "fencing_token is negative")?;
        let attempt = u8::try_from(self.attempt).map_err(|_| "attempt is out of range")?;
        let recovery = match self.recovery {
            "none" => Recovery::None,
            "earlier" => Recovery::Earlier,
            "takeover" => Recovery::Takeover,
            _ => return Err("recovery is of no known kind".to_owned()),
        };
        let state = match self.state {
            "pending" => {
                let token = <[u8; 16]>::try_from(self.owner).map_err(|_| "owner is no token")?;
                State::Pending {
                    token: Token::from(token),
                    attempt,
                    recovery,
                    fencing_token,
                }
            }
            "released" => State::Released {
                by: self.tag()?,
                attempt,
                recovery,
                fencing_token,
                reason: self.reason.to_owned(),
            },
            "completed" => {
                let result = self.result.ok_or("column result is null")?;
                State::Completed {
                    by: self.tag()?,
                    result: Bytes::copy_from_slice(result),
                }
            }
            "failed" => State::Failed {
                by: self.tag()?,
                attempt,
                handed_over: self.handed_over,
                reason: self.reason.to_owned(),
            },
            _ => return Err("state is of no known kind".to_owned()),
        };
        // An expiry before 1970 is taken as 1970: the record has expired either way.
        let expires_at =
            StoreTime::from_millis(u64::try_from(self.expires_at_ms).unwrap_or_default());
        Ok(Record {
            expires_at,
            fingerprint: fingerprint.map(Fingerprint::from_bytes),
            state,
        })
    }

    fn tag(&self) -> Result<TokenTag, &'static str> {
        <[u8; 4]>::try_from(self.owner)
            .map(TokenTag)
            .map_err(|_| "owner is no tag")
    }
}

fn column<'a, T: FromSql<'a>>(row: &'a Row, name: &str) -> Result<T, String> {
    row.try_get(name)
        .map_err(|_| format!("column {name} holds something else"))
}
