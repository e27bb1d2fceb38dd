//! Where a partition without a commit begins, when the source begins at the end.
//!
//! The client alone would begin at the end at every assignment until something is committed, and skip what came meanwhile.
//! So the position is decided once, here, and nothing of the partition is received before the broker has it:
//!
//! | the group has | the partition begins |
//! |---|---|
//! | a commit of this partition | there |
//! | a commit of another partition of the topic | at its first message: the topic has gained it since |
//! | no commit of the topic | at its end |
//!
//! In the last case the owner of the topic's first partition commits the ends of *all* its partitions in one request, and
//! the owners of the others wait for that. Each deciding for its own, the second one would find the first one's commits and
//! take its partitions for new ones. The ends are read before the broker is asked once more for commits: they lie before
//! everything that another member can have committed, so they never skip a message, however late the request comes.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rdkafka::TopicPartitionList;
use rdkafka::consumer::{BaseConsumer, CommitMode, Consumer};
use rdkafka::error::KafkaError;
use rdkafka::topic_partition_list::Offset;

use super::assignment::Assignment;
use super::member::Context;
use super::topics;
use crate::source::SourceError;

/// How long one question may take. A revoke's commit waits behind it.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);

/// How long to wait before asking again.
pub(crate) const ASK_AGAIN: Duration = Duration::from_millis(100);

/// How long the owner of the first partition may take. Then it is a program that does not know of this, and each member
/// decides for itself.
const FIRST_OWNER_PATIENCE: Duration = Duration::from_secs(60);

type Offsets = BTreeMap<i32, i64>;

/// Decides where partitions begin, on the thread that may wait for the broker.
#[derive(Debug, Default)]
pub(crate) struct Beginnings {
    /// Since when another member should have committed the ends.
    waiting_since: Option<Instant>,
}

impl Beginnings {
    /// Resolves what can be resolved now; whether there is something new to commit. What fails is tried again.
    pub(crate) fn resolve(&mut self, consumer: &BaseConsumer<Context>) -> bool {
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
                    tracing::warn!(%error, why, "where {topic} begins is not known yet; asking again");
                }
            }
        }
        any
    }

    fn resolve_topic(
        &mut self,
        consumer: &BaseConsumer<Context>,
        topic: &str,
        mut ours: Vec<Arc<Assignment>>,
    ) -> Result<bool, SourceError> {
        let numbers: Vec<i32> = ours.iter().map(|one| one.partition().number).collect();
        go_on(&mut ours, &committed(consumer, topic, &numbers)?);
        if ours.is_empty() {
            return Ok(false);
        }
        let all = topics::partitions(consumer, "the cluster", topic, ANSWER_TIMEOUT)?;
        let ends = offsets(consumer, topic, &all, Offset::End)?;
        // After the ends: see the module's text.
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
                SourceError::caused(format!("the ends of {topic} are not committed"), error)
            })?;
            tracing::info!(
                topic,
                partitions = ends.len(),
                "the group is new to the topic; it begins at the end"
            );
        } else if self.waiting_since.get_or_insert_with(Instant::now).elapsed() < FIRST_OWNER_PATIENCE {
            return Ok(false);
        } else {
            tracing::warn!(
                topic,
                "the owner of its first partition has committed nothing; beginning at the end"
            );
        }
        for one in &ours {
            if let Some(end) = ends.get(&one.partition().number) {
                // The commit thread commits it, again perhaps, like every other position of ours.
                one.resolve(*end, false);
            }
        }
        Ok(true)
    }
}

/// Those of which the group has a commit go on there.
fn go_on(ours: &mut Vec<Arc<Assignment>>, committed: &Offsets) {
    ours.retain(|one| {
        let found = committed.get(&one.partition().number);
        found.inspect(|position| one.resolve(**position, true)).is_none()
    });
}

/// The topic has gained these since the group began with it: nothing of them may be skipped.
fn begin_new(
    consumer: &BaseConsumer<Context>,
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

/// What the group has committed of these partitions; those without a commit are absent.
fn committed(consumer: &BaseConsumer<Context>, topic: &str, numbers: &[i32]) -> Result<Offsets, SourceError> {
    let asked = list(topic, numbers.iter().map(|number| (*number, Offset::Invalid)));
    let answer = asked.and_then(|list| consumer.committed_offsets(list, ANSWER_TIMEOUT));
    read(answer).map_err(|error| SourceError::caused(format!("the commits of {topic} are not known"), error))
}

/// The first or last offsets of these partitions.
fn offsets(
    consumer: &BaseConsumer<Context>,
    topic: &str,
    numbers: &[i32],
    which: Offset,
) -> Result<Offsets, SourceError> {
    if numbers.is_empty() {
        return Ok(Offsets::new());
    }
    let asked = list(topic, numbers.iter().map(|number| (*number, which)));
    // In the protocol the beginning and the end are points in time like others.
    let answer = asked.and_then(|list| consumer.offsets_for_times(list, ANSWER_TIMEOUT));
    read(answer).map_err(|error| SourceError::caused(format!("the ends of {topic} are not known"), error))
}

fn list(topic: &str, offsets: impl Iterator<Item = (i32, Offset)>) -> Result<TopicPartitionList, KafkaError> {
    let mut list = TopicPartitionList::new();
    for (number, offset) in offsets {
        list.add_partition_offset(topic, number, offset)?;
    }
    Ok(list)
}

/// The offsets in an answer, or the first error in it.
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
