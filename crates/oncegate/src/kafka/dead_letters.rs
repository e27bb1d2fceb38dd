//! Writes dead letters to a Kafka topic.

use std::fmt;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use rdkafka::client::ClientContext;
use rdkafka::config::{ClientConfig, RDKafkaLogLevel};
use rdkafka::consumer::BaseConsumer;
use rdkafka::error::KafkaError;
use rdkafka::message::{Header, OwnedHeaders};
use rdkafka::producer::{FutureProducer, FutureRecord};

use super::settings::{self, Property};
use super::{FIRST_FAILED_HEADER, ROUTE_HEADER, member, topics};
use crate::dead_letters::{DeadLetter, DeadLetters, millis_since_1970};
use crate::failure::BoxError;
use crate::message::{Message, Origin};
use crate::source::SourceError;

/// The prefix of all our headers.
pub(crate) const PREFIX: &str = "oncegate-";

/// The longest `oncegate-reason`, in bytes.
const REASON_MAX_BYTES: usize = 1024;

/// Time limit for opening to wait for the brokers.
const OPEN_TIMEOUT: Duration = Duration::from_secs(10);

/// Writes dead letters to a topic: payload, key and headers unchanged, and headers with their origin and cause (see
/// [`kafka`](super)).
///
/// A dead letter counts as written when all in-sync replicas have it.
pub struct KafkaDeadLetters {
    brokers: String,
    topic: String,
    properties: Vec<Property>,
    /// Topics that a source consumes. Our topic must not be one of them.
    consumed: Vec<String>,
    producer: Mutex<Option<FutureProducer<Context>>>,
}

/// Producer properties that only oncegate may set, and why.
const REFUSED: &[(&str, &str)] = &[
    ("bootstrap.servers", "the brokers are the first argument"),
    ("metadata.broker.list", "the brokers are the first argument"),
    ("acks", "a dead letter must reach all in-sync replicas"),
    ("request.required.acks", "a dead letter must reach all in-sync replicas"),
    ("enable.idempotence", "a retry inside the client must not write a dead letter twice"),
    ("transactional.id", "dead letters are not written in transactions"),
];

/// Prefixes of a source's connection properties that its producer needs as well.
const CONNECTION: &[&str] = &["security.", "sasl.", "ssl.", "socket.", "broker.address.", "client.", "debug"];

impl KafkaDeadLetters {
    /// Creates dead letters that write to `topic` in the cluster at `brokers` (`"host:port,host:port"`).
    ///
    /// [`KafkaSource::dead_letters`](super::KafkaSource::dead_letters) takes both the brokers and the
    /// connection properties from a source.
    pub fn new(brokers: impl Into<String>, topic: impl Into<String>) -> Self {
        Self {
            brokers: brokers.into(),
            topic: topic.into(),
            properties: Vec::new(),
            consumed: Vec::new(),
            producer: Mutex::default(),
        }
    }

    /// Sets a property of the librdkafka producer, such as `compression.type`. Opening fails with the name of any
    /// property that could lose dead letters.
    #[must_use]
    pub fn property(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.properties.push((name.into(), value.into()));
        self
    }

    pub(crate) fn beside(mut self, consumed: Vec<String>, properties: &[Property]) -> Self {
        self.consumed = consumed;
        self.properties.extend(properties.iter().filter(|property| is_connection(property)).cloned());
        self
    }

    fn refuse_loop(&self, consumed: &str) -> Result<(), BoxError> {
        if consumed == self.topic {
            return Err(format!(
                "the dead-letter topic {consumed} is consumed by the same consumer: every dead letter would \
                 come back as a message; use another topic"
            )
            .into());
        }
        Ok(())
    }

    fn producer(&self) -> Result<FutureProducer<Context>, BoxError> {
        let producer = self.producer.lock().unwrap_or_else(PoisonError::into_inner);
        producer.clone().ok_or_else(|| "the dead-letter topic has not been opened".into())
    }
}

#[async_trait]
impl DeadLetters for KafkaDeadLetters {
    /// Checks that the topic exists, and that no source consumes it.
    async fn open(&self) -> Result<(), BoxError> {
        settings::check_topic(&self.topic)?;
        self.consumed.iter().try_for_each(|consumed| self.refuse_loop(consumed))?;
        let producer = producer(&self.brokers, &self.properties)?;
        // A producer that requests a topic's metadata creates the topic where brokers allow that; a consumer does not.
        let mut config = ClientConfig::new();
        config.extend(self.properties.iter().filter(|property| is_connection(property)).cloned());
        config.set("bootstrap.servers", &self.brokers);
        let (brokers, topic) = (self.brokers.clone(), self.topic.clone());
        let asking = tokio::task::spawn_blocking(move || {
            let client: BaseConsumer = config.create().map_err(settings::unusable)?;
            topics::check(&client, &brokers, &[topic], OPEN_TIMEOUT)
        });
        asking.await??;
        *self.producer.lock().unwrap_or_else(PoisonError::into_inner) = Some(producer);
        Ok(())
    }

