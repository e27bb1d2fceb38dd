//! The outbox: messages that are written in the transaction of an effect, and published by a relay
//! after its commit.
//!
//! A transaction that changes rows and publishes a message would need both a database and a broker
//! to commit. Instead it writes the message into a table of its own database ([`OutboxMessage`];
//! `PostgresOutbox` and `SqliteOutbox` write it). A [`Relay`] reads the table and publishes. A
//! rolled-back transaction publishes nothing.
//!
//! - **Nothing is lost.** A row counts as sent only after the broker has confirmed the message
//!   durably.
//! - **At least once.** A relay that ends between the confirmation and the mark publishes again.
//!   Each message has an id in the header [`ID_HEADER`], the same each time: with
//!   [`Key::header`](oncegate_core::key::Key::header)`("outbox-id")` the next consumer's gate
//!   answers the repeats.
//! - **Order per key.** Of the messages with one key in one topic, the relay sends the next one
//!   only after the broker has confirmed the last one. So their first copies arrive in the order in
//!   which they were written, whatever fails, and even while two relays run. Transactions that
//!   write at the same time have no order; those of one key are one after another when a consumer
//!   handles its messages in order.
//! - **Back-pressure.** At most one batch is in memory and in flight.
//!
//! [`OutboxStore`] is the port of the table, [`Publisher`] that of the broker.

mod backlog;
mod flight;
mod held_back;
mod leader;
mod relay;
mod scan;
mod settings;

use std::fmt;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use oncegate_core::record::Token;
use oncegate_core::store::StoreError;

use oncegate_runtime::failure::BoxError;
use oncegate_runtime::message::Header;

pub use self::backlog::{OutboxBacklog, RelayMonitor};
pub use self::held_back::HeldBack;
pub use self::relay::{Relay, RelayError};
pub use self::settings::RelaySettings;

/// The header with the id of a published message. The next consumer's key is
/// `Key::header("outbox-id")`.
///
/// The name does not begin with `oncegate-`: retry topics and dead letters remove such headers, and
/// this one must come back with its message.
pub const ID_HEADER: &str = "outbox-id";

/// The longest id, in bytes.
const ID_MAX_BYTES: usize = 128;

/// The longest name of a topic, in bytes. Kafka's own limit is 249.
const TOPIC_MAX_BYTES: usize = 512;

/// The most headers of a message.
const HEADERS_MAX: usize = 128;

/// The most bytes of a message: payload, key and headers.
const MESSAGE_MAX_BYTES: usize = 64 * 1024 * 1024;

/// A message to be published after its transaction has been committed.
///
/// ```
/// use oncegate::outbox::OutboxMessage;
///
/// let message = OutboxMessage::new("shipments", r#"{"order_id":"4711"}"#).key("customer-1").header("type", "shipped");
/// assert_eq!(message.topic(), "shipments");
/// ```
#[derive(Clone, PartialEq, Eq)]
pub struct OutboxMessage {
    id: String,
    topic: String,
    key: Option<Bytes>,
    payload: Option<Bytes>,
    headers: Vec<Header>,
}

impl OutboxMessage {
    /// Creates a message for `topic` with this payload. It has a random id, no key and no headers.
    pub fn new(topic: impl Into<String>, payload: impl Into<Bytes>) -> Self {
        Self {
            payload: Some(payload.into()),
            ..Self::tombstone(topic)
        }
    }

    /// Creates a message without a payload, which deletes its key in a compacted topic.
    pub fn tombstone(topic: impl Into<String>) -> Self {
        let id = format!("{:032x}", rand::random::<u128>());
        Self {
            id,
            topic: topic.into(),
            key: None,
            payload: None,
            headers: Vec::new(),
        }
    }

    /// Sets the broker's key. It decides the partition, as with other clients, and messages with
    /// the same key keep their order. Default: none; the message then has no order.
    #[must_use]
    pub fn key(self, key: impl Into<Bytes>) -> Self {
        Self {
            key: Some(key.into()),
            ..self
        }
    }

    /// Adds a header. It is published unchanged.
    #[must_use]
    pub fn header(mut self, name: impl Into<Box<str>>, value: impl Into<Bytes>) -> Self {
        self.headers.push(Header {
            name: name.into(),
            value: Some(value.into()),
        });
        self
    }

    /// Sets the headers, replacing those that are there.
    #[must_use]
    pub fn headers(self, headers: Vec<Header>) -> Self {
        Self { headers, ..self }
    }

    /// Sets the id. Default: 128 random bits.
    ///
    /// With [`Attempt::idempotency_key`](oncegate_runtime::Attempt::idempotency_key) it is the same
    /// for all attempts of a message, so that a gate also answers repeats of an effect outside of
    /// the store's transaction.
    #[must_use]
    pub fn id(self, id: impl Into<String>) -> Self {
        Self {
            id: id.into(),
            ..self
        }
    }

