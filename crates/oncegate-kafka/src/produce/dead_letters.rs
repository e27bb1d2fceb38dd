//! Writes dead letters to a Kafka topic.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use parking_lot::Mutex;
use rdkafka::config::ClientConfig;
use rdkafka::message::{Header, OwnedHeaders};

use crate::ask::rights;
use crate::ask::topics;
use crate::client::headers::{FIRST_FAILED_HEADER, ID_HEADER, PREFIX, ROUTE_HEADER, SCOPE_HEADER};
use crate::client::inquiry;
use crate::client::producer::{DurableProducer, is_connection};
use crate::client::properties::Properties;
use crate::client::remedies;
use crate::client::settings;
use crate::client::source_settings::KafkaSettings;
use oncegate_core::reason::one_line;
use oncegate_runtime::dead_letters::{
    DeadLetter, DeadLetterRefused, DeadLetters, millis_since_1970,
};
use oncegate_runtime::failure::BoxError;
use oncegate_runtime::message::{Message, Origin};

/// The longest `oncegate-reason`, in bytes.
const REASON_MAX_BYTES: usize = 1024;

/// Writes dead letters to a topic: payload, key and headers unchanged, and headers with their
/// origin and cause (see [`kafka`](crate)).
///
/// A dead letter counts as written when all in-sync replicas have it. It is compressed (zstd), so
/// that a message that fits into its topic fits into the dead-letter topic as well. A dead letter
/// that the topic will never take, for example because it is too large, stops the consumer.
pub struct KafkaDeadLetters {
    brokers: String,
    topic: String,
    properties: Properties,
    /// Topics that a source consumes. Our topic must not be one of them.
    consumed: Vec<String>,
    open_timeout: Duration,
    producer: Mutex<Option<Arc<DurableProducer>>>,
}

impl KafkaDeadLetters {
    /// Creates dead letters that write to `topic` in the cluster at `brokers`
    /// (`"host:port,host:port"`).
    ///
    /// [`KafkaSource::dead_letters`](crate::KafkaSource::dead_letters) takes both the brokers and
    /// the connection properties from a source.
    pub fn new(brokers: impl Into<String>, topic: impl Into<String>) -> Self {
        Self {
            brokers: brokers.into(),
            topic: topic.into(),
            properties: Properties::default(),
            consumed: Vec::new(),
            open_timeout: KafkaSettings::DEFAULT.open_timeout,
            producer: Mutex::default(),
        }
    }

    /// Sets a property of the librdkafka producer, such as `compression.type`. Opening fails with
    /// the name of any property that could lose dead letters.
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

    /// Time limit for one attempt to open, in which the brokers must answer; default 10 s, or that
    /// of the [source](crate::KafkaSource::open_timeout) that they are made of.
    #[must_use]
    pub fn open_timeout(mut self, timeout: Duration) -> Self {
        self.open_timeout = timeout;
        self
    }

    pub(crate) fn beside(mut self, consumed: Vec<String>, properties: &Properties) -> Self {
        self.consumed = consumed;
        self.properties.extend(properties, is_connection);
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

    fn producer(&self) -> Result<Arc<DurableProducer>, BoxError> {
        let producer = self.producer.lock();
        producer
            .clone()
            .ok_or_else(|| "the dead-letter topic has not been opened".into())
    }
}

#[async_trait]
impl DeadLetters for KafkaDeadLetters {
    /// Checks that the topic exists, that this user may write to it, and that no source consumes
    /// it.
    async fn open(&self) -> Result<(), BoxError> {
        settings::check_topic(&self.topic)?;
        self.consumed
            .iter()
            .try_for_each(|consumed| self.refuse_loop(consumed))?;
        let producer = DurableProducer::new(&self.brokers, self.properties.clone())?;
        // A producer that requests a topic's metadata creates the topic where brokers allow that; a
        // consumer does not.
        let connection = self.properties.only(is_connection).read()?;
        let mut config = ClientConfig::new();
        config.extend(connection.iter().cloned());
        config.set("bootstrap.servers", &self.brokers);
        let brokers = self.brokers.clone();
        let topic = self.topic.clone();
        let timeout = self.open_timeout;
        let asking = tokio::task::spawn_blocking(move || {
            let client = inquiry::client(config)?;
            topics::check(&client, &brokers, &[topic], timeout)
        });
        asking.await??;
        let missing = rights::to_write(
            &self.brokers,
            std::slice::from_ref(&self.topic),
            &connection,
        )
        .await?;
        rights::refuse(&self.brokers, &missing)?;
        *self.producer.lock() = Some(Arc::new(producer));
        Ok(())
    }

