//! Selects the messages of a topic that are read.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::time::{Duration, SystemTime};

use rdkafka::TopicPartitionList;
use rdkafka::consumer::Consumer as _;
use rdkafka::topic_partition_list::Offset;

use crate::client::convert::Routes;
use crate::client::inquiry::InquiryClient;
use oncegate_runtime::dead_letters::millis_since_1970;
use oncegate_runtime::source::SourceError;

/// Selects messages of a topic, by partition, offset and time, and where their routes are from. By
/// default all of them, with the topic as route.
#[derive(Clone, Debug, Default)]
pub struct TopicWindow {
    /// The partitions; `None` for all.
    partitions: Option<BTreeSet<i32>>,
    offsets: BTreeMap<i32, Range<i64>>,
    from_offset: Option<i64>,
    to_offset: Option<i64>,
    since: Option<SystemTime>,
    until: Option<SystemTime>,
    pub(crate) routes: Routes,
}

impl TopicWindow {
    /// The window of all messages.
    pub fn new() -> Self {
        Self::default()
    }

    /// Only these offsets of these partitions, as
    /// [`TopicReader::offsets`](crate::TopicReader::offsets) returns them: to read the same
    /// messages again.
    pub fn exactly(offsets: BTreeMap<i32, Range<i64>>) -> Self {
        Self {
            partitions: Some(offsets.keys().copied().collect()),
            offsets,
            ..Self::default()
        }
    }

    /// Only this partition, and others for which this is called.
    #[must_use]
    pub fn partition(mut self, partition: i32) -> Self {
        self.partitions.get_or_insert_default().insert(partition);
        self
    }

    /// Only messages of each partition from this offset on.
    #[must_use]
    pub fn from_offset(mut self, offset: i64) -> Self {
        self.from_offset = Some(offset);
        self
    }

    /// Only messages of each partition before this offset.
    #[must_use]
    pub fn to_offset(mut self, offset: i64) -> Self {
        self.to_offset = Some(offset);
        self
    }

    /// Only messages from the first one of each partition on that has this timestamp or a later
    /// one. A later message with an earlier timestamp is read, too.
    #[must_use]
    pub fn since(mut self, time: SystemTime) -> Self {
        self.since = Some(time);
        self
    }

    /// Only messages before the first one of each partition that has this timestamp or a later one.
    #[must_use]
    pub fn until(mut self, time: SystemTime) -> Self {
        self.until = Some(time);
        self
    }

    /// Takes the route of each message from its header, as the consumer of the topic does with
    /// [`KafkaSource::routes_from_headers`](crate::KafkaSource::routes_from_headers). By default
    /// the topic is the route.
    #[must_use]
    pub fn routes_from_headers(mut self) -> Self {
        self.routes = Routes::Headers;
        self
    }

    /// Begins at these offsets; partitions without one begin at their first message.
    pub(crate) fn starting(starts: BTreeMap<i32, i64>) -> Self {
        let offsets = starts
            .into_iter()
            .map(|(partition, start)| (partition, start..i64::MAX));
        Self {
            offsets: offsets.collect(),
            ..Self::default()
        }
    }

    /// The offsets to read of a topic that has `kept`, by partition. Blocks for at most twice
    /// `timeout`.
    ///
    /// # Errors
    /// When there is no such partition, or no broker answers about times.
    pub(crate) fn apply(
        &self,
        client: &InquiryClient,
        topic: &str,
        kept: BTreeMap<i32, Range<i64>>,
        timeout: Duration,
    ) -> Result<BTreeMap<i32, Range<i64>>, SourceError> {
        if let Some(missing) = self
            .partitions
            .iter()
            .flatten()
            .find(|partition| !kept.contains_key(partition))
        {
            return Err(SourceError::new(format!(
                "topic {topic} has no partition {missing}"
            )));
        }
        let chosen: Vec<i32> = kept
            .keys()
            .copied()
            .filter(|partition| self.chooses(*partition))
            .collect();
        let since = self
            .since
            .map(|time| offsets_at(client, topic, &chosen, time, timeout))
            .transpose()?;
        let until = self
            .until
            .map(|time| offsets_at(client, topic, &chosen, time, timeout))
            .transpose()?;
        Ok(kept
            .into_iter()
            .filter(|(partition, _)| self.chooses(*partition))
            .map(|(partition, kept)| {
                let since = since
                    .as_ref()
                    .map(|times| offset_of(times, partition, &kept));
                let until = until
                    .as_ref()
                    .map(|times| offset_of(times, partition, &kept));
                (partition, self.cut(partition, &kept, since, until))
            })
            .collect())
    }

    /// Returns the offsets of `kept` that are in the window, whose times are given as offsets.
    fn cut(
        &self,
        partition: i32,
        kept: &Range<i64>,
        since: Option<i64>,
        until: Option<i64>,
    ) -> Range<i64> {
        let given = self.offsets.get(&partition);
        let starts = [self.from_offset, given.map(|given| given.start), since];
        let ends = [self.to_offset, given.map(|given| given.end), until];
        let start = starts.into_iter().flatten().fold(kept.start, i64::max);
        let end = ends.into_iter().flatten().fold(kept.end, i64::min);
        start..end.max(start)
    }

    fn chooses(&self, partition: i32) -> bool {
        self.partitions
            .as_ref()
            .is_none_or(|chosen| chosen.contains(&partition))
    }
}

/// Returns the offset of a time. A time after the last message has none, and stands for the end.
fn offset_of(times: &BTreeMap<i32, i64>, partition: i32, kept: &Range<i64>) -> i64 {
    times.get(&partition).copied().unwrap_or(kept.end)
}

/// The offset of the first message with this timestamp or a later one, for partitions that have
/// one.
fn offsets_at(
    client: &InquiryClient,
    topic: &str,
    partitions: &[i32],
    time: SystemTime,
    timeout: Duration,
) -> Result<BTreeMap<i32, i64>, SourceError> {
    let failed = |error| {
        SourceError::caused(
            format!("cannot find the offsets of a time in topic {topic}"),
            error,
        )
    };
    let millis = i64::try_from(millis_since_1970(time)).unwrap_or(i64::MAX);
    let mut asked = TopicPartitionList::new();
    for partition in partitions {
        asked
            .add_partition(topic, *partition)
            .set_offset(Offset::Offset(millis))
            .map_err(failed)?;
    }
    let found = client.offsets_for_times(asked, timeout).map_err(failed)?;
    let mut offsets = BTreeMap::new();
    for element in found.elements() {
        element.error().map_err(failed)?;
        if let Offset::Offset(offset) = element.offset() {
            offsets.insert(element.partition(), offset);
        }
    }
    Ok(offsets)
}
