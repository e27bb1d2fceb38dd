//! Decides where partitions begin whose position the client must not decide. They are paused until
//! the broker has the position and the client has sought to it. There are two kinds.
//!
//! # The brokers withhold the committed offset of a partition
//!
//! A transaction that commits it is open. The client would wait for it with all partitions that it
//! was assigned together with, and later ones ([`committed`]). So each of these is asked about
//! alone, and costs only itself. Without a committed offset it begins at its first message.
//!
//! # The source begins at the end
//!
//! The client alone would begin at the end at every assignment until an offset is committed, and
//! skip messages that came meanwhile. So the position is decided here once:
//!
//! | the group has | the partition begins |
//! |---|---|
//! | a committed offset of this partition | at that offset |
//! | a committed offset of another partition of the topic | at its first message, because the topic has gained it since |
//! | no committed offset of the topic | at its end |
//!
//! In the last case the owner of the topic's first partition commits the ends of *all* its
//! partitions in one request, and the owners of the others wait for that. If each owner decided for
//! its own partitions, the second one would find the first one's commits and treat its own
//! partitions as new. The ends are read before the committed offsets are requested again: the ends
//! are not beyond any position that another member can have committed, so they never skip a
//! message, however late the request comes.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rdkafka::TopicPartitionList;
use rdkafka::consumer::{BaseConsumer, CommitMode, Consumer};
use rdkafka::error::KafkaError;
use rdkafka::topic_partition_list::Offset;

use super::commit_desk::CommitContext;
use crate::ask::committed::{self, ANSWER_TIMEOUT, Committed, Inquirer, Offsets};
use crate::ask::topics;
use crate::client::inquiry::TopicLayout;
use crate::client::log;
use crate::client::trouble::OFFSET;
use crate::partitions::assignment::Assignment;
use crate::partitions::partition::Partition;
use oncegate_runtime::observe::Event;
use oncegate_runtime::source::SourceError;

/// Stands for the addresses of the brokers in errors.
const CLUSTER: &str = "the cluster";

/// Delay before a request is repeated.
const ASK_AGAIN: Duration = Duration::from_millis(100);

/// The same for an offset that the brokers withhold, possibly for as long as a transaction may
/// last.
const ASK_AGAIN_WITHHELD: Duration = Duration::from_secs(1);

/// The time for the topics of one round. Commits wait for it.
const ROUND_MAX: Duration = Duration::from_secs(4);

/// The time to wait for the owner of the first partition. After that, the owner is taken for a
/// program without this rule, and each member decides for itself.
const FIRST_OWNER_PATIENCE: Duration = Duration::from_secs(60);

/// Decides where partitions begin, on the commit thread, which may wait for the broker.
#[derive(Debug, Default)]
pub(crate) struct Beginnings {
    /// The time since which we have waited for another member to commit the ends.
    waiting_since: Option<Instant>,
    committed: Inquirer,
    /// The topic that was asked about last: the next round begins after it.
    last_topic: Option<Arc<str>>,
    /// The withheld partitions that the log has named.
    named: Vec<Partition>,
}

impl Beginnings {
    /// Returns the delay before the next round, which is `interval` if nothing is left to decide.
    pub(crate) fn pause(&self, interval: Duration, unresolved: usize) -> Duration {
        match unresolved {
            0 => interval,
            _ if unresolved > self.committed.withheld().len() => interval.min(ASK_AGAIN),
            _ => interval.min(ASK_AGAIN_WITHHELD),
        }
    }

    /// Resolves the partitions that can be resolved now; returns whether there is something new to
    /// commit. Failures are retried.
    pub(crate) fn resolve<C: CommitContext>(&mut self, consumer: &BaseConsumer<C>) -> bool {
        let context = consumer.context();
        let unresolved = context.assignments().unresolved();
        self.committed
            .retain(|one| unresolved.iter().any(|ours| ours.partition() == one));
        if unresolved.is_empty() {
            self.waiting_since = None;
            self.tell(consumer);
            return false;
        }
        let mut topics: BTreeMap<Arc<str>, Vec<Arc<Assignment>>> = BTreeMap::new();
        for assignment in unresolved {
            topics
                .entry(Arc::clone(&assignment.partition().topic))
                .or_default()
                .push(assignment);
        }
        let begun = Instant::now();
        let mut topics: Vec<_> = topics.into_iter().collect();
        let after = topics
            .iter()
            .position(|(topic, _)| Some(topic) > self.last_topic.as_ref());
        topics.rotate_left(after.unwrap_or_default());
        let mut any = false;
        for (topic, ours) in topics {
            match self.resolve_topic(consumer, &topic, ours) {
                Ok(resolved) => any |= resolved,
                Err(error) => {
                    let why = std::error::Error::source(&error).map(ToString::to_string);
                    if let Some(left_out) =
                        log::worth_logging(&format!("begin {topic}: {error}: {why:?}"))
                    {
                        tracing::warn!(%error, why, left_out, "cannot decide yet where {topic} begins; retrying");
                    }
                }
            }
            self.last_topic = Some(topic);
            if begun.elapsed() >= ROUND_MAX {
                break;
            }
        }
        self.tell(consumer);
        any
    }

