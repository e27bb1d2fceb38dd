//! The outbox in the file: one row for each message, written in the transactions of users.

use std::collections::HashSet;
use std::hash::{BuildHasher as _, RandomState};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use oncegate_core::key::Scope;
use oncegate_core::record::{Token, whole_millis};
use oncegate_core::store::StoreError;
use oncegate_outbox::{
    HeldBack, OutboxBacklog, OutboxMessage, OutboxStatus, OutboxStore, ReadLimits, UnsentMessage,
};
use oncegate_runtime::failure::BoxError;
use oncegate_runtime::message::Header;
use rusqlite::{Connection, OptionalExtension as _, Row, params};

use super::SqliteStore;
use super::sessions::NOW_MS;

/// Files of earlier releases have no such tables. A sequence is never used again: a late mark must
/// not meet another message.
const TABLES: &str = "\
CREATE TABLE IF NOT EXISTS oncegate_outbox (
    sequence      INTEGER PRIMARY KEY AUTOINCREMENT,
    outbox        TEXT    NOT NULL,              -- the name of the outbox
    id            TEXT    NOT NULL DEFAULT (lower(hex(randomblob(16)))), -- the header outbox-id: unique
    topic         TEXT    NOT NULL,
    key           BLOB,
    payload       BLOB,                          -- NULL: a tombstone
    headers       BLOB    NOT NULL DEFAULT x'',  -- each name and value with its length before it
    written_at_ms INTEGER NOT NULL DEFAULT (CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER)), -- since 1970
    sent_at_ms    INTEGER,                       -- NULL: not sent yet
    CHECK (length(CAST(id AS BLOB)) BETWEEN 1 AND 128 AND length(CAST(topic AS BLOB)) BETWEEN 1 AND 512)
) STRICT;
CREATE INDEX IF NOT EXISTS oncegate_outbox_unsent ON oncegate_outbox (outbox, sequence) WHERE sent_at_ms IS NULL;
CREATE INDEX IF NOT EXISTS oncegate_outbox_sent ON oncegate_outbox (outbox, sent_at_ms) WHERE sent_at_ms IS NOT NULL;
CREATE TABLE IF NOT EXISTS oncegate_outbox_leaders (
    outbox         TEXT    NOT NULL PRIMARY KEY,
    relay          BLOB    NOT NULL,
    leads_until_ms INTEGER NOT NULL,
    lease_ms       INTEGER NOT NULL              -- of the relay
) STRICT;
";

/// An outbox in the file of a [`SqliteStore`]; made by [`SqliteStore::outbox`].
///
/// A clone is another handle on the same outbox.
#[derive(Clone, Debug)]
pub struct SqliteOutbox {
    store: SqliteStore,
    name: Scope,
}

impl SqliteStore {
    /// Returns the outbox of this name in the file: 1 to 64 of `A-Z a-z 0-9 . _ -`. Each outbox has
    /// its own relay.
    ///
    /// The first call for a file creates the tables.
    ///
    /// # Errors
    /// [`StoreError::Refused`] when the name has other characters or another length; others like
    /// any write.
    pub async fn outbox(&self, name: &str) -> Result<SqliteOutbox, StoreError> {
        let name = Scope::new(name).map_err(StoreError::refused)?;
        self.inner
            .writer
            .ask(|connection| connection.execute_batch(TABLES))
            .await?;
        Ok(SqliteOutbox {
            store: self.clone(),
            name,
        })
    }
}

impl SqliteOutbox {
    /// Writes the message in `transaction`, a transaction of rusqlite or a
    /// [`SqliteTransaction`](super::SqliteTransaction). The relay publishes it after the commit; a
    /// rollback publishes nothing.
    ///
    /// The transaction must be on the file of this outbox: [`SqliteStore::open_connection`]. It
    /// blocks, as all of rusqlite does.
    ///
    /// ```no_run
    /// # fn ship(store: &oncegate::sqlite::SqliteStore, outbox: &oncegate::sqlite::SqliteOutbox,
    /// #     attempt: &oncegate::Attempt) -> Result<(), oncegate::Failure> {
    /// use oncegate::outbox::OutboxMessage;
    /// use rusqlite::TransactionBehavior::Immediate;
    ///
    /// let mut connection = store.open_connection()?;
    /// let transaction = connection.transaction_with_behavior(Immediate)?;
    /// transaction.execute("INSERT INTO shipments (order_id) VALUES ('4711')", [])?;
    /// outbox.publish(&transaction, &OutboxMessage::new("shipments", r#"{"order_id":"4711"}"#).key("customer-1"))?;
    /// attempt.blocking_commit_with(transaction, &())
    /// # }
    /// ```
    ///
    /// # Errors
    /// The error of rusqlite, or the limit that the message exceeds. Roll back then.
    pub fn publish(
        &self,
        transaction: &Connection,
        message: &OutboxMessage,
    ) -> Result<(), BoxError> {
        message.check()?;
        let insert = format!(
            "INSERT INTO oncegate_outbox (outbox, id, topic, key, payload, headers, written_at_ms) \
             VALUES (?1, ?2, ?3, ?4, ?5, ?6, {NOW_MS})"
        );
        transaction.prepare_cached(&insert)?.execute(params![
            self.name.as_str(),
            message.message_id(),
            message.topic(),
            message.key_bytes().map(|key| &**key),
            message.payload().map(|payload| &**payload),
            encode(message.own_headers()),
        ])?;
        Ok(())
    }