    async fn send(&self, letter: &DeadLetter) -> Result<(), BoxError> {
        let message = &letter.message;
        if let Origin::Kafka { topic, .. } = message.origin() {
            self.refuse_loop(topic)?;
        }
        let producer = self.producer()?;
        let sent = producer
            .send(&self.topic, message.into(), headers(letter))
            .await;
        sent.map_err(|error| {
            let why = producer.explain(&error);
            let what = format!(
                "dead letter could not be written to topic {}: {why}",
                self.topic
            );
            match remedies::remedy(&error) {
                Some(remedy) => DeadLetterRefused::new(format!("{what}; {remedy}")).into(),
                None => what.into(),
            }
        })
    }
}

/// Returns the message's own headers, and ours.
fn headers(letter: &DeadLetter) -> OwnedHeaders {
    let mut headers = own_headers(&letter.message);
    for (name, value) in provenance(letter) {
        headers = headers.insert(Header {
            key: name,
            value: Some(value.as_bytes()),
        });
    }
    headers
}

/// Returns the message's own headers, without ours from an earlier delivery.
pub(crate) fn own_headers(message: &Message) -> OwnedHeaders {
    /// The number of our headers that a dead letter gets.
    const OURS: usize = 16;
    let mut headers = OwnedHeaders::new_with_capacity(message.headers().len() + OURS);
    for header in message
        .headers()
        .iter()
        .filter(|header| !header.name.starts_with(PREFIX))
    {
        headers = headers.insert(Header {
            key: &header.name,
            value: header.value.as_deref(),
        });
    }
    headers
}

fn provenance(letter: &DeadLetter) -> Vec<(&'static str, String)> {
    let message: &Message = &letter.message;
    let mut ours = vec![
        (ID_HEADER, letter.id()),
        (ROUTE_HEADER, message.route().to_owned()),
    ];
    match message.origin() {
        Origin::Kafka {
            topic,
            partition,
            offset,
        } => ours.extend([
            ("oncegate-origin-topic", topic.to_string()),
            ("oncegate-origin-partition", partition.to_string()),
            ("oncegate-origin-offset", offset.to_string()),
        ]),
        other => ours.push(("oncegate-origin", other.to_string())),
    }
    if let Some(timestamp_ms) = message.timestamp_ms() {
        ours.push(("oncegate-origin-timestamp", timestamp_ms.to_string()));
    }
    ours.push((SCOPE_HEADER, letter.scope.clone()));
    if let Some(key) = &letter.key {
        ours.push(("oncegate-key", key.clone()));
    }
    ours.extend([
        ("oncegate-cause", letter.cause.as_str().to_owned()),
        ("oncegate-reason", one_line(truncated(&letter.reason))),
        ("oncegate-attempts", letter.attempts.to_string()),
    ]);
    if let Some(first) = letter.first_failed_at {
        ours.push((FIRST_FAILED_HEADER, millis_since_1970(first).to_string()));
    }
    ours.push((
        "oncegate-failed-at",
        millis_since_1970(letter.failed_at).to_string(),
    ));
    ours
}

/// Returns the beginning of the reason, cut between characters.
fn truncated(reason: &str) -> &str {
    let cut = (0..=REASON_MAX_BYTES.min(reason.len()))
        .rev()
        .find(|end| reason.is_char_boundary(*end));
    cut.and_then(|end| reason.get(..end)).unwrap_or_default()
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
