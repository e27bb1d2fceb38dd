//! A delivery from a broker.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use oncegate_core::key::{HeaderValue, KeySource};
use serde::de::DeserializeOwned;

use crate::failure::Failure;

/// A delivery from a broker: payload, broker key, headers and origin.
///
/// Cheap to clone. A message knows nothing of attempts: see [`Attempt`](crate::Attempt).
#[derive(Clone)]
pub struct Message {
    delivered: Arc<Delivered>,
}

#[derive(Clone)]
struct Delivered {
    route: Arc<str>,
    origin: Origin,
    broker: Option<&'static Broker>,
    payload: Option<Bytes>,
    key: Option<Bytes>,
    headers: Vec<Header>,
    timestamp_ms: Option<i64>,
    first_failed_at: Option<SystemTime>,
    defect: Option<&'static str>,
    dead_letter_of: Option<Arc<str>>,
    is_redelivered: bool,
}

/// A header: its name and its bytes, if any. A name may occur more than once.
#[derive(Clone, PartialEq, Eq)]
pub struct Header {
    /// The name, as the broker has it.
    pub name: Box<str>,
    /// The value; `None` is a null header.
    pub value: Option<Bytes>,
}

impl Header {
    fn size_bytes(&self) -> usize {
        const FIXED_BYTES: usize = 48;
        FIXED_BYTES + self.name.len() + self.value.as_ref().map_or(0, Bytes::len)
    }
}

impl fmt::Debug for Header {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}: {} bytes",
            self.name,
            self.value.as_ref().map_or(0, Bytes::len)
        )
    }
}

/// The names of a broker, for spans and for workers. Each source has one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Broker {
    /// The name in settings and in what workers get, such as `sqs`.
    pub name: &'static str,
    /// The name in OpenTelemetry's conventions for messaging (`messaging.system`), such as
    /// `aws_sqs`.
    pub system: &'static str,
}

/// The origin of a message. It names a delivery for logs and dead letters; it does not identify the
/// message.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Origin {
    /// A Kafka record.
    Kafka {
        /// The topic.
        topic: Arc<str>,
        /// The partition.
        partition: i32,
        /// The offset in the partition.
        offset: i64,
    },
    /// A message of a queue.
    Queue {
        /// The queue's name or address.
        queue: Arc<str>,
        /// The broker's message id.
        id: Arc<str>,
    },
    /// Another origin, as free text.
    Other(Arc<str>),
}

impl Origin {
    /// The unit of order: a topic's partition, or a queue.
    pub fn partition(&self) -> (&str, i32) {
        match self {
            Self::Kafka {
                topic, partition, ..
            } => (topic, *partition),
            Self::Queue { queue, .. } => (queue, 0),
            Self::Other(_) => ("", 0),
        }
    }
}

impl Origin {
    /// Parses an origin as `Display` writes it.
    pub fn parse(words: &str) -> Self {
        Self::parse_kafka(words)
            .or_else(|| Self::parse_queue(words))
            .unwrap_or_else(|| Self::Other(words.into()))
    }

    fn parse_kafka(words: &str) -> Option<Self> {
        let (place, offset) = words.rsplit_once('@')?;
        let (topic, partition) = place.rsplit_once('/')?;
        Some(Self::Kafka {
            topic: topic.into(),
            partition: partition.parse().ok()?,
            offset: offset.parse().ok()?,
        })
    }

    fn parse_queue(words: &str) -> Option<Self> {
        // Neither a queue's name nor a topic's contains this character.
        let (queue, id) = words.split_once('#')?;
        Some(Self::Queue {
            queue: queue.into(),
            id: id.into(),
        })
    }
}

impl fmt::Display for Origin {
    /// `orders/3@42`, `queue#id`, or the text.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Kafka {
                topic,
                partition,
                offset,
            } => write!(f, "{topic}/{partition}@{offset}"),
            Self::Queue { queue, id } => write!(f, "{queue}#{id}"),
            Self::Other(words) => f.write_str(words),
        }
    }
}

impl Message {
    /// A message of `route` with this payload; `None` is a tombstone.
    ///
    /// The route is the logical name of the stream: by default the topic or queue.
    pub fn new(route: impl Into<Arc<str>>, origin: Origin, payload: Option<Bytes>) -> Self {
        let delivered = Delivered {
            route: route.into(),
            origin,
            broker: None,
            payload,
            key: None,
            headers: Vec::new(),
            timestamp_ms: None,
            first_failed_at: None,
            defect: None,
            dead_letter_of: None,
            is_redelivered: false,
        };
        Self {
            delivered: Arc::new(delivered),
        }
    }

