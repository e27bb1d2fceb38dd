//! A relay process for the tests that kill it. It ends at a SIGTERM.

use std::time::Duration;

use oncegate::kafka::KafkaPublisher;
use oncegate::outbox::Relay;
use oncegate::postgres::PostgresStore;
use oncegate::sqs::SqsPublisher;
use oncegate::{BoxError, shutdown_signal};
use oncegate_testkit::Sqs;

/// Short: the next relay waits for it.
const LEASE: Duration = Duration::from_millis(600);
/// Small, so that a kill hits messages in flight, and others that are confirmed and not marked.
const BATCH: u32 = 20;

/// Arguments: the URL of the database, the address of Kafka or the URL of an SQS server, the name
/// of the outbox.
#[tokio::main]
async fn main() -> Result<(), BoxError> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [url, broker, name] = arguments.as_slice() else {
        return Err("relay URL BROKER NAME".into());
    };
    let outbox = PostgresStore::connect(url).await?.outbox(name)?;
    let relay = if broker.starts_with("http") {
        Relay::new(
            outbox,
            SqsPublisher::from_client(Sqs::at(broker).client().clone()),
        )
    } else {
        Relay::new(outbox, KafkaPublisher::new(broker))
    };
    relay
        .batch(BATCH)
        .lease(LEASE)
        .run_until(shutdown_signal())
        .await?;
    Ok(())
}
