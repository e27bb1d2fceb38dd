//! The outbox in PostgreSQL: one row for each message, written in the transactions of users.

use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use deadpool_postgres::Object;
use oncegate_core::key::{KeySpecError, Scope};
use oncegate_core::record::{Token, whole_millis};
use oncegate_core::store::StoreError;
use oncegate_outbox::{
    HeldBack, OutboxBacklog, OutboxMessage, OutboxStatus, OutboxStore, ReadLimits, UnsentMessage,
};
use oncegate_runtime::failure::BoxError;
use oncegate_runtime::message::Header;
use tokio_postgres::Row;
use tokio_postgres::types::ToSql;

use super::errors::REMEDY;
use super::errors::{self, Trouble};
use super::{PostgresStore, schema};

#[cfg(feature = "sqlx")]
mod sqlx;
pub(super) mod tables;
mod write;

pub use self::write::{OutboxRow, OutboxTransaction};

use self::tables::IS_MESSAGE;

/// The clock is read in the comparison: a relay that waited for the row compares again.
///
/// After the clock has gone back, a lead ends later than a whole lease from now. It is cut to that:
/// its relay, if it runs, renews it in time.
const LEAD: &str = "\
INSERT INTO oncegate_outbox_leaders AS l (outbox, relay, leads_until_ms, lease_ms) \
VALUES ($1, $2, floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint + $3, $3) \
ON CONFLICT (outbox) DO UPDATE SET (relay, leads_until_ms, lease_ms) = (\
SELECT CASE WHEN is_free THEN $2 ELSE l.relay END, \
now_ms + CASE WHEN is_free THEN $3 ELSE l.lease_ms END, CASE WHEN is_free THEN $3 ELSE l.lease_ms END \
FROM (SELECT floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint AS now_ms) AS clock, \
LATERAL (SELECT l.relay = $2 OR l.leads_until_ms < now_ms AS is_free) AS lead) \
WHERE l.relay = $2 OR l.leads_until_ms < floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint \
OR l.leads_until_ms > floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint + l.lease_ms \
RETURNING relay = $2";

const RESIGN: &str = "DELETE FROM oncegate_outbox_leaders WHERE outbox = $1 AND relay = $2";

/// Reads the oldest messages up to a number (`$2`) and a sum of bytes (`$3`). The length of a value
/// is known without reading it.
/// The unsent messages behind those that were passed over, `$8`, of keys of which none waits there.
/// `NOT EXISTS` reads them once, whatever their number.
const BEHIND: &str = "\
AND sequence > $8::bigint AND NOT EXISTS (SELECT FROM oncegate_outbox AS passed WHERE passed.outbox = $1 \
AND passed.sent_at_ms IS NULL AND passed.sequence <= $8::bigint AND passed.topic = o.topic AND passed.key = o.key) ";

const MARK: &str = "\
UPDATE oncegate_outbox SET sent_at_ms = floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint \
WHERE sequence = ANY($1::bigint[]) AND sent_at_ms IS NULL";

const PURGE: &str = "\
DELETE FROM oncegate_outbox WHERE sequence IN (SELECT sequence FROM oncegate_outbox WHERE outbox = $1 \
AND sent_at_ms <= floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint - $2 \
ORDER BY sent_at_ms LIMIT $3 FOR UPDATE SKIP LOCKED)";

/// Reads the index of what is not sent; the number of messages needs no more than `$2` rows of it.
const BACKLOG: &str = "\
SELECT (SELECT count(*) FROM (SELECT FROM oncegate_outbox WHERE outbox = $1 AND sent_at_ms IS NULL LIMIT $2) AS unsent) \
AS messages, (SELECT greatest(floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint - written_at_ms, 0) \
FROM oncegate_outbox WHERE outbox = $1 AND sent_at_ms IS NULL ORDER BY sequence LIMIT 1) AS oldest_ms";

/// An outbox in the database of a [`PostgresStore`]; made by [`PostgresStore::outbox`].
///
/// A clone is another handle on the same outbox.
#[derive(Clone, Debug)]
pub struct PostgresOutbox {
    store: PostgresStore,
    name: Scope,
}