    async fn send(&self, letter: &DeadLetter) -> Result<(), BoxError> {
        let message = &letter.message;
        if let Origin::Kafka { topic, .. } = message.origin() {
            self.refuse_loop(topic)?;
        }
        let producer = self.producer()?;
        let delivered = deliver(&producer, &self.topic, message, headers(letter)).await;
        delivered.map_err(|error| {
            format!("dead letter could not be written to topic {}: {error}", self.topic).into()
        })
    }
}

/// Creates a producer whose messages count as sent when all in-sync replicas have them.
pub(crate) fn producer(
    brokers: &str,
    properties: &[Property],
) -> Result<FutureProducer<Context>, SourceError> {
    settings::refuse(properties, REFUSED)?;
    let mut config = ClientConfig::new();
    config
        .set("client.id", "oncegate")
        // The caller retries. The client's default of five minutes would block it without any report.
        .set("delivery.timeout.ms", "30000")
        // Only the broker's limit applies, and no second one here.
        .set("message.max.bytes", "100000000")
        // Equal keys go to the same partition as with other clients.
        .set("partitioner", "murmur2_random");
    for (name, value) in properties {
        config.set(name, value);
    }
    config.set("bootstrap.servers", brokers).set("acks", "all").set("enable.idempotence", "true");
    config.create_with_context(Context).map_err(settings::unusable)
}

/// Sends the message's payload and key with these headers, and waits until they are written.
pub(crate) async fn deliver(
    producer: &FutureProducer<Context>,
    topic: &str,
    message: &Message,
    headers: OwnedHeaders,
) -> Result<(), KafkaError> {
    let mut record = FutureRecord::<[u8], [u8]>::to(topic).headers(headers);
    if !message.is_tombstone() {
        record = record.payload(message.payload());
    }
    if let Some(key) = message.key() {
        record = record.key(key);
    }
    let report = producer.send_result(record).map_err(|(error, _)| error)?;
    report.await.map_err(|_| KafkaError::Canceled)?.map_err(|(error, _)| error)?;
    Ok(())
}

pub(crate) fn is_connection((name, _): &Property) -> bool {
    CONNECTION.iter().any(|prefix| name.starts_with(prefix))
}

/// Returns the message's own headers, and ours.
fn headers(letter: &DeadLetter) -> OwnedHeaders {
    let mut headers = own_headers(&letter.message);
    for (name, value) in provenance(letter) {
        headers = headers.insert(Header { key: name, value: Some(value.as_bytes()) });
    }
    headers
}

/// Returns the message's own headers, without ours from an earlier delivery.
pub(crate) fn own_headers(message: &Message) -> OwnedHeaders {
    /// The number of our headers that a dead letter gets.
    const OURS: usize = 16;
    let mut headers = OwnedHeaders::new_with_capacity(message.headers().len() + OURS);
    for header in message.headers().iter().filter(|header| !header.name.starts_with(PREFIX)) {
        headers = headers.insert(Header { key: &header.name, value: header.value.as_deref() });
    }
    headers
}

fn provenance(letter: &DeadLetter) -> Vec<(&'static str, String)> {
    let message: &Message = &letter.message;
    let mut ours = vec![(ROUTE_HEADER, message.route().to_owned())];
    match message.origin() {
        Origin::Kafka { topic, partition, offset } => ours.extend([
            ("oncegate-origin-topic", topic.to_string()),
            ("oncegate-origin-partition", partition.to_string()),
            ("oncegate-origin-offset", offset.to_string()),
        ]),
        other => ours.push(("oncegate-origin", other.to_string())),
    }
    if let Some(timestamp_ms) = message.timestamp_ms() {
        ours.push(("oncegate-origin-timestamp", timestamp_ms.to_string()));
    }
    ours.push(("oncegate-scope", letter.scope.clone()));
    if let Some(key) = &letter.key {
        ours.push(("oncegate-key", key.clone()));
    }
    ours.extend([
        ("oncegate-cause", letter.cause.as_str().to_owned()),
        ("oncegate-reason", truncated(&letter.reason).to_owned()),
        ("oncegate-attempts", letter.attempts.to_string()),
    ]);
    if let Some(first) = letter.first_failed_at {
        ours.push((FIRST_FAILED_HEADER, millis_since_1970(first).to_string()));
    }
    ours.push(("oncegate-failed-at", millis_since_1970(letter.failed_at).to_string()));
    ours
}

/// Returns the beginning of the reason, cut between characters.
fn truncated(reason: &str) -> &str {
    let cut = (0..=REASON_MAX_BYTES.min(reason.len())).rev().find(|end| reason.is_char_boundary(*end));
    cut.and_then(|end| reason.get(..end)).unwrap_or_default()
}

/// The producer's callbacks.
#[derive(Debug)]
pub(crate) struct Context;

impl ClientContext for Context {
    fn log(&self, level: RDKafkaLogLevel, facility: &str, line: &str) {
        member::log(level, facility, line);
    }

    fn error(&self, error: KafkaError, reason: &str) {
        tracing::warn!(%error, reason, "the producer's Kafka client reports an error");
    }

    fn stats_raw(&self, _statistics: &[u8]) {}
}

impl fmt::Debug for KafkaDeadLetters {
    /// Shows no property values, because they may be passwords.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KafkaDeadLetters")
            .field("brokers", &self.brokers)
            .field("topic", &self.topic)
            .finish_non_exhaustive()
    }
}