    /// The topic or queue.
    pub fn topic(&self) -> &str {
        &self.topic
    }

    /// The id: the value of [`ID_HEADER`] when the message is published.
    pub fn message_id(&self) -> &str {
        &self.id
    }

    /// The broker's key.
    pub fn key_bytes(&self) -> Option<&Bytes> {
        self.key.as_ref()
    }

    /// The payload; `None` for a tombstone.
    pub fn payload(&self) -> Option<&Bytes> {
        self.payload.as_ref()
    }

    /// The headers, without [`ID_HEADER`].
    pub fn own_headers(&self) -> &[Header] {
        &self.headers
    }

    /// The bytes of payload, key and headers.
    pub fn size_bytes(&self) -> usize {
        let headers = self
            .headers
            .iter()
            .map(|header| header.name.len() + length(header.value.as_ref()));
        length(self.payload()) + length(self.key_bytes()) + headers.sum::<usize>()
    }

    /// Checks the limits, for adapters that write the message.
    ///
    /// # Errors
    /// Names the limit or the header. It contains nothing of the payload.
    pub fn check(&self) -> Result<(), BoxError> {
        let Self {
            id, topic, headers, ..
        } = self;
        let bytes = self.size_bytes();
        let why = if topic.is_empty() || topic.len() > TOPIC_MAX_BYTES {
            format!(
                "its topic has {} bytes; give it 1 to {TOPIC_MAX_BYTES}",
                topic.len()
            )
        } else if id.is_empty() || id.len() > ID_MAX_BYTES {
            format!("its id has {} bytes; give it 1 to {ID_MAX_BYTES}", id.len())
        } else if headers.len() > HEADERS_MAX {
            format!(
                "it has {} headers, and the most are {HEADERS_MAX}",
                headers.len()
            )
        } else if headers.iter().any(|header| &*header.name == ID_HEADER) {
            format!(
                "it has a header {ID_HEADER}, which the relay sets; set OutboxMessage::id instead"
            )
        } else if bytes > MESSAGE_MAX_BYTES {
            format!("it has {bytes} bytes, and the most are {MESSAGE_MAX_BYTES}")
        } else {
            return Ok(());
        };
        Err(format!("the message cannot be written into the outbox: {why}").into())
    }
}

fn length(bytes: Option<&Bytes>) -> usize {
    bytes.map_or(0, Bytes::len)
}

impl fmt::Debug for OutboxMessage {
    /// Shows nothing of payload, key and headers.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OutboxMessage")
            .field("id", &self.id)
            .field("topic", &self.topic)
            .field("bytes", &self.size_bytes())
            .finish_non_exhaustive()
    }
}

/// A message in the outbox that was not sent yet.
#[derive(Clone, Debug)]
pub struct UnsentMessage {
    /// The place in the order of the outbox.
    pub sequence: i64,
    /// The message.
    pub message: OutboxMessage,
    /// The time from its write to its read, by the database's clock.
    pub age: Duration,
    /// The reason why its row is no message, for a row that another program has written; `None`:
    /// it is one. Such a row is refused, and holds up only the later messages of its key.
    pub fault: Option<String>,
}

/// The limits of a read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadLimits {
    /// The most messages.
    pub messages: u32,
    /// The most bytes of payloads. A larger message is read alone.
    pub bytes: u64,
}

/// The numbers of messages in an outbox.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OutboxStatus {
    /// Messages that are not sent yet.
    pub unsent: u64,
    /// The time since the oldest of them was written; `None` if there is none.
    pub oldest_unsent: Option<Duration>,
    /// Messages that were sent and are kept until their retention is over.
    pub sent: u64,
    /// The unsent rows that are no messages, which another program has written: the relay's log has
    /// the reasons.
    pub malformed: u64,
    /// `true` when a relay leads at this moment.
    pub led: bool,
}

/// An outbox in a database: the port of the SQL adapters, implemented by `PostgresOutbox` and
/// `SqliteOutbox`.
///
/// All times are the database's.
#[async_trait]
pub trait OutboxStore: Send + Sync + fmt::Debug {
    /// The name of the outbox.
    fn name(&self) -> &str;

    /// Checks that the tables are there and may be used.
    ///
    /// # Errors
    /// [`StoreError::Refused`] says what to run or to grant.
    async fn check(&self) -> Result<(), StoreError>;

    /// Makes `relay` the leader for `lease` from now on, if it is the leader or there is none.
    /// Returns whether it is.
    ///
    /// # Errors
    /// The database did not answer or refuses.
    async fn lead(&self, relay: Token, lease: Duration) -> Result<bool, StoreError>;

    /// Ends the leadership of `relay`, if it is the leader.
    ///
    /// # Errors
    /// The database did not answer. The leadership then ends with its lease.
    async fn resign(&self, relay: Token) -> Result<(), StoreError>;

