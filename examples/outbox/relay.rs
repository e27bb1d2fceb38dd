//! The relay: publishes the outbox to Kafka, at least once and in order for each customer.

use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::time::Duration;

use clap::Args;
use oncegate::kafka::KafkaPublisher;
use oncegate::outbox::Relay as OutboxRelay;
use oncegate::postgres::PostgresStore;
use oncegate::{BoxError, Event, Observer};
use oncegate_examples::crew::{start_logging, until_told_to_stop};

/// The time that the next relay waits after one has crashed.
const LEASE: Duration = Duration::from_secs(1);
/// The number of messages that a relay publishes before it crashes.
const CRASH_AFTER: u32 = 20;

#[derive(Debug, Args)]
pub(crate) struct Relay {
    #[arg(long)]
    bootstrap: String,
    #[arg(long)]
    postgres: String,
    #[arg(long)]
    run: String,
    /// Crash once something is published, before it is marked as sent.
    #[arg(long)]
    crash: bool,
}

/// Crashes when the broker has confirmed some messages: most of them are not marked by then.
#[derive(Debug, Default)]
struct Crash {
    published: AtomicU32,
}

impl Observer for Crash {
    fn observe(&self, event: Event<'_>) {
        if matches!(event, Event::OutboxPublished { .. })
            && self.published.fetch_add(1, Relaxed) == CRASH_AFTER
        {
            std::process::abort();
        }
    }
}

impl Relay {
    #[tokio::main]
    pub(crate) async fn run(self) -> Result<(), BoxError> {
        start_logging();
        let outbox = PostgresStore::connect(&self.postgres)
            .await?
            .outbox(&self.run)?;
        let mut relay = OutboxRelay::new(outbox, KafkaPublisher::new(&self.bootstrap)).lease(LEASE);
        if self.crash {
            relay = relay.observer(std::sync::Arc::new(Crash::default()));
        }
        relay.run_until(until_told_to_stop()).await?;
        Ok(())
    }
}