    /// A message that is nothing but this key of `route`, for work of a program's own with
    /// [`Gate::run`](crate::Gate::run) and a gate with [`Key::message_key`].
    ///
    /// [`Key::message_key`]: oncegate_core::key::Key::message_key
    pub fn keyed(route: impl Into<Arc<str>>, key: impl Into<Bytes>) -> Self {
        Self::new(route, Origin::Other("run".into()), None).with_key(key)
    }

    /// The same message with this payload, such as its decoded form for a handler.
    pub fn with_payload(self, payload: impl Into<Bytes>) -> Self {
        self.edit(|delivered| delivered.payload = Some(payload.into()))
    }

    /// The same message with the broker's key.
    pub fn with_key(self, key: impl Into<Bytes>) -> Self {
        self.edit(|delivered| delivered.key = Some(key.into()))
    }

    /// The same message with these headers.
    pub fn with_headers(self, headers: Vec<Header>) -> Self {
        self.edit(|delivered| delivered.headers = headers)
    }

    /// The same message with the broker's timestamp, in milliseconds since 1970.
    pub fn with_timestamp_ms(self, timestamp_ms: i64) -> Self {
        self.edit(|delivered| delivered.timestamp_ms = Some(timestamp_ms))
    }

    /// The same message with the time at which its first attempt failed. A [retry
    /// queue](crate::source::RetryQueue) keeps that time with the message, and the dead letter
    /// contains it.
    pub fn with_first_failed_at(self, time: SystemTime) -> Self {
        self.edit(|delivered| delivered.first_failed_at = Some(time))
    }

    /// The same message, marked as not having the form that its source is configured to read;
    /// `expected` describes that form. No gate derives a key from it: it is bad input, and goes to
    /// the dead letters.
    pub fn with_defect(self, expected: &'static str) -> Self {
        self.edit(|delivered| delivered.defect = Some(expected))
    }