    /// Reads the oldest messages that are not sent, in the order of their sequence, without those
    /// that are held back. A row that is no message is read with its
    /// [fault](UnsentMessage::fault).
    ///
    /// # Errors
    /// The database did not answer or refuses.
    async fn read(
        &self,
        held_back: &HeldBack,
        most: ReadLimits,
    ) -> Result<Vec<UnsentMessage>, StoreError>;

    /// Notes that these messages were sent. It can be repeated.
    ///
    /// # Errors
    /// After an unknown outcome the caller repeats it.
    async fn mark_sent(&self, sequences: Vec<i64>) -> Result<(), StoreError>;

    /// Removes messages that were sent longer ago than `retention`, at most `most` of them. Returns
    /// the number of removed messages.
    ///
    /// # Errors
    /// The database did not answer or refuses.
    async fn purge(&self, retention: Duration, most: u32) -> Result<u64, StoreError>;

    /// Counts the messages that are not sent, up to `most`, and returns the age of the first one.
    /// It is called every few seconds, by each relay: it must not read all of them.
    ///
    /// # Errors
    /// The database did not answer or refuses.
    async fn backlog(&self, most: u32) -> Result<OutboxBacklog, StoreError>;

    /// Counts the messages of the outbox.
    ///
    /// # Errors
    /// The database did not answer or refuses.
    async fn status(&self) -> Result<OutboxStatus, StoreError>;
}

/// A broker that messages of an outbox are published to: the port that `KafkaPublisher` and
/// `SqsPublisher` implement.
#[async_trait]
pub trait Publisher: Send + Sync + fmt::Debug {
    /// Checks the settings. Called once, before the first message.
    ///
    /// # Errors
    /// Names the setting to change.
    async fn open(&self) -> Result<(), BoxError> {
        Ok(())
    }

    /// Publishes the message with its id in [`ID_HEADER`]. Returns only when it is durable: it is
    /// marked as sent right after.
    ///
    /// # Errors
    /// When it may not be durable. The relay publishes it again, so it may arrive twice.
    async fn publish(&self, message: &OutboxMessage) -> Result<(), PublishError>;

    /// Returns the part of the topic that messages with this key, or without one, go to, if the
    /// topic has parts that fail apart, such as partitions, and they are known. Default: `None`.
    ///
    /// Messages of a part that does not answer are held back without those of other parts. It is
    /// called for each message, and must not wait.
    fn part(&self, _topic: &str, _key: Option<&[u8]>) -> Option<TopicPart> {
        None
    }
}

/// A part of a topic that may fail while the others do not.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TopicPart {
    /// The number of the part, from 0; that of messages that may go to any part is
    /// [`of`](Self::of).
    pub number: u32,
    /// The number of parts that the topic has.
    pub of: u32,
}

/// The reason that a message may not have been published.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PublishError {
    /// The broker will not take this message before something is changed.
    #[error("the broker refuses: {0}")]
    Refused(String),
    /// The broker will not take any message of this topic before something is changed.
    #[error("the broker refuses the topic: {0}")]
    TopicRefused(String),
    /// The broker did not confirm; a later try may succeed.
    #[error("the broker did not confirm: {0}")]
    Unconfirmed(String),
}

impl PublishError {
    /// Returns the lower-case word for metrics: `refused` or `unconfirmed`.
    pub fn class(&self) -> &'static str {
        match self {
            Self::Refused(_) | Self::TopicRefused(_) => "refused",
            Self::Unconfirmed(_) => "unconfirmed",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_over_a_limit_is_refused_before_it_is_written() {
        fn message() -> OutboxMessage {
            OutboxMessage::new("shipments", "{}")
        }
        assert!(message().key("k").header("type", "shipped").check().is_ok());
        assert!(OutboxMessage::tombstone("shipments").check().is_ok());
        let many = (0..=HEADERS_MAX).fold(message(), |message, _| message.header("x", "y"));
        for (bad, named) in [
            (OutboxMessage::new("", "{}"), "topic"),
            (OutboxMessage::new("t".repeat(513), "{}"), "topic"),
            (message().id(""), "id"),
            (message().header(ID_HEADER, "mine"), ID_HEADER),
            (many, "headers"),
            (
                OutboxMessage::new("t", vec![0; MESSAGE_MAX_BYTES + 1]),
                "bytes",
            ),
        ] {
            let error = bad.check().unwrap_err().to_string();
            assert!(error.contains(named), "{error}");
        }
    }

    #[test]
    fn ids_are_random_and_no_content_is_shown() {
        let message = OutboxMessage::new("shipments", "a secret")
            .key("secret key")
            .header("h", "secret value");
        let other = OutboxMessage::new("shipments", "a secret");
        assert_ne!(message.message_id(), other.message_id());
        assert!(!format!("{message:?}").contains("secret"));
    }
}