    /// Runs `work` in a transaction of the writing thread, with the name of the outbox.
    async fn write<T: Send + 'static>(
        &self,
        mut work: impl FnMut(&Connection, &str) -> rusqlite::Result<T> + Send + 'static,
    ) -> Result<T, StoreError> {
        let name = self.name.clone();
        self.store
            .inner
            .writer
            .ask(move |connection| work(connection, name.as_str()))
            .await
    }
}

#[async_trait]
impl OutboxStore for SqliteOutbox {
    fn name(&self) -> &str {
        self.name.as_str()
    }

    /// The tables were created by [`SqliteStore::outbox`].
    async fn check(&self) -> Result<(), StoreError> {
        Ok(())
    }

    async fn lead(&self, relay: Token, lease: Duration) -> Result<bool, StoreError> {
        let led = self.write(move |connection, name| {
            let is_free = format!("(l.relay = ?2 OR l.leads_until_ms < {NOW_MS})");
            // After the clock has gone back, a lead ends later than a whole lease from now. It is
            // cut to that: its relay, if it runs, renews it in time.
            let lead = format!(
                "INSERT INTO oncegate_outbox_leaders AS l VALUES (?1, ?2, {NOW_MS} + ?3, ?3) ON CONFLICT (outbox) \
                 DO UPDATE SET relay = iif({is_free}, ?2, l.relay), lease_ms = iif({is_free}, ?3, l.lease_ms), \
                 leads_until_ms = {NOW_MS} + iif({is_free}, ?3, l.lease_ms) \
                 WHERE {is_free} OR l.leads_until_ms > {NOW_MS} + l.lease_ms RETURNING relay = ?2"
            );
            let mut lead = connection.prepare_cached(&lead)?;
            lead.query_row(params![name, relay.as_bytes(), millis(lease)], |row| {
                row.get(0)
            })
            .optional()
        });
        Ok(led.await?.unwrap_or(false))
    }

    async fn resign(&self, relay: Token) -> Result<(), StoreError> {
        self.write(move |connection, name| {
            let resign = "DELETE FROM oncegate_outbox_leaders WHERE outbox = ?1 AND relay = ?2";
            connection
                .execute(resign, params![name, relay.as_bytes()])
                .map(drop)
        })
        .await
    }

    async fn read(
        &self,
        held_back: &HeldBack,
        most: ReadLimits,
    ) -> Result<Vec<UnsentMessage>, StoreError> {
        let name = self.name.clone();
        let held_back = held_back.clone();
        self.store
            .inner
            .reader
            .ask(move |connection| read(connection, name.as_str(), &held_back, most))
            .await
    }

    async fn mark_sent(&self, sequences: Vec<i64>) -> Result<(), StoreError> {
        self.write(move |connection, _| {
            let mark = format!(
                "UPDATE oncegate_outbox SET sent_at_ms = {NOW_MS} WHERE sequence = ?1 AND sent_at_ms IS NULL"
            );
            let mut mark = connection.prepare_cached(&mark)?;
            sequences
                .iter()
                .try_for_each(|sequence| mark.execute([sequence]).map(drop))
        })
        .await
    }

    async fn purge(&self, retention: Duration, most: u32) -> Result<u64, StoreError> {
        let rows = self.write(move |connection, name| {
            let purge = format!(
                "DELETE FROM oncegate_outbox WHERE sequence IN (SELECT sequence FROM oncegate_outbox \
                 WHERE outbox = ?1 AND sent_at_ms <= {NOW_MS} - ?2 ORDER BY sent_at_ms LIMIT ?3)"
            );
            connection
                .prepare_cached(&purge)?
                .execute(params![name, millis(retention), most])
        });
        Ok(rows.await? as u64)
    }