    /// The form that its source expects and the message does not have; see
    /// [`with_defect`](Self::with_defect).
    pub fn defect(&self) -> Option<&'static str> {
        self.delivered.defect
    }

    /// The same message, marked as a dead letter that the consumer of this scope has written, and
    /// that was put back unchanged, for example with the redrive of an SQS console. A redrive of
    /// ours sends the original message instead.
    pub fn with_dead_letter_of(self, scope: impl Into<Arc<str>>) -> Self {
        self.edit(|delivered| delivered.dead_letter_of = Some(scope.into()))
    }

    /// The scope whose dead letter this delivery is; see
    /// [`with_dead_letter_of`](Self::with_dead_letter_of).
    pub fn dead_letter_of(&self) -> Option<&str> {
        self.delivered.dead_letter_of.as_deref()
    }

    /// The same message, marked as one that its broker may have delivered before.
    pub fn with_redelivery(self) -> Self {
        self.edit(|delivered| delivered.is_redelivered = true)
    }

    /// Returns `true` if its broker says that it may have delivered it before: to a process that
    /// ended without a word, for example. Only its record knows whether it has run.
    pub fn is_redelivered(&self) -> bool {
        self.delivered.is_redelivered
    }

    /// The same message of this broker.
    pub fn with_broker(self, broker: &'static Broker) -> Self {
        self.edit(|delivered| delivered.broker = Some(broker))
    }

    /// The broker, if the source has named it; an [`Origin::Kafka`] says it by itself.
    pub fn broker(&self) -> Option<&'static Broker> {
        self.delivered.broker
    }

    fn edit(mut self, change: impl FnOnce(&mut Delivered)) -> Self {
        change(Arc::make_mut(&mut self.delivered));
        self
    }

    /// The logical name of the stream; a retried or redriven message keeps its first one.
    pub fn route(&self) -> &str {
        &self.delivered.route
    }

    /// The origin of this delivery.
    pub fn origin(&self) -> &Origin {
        &self.delivered.origin
    }

    /// The payload; empty for a tombstone.
    pub fn payload(&self) -> &[u8] {
        self.delivered.payload.as_deref().unwrap_or_default()
    }

    /// The payload without copying it; `None` for a tombstone.
    pub fn payload_bytes(&self) -> Option<Bytes> {
        self.delivered.payload.clone()
    }

    /// Returns whether the broker delivered a null payload.
    pub fn is_tombstone(&self) -> bool {
        self.delivered.payload.is_none()
    }

    /// The broker's key of the message.
    pub fn key(&self) -> Option<&[u8]> {
        self.delivered.key.as_deref()
    }

    /// The broker's key without copying it.
    pub fn key_bytes(&self) -> Option<Bytes> {
        self.delivered.key.clone()
    }

    /// The last header of this name.
    pub fn header(&self, name: &str) -> Option<&[u8]> {
        let named = self
            .delivered
            .headers
            .iter()
            .rev()
            .find(|header| &*header.name == name);
        named.and_then(|header| header.value.as_deref())
    }

    /// The headers, in the broker's order.
    pub fn headers(&self) -> &[Header] {
        &self.delivered.headers
    }

    /// The broker's timestamp, in milliseconds since 1970.
    pub fn timestamp_ms(&self) -> Option<i64> {
        self.delivered.timestamp_ms
    }

    /// The time at which its first attempt failed, by the wall clock of the process that ran it.
    /// `None` when none has failed, or when another process ran it and the message did not come
    /// through a [retry queue](crate::source::RetryQueue).
    pub fn first_failed_at(&self) -> Option<SystemTime> {
        self.delivered.first_failed_at
    }

    /// The time since the broker received it, by this machine's clock; `None` without a timestamp,
    /// and with one of 0, which producers send that set none.
    pub fn age(&self) -> Option<Duration> {
        Some(
            SystemTime::now()
                .duration_since(self.produced_at()?)
                .unwrap_or_default(),
        )
    }

    /// The broker's timestamp, unless there is none or it says 1970.
    pub(crate) fn produced_at(&self) -> Option<SystemTime> {
        let millis = u64::try_from(self.timestamp_ms()?)
            .ok()
            .filter(|millis| *millis > 0)?;
        SystemTime::UNIX_EPOCH.checked_add(Duration::from_millis(millis))
    }

    /// The approximate size of this message in memory, in bytes, as counted by the limits on bytes.
    pub fn size_bytes(&self) -> usize {
        const FIXED_BYTES: usize = 256;
        FIXED_BYTES
            + self.payload().len()
            + self.key().map_or(0, <[u8]>::len)
            + self.headers().iter().map(Header::size_bytes).sum::<usize>()
    }

    /// Decodes the payload as JSON.
    ///
    /// # Errors
    /// Returns a permanent failure when it is not JSON of this shape: trying again would not help,
    /// so the message goes to the dead letters.
    pub fn json<T: DeserializeOwned>(&self) -> Result<T, Failure> {
        // A key skips a byte order mark too, so a message that has a key can be read.
        let payload = self.payload();
        let payload = payload.strip_prefix(b"\xEF\xBB\xBF").unwrap_or(payload);
        serde_json::from_slice(payload).map_err(|error| {
            // serde's own text quotes the value, and a reason is written to logs and dead letters.
            let category = error.classify();
            let line = error.line();
            let column = error.column();
            Failure::permanent(format!(
                "payload is not the expected JSON ({category:?} error at {line}:{column})"
            ))
        })
    }
}

impl KeySource for Message {
    fn payload(&self) -> Option<&[u8]> {
        self.delivered.payload.as_deref()
    }

    fn header(&self, name: &str) -> HeaderValue<'_> {
        let headers = self.headers().iter();
        HeaderValue::named(
            headers.filter_map(|header| Some((&*header.name, header.value.as_deref()?))),
            name,
        )
    }

    fn message_key(&self) -> Option<&[u8]> {
        self.key()
    }

    fn message_id(&self) -> Option<&str> {
        match self.origin() {
            Origin::Queue { id, .. } => Some(id),
            Origin::Kafka { .. } | Origin::Other(_) => None,
        }
    }
}

impl fmt::Debug for Message {
    /// Shows its origin and its size, never its content.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Message")
            .field("origin", &format_args!("{}", self.origin()))
            .field("payload_bytes", &self.payload().len())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn produced_at(timestamp_ms: i64) -> Message {
        Message::new("orders", Origin::Other("test".into()), None).with_timestamp_ms(timestamp_ms)
    }

    #[test]
    fn a_timestamp_of_zero_gives_no_age() {
        assert_eq!(produced_at(0).age(), None, "its age would be that of 1970");
        assert_eq!(produced_at(-1).age(), None);
        assert_eq!(
            produced_at(i64::MAX).age(),
            Some(Duration::ZERO),
            "this clock is behind the broker's"
        );
        assert!(produced_at(1_700_000_000_000).age() > Some(Duration::from_secs(3_600)));
    }
}