impl PostgresStore {
    /// Returns the outbox of this name in the database: 1 to 64 of `A-Z a-z 0-9 . _ -`. Each outbox
    /// has its own relay.
    ///
    /// Its tables are made by [`create_schema`](Self::create_schema) and `oncegate migrate`, with
    /// those of the records.
    ///
    /// # Errors
    /// When the name has other characters or another length.
    pub fn outbox(&self, name: &str) -> Result<PostgresOutbox, KeySpecError> {
        Ok(PostgresOutbox {
            store: self.clone(),
            name: Scope::new(name)?,
        })
    }
}

impl PostgresOutbox {
    /// Writes the message in `transaction`. The relay publishes it after the commit; a rollback
    /// publishes nothing.
    ///
    /// `transaction` is one of tokio-postgres, deadpool-postgres, or sqlx (feature `sqlx`), or the
    /// [`PostgresTransaction`](crate::PostgresTransaction) of a transactional handler. The message
    /// goes into the database of the transaction, which must be the one that the relay reads.
    ///
    /// ```no_run
    /// use oncegate::outbox::OutboxMessage;
    /// use oncegate::postgres::PostgresOutbox;
    /// use oncegate::{Attempt, Failure, Handler, Message};
    ///
    /// struct Shipping {
    ///     pool: deadpool_postgres::Pool,
    ///     outbox: PostgresOutbox,
    /// }
    ///
    /// impl Handler for Shipping {
    ///     type Output = ();
    ///
    ///     async fn handle(&self, _: &Message, attempt: &Attempt) -> Result<(), Failure> {
    ///         let mut client = self.pool.get().await?;
    ///         let mut transaction = client.transaction().await?;
    ///         transaction.execute("INSERT INTO shipments (order_id) VALUES ($1)", &[&"4711"]).await?;
    ///         let notice = OutboxMessage::new("shipments", r#"{"order_id":"4711"}"#).key("customer-1");
    ///         self.outbox.publish(&mut transaction, notice).await?;
    ///         attempt.commit_with(transaction, &()).await
    ///     }
    /// }
    /// ```
    ///
    /// # Errors
    /// The error of the client, or the limit that the message exceeds. Pass it on, and the
    /// transaction is rolled back.
    pub async fn publish<Tx: OutboxTransaction>(
        &self,
        transaction: &mut Tx,
        message: OutboxMessage,
    ) -> Result<(), BoxError> {
        message.check()?;
        transaction
            .insert(&OutboxRow {
                outbox: self.name.as_str(),
                message: &message,
            })
            .await
    }
}

impl PostgresOutbox {
    /// Runs `work` on the store's thread, with the name of the outbox.
    async fn run<T, F>(
        &self,
        work: impl FnOnce(Object, Scope) -> F + Send + 'static,
    ) -> Result<T, StoreError>
    where
        T: Send + 'static,
        F: Future<Output = (Object, Result<T, tokio_postgres::Error>)> + Send,
    {
        let name = self.name.clone();
        self.store
            .inner
            .link
            .run(move |client| async move {
                let (client, worked) = work(client, name).await;
                (client, worked.map_err(|error| errors::not_executed(&error)))
            })
            .await
    }
}

#[async_trait]
impl OutboxStore for PostgresOutbox {
    fn name(&self) -> &str {
        self.name.as_str()
    }

    async fn check(&self) -> Result<(), StoreError> {
        self.store
            .inner
            .link
            .run(|client| async move {
                let checked = check(&client).await;
                (client, checked)
            })
            .await
    }

    async fn lead(&self, relay: Token, lease: Duration) -> Result<bool, StoreError> {
        self.run(move |client, name| async move {
            let name = name.as_str();
            let relay = relay.as_bytes().as_slice();
            let lease_ms = millis(lease);
            let led = lead(&client, &[&name, &relay, &lease_ms]).await;
            (client, led)
        })
        .await
    }

    async fn resign(&self, relay: Token) -> Result<(), StoreError> {
        self.run(move |client, name| async move {
            let resigned = execute(
                &client,
                RESIGN,
                &[&name.as_str(), &relay.as_bytes().as_slice()],
            )
            .await;
            (client, resigned.map(drop))
        })
        .await
    }