    /// Puts the withheld partitions into the status, and into the log when they change.
    fn tell<C: CommitContext>(&mut self, consumer: &BaseConsumer<C>) {
        let context = consumer.context();
        let withheld = self.committed.withheld();
        let Some(first) = withheld.first() else {
            self.named.clear();
            if !context.assignments().is_empty() {
                context.failures().succeeded(OFFSET);
            }
            return;
        };
        let others = match withheld.len() {
            1 => String::new(),
            count => format!(" and of {} more partitions", count - 1),
        };
        let why = format!(
            "the brokers withhold the group's committed offset of {first}{others}: a transaction that commits it is \
             open. Each such partition is read when its transaction ends, by its producer or after its \
             transaction.timeout.ms; kafka-transactions.sh lists and aborts transactions"
        );
        context.failures().failed(Instant::now(), OFFSET, &why);
        if withheld.iter().any(|one| !self.named.contains(one)) {
            tracing::warn!(why, "partitions wait");
            context
                .observer()
                .observe(Event::SourceError { operation: OFFSET });
        }
        self.named = withheld.to_vec();
    }

    fn resolve_topic<C: CommitContext>(
        &mut self,
        consumer: &BaseConsumer<C>,
        topic: &str,
        mut ours: Vec<Arc<Assignment>>,
    ) -> Result<bool, SourceError> {
        let numbers: Vec<i32> = ours.iter().map(|one| one.partition().number).collect();
        let known = self.ask(consumer, topic, &numbers)?;
        go_on(&mut ours, &known.offsets);
        ours.retain(|one| !known.withheld.contains(&one.partition().number));
        if ours.is_empty() {
            return Ok(false);
        }
        if !consumer.context().begins_at_end() {
            return begin_first(consumer, topic, &ours);
        }
        let metadata = consumer
            .fetch_metadata(Some(topic), ANSWER_TIMEOUT)
            .map_err(|error| topics::unreachable(CLUSTER, ANSWER_TIMEOUT, error))?;
        let found = metadata.topics().iter().find(|found| found.name() == topic);
        let all = topics::described(found.map(TopicLayout::of), CLUSTER, topic)?;
        let ends = offsets(consumer, topic, &all, Offset::End)?;
        // This must follow the request for the ends; see the module's documentation.
        let known = self.ask(consumer, topic, &all)?;
        go_on(&mut ours, &known.offsets);
        if !known.offsets.is_empty() {
            return begin_first(consumer, topic, &ours);
        }
        if !known.withheld.is_empty() {
            // The transaction decides whether the group has an offset of the topic.
            return Ok(false);
        }
        let first = all.iter().min().copied();
        if ours.iter().any(|one| Some(one.partition().number) == first) {
            let list = list(
                topic,
                ends.iter()
                    .map(|(number, end)| (*number, Offset::Offset(*end))),
            );
            let done = list.and_then(|list| consumer.commit(&list, CommitMode::Sync));
            done.map_err(|error| {
                SourceError::caused(format!("cannot commit the end offsets of {topic}"), error)
            })?;
            tracing::info!(
                topic,
                partitions = ends.len(),
                "the group has no committed offset of the topic; beginning at the end"
            );
        } else if self
            .waiting_since
            .get_or_insert_with(Instant::now)
            .elapsed()
            < FIRST_OWNER_PATIENCE
        {
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

    fn ask<C: CommitContext>(
        &mut self,
        consumer: &BaseConsumer<C>,
        topic: &str,
        numbers: &[i32],
    ) -> Result<Committed, SourceError> {
        self.committed
            .ask(consumer, topic, numbers)
            .map_err(|error| {
                SourceError::caused(
                    format!("cannot read the committed offsets of {topic}"),
                    error,
                )
            })
    }
}

/// Resolves the partitions with a committed offset to that offset.
fn go_on(ours: &mut Vec<Arc<Assignment>>, committed: &Offsets) {
    ours.retain(|one| {
        let found = committed.get(&one.partition().number);
        found
            .inspect(|position| one.resolve(**position, true))
            .is_none()
    });
}

/// Resolves partitions without a committed offset to their first message: none may be skipped. The
/// topic may have gained them since the group began.
fn begin_first<C: CommitContext>(
    consumer: &BaseConsumer<C>,
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

/// Returns the first or last offsets of these partitions.
fn offsets<C: CommitContext>(
    consumer: &BaseConsumer<C>,
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
    committed::read(answer).map_err(|error| {
        SourceError::caused(
            format!("cannot read the first or last offsets of {topic}"),
            error,
        )
    })
}

fn list(
    topic: &str,
    offsets: impl Iterator<Item = (i32, Offset)>,
) -> Result<TopicPartitionList, KafkaError> {
    let mut list = TopicPartitionList::new();
    for (number, offset) in offsets {
        list.add_partition(topic, number).set_offset(offset)?;
    }
    Ok(list)
}
