//! A Kafka message that a test produces.

use std::time::{SystemTime, UNIX_EPOCH};

use rdkafka::message::{Header, OwnedHeaders};
use rdkafka::producer::FutureRecord;

/// A message to produce. Without [`Record::key`] it has none, and Kafka chooses its partition.
#[derive(Clone, Debug, Default)]
pub struct Record {
    payload: Option<Vec<u8>>,
    key: Option<Vec<u8>>,
    partition: Option<i32>,
    headers: Option<OwnedHeaders>,
    timestamp_ms: Option<i64>,
}

impl Record {
    /// A message with this payload.
    #[must_use]
    pub fn new(payload: impl Into<Vec<u8>>) -> Self {
        Self {
            payload: Some(payload.into()),
            ..Self::default()
        }
    }

    /// A message without a payload, which deletes its key from a compacted topic.
    #[must_use]
    pub fn tombstone() -> Self {
        Self::default()
    }

    /// The broker key. Equal keys go to one partition.
    #[must_use]
    pub fn key(mut self, key: impl Into<Vec<u8>>) -> Self {
        self.key = Some(key.into());
        self
    }

    /// The partition, in place of the one that Kafka would choose.
    #[must_use]
    pub fn partition(mut self, partition: i32) -> Self {
        self.partition = Some(partition);
        self
    }

    /// The time of the message, in place of the one at which it is produced. It is a time of today:
    /// the topic's retention deletes messages of long ago, and the brokers of the tests refuse
    /// them.
    #[must_use]
    pub fn produced_at(mut self, at: SystemTime) -> Self {
        let since_epoch = at.duration_since(UNIX_EPOCH).expect("it is after 1970");
        self.timestamp_ms =
            Some(i64::try_from(since_epoch.as_millis()).expect("it is before the end of time"));
        self
    }

    /// Adds a header; its value may be any bytes.
    #[must_use]
    pub fn header(mut self, name: &str, value: impl AsRef<[u8]>) -> Self {
        let headers = self.headers.unwrap_or_default();
        self.headers = Some(headers.insert(Header {
            key: name,
            value: Some(value.as_ref()),
        }));
        self
    }

    /// The message as the producer sends it to `topic`.
    pub(crate) fn to_future_record<'a>(&'a self, topic: &'a str) -> FutureRecord<'a, [u8], [u8]> {
        FutureRecord {
            topic,
            partition: self.partition,
            payload: self.payload.as_deref(),
            key: self.key.as_deref(),
            timestamp: self.timestamp_ms,
            headers: self.headers.clone(),
        }
    }
}
