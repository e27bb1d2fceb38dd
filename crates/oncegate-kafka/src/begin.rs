//! Decides where a partition without a committed offset begins, when the source begins at the end.
//!
//! The client alone would begin at the end at every assignment until an offset is committed, and skip messages that
//! came meanwhile. So the position is decided here once, and the partition is paused until the broker has it and the
//! client has sought to it:
//!
//! | the group has | the partition begins |
//! |---|---|
//! | a committed offset of this partition | at that offset |
//! | a committed offset of another partition of the topic | at its first message, because the topic has gained it since |
//! | no committed offset of the topic | at its end |
//!
//! In the last case the owner of the topic's first partition commits the ends of *all* its partitions in one request,
//! and the owners of the others wait for that. If each owner decided for its own partitions, the second one would
//! find the first one's commits and treat its own partitions as new. The ends are read before the committed offsets
//! are requested again: the ends are not beyond any position that another member can have committed, so they never
//! skip a message, however late the request comes.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rdkafka::TopicPartitionList;
use rdkafka::consumer::{BaseConsumer, CommitMode, Consumer};
use rdkafka::error::KafkaError;
use rdkafka::topic_partition_list::Offset;

use super::assignment::Assignment;
use super::member::MemberContext;
use super::topics;
use oncegate_runtime::source::SourceError;

/// Time limit of one request to the broker. A revoke's commit waits for it.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);

/// Stands for the addresses of the brokers in errors.
const CLUSTER: &str = "the cluster";

/// Delay before a request is repeated.
pub(crate) const ASK_AGAIN: Duration = Duration::from_millis(100);

/// How long to wait for the owner of the first partition. After that, the owner is taken for a program without this
/// rule, and each member decides for itself.
const FIRST_OWNER_PATIENCE: Duration = Duration::from_secs(60);

type Offsets = BTreeMap<i32, i64>;

/// Decides where partitions begin, on the commit thread, which may wait for the broker.
#[derive(Debug, Default)]
pub(crate) struct Beginnings {
    /// Since when we have waited for another member to commit the ends.
    waiting_since: Option<Instant>,
}

impl Beginnings {
    /// Resolves the partitions that can be resolved now; returns whether there is something new to commit. Failures are
    /// retried.
    pub(crate) fn resolve(&mut self, consumer: &BaseConsumer<MemberContext>) -> bool {
        let unresolved = consumer.context().member().assignments.unresolved();
        if unresolved.is_empty() {
            self.waiting_since = None;
            return false;
        }
        let mut topics: BTreeMap<Arc<str>, Vec<Arc<Assignment>>> = BTreeMap::new();
        for assignment in unresolved {
            topics.entry(Arc::clone(&assignment.partition().topic)).or_default().push(assignment);
        }
        let mut any = false;
        for (topic, ours) in topics {
            match self.resolve_topic(consumer, &topic, ours) {
                Ok(resolved) => any |= resolved,
                Err(error) => {
                    let why = std::error::Error::source(&error).map(ToString::to_string);
                    tracing::warn!(%error, why, "cannot decide yet where {topic} begins; retrying");
                }
            }
        }
        any
    }

