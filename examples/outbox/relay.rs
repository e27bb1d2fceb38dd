//! The relay: what you would write yourself. It publishes the outbox, at least once and in order for each customer.

use std::time::Duration;

use clap::Args;
use futures_util::future::try_join_all;
use oncegate::BoxError;
use oncegate_examples::crew::{start_logging, told_to_stop};
use rdkafka::config::ClientConfig;
use rdkafka::message::{Header, OwnedHeaders};
use rdkafka::producer::{FutureProducer, FutureRecord};
use tokio_postgres::{Client, NoTls};

/// The header of a published message that has the id of its row.
pub(crate) const ID: &str = "outbox-id";

/// Maximum number of rows that are published before they are removed.
const BATCH: i64 = 200;
/// How long to wait when there is nothing to publish.
const IDLE: Duration = Duration::from_millis(20);

#[derive(Debug, Args)]
pub(crate) struct Relay {
    #[arg(long)]
    bootstrap: String,
    #[arg(long)]
    postgres: String,
    #[arg(long)]
    run: String,
    /// Crash once something is published, before it is removed.
    #[arg(long)]
    crash: bool,
}

impl Relay {
    #[tokio::main]
    pub(crate) async fn run(self) -> Result<(), BoxError> {
        start_logging();
        tokio::select! {
            ended = self.publish() => ended,
            () = told_to_stop() => Ok(()),
        }
    }

    async fn publish(&self) -> Result<(), BoxError> {
        let (mut client, connection) = tokio_postgres::connect(&self.postgres, NoTls).await?;
        tokio::spawn(connection);
        // Repeats of its own are dropped by the broker, and nothing overtakes.
        let producer: FutureProducer = ClientConfig::new()
            .set("bootstrap.servers", &self.bootstrap)
            .set("enable.idempotence", "true")
            .set("linger.ms", "2")
            .create()?;
        loop {
            let published = self.publish_some(&mut client, &producer).await?;
            if published == 0 {
                tokio::time::sleep(IDLE).await;
            }
        }
    }

    /// Publishes the oldest rows, and removes them from the outbox once the broker has them.
    async fn publish_some(&self, client: &mut Client, producer: &FutureProducer) -> Result<usize, BoxError> {
        let transaction = client.transaction().await?;
        // One relay at a time: two could publish the notices of a customer out of order. This one waits until
        // the other's transaction has ended, by commit or by crash.
        transaction.execute("SELECT pg_advisory_xact_lock(hashtext($1))", &[&self.run]).await?;
        // Rows of one customer were committed in the order of their sequence, because its orders are handled one
        // after another. Rows of other customers may still appear before these; the next query finds them.
        let waiting = "SELECT sequence, id::text, customer, payload FROM outbox WHERE run = $1 ORDER BY sequence LIMIT $2";
        let rows = transaction.query(waiting, &[&self.run, &BATCH]).await?;
        if rows.is_empty() {
            return Ok(0);
        }
        let topic = format!("{}-shipments", self.run);
        let mut deliveries = Vec::new();
        for row in &rows {
            let (id, customer, payload): (&str, &str, &str) =
                (row.get("id"), row.get("customer"), row.get("payload"));
            let headers = OwnedHeaders::new().insert(Header { key: ID, value: Some(id) });
            let record = FutureRecord::to(&topic).key(customer).payload(payload).headers(headers);
            deliveries.push(producer.send_result(record).map_err(|(error, _)| error)?);
        }
        for delivered in try_join_all(deliveries).await? {
            delivered.map_err(|(error, _)| error)?;
        }
        if self.crash {
            std::process::abort();
        }
        let sequences: Vec<i64> = rows.iter().map(|row| row.get("sequence")).collect();
        transaction.execute("DELETE FROM outbox WHERE sequence = ANY($1)", &[&sequences]).await?;
        transaction.commit().await?;
        Ok(rows.len())
    }
}