    async fn read(
        &self,
        held_back: &HeldBack,
        most: ReadLimits,
    ) -> Result<Vec<UnsentMessage>, StoreError> {
        let held_back = held_back.clone();
        let rows = self
            .run(move |client, name| async move {
                let rows = read(&client, &name, &held_back, most).await;
                (client, rows)
            })
            .await?;
        rows.iter()
            .map(unsent)
            .collect::<Result<_, _>>()
            .map_err(|error| {
                StoreError::refused(format!(
                    "a row of oncegate_outbox holds something else: {error}; {REMEDY}"
                ))
            })
    }

    async fn mark_sent(&self, sequences: Vec<i64>) -> Result<(), StoreError> {
        self.run(move |client, _| async move {
            let marked = execute(&client, MARK, &[&sequences]).await;
            (client, marked.map(drop))
        })
        .await
    }

    async fn purge(&self, retention: Duration, most: u32) -> Result<u64, StoreError> {
        self.run(move |client, name| async move {
            let purged = execute(
                &client,
                PURGE,
                &[&name.as_str(), &millis(retention), &i64::from(most)],
            )
            .await;
            (client, purged)
        })
        .await
    }

    async fn backlog(&self, most: u32) -> Result<OutboxBacklog, StoreError> {
        let row = self
            .run(move |client, name| async move {
                let row = query_backlog(&client, name.as_str(), most).await;
                (client, row)
            })
            .await?;
        let oldest_ms: Option<i64> = row.get("oldest_ms");
        Ok(OutboxBacklog {
            messages: row.get::<_, i64>("messages").unsigned_abs(),
            oldest: oldest_ms.map(|ms| Duration::from_millis(ms.unsigned_abs())),
        })
    }

    async fn status(&self) -> Result<OutboxStatus, StoreError> {
        let row = self
            .run(|client, name| async move {
                let row = client.query_one(&status_sql(), &[&name.as_str()]).await;
                (client, row)
            })
            .await?;
        let oldest_ms: Option<i64> = row.get("oldest_ms");
        Ok(OutboxStatus {
            unsent: row.get::<_, i64>("unsent").unsigned_abs(),
            oldest_unsent: oldest_ms.map(|ms| Duration::from_millis(ms.unsigned_abs())),
            sent: row.get::<_, i64>("sent").unsigned_abs(),
            malformed: row.get::<_, i64>("malformed").unsigned_abs(),
            led: row.get("led"),
        })
    }
}

/// Refuses a database without the tables.
async fn check(client: &Object) -> Result<(), Trouble> {
    if schema::exists(client, "oncegate_outbox").await? {
        return Ok(());
    }
    Err(StoreError::refused(format!("the tables of the outbox are missing: {REMEDY}")).into())
}

async fn execute(
    client: &Object,
    sql: &str,
    parameters: &[&(dyn ToSql + Sync)],
) -> Result<u64, tokio_postgres::Error> {
    let statement = client.prepare_cached(sql).await?;
    client.execute(&statement, parameters).await
}

/// Tries to lead. Returns whether the relay leads now.
async fn lead(
    client: &Object,
    parameters: &[&(dyn ToSql + Sync)],
) -> Result<bool, tokio_postgres::Error> {
    let statement = client.prepare_cached(LEAD).await?;
    let row = client.query_opt(&statement, parameters).await?;
    row.map_or(Ok(false), |row| row.try_get(0))
}

async fn query_backlog(
    client: &Object,
    name: &str,
    most: u32,
) -> Result<Row, tokio_postgres::Error> {
    let statement = client.prepare_cached(BACKLOG).await?;
    client
        .query_one(&statement, &[&name, &i64::from(most)])
        .await
}

async fn read(
    client: &Object,
    name: &Scope,
    held_back: &HeldBack,
    most: ReadLimits,
) -> Result<Vec<Row>, tokio_postgres::Error> {
    let (topics, keys): (Vec<&str>, Vec<&[u8]>) = held_back
        .keys
        .iter()
        .map(|(topic, key)| (&**topic, &**key))
        .unzip();
    let bytes = i64::try_from(most.bytes).unwrap_or(i64::MAX).max(1);
    let all_of: Vec<&str> = held_back.topics.iter().map(|topic| &**topic).collect();
    let name = name.as_str();
    let messages = i64::from(most.messages);
    let mut parameters: Vec<&(dyn ToSql + Sync)> = vec![
        &name,
        &messages,
        &bytes,
        &held_back.sequences,
        &topics,
        &keys,
        &all_of,
    ];
    let behind = match &held_back.up_to {
        Some(up_to) => {
            parameters.push(up_to);
            BEHIND
        }
        None => "",
    };
    let statement = client.prepare_cached(&read_sql(behind)).await?;
    client.query(&statement, &parameters).await
}

