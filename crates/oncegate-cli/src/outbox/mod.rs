//! `oncegate outbox`: publishes the messages of outboxes, and shows what an outbox holds.

mod relay;
mod status;

use std::sync::Arc;
use std::time::Duration;

use clap::Subcommand;
use oncegate::kafka::KafkaPublisher;
use oncegate::outbox::{OutboxStore, Relay};
use oncegate::sqs::SqsPublisher;

use crate::config::shape;
use crate::config::values::{Property, Secret};
use crate::exit::{Exit, Problem};
use crate::stores;

/// Publish the messages of an outbox, or show what it holds
#[derive(Debug, Subcommand)]
pub(crate) enum OutboxCommand {
    Relay(Box<relay::RelayArgs>),
    Status(status::OutboxStatusArgs),
}

pub(crate) async fn run(command: &OutboxCommand) -> Result<Exit, Problem> {
    match command {
        OutboxCommand::Relay(args) => Box::pin(relay::run(args)).await,
        OutboxCommand::Status(args) => status::run(args).await,
    }
}

/// The publisher of an outbox.
pub(crate) enum Broker {
    Kafka(KafkaPublisher),
    Sqs(SqsPublisher),
}

impl Broker {
    /// The publisher of this outbox.
    ///
    /// # Errors
    /// When the file or variable of a secret cannot be read.
    pub(crate) fn of(outbox: &shape::Outbox) -> Result<Self, String> {
        match &outbox.sqs {
            Some(sqs) => Ok(Self::Sqs(sqs_publisher(sqs))),
            None => kafka_publisher(&outbox.kafka.clone().unwrap_or_default()).map(Self::Kafka),
        }
    }

    fn relay(self, outbox: Arc<dyn OutboxStore>) -> Relay {
        match self {
            Self::Kafka(publisher) => Relay::shared(outbox, publisher),
            Self::Sqs(publisher) => Relay::shared(outbox, publisher),
        }
    }
}

fn sqs_publisher(sqs: &shape::OutboxSqs) -> SqsPublisher {
    let mut publisher = SqsPublisher::new();
    if let Some(region) = &sqs.region {
        publisher = publisher.region(region);
    }
    if let Some(url) = &sqs.endpoint_url {
        publisher = publisher.endpoint_url(url);
    }
    publisher
}

fn kafka_publisher(kafka: &shape::OutboxKafka) -> Result<KafkaPublisher, String> {
    let brokers = kafka
        .brokers
        .as_ref()
        .map(|brokers| brokers.0.join(","))
        .unwrap_or_default();
    let mut publisher = KafkaPublisher::new(brokers);
    for (property, Property(value)) in &kafka.properties {
        publisher = match value {
            Secret::File(path) => publisher.property_file(property, path),
            other => {
                let value = other
                    .resolve()
                    .map_err(|why| format!("{property}: {why}"))?;
                publisher.property(property, value)
            }
        };
    }
    Ok(publisher)
}

/// Connects to the database of an outbox, and makes its relay.
async fn relay_of(
    store: &shape::Store,
    name: &str,
    outbox: &shape::Outbox,
    patience: Duration,
) -> Result<Relay, Problem> {
    let broker = Broker::of(outbox).map_err(Problem::configuration)?;
    let relay = broker.relay(stores::open_outbox(store, name, patience).await?);
    Ok(relay.settings(outbox.relay))
}