    async fn backlog(&self, most: u32) -> Result<OutboxBacklog, StoreError> {
        let name = self.name.clone();
        let backlog = self.store.inner.reader.ask(move |connection| {
            let backlog = format!(
                "SELECT (SELECT count(*) FROM (SELECT 1 FROM oncegate_outbox WHERE outbox = ?1 AND sent_at_ms IS NULL \
                 LIMIT ?2)), (SELECT max({NOW_MS} - written_at_ms, 0) FROM oncegate_outbox WHERE outbox = ?1 \
                 AND sent_at_ms IS NULL ORDER BY sequence LIMIT 1)"
            );
            let mut backlog = connection.prepare_cached(&backlog)?;
            backlog.query_row(params![name.as_str(), most], |row| {
                let oldest_ms: Option<i64> = row.get(1)?;
                Ok(OutboxBacklog {
                    messages: row.get::<_, i64>(0)?.unsigned_abs(),
                    oldest: oldest_ms.map(|ms| Duration::from_millis(ms.unsigned_abs())),
                })
            })
        });
        backlog.await
    }

    async fn status(&self) -> Result<OutboxStatus, StoreError> {
        let name = self.name.clone();
        let status = self.store.inner.reader.ask(move |connection| {
            let status = format!(
                "SELECT count(*) - count(sent_at_ms), count(sent_at_ms), \
                 max({NOW_MS} - min(written_at_ms) FILTER (WHERE sent_at_ms IS NULL), 0), \
                 EXISTS (SELECT 1 FROM oncegate_outbox_leaders WHERE outbox = ?1 AND leads_until_ms >= {NOW_MS}) \
                 FROM oncegate_outbox WHERE outbox = ?1"
            );
            let malformed = count_malformed(connection, name.as_str())?;
            connection.query_row(&status, [name.as_str()], |row| {
                let oldest_ms: Option<i64> = row.get(2)?;
                Ok(OutboxStatus {
                    malformed,
                    unsent: row.get::<_, i64>(0)?.unsigned_abs(),
                    sent: row.get::<_, i64>(1)?.unsigned_abs(),
                    oldest_unsent: oldest_ms.map(|ms| Duration::from_millis(ms.unsigned_abs())),
                    led: row.get(3)?,
                })
            })
        });
        status.await
    }
}

/// Counts the unsent rows whose headers or topic cannot be read.
fn count_malformed(connection: &Connection, name: &str) -> rusqlite::Result<u64> {
    let select =
        "SELECT topic, headers FROM oncegate_outbox WHERE outbox = ?1 AND sent_at_ms IS NULL";
    let mut select = connection.prepare_cached(select)?;
    let mut rows = select.query([name])?;
    let mut count = 0;
    while let Some(row) = rows.next()? {
        let is_read =
            row.get_ref(0)?.as_str().is_ok() && decode(row.get_ref(1)?.as_blob()?).is_some();
        count += u64::from(!is_read);
    }
    Ok(count)
}

/// Reads the oldest messages that are not held back, up to a number and a sum of bytes.
fn read(
    connection: &Connection,
    name: &str,
    held_back: &HeldBack,
    most: ReadLimits,
) -> rusqlite::Result<Vec<UnsentMessage>> {
    let select = format!(
        "SELECT sequence, id, topic, key, payload, headers, max({NOW_MS} - written_at_ms, 0) FROM oncegate_outbox \
         WHERE outbox = ?1 AND sent_at_ms IS NULL ORDER BY sequence"
    );
    let mut held_back = Held::of(held_back);
    let mut select = connection.prepare_cached(&select)?;
    let mut rows = select.query([name])?;
    let mut messages = Vec::new();
    let mut bytes = 0;
    while messages.len() < most.messages as usize && bytes < most.bytes {
        let Some(row) = rows.next()? else { break };
        if held_back.has(row)? {
            continue;
        }
        let message = unsent(row)?;
        bytes += message.message.payload().map_or(0, Bytes::len) as u64;
        messages.push(message);
    }
    Ok(messages)
}

/// The topics, keys and messages that are held back, as sets: each row that is read is looked up.
struct Held<'a> {
    topics: HashSet<&'a str>,
    keys: HashSet<(&'a str, &'a [u8])>,
    sequences: HashSet<i64>,
    /// The messages up to this sequence are passed over.
    up_to: Option<i64>,
    /// The hashes of their topics and keys, whose later messages wait, too. Should another key have
    /// the hash of one of them, its messages wait until the next pass.
    passed: HashSet<u64>,
    hashes: RandomState,
}

impl<'a> Held<'a> {
    fn of(held_back: &'a HeldBack) -> Self {
        Self {
            topics: held_back.topics.iter().map(|topic| &**topic).collect(),
            keys: held_back
                .keys
                .iter()
                .map(|(topic, key)| (&**topic, &**key))
                .collect(),
            sequences: held_back.sequences.iter().copied().collect(),
            up_to: held_back.up_to,
            passed: HashSet::new(),
            hashes: RandomState::new(),
        }
    }

