//! Writes messages to partitions that the caller chooses.

use std::fmt;

use crate::client::headers::ROUTE_HEADER;
use crate::client::producer::{self, Content, DurableProducer};
use crate::client::properties::Properties;
use crate::client::settings;
use oncegate_runtime::message::Message;
use oncegate_runtime::source::SourceError;

/// Writes messages to partitions of a topic, for tests and tools; an application publishes with its
/// own producer, or an outbox with a [`KafkaPublisher`](crate::KafkaPublisher).
pub struct TopicWriter {
    topic: String,
    producer: DurableProducer,
}

impl TopicWriter {
    /// Creates a writer for a topic of the cluster at `brokers`. Of `properties`, which may be
    /// those of a [source](crate::KafkaSource::property), it takes what concerns the connection. It
    /// connects by itself.
    ///
    /// # Errors
    /// When the topic's name or a property of the connection is not valid.
    pub fn new(
        brokers: &str,
        topic: impl Into<String>,
        properties: &[(String, String)],
    ) -> Result<Self, SourceError> {
        let topic = topic.into();
        settings::check_topic(&topic)?;
        let mut own = Properties::default();
        own.set("linger.ms", "1");
        let connection = properties
            .iter()
            .filter(|(name, _)| producer::is_connection(name));
        connection.for_each(|(name, value)| own.set(name, value));
        Ok(Self {
            topic,
            producer: DurableProducer::new(brokers, own)?,
        })
    }

    /// Writes payload, key and headers of the message to a partition, and waits until all in-sync
    /// replicas have it. The message's route is in the header `oncegate-route`, for sources that
    /// take [routes from headers](crate::KafkaSource::routes_from_headers).
    ///
    /// Calls whose futures are polled in order write in that order.
    ///
    /// # Errors
    /// When the message may not be written. It may be written nevertheless.
    pub async fn write(&self, partition: i32, message: &Message) -> Result<(), SourceError> {
        let content = Content {
            partition: Some(partition),
            ..Content::from(message)
        };
        let headers =
            producer::headers(message.headers(), ROUTE_HEADER, message.route().as_bytes());
        self.producer
            .send(&self.topic, content, headers)
            .await
            .map_err(|error| {
                let why = self.producer.explain(&error);
                SourceError::caused(
                    format!(
                        "partition {partition} of {} was not written to: {why}",
                        self.topic
                    ),
                    error,
                )
            })
    }
}

impl fmt::Debug for TopicWriter {
    /// Shows no property values, because they may be passwords.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TopicWriter")
            .field("topic", &self.topic)
            .finish_non_exhaustive()
    }
}
