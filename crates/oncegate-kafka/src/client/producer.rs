//! Writes messages so that they count as sent only when all in-sync replicas have them.

use std::error::Error;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};
use rdkafka::client::{ClientContext, OAuthToken};
use rdkafka::config::{ClientConfig, RDKafkaLogLevel};
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::message::{Header, OwnedHeaders};
use rdkafka::metadata::{Metadata, MetadataTopic};
use rdkafka::producer::{FutureProducer, Producer as _};

pub(crate) use super::delivery::Content;
use super::delivery::{Undelivered, deliver};
use super::log;
use super::login::login_refusal;
use super::properties::{FileContents, Properties};
use super::rotation;
use super::settings::{self, Property};
use super::tokens::{self, Tokens};
use oncegate_runtime::message::Header as OwnHeader;
use oncegate_runtime::source::SourceError;

/// Producer properties that only oncegate may set, and why.
const REFUSED: &[(&str, &str)] = &[
    ("bootstrap.servers", "the brokers are the first argument"),
    ("metadata.broker.list", "the brokers are the first argument"),
    ("acks", "what is written must reach all in-sync replicas"),
    (
        "request.required.acks",
        "what is written must reach all in-sync replicas",
    ),
    (
        "enable.idempotence",
        "a retry inside the client must not write a message twice",
    ),
    ("transactional.id", "oncegate writes in no transactions"),
];

/// Prefixes of a source's connection properties that its producer needs as well.
const CONNECTION: &[&str] = &[
    "security.",
    "sasl.",
    "ssl.",
    "enable.ssl.",
    "https.",
    "socket.",
    "broker.address.",
    "reconnect.",
    "client.",
    "debug",
];

/// Returns whether a source's property concerns the connection, so that its producers need it as
/// well.
pub(crate) fn is_connection(name: &str) -> bool {
    CONNECTION.iter().any(|prefix| name.starts_with(prefix))
}

/// The time limit for the brokers' answer how many partitions a topic has.
const COUNT_LIMIT: Duration = Duration::from_secs(2);

/// A producer whose messages count as sent when all in-sync replicas have them.
///
/// Its librdkafka client sends nothing more after a fatal error, for example after one answer that
/// denies idempotent writes. After brokers that came and went it may connect no more, so that every
/// message waits until its time is over, though the brokers answer others. Another client replaces
/// it then, and also when a password or certificate has changed.
pub(crate) struct DurableProducer {
    brokers: String,
    properties: Properties,
    current: Mutex<Current>,
}

type ProducerClient = FutureProducer<ProducerContext>;

/// The client in use.
struct Current {
    client: ProducerClient,
    /// Differs from that of every other client of this process.
    number: u64,
    config: ClientConfig,
    context: ProducerContext,
    /// The contents of the files that it was made of.
    contents: FileContents,
    /// The time at which the files are read next.
    look_at: Instant,
    /// The time before which the brokers are not asked again whether they answer another client.
    ask_at: Instant,
}

/// The number of the next client.
static NUMBER: AtomicU64 = AtomicU64::new(0);

impl Current {
    /// Replaces the client by one with the same settings. Returns the former one, to be ended.
    fn replace(&mut self) -> Result<ProducerClient, KafkaError> {
        let next = self.config.create_with_context(self.context.clone())?;
        self.number = NUMBER.fetch_add(1, Relaxed);
        Ok(std::mem::replace(&mut self.client, next))
    }
}

impl DurableProducer {
    /// Creates a producer for the cluster at `brokers`. It connects by itself.
    ///
    /// # Errors
    /// When a file cannot be read, or a property is not valid.
    pub(crate) fn new(brokers: &str, properties: Properties) -> Result<Self, SourceError> {
        let current = Current::new(brokers, &properties)?;
        Ok(Self {
            brokers: brokers.to_owned(),
            properties,
            current: Mutex::new(current),
        })
    }

    /// Sends the content with these headers, and waits until they are written.
    ///
    /// # Errors
    /// When the message may not be written. It may be written nevertheless.
    pub(crate) async fn send(
        &self,
        topic: &str,
        content: Content<'_>,
        headers: OwnedHeaders,
    ) -> Result<(), KafkaError> {
        let (client, number) = self.client_for(topic).await;
        let Err(Undelivered { error, partition }) =
            deliver(&client, topic, content, headers.clone()).await
        else {
            self.current().context.refusal().take();
            return Ok(());
        };
        // Only after a fatal error, or without a connection, does another client do better.
        let client = if client.client().fatal_error().is_some() {
            self.replace_failed().await?
        } else if is_over(&error) && self.is_replaced(number, (topic, partition)).await? {
            self.current().client.clone()
        } else {
            return Err(error);
        };
        deliver(&client, topic, content, headers)
            .await
            .map_err(|undelivered| match client.client().fatal_error() {
                Some((code, _)) => KafkaError::MessageProduction(code),
                None => undelivered.error,
            })
    }