/// Reads the oldest unsent messages. `behind`: only [`BEHIND`] those that were passed over.
fn read_sql(behind: &str) -> String {
    format!(
        "\
SELECT sequence, id, topic, key, payload, header_names, header_values, \
greatest(floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint - written_at_ms, 0) AS age_ms \
FROM (SELECT o.*, sum(coalesce(octet_length(payload), 0)) OVER (ORDER BY sequence) \
- coalesce(octet_length(payload), 0) AS bytes_before \
FROM (SELECT * FROM oncegate_outbox AS o WHERE outbox = $1 AND sent_at_ms IS NULL AND sequence <> ALL($4::bigint[]) \
AND topic <> ALL($7::text[]) \
AND NOT EXISTS (SELECT FROM unnest($5::text[], $6::bytea[]) AS held (topic, key) \
WHERE held.topic = o.topic AND held.key = o.key) {behind}\
ORDER BY sequence LIMIT $2) AS o) AS oldest WHERE bytes_before < $3::bigint ORDER BY sequence"
    )
}

fn status_sql() -> String {
    format!(
        "\
SELECT count(*) FILTER (WHERE sent_at_ms IS NULL) AS unsent, count(sent_at_ms) AS sent, \
count(*) FILTER (WHERE sent_at_ms IS NULL AND NOT ({IS_MESSAGE})) AS malformed, \
greatest(floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint \
- min(written_at_ms) FILTER (WHERE sent_at_ms IS NULL), 0) AS oldest_ms, \
EXISTS (SELECT FROM oncegate_outbox_leaders WHERE outbox = $1 \
AND leads_until_ms >= floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint) AS led \
FROM oncegate_outbox WHERE outbox = $1"
    )
}

/// The message of a row of a read. Other programs may write rows, too.
fn unsent(row: &Row) -> Result<UnsentMessage, tokio_postgres::Error> {
    let topic: String = row.try_get("topic")?;
    let id: String = row.try_get("id")?;
    let headers = headers(row);
    let message = match bytes(row.try_get("payload")?) {
        Some(payload) => OutboxMessage::new(topic, payload),
        None => OutboxMessage::tombstone(topic),
    };
    let fault = headers.as_ref().err().cloned();
    let message = message.id(id).headers(headers.unwrap_or_default());
    let message = match bytes(row.try_get("key")?) {
        Some(key) => message.key(key),
        None => message,
    };
    let age = Duration::from_millis(row.try_get::<_, i64>("age_ms")?.unsigned_abs());
    Ok(UnsentMessage {
        sequence: row.try_get("sequence")?,
        message,
        age,
        fault,
    })
}

/// The headers of a row, or the reason why it has none.
fn headers(row: &Row) -> Result<Vec<Header>, String> {
    let names: Vec<Option<&str>> = row
        .try_get("header_names")
        .map_err(|error| format!("its header_names are no list of names: {error}"))?;
    let values: Vec<Option<&[u8]>> = row
        .try_get("header_values")
        .map_err(|error| format!("its header_values are no list of values: {error}"))?;
    if names.len() != values.len() {
        return Err(format!(
            "it has {} header_names and {} header_values; write as many of both",
            names.len(),
            values.len()
        ));
    }
    names
        .into_iter()
        .zip(values)
        .map(|(name, value)| {
            Ok(Header {
                name: name.ok_or("one of its header_names is NULL")?.into(),
                value: bytes(value),
            })
        })
        .collect()
}

fn bytes(value: Option<&[u8]>) -> Option<Bytes> {
    value.map(Bytes::copy_from_slice)
}

fn millis(time: Duration) -> i64 {
    // So that a sum with the time is no overflow.
    i64::try_from(whole_millis(time))
        .unwrap_or(i64::MAX)
        .min(i64::MAX / 4)
}
