//! Every commit of a group, as the broker keeps it in its own topic.

use std::collections::BTreeMap;

use oncegate_testing::promise::OffsetCommit;
use rdkafka::Message as _;

use crate::kafka::Kafka;

/// Where Kafka keeps what groups have committed.
const OFFSETS_TOPIC: &str = "__consumer_offsets";

/// The commits of `group` to `topic`, in the order in which the broker has taken them.
pub(super) async fn commits(kafka: &Kafka, group: &str, topic: &str) -> Vec<OffsetCommit> {
    let records = kafka.read_all(OFFSETS_TOPIC).await;
    let commit = |record: &rdkafka::message::OwnedMessage| {
        let mut key = Fields(record.key()?);
        // Versions 0 and 1 of a key are offsets; others are about the group itself.
        let of_group = key.short()? <= 1 && key.text()? == group && key.text()? == topic;
        let partition = key.int()?;
        let mut value = Fields(record.payload()?);
        value.short()?;
        let offset = value.long()?;
        let at_ms = record.timestamp().to_millis()?;
        of_group.then_some(OffsetCommit {
            partition,
            offset,
            at_ms,
        })
    };
    records.iter().filter_map(commit).collect()
}

/// The offsets that the group has committed for each partition of the topic, in the order in which
/// the broker has taken them.
pub async fn commits_of(kafka: &Kafka, group: &str, topic: &str) -> BTreeMap<i32, Vec<i64>> {
    let mut of_partition: BTreeMap<i32, Vec<i64>> = BTreeMap::new();
    for commit in commits(kafka, group, topic).await {
        of_partition
            .entry(commit.partition)
            .or_default()
            .push(commit.offset);
    }
    of_partition
}

/// Kafka's numbers and texts, one after the other.
struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (bytes, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*bytes)
    }

    fn short(&mut self) -> Option<i16> {
        self.take().map(i16::from_be_bytes)
    }

    fn int(&mut self) -> Option<i32> {
        self.take().map(i32::from_be_bytes)
    }

    fn long(&mut self) -> Option<i64> {
        self.take().map(i64::from_be_bytes)
    }

    fn text(&mut self) -> Option<&'a str> {
        let length = usize::try_from(self.short()?).ok()?;
        let (text, rest) = self.0.split_at_checked(length)?;
        self.0 = rest;
        std::str::from_utf8(text).ok()
    }
}
