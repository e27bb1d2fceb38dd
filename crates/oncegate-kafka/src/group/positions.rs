//! The positions from which the poll thread reads: seeks, recreated topics, deleted messages, and
//! offsets without a message.

use std::sync::Arc;
use std::time::Duration;

use rdkafka::consumer::Consumer;
use rdkafka::error::KafkaError;
use rdkafka::topic_partition_list::{Offset, TopicPartitionList};

use super::poll::Poller;
use crate::partitions::assignment::Assignment;
use crate::partitions::partition::Partition;
use crate::partitions::partition_map::{PartitionMap, list_of};
use oncegate_runtime::observe::Event;

/// Time limit for one seek. A seek that fails is retried, and no message of the partition is
/// accepted before it succeeds.
const SEEK_PATIENCE: Duration = Duration::from_millis(500);

impl Poller {
    /// Handles a recreated topic: positions in the deleted topic mean nothing in the new one.
    pub(super) fn made_again(&mut self, topic: &str) {
        self.refresh();
        let ours = self
            .owned
            .values()
            .map(|one| one.partition())
            .filter(|one| &*one.topic == topic);
        let ours: Vec<Partition> = ours.cloned().collect();
        if self.terms.keeps_positions {
            tracing::warn!(
                topic,
                partitions = ours.len(),
                "the topic has another id; continuing at the same positions"
            );
            return;
        }
        tracing::warn!(
            topic,
            partitions = ours.len(),
            "the topic was recreated; reading it from its beginning"
        );
        self.member.observer.observe(Event::TopicMadeAgain);
        for partition in ours {
            self.gone_from.remove(&partition);
            self.read_anew(partition);
        }
    }

    /// Handles a position without messages: they were deleted, or the log was truncated.
    pub(super) fn out_of_range(&mut self, partition: Partition, position: i64) {
        self.refresh();
        let Some(owned) = self.owned.of(&partition) else {
            return;
        };
        if !owned.has_begun() || self.is_sought(owned) {
            self.left_early.insert(&partition, Arc::clone(owned));
            return;
        }
        if let Some(sought) = owned.seeks_again_after(position) {
            tracing::debug!(%partition, position, sought, "the client has left the position that it was sought to");
            let again = (Arc::clone(owned), Offset::Offset(sought));
            self.seeking.insert(&partition, again);
            return;
        }
        tracing::warn!(%partition, position, "the log has no message at this position; continuing with its oldest one");
        self.gone_from
            .insert(&partition.clone(), (partition, position));
    }

    pub(super) fn is_sought(&self, assignment: &Arc<Assignment>) -> bool {
        self.seeking
            .of(assignment.partition())
            .is_some_and(|(sought, _)| Arc::ptr_eq(sought, assignment))
    }

    /// Begins another epoch of one of our partitions, from the beginning of its new log.
    fn read_anew(&mut self, partition: Partition) {
        if !self.member.assignments.restart(&partition) {
            return;
        }
        if !self.held {
            // The last epoch may have been paused because too many of its messages were unfinished,
            // or it had not begun.
            let list = list_of(std::iter::once(&partition));
            if let Err(error) = self.consumer.resume(&list) {
                tracing::warn!(%error, "cannot resume a partition that is read again from its beginning");
            }
        }
        self.member.buffer.purge_revoked();
        self.refresh();
        if let Some(assignment) = self.owned.of(&partition).cloned() {
            self.seeking
                .insert(&partition, (assignment, Offset::Beginning));
        }
        self.seek();
    }

    /// Starts reading the partitions whose starting position is decided and committed.
    pub(super) fn begin(&mut self) {
        let seeking = &mut self.seeking;
        self.beginning.retain(|assignment| {
            let Some(position) = assignment.begins_at() else {
                return true;
            };
            let sought = (Arc::clone(assignment), Offset::Offset(position));
            seeking.insert(assignment.partition(), sought);
            false
        });
    }

    /// Seeks the partitions that wait for a seek.
    pub(super) fn seek(&mut self) {
        if self.seeking.is_empty() {
            return;
        }
        self.refresh();
        let sought = list_at(&self.seeking)
            .and_then(|list| self.consumer.seek_partitions(list, SEEK_PATIENCE));
        match sought {
            // A seek that fails, for example because the leader is not known, is retried.
            Ok(sought) => {
                let sought = PartitionMap::of_list(&sought, |element| element.error().is_ok());
                let mut paused = Vec::new();
                self.seeking.retain(|(assignment, _)| {
                    let is_sought = sought.of(assignment.partition()) == Some(&true);
                    if is_sought && !assignment.has_begun() {
                        paused.push(Arc::clone(assignment));
                    }
                    if is_sought {
                        assignment.begun();
                    }
                    !is_sought
                });
                if !self.held {
                    self.resume(paused.iter());
                }
            }
            Err(error) => tracing::debug!(%error, "the client cannot seek yet"),
        }
    }

    /// Moves the watermarks past offsets without a message. The client's positions are exact,
    /// transaction markers included, because only this thread polls it.
    pub(super) fn pass(&self) {
        let positions = match self.consumer.position() {
            Ok(positions) => PartitionMap::of_list(&positions, |element| element.offset()),
            Err(error) => {
                return tracing::debug!(%error, "the client does not report its positions");
            }
        };
        for assignment in self.owned.values().filter(|one| !self.is_sought(one)) {
            if let Some(Offset::Offset(position)) = positions.of(assignment.partition()) {
                assignment.passes(*position);
            }
        }
    }
}

/// Returns the partition list for one seek.
fn list_at(
    sought: &PartitionMap<(Arc<Assignment>, Offset)>,
) -> Result<TopicPartitionList, KafkaError> {
    let mut list = TopicPartitionList::with_capacity(sought.len());
    for (assignment, offset) in sought.values() {
        let partition = assignment.partition();
        list.add_partition(&partition.topic, partition.number)
            .set_offset(*offset)?;
    }
    Ok(list)
}