    /// Returns how many partitions a topic has; `None` without an answer of the brokers.
    pub(crate) async fn count_partitions(&self, topic: &str) -> Option<u32> {
        let client = self.current().client.clone();
        let topic = topic.to_owned();
        let asking = tokio::task::spawn_blocking(move || {
            let metadata = client.client().fetch_metadata(Some(&topic), COUNT_LIMIT);
            let metadata = metadata.ok()?;
            let found = metadata
                .topics()
                .iter()
                .find(|found| found.name() == topic)?;
            u32::try_from(found.partitions().len()).ok()
        });
        asking.await.ok()?.filter(|count| *count > 0)
    }

    /// The text of an error of `send`, with the reason if the brokers refuse the login: the client
    /// tries again until the time limit of a message, and then says only that it is over.
    pub(crate) fn explain(&self, error: &KafkaError) -> String {
        match &*self.current().context.refusal() {
            Some(refusal) => format!("{error}: {refusal}"),
            None => error.to_string(),
        }
    }

    /// Replaces the client if it has failed, and returns the one that is used from now on.
    async fn replace_failed(&self) -> Result<ProducerClient, KafkaError> {
        let (client, former) = {
            let mut current = self.current();
            let former = match current.client.client().fatal_error() {
                Some((code, reason)) => {
                    tracing::warn!(%code, reason, "a Kafka producer has failed; replacing it");
                    Some(current.replace()?)
                }
                None => None,
            };
            (current.client.clone(), former)
        };
        end(former).await;
        Ok(client)
    }

    /// Replaces the client of this number, which has not written a message in time, if the brokers
    /// answer another client and the partition of the message has a leader. Returns whether it is
    /// replaced, by this call or another one.
    async fn is_replaced(
        &self,
        number: u64,
        (topic, partition): (&str, i32),
    ) -> Result<bool, KafkaError> {
        {
            let mut current = self.current();
            if current.number != number {
                return Ok(true);
            }
            let now = Instant::now();
            if now < current.ask_at {
                return Ok(false);
            }
            current.ask_at = now + rotation::LOOK_EVERY;
        }
        let brokers = self.brokers.clone();
        let properties = self.properties.clone();
        let topic = topic.to_owned();
        let asking = tokio::task::spawn_blocking(move || {
            answer_others(&brokers, &properties, &topic)
                .is_ok_and(|metadata| !lacks_leader(&metadata, partition))
        });
        if !asking.await.unwrap_or(false) {
            return Ok(false);
        }
        let former = {
            let mut current = self.current();
            if current.number != number {
                return Ok(true);
            }
            tracing::warn!(
                "a Kafka producer has written nothing in time, though the brokers answer another client; replacing it"
            );
            current.replace()?
        };
        end(former).await;
        Ok(true)
    }

    /// Returns the client to write to `topic` with, and its number: another one, once the brokers
    /// accept a changed password or certificate.
    async fn client_for(&self, topic: &str) -> (ProducerClient, u64) {
        let (client, contents) = {
            let mut current = self.current();
            let now = Instant::now();
            if !self.properties.has_files() || now < current.look_at {
                return (current.client.clone(), current.number);
            }
            // Until this one knows more, other calls use the client that is there.
            current.look_at = now + rotation::TRIAL_TIMEOUT;
            let client = (current.client.clone(), current.number);
            (client, current.contents)
        };
        let brokers = self.brokers.clone();
        let properties = self.properties.clone();
        let topic = topic.to_owned();
        let looking =
            tokio::task::spawn_blocking(move || changed(&brokers, &properties, contents, &topic));
        let changed = looking.await.unwrap_or(None);
        let (client, former) = {
            let mut current = self.current();
            current.look_at = Instant::now() + rotation::LOOK_EVERY;
            match changed {
                None => return client,
                Some(next) => {
                    tracing::info!(
                        "a Kafka producer is replaced, because its password or certificate has changed"
                    );
                    let former = std::mem::replace(&mut *current, next);
                    ((current.client.clone(), current.number), former)
                }
            }
        };
        end(former).await;
        client
    }

    fn current(&self) -> MutexGuard<'_, Current> {
        self.current.lock()
    }
}

/// Drops a client, which waits for its threads. A panic there concerns no message.
async fn end<T: Send + 'static>(former: T) {
    _ = tokio::task::spawn_blocking(move || drop(former)).await;
}

/// Returns a client with what is in the files now, if that has changed and the brokers accept it.
fn changed(
    brokers: &str,
    properties: &Properties,
    contents: FileContents,
    topic: &str,
) -> Option<Current> {
    if properties.contents() == contents {
        return None;
    }
    let next = Current::new(brokers, properties)
        .and_then(|next| answer_others(brokers, properties, topic).map(|_| next));
    next.inspect_err(|error| {
        tracing::warn!(%error, "a producer's changed password or certificate is not accepted yet; continuing with the former one");
    })
    .ok()
}

