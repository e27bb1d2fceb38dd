//! Publishes the messages of an outbox.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use async_trait::async_trait;
use parking_lot::Mutex;

use crate::client::producer::{self, Content, DurableProducer};
use crate::client::properties::Properties;
use crate::client::remedies;
use crate::client::settings;
use crate::produce::partitioner::{self, PartitionCounts};
use oncegate_outbox::{ID_HEADER, OutboxMessage, PublishError, Publisher, TopicPart};
use oncegate_runtime::failure::BoxError;

/// Publishes an outbox to the topics of a Kafka cluster, for a
/// [`Relay`](oncegate_outbox::Relay).
///
/// Payload, key and headers are written unchanged, with the id in the header `outbox-id`. A message
/// counts as published when all in-sync replicas have it. Its key decides the partition, as with
/// Java clients (murmur2).
///
/// The relay sends messages with one key one after another, so the producer does not wait for
/// others to fill a batch: `linger.ms` is 1. A topic that the brokers do not know for two seconds
/// is refused (`topic.metadata.propagation.max.ms`).
pub struct KafkaPublisher {
    brokers: String,
    properties: Properties,
    producer: Mutex<Option<Arc<DurableProducer>>>,
    counts: PartitionCounts,
}

impl KafkaPublisher {
    /// Creates a publisher to the cluster at `brokers` (`"host:port,host:port"`).
    pub fn new(brokers: impl Into<String>) -> Self {
        let mut properties = Properties::default();
        properties.set("linger.ms", "1");
        // The relay tries again. The client's default of 30 s would occupy a batch with messages of
        // a topic that there is not.
        properties.set("topic.metadata.propagation.max.ms", "2000");
        Self {
            brokers: brokers.into(),
            properties,
            producer: Mutex::default(),
            counts: PartitionCounts::default(),
        }
    }

    /// Sets a property of the librdkafka producer, such as `security.protocol`. Opening fails with
    /// the name of any property that could lose messages.
    #[must_use]
    pub fn property(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.properties.set(name, value);
        self
    }

    /// Sets a property to the content of a file, which is read again when it changes, as for
    /// [`KafkaSource::property_file`](crate::KafkaSource::property_file).
    #[must_use]
    pub fn property_file(mut self, name: impl Into<String>, path: impl Into<PathBuf>) -> Self {
        self.properties.set_file(name, path);
        self
    }

    /// Returns whether a password or token would be sent to another machine in plain text.
    pub fn shows_login(&self) -> bool {
        settings::shows_login(&self.brokers, &self.properties.unread())
    }

    /// Checks the settings, without reading a file. It needs no broker.
    ///
    /// # Errors
    /// Names the property, and why it is refused.
    pub fn check(&self) -> Result<(), BoxError> {
        Ok(producer::refuse(&self.properties.unread())?)
    }

    /// Asks how many partitions a topic has of which a message was not written: others of them may
    /// be written to.
    async fn learn_parts(&self, producer: &DurableProducer, topic: &str) {
        let partitioner = self.properties.text("partitioner");
        if partitioner::is_known(partitioner) && self.counts.is_wanted(topic) {
            let count = producer.count_partitions(topic).await;
            self.counts.note(topic, count);
        }
    }

    /// Returns the producer, which the first call makes.
    fn producer(&self) -> Result<Arc<DurableProducer>, BoxError> {
        let mut producer = self.producer.lock();
        match &*producer {
            Some(producer) => Ok(Arc::clone(producer)),
            None => {
                let made = DurableProducer::new(&self.brokers, self.properties.clone())?;
                Ok(Arc::clone(producer.insert(Arc::new(made))))
            }
        }
    }
}

#[async_trait]
impl Publisher for KafkaPublisher {
    async fn open(&self) -> Result<(), BoxError> {
        self.producer().map(drop)
    }

    async fn publish(&self, message: &OutboxMessage) -> Result<(), PublishError> {
        let topic = message.topic();
        settings::check_topic(topic)
            .map_err(|error| PublishError::TopicRefused(error.to_string()))?;
        let producer = self
            .producer()
            .map_err(|error| PublishError::TopicRefused(error.to_string()))?;
        let key = message.key_bytes();
        let payload = message.payload().map(|payload| &**payload);
        let content = Content {
            partition: None,
            key: key.map(|key| &**key),
            payload,
        };
        let headers = producer::headers(
            message.own_headers(),
            ID_HEADER,
            message.message_id().as_bytes(),
        );
        let Err(error) = producer.send(topic, content, headers).await else {
            return Ok(());
        };
        let why = producer.explain(&error);
        Err(match remedies::remedy(&error) {
            Some(remedy) if remedies::is_about_the_topic(&error) => {
                PublishError::TopicRefused(format!("{why}; {remedy}"))
            }
            Some(remedy) => PublishError::Refused(format!("{why}; {remedy}")),
            None => {
                self.learn_parts(&producer, topic).await;
                PublishError::Unconfirmed(why)
            }
        })
    }

    fn part(&self, topic: &str, key: Option<&[u8]>) -> Option<TopicPart> {
        self.counts.part(topic, key)
    }
}

impl fmt::Debug for KafkaPublisher {
    /// Shows no property values, because they may be passwords.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KafkaPublisher")
            .field("brokers", &self.brokers)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_property_that_could_lose_messages_is_refused_at_the_check() {
        let error = KafkaPublisher::new("localhost:1")
            .property("acks", "1")
            .check()
            .unwrap_err();
        assert!(error.to_string().contains("acks"), "{error}");
        let shows =
            KafkaPublisher::new("kafka.example.org:9092").property("sasl.password", "secret");
        assert!(!format!("{shows:?}").contains("secret"));
    }
}