    /// Returns whether the message of the row is held back. The rows come in their order.
    fn has(&mut self, row: &Row<'_>) -> rusqlite::Result<bool> {
        let Ok(topic) = row.get_ref(2)?.as_str() else {
            return Ok(self.sequences.contains(&row.get(0)?));
        };
        let key = row.get_ref(3)?.as_blob_or_null()?;
        if let Some(up_to) = self.up_to {
            let hash = key.map(|key| self.hashes.hash_one((topic, key)));
            if row.get::<_, i64>(0)? <= up_to {
                self.passed.extend(hash);
                return Ok(true);
            }
            if hash.is_some_and(|hash| self.passed.contains(&hash)) {
                return Ok(true);
            }
        }
        Ok(self.topics.contains(topic)
            || key.is_some_and(|key| self.keys.contains(&(topic, key)))
            || self.sequences.contains(&row.get(0)?))
    }
}

/// The message of a row. Other programs may write rows, too.
fn unsent(row: &Row<'_>) -> rusqlite::Result<UnsentMessage> {
    let sequence: i64 = row.get(0)?;
    let id = String::from_utf8_lossy(row.get_ref(1)?.as_bytes()?).into_owned();
    let topic = String::from_utf8_lossy(row.get_ref(2)?.as_bytes()?).into_owned();
    let topic_is_text = row.get_ref(2)?.as_str().is_ok();
    let headers = decode(row.get_ref(5)?.as_blob()?);
    let fault = if !topic_is_text {
        Some("its topic is no text")
    } else if headers.is_none() {
        Some("its headers are not written as docs/OUTBOX.md says")
    } else {
        None
    };
    let message = match bytes(row, 4)? {
        Some(payload) => OutboxMessage::new(topic, payload),
        None => OutboxMessage::tombstone(topic),
    };
    let message = message.id(id).headers(headers.unwrap_or_default());
    // Without its topic it belongs to no order, and is held back by its sequence.
    let message = match bytes(row, 3)?.filter(|_| topic_is_text) {
        Some(key) => message.key(key),
        None => message,
    };
    let age = Duration::from_millis(row.get::<_, i64>(6)?.unsigned_abs());
    Ok(UnsentMessage {
        sequence,
        message,
        age,
        fault: fault.map(str::to_owned),
    })
}

fn bytes(row: &Row<'_>, column: usize) -> rusqlite::Result<Option<Bytes>> {
    Ok(row.get::<_, Option<Vec<u8>>>(column)?.map(Bytes::from))
}

/// The length that stands for a null header.
const NULL: u32 = u32::MAX;

/// Encodes each header as the length of its name, its name, the length of its value, and its value.
fn encode(headers: &[Header]) -> Vec<u8> {
    let mut out = Vec::new();
    for Header { name, value } in headers {
        out.extend(length(name.as_bytes()));
        out.extend(name.as_bytes());
        match value {
            Some(value) => {
                out.extend(length(value));
                out.extend(&**value);
            }
            None => out.extend(NULL.to_be_bytes()),
        }
    }
    out
}

/// The length of a name or value; the limits of a message are far below.
fn length(bytes: &[u8]) -> [u8; 4] {
    (bytes.len() as u32).to_be_bytes()
}

/// `None` for bytes that [`encode`] did not write.
fn decode(mut bytes: &[u8]) -> Option<Vec<Header>> {
    let mut headers = Vec::new();
    while !bytes.is_empty() {
        let name = take(&mut bytes)??;
        let value = take(&mut bytes)?.map(Bytes::copy_from_slice);
        headers.push(Header {
            name: std::str::from_utf8(name).ok()?.into(),
            value,
        });
    }
    Some(headers)
}

/// The bytes with their length before them; `Some(None)` for a null.
fn take<'b>(bytes: &mut &'b [u8]) -> Option<Option<&'b [u8]>> {
    let (length, rest) = bytes.split_first_chunk::<4>()?;
    let length = u32::from_be_bytes(*length);
    if length == NULL {
        *bytes = rest;
        return Some(None);
    }
    let (taken, rest) = rest.split_at_checked(length as usize)?;
    *bytes = rest;
    Some(Some(taken))
}

fn millis(time: Duration) -> i64 {
    // So that a sum with the time is no overflow.
    i64::try_from(whole_millis(time))
        .unwrap_or(i64::MAX)
        .min(i64::MAX / 4)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header(name: &str, value: Option<&'static [u8]>) -> Header {
        Header {
            name: name.into(),
            value: value.map(Bytes::from_static),
        }
    }

    #[test]
    fn headers_come_back_as_they_were_and_a_part_of_them_does_not() {
        let headers = [
            header("type", Some(b"shipped")),
            header("", Some(b"")),
            header("ü", None),
            header("b", Some(b"\0\xff")),
        ];
        let encoded = encode(&headers);
        assert_eq!(decode(&encoded).unwrap(), headers);
        assert_eq!(decode(&[]).unwrap(), []);
        assert!(decode(&encoded[..encoded.len() - 1]).is_none());
    }
}