/// Returns whether a partition of the topic has no leader, so that no client can write to it.
fn lacks_leader(metadata: &Metadata, partition: i32) -> bool {
    let mut partitions = metadata.topics().iter().flat_map(MetadataTopic::partitions);
    partitions.any(|found| found.id() == partition && found.leader() < 0)
}

/// Returns what the brokers answer about a topic to another client that connects with the same
/// properties.
fn answer_others(
    brokers: &str,
    properties: &Properties,
    topic: &str,
) -> Result<Metadata, SourceError> {
    let mut asking = ClientConfig::new();
    asking.extend(properties.only(is_connection).read()?);
    asking.set("bootstrap.servers", brokers);
    rotation::answers(asking, topic)
}

/// Returns whether the time of a message was over before it was written.
fn is_over(error: &KafkaError) -> bool {
    error.rdkafka_error_code() == Some(RDKafkaErrorCode::MessageTimedOut)
}

impl Current {
    /// Creates a client for the cluster at `brokers`. It connects by itself.
    fn new(brokers: &str, properties: &Properties) -> Result<Self, SourceError> {
        // First, so that a change in between is detected later.
        let contents = properties.contents();
        let mut config = config(brokers, &properties.read()?)?;
        let context = ProducerContext::new(Tokens::take(&mut config)?);
        let client = config
            .create_with_context(context.clone())
            .map_err(settings::unusable)?;
        Ok(Self {
            client,
            number: NUMBER.fetch_add(1, Relaxed),
            config,
            context,
            contents,
            look_at: Instant::now() + rotation::LOOK_EVERY,
            ask_at: Instant::now(),
        })
    }
}

/// Refuses properties with which messages could be lost.
pub(crate) fn refuse(properties: &[Property]) -> Result<(), SourceError> {
    settings::refuse(properties, REFUSED)
}

fn config(brokers: &str, properties: &[Property]) -> Result<ClientConfig, SourceError> {
    refuse(properties)?;
    settings::check_brokers(brokers)?;
    let mut config = ClientConfig::new();
    config
        .set("client.id", "oncegate")
        // The caller retries. The client's default of five minutes would block it without any
        // report.
        .set("delivery.timeout.ms", "30000")
        // Only the broker's limit applies, and no second one here.
        .set("message.max.bytes", "100000000")
        // The broker's limit applies to compressed batches. A message that was read from such a
        // batch may be too large without compression.
        .set("compression.type", "zstd")
        // Equal keys go to the same partition as with other clients.
        .set("partitioner", "murmur2_random")
        .set(settings::RECONNECT.0, settings::RECONNECT.1);
    for (name, value) in properties {
        config.set(name, value);
    }
    config
        .set("bootstrap.servers", brokers)
        .set("acks", "all")
        .set("enable.idempotence", "true");
    Ok(config)
}

/// A message's own headers, and one of ours.
pub(crate) fn headers(own: &[OwnHeader], name: &str, value: &[u8]) -> OwnedHeaders {
    let headers = OwnedHeaders::new_with_capacity(own.len() + 1);
    let headers = own.iter().fold(headers, |headers, header| {
        headers.insert(Header {
            key: &header.name,
            value: header.value.as_deref(),
        })
    });
    headers.insert(Header {
        key: name,
        value: Some(value),
    })
}

impl fmt::Debug for DurableProducer {
    /// Shows no property values, because they may be passwords.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DurableProducer").finish_non_exhaustive()
    }
}

/// The producer's callbacks.
#[derive(Clone, Debug)]
pub(crate) struct ProducerContext {
    tokens: Option<Tokens>,
    /// The reason for which the brokers refuse the login, since a message was last written.
    refusal: Arc<Mutex<Option<String>>>,
}

impl ProducerContext {
    pub(crate) fn new(tokens: Option<Tokens>) -> Self {
        Self {
            tokens,
            refusal: Arc::default(),
        }
    }

    fn refusal(&self) -> MutexGuard<'_, Option<String>> {
        self.refusal.lock()
    }
}

impl ClientContext for ProducerContext {
    const ENABLE_REFRESH_OAUTH_TOKEN: bool = true;

    fn generate_oauth_token(&self, _config: Option<&str>) -> Result<OAuthToken, Box<dyn Error>> {
        tokens::generate(self.tokens.as_ref())
    }

    fn log(&self, level: RDKafkaLogLevel, facility: &str, line: &str) {
        log::log(level, facility, line);
    }

    fn error(&self, error: KafkaError, reason: &str) {
        if let Some(left_out) = log::worth_logging(&format!("producer: {reason}")) {
            tracing::warn!(%error, reason, left_out, "the producer's Kafka client reports an error");
        }
        if let Some(refusal) = login_refusal(&error, reason, self.tokens.is_some()) {
            *self.refusal() = Some(refusal);
        }
    }

    fn stats_raw(&self, _statistics: &[u8]) {}
}

#[cfg(test)]
#[path = "producer_tests.rs"]
mod tests;