    fn resolve_topic(
        &mut self,
        consumer: &BaseConsumer<MemberContext>,
        topic: &str,
        mut ours: Vec<Arc<Assignment>>,
    ) -> Result<bool, SourceError> {
        let numbers: Vec<i32> = ours.iter().map(|one| one.partition().number).collect();
        go_on(&mut ours, &committed(consumer, topic, &numbers)?);
        if ours.is_empty() {
            return Ok(false);
        }
        let metadata = consumer.fetch_metadata(Some(topic), ANSWER_TIMEOUT);
        let unreachable = |error| topics::unreachable(CLUSTER, ANSWER_TIMEOUT, error);
        let all = topics::described(&metadata.map_err(unreachable)?, CLUSTER, topic)?;
        let ends = offsets(consumer, topic, &all, Offset::End)?;
        // This must follow the request for the ends; see the module's documentation.
        let known = committed(consumer, topic, &all)?;
        go_on(&mut ours, &known);
        if !known.is_empty() {
            return begin_new(consumer, topic, &ours);
        }
        let first = all.iter().min().copied();
        if ours.iter().any(|one| Some(one.partition().number) == first) {
            let list = list(topic, ends.iter().map(|(number, end)| (*number, Offset::Offset(*end))));
            let done = list.and_then(|list| consumer.commit(&list, CommitMode::Sync));
            done.map_err(|error| {
                SourceError::caused(format!("cannot commit the end offsets of {topic}"), error)
            })?;
            tracing::info!(
                topic,
                partitions = ends.len(),
                "the group has no committed offset of the topic; beginning at the end"
            );
        } else if self.waiting_since.get_or_insert_with(Instant::now).elapsed() < FIRST_OWNER_PATIENCE {
            return Ok(false);
        } else {
            tracing::warn!(
                topic,
                "the owner of the topic's first partition has committed nothing; beginning at the end"
            );
        }
        for one in &ours {
            if let Some(end) = ends.get(&one.partition().number) {
                // The commit thread commits it like every other position, possibly once more.
                one.resolve(*end, false);
            }
        }
        Ok(true)
    }
}

/// Resolves the partitions with a committed offset to that offset.
fn go_on(ours: &mut Vec<Arc<Assignment>>, committed: &Offsets) {
    ours.retain(|one| {
        let found = committed.get(&one.partition().number);
        found.inspect(|position| one.resolve(**position, true)).is_none()
    });
}

/// Resolves partitions that the topic has gained since the group began: none of their messages may be skipped.
fn begin_new(
    consumer: &BaseConsumer<MemberContext>,
    topic: &str,
    ours: &[Arc<Assignment>],
) -> Result<bool, SourceError> {
    let numbers: Vec<i32> = ours.iter().map(|one| one.partition().number).collect();
    let starts = offsets(consumer, topic, &numbers, Offset::Beginning)?;
    for one in ours {
        if let Some(start) = starts.get(&one.partition().number) {
            tracing::info!(partition = %one.partition(), start, "the partition is new to the group");
            one.resolve(*start, false);
        }
    }
    Ok(!ours.is_empty())
}

/// Returns the group's committed offsets of these partitions; partitions without one are absent.
fn committed(
    consumer: &BaseConsumer<MemberContext>,
    topic: &str,
    numbers: &[i32],
) -> Result<Offsets, SourceError> {
    let asked = list(topic, numbers.iter().map(|number| (*number, Offset::Invalid)));
    let answer = asked.and_then(|list| consumer.committed_offsets(list, ANSWER_TIMEOUT));
    read(answer)
        .map_err(|error| SourceError::caused(format!("cannot read the committed offsets of {topic}"), error))
}

/// Returns the first or last offsets of these partitions.
fn offsets(
    consumer: &BaseConsumer<MemberContext>,
    topic: &str,
    numbers: &[i32],
    which: Offset,
) -> Result<Offsets, SourceError> {
    if numbers.is_empty() {
        return Ok(Offsets::new());
    }
    let asked = list(topic, numbers.iter().map(|number| (*number, which)));
    // In the protocol, the beginning and the end are special timestamps.
    let answer = asked.and_then(|list| consumer.offsets_for_times(list, ANSWER_TIMEOUT));
    read(answer).map_err(|error| {
        SourceError::caused(format!("cannot read the first or last offsets of {topic}"), error)
    })
}

fn list(topic: &str, offsets: impl Iterator<Item = (i32, Offset)>) -> Result<TopicPartitionList, KafkaError> {
    let mut list = TopicPartitionList::new();
    for (number, offset) in offsets {
        list.add_partition(topic, number).set_offset(offset)?;
    }
    Ok(list)
}

/// Returns the offsets in an answer, or the first error in it.
fn read(answer: Result<TopicPartitionList, KafkaError>) -> Result<Offsets, KafkaError> {
    let answer = answer?;
    let mut offsets = Offsets::new();
    for element in answer.elements() {
        element.error()?;
        if let Offset::Offset(offset) = element.offset() {
            offsets.insert(element.partition(), offset);
        }
    }
    Ok(offsets)
}
