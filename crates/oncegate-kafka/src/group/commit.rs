//! Commits offsets on a thread of its own.
//!
//! Only a synchronous commit reports its failure, and it has no time limit: it takes 6 s in a
//! rebalance and 31 s with the broker down. So commits run beside the poll thread, at most one at a
//! time. A revoke requests a commit here and waits within its own limit. One at a time also means
//! that no earlier commit is still in flight when a later one has been answered.

use std::sync::Arc;
use std::time::{Duration, Instant};

use rdkafka::TopicPartitionList;
use rdkafka::consumer::{BaseConsumer, CommitMode, Consumer};
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::topic_partition_list::Offset;

use super::begin::Beginnings;
use super::commit_desk::{CommitContext, CommitOutcome};
use crate::partitions::assignment::Due;
use oncegate_runtime::observe::Event;

/// The name of the operation, in metrics and in the status.
const COMMIT: &str = "commit";

/// Runs the commit thread: commits what is due, at each interval and on request, until commits
/// stop.
fn run<C: CommitContext>(consumer: &BaseConsumer<C>, interval: Duration) {
    let desk = consumer.context().desk();
    let assignments = consumer.context().assignments();
    let mut beginnings = Beginnings::default();
    let mut pause = interval;
    while let Some(round) = desk.next(pause) {
        desk.finish(round, commit_due(consumer));
        if beginnings.resolve(consumer) {
            commit_due(consumer);
        }
        pause = beginnings.pause(interval, assignments.unresolved().len());
    }
}

fn commit_due<C: CommitContext>(consumer: &BaseConsumer<C>) -> CommitOutcome {
    let context = consumer.context();
    let due = context.assignments().due();
    if due.is_empty() {
        // What could not be committed is not ours any more.
        context.failures().succeeded(COMMIT);
        return CommitOutcome::Committed;
    }
    let annotation = context.annotation();
    let committed = list(&due, annotation.as_deref());
    let committed = committed.and_then(|list| consumer.commit(&list, CommitMode::Sync));
    let Err(error) = committed else {
        context.assignments().committed(&due);
        context.failures().succeeded(COMMIT);
        context.observer().observe(Event::Committed {
            partitions: due.len(),
        });
        return CommitOutcome::Committed;
    };
    let partitions = due.len();
    let outcome = match Refusal::of(&error) {
        Refusal::NotOurs => {
            tracing::debug!(%error, "a commit was dropped: its group generation is over");
            return CommitOutcome::NotOurs(error.to_string());
        }
        Refusal::Passing => {
            tracing::warn!(%error, partitions, "offsets could not be committed; retrying");
            context.failures().failed(Instant::now(), COMMIT, &error);
            CommitOutcome::Busy(error.to_string())
        }
        Refusal::Lasting(change) => {
            tracing::error!(%error, partitions, change, "Kafka rejects our commits; retrying until the cause is fixed");
            context
                .failures()
                .failed(Instant::now(), COMMIT, &format_args!("{error}: {change}"));
            CommitOutcome::Failed(error.to_string())
        }
    };
    context
        .observer()
        .observe(Event::SourceError { operation: COMMIT });
    outcome
}

fn list(due: &[Due], annotation: Option<&str>) -> Result<TopicPartitionList, KafkaError> {
    let mut list = TopicPartitionList::with_capacity(due.len());
    for due in due {
        let partition = due.partition();
        let mut position = list.add_partition(&partition.topic, partition.number);
        position.set_offset(Offset::Offset(due.position))?;
        if let Some(annotation) = annotation {
            position.set_metadata(annotation);
        }
    }
    Ok(list)
}

/// The class of a rejected commit. In every class the positions stay due and nothing counts as
/// committed: the next round commits what is still ours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Refusal {
    /// The member or its generation is no longer valid. Every healthy group answers this during a
    /// rebalance.
    NotOurs,
    /// The brokers are busy or unreachable.
    Passing,
    /// An operator must change something: what.
    Lasting(&'static str),
}

impl Refusal {
    fn of(error: &KafkaError) -> Self {
        use RDKafkaErrorCode::{
            FencedInstanceId, FencedMemberEpoch, GroupAuthorizationFailed, IllegalGeneration,
            InvalidCommitOffsetSize, InvalidGroupId, OffsetMetadataTooLarge, RebalanceInProgress,
            StaleMemberEpoch, TopicAuthorizationFailed, UnknownMemberId,
        };
        match error.rdkafka_error_code() {
            Some(
                FencedInstanceId | FencedMemberEpoch | IllegalGeneration | RebalanceInProgress
                | StaleMemberEpoch | UnknownMemberId,
            ) => Self::NotOurs,
            Some(GroupAuthorizationFailed) => Self::Lasting("the ACL READ on the group is missing"),
            Some(TopicAuthorizationFailed) => Self::Lasting("the ACL READ on the topic is missing"),
            Some(InvalidCommitOffsetSize | OffsetMetadataTooLarge) => Self::Lasting(
                "the broker's offset.metadata.max.bytes or message.max.bytes is too small",
            ),
            Some(InvalidGroupId) => {
                Self::Lasting("the broker does not accept the name of the group")
            }
            _ => Self::Passing,
        }
    }
}

/// Starts the thread that commits through this client.
pub(crate) fn spawn<C: CommitContext + 'static>(
    consumer: Arc<BaseConsumer<C>>,
    interval: Duration,
) -> std::io::Result<std::thread::JoinHandle<()>> {
    std::thread::Builder::new()
        .name("oncegate-commit".to_owned())
        .spawn(move || {
            // A caller must not wait for a thread that has panicked.
            let _stop = StopOnDrop(&consumer);
            run(&consumer, interval);
        })
}

struct StopOnDrop<'a, C: CommitContext>(&'a BaseConsumer<C>);

impl<C: CommitContext> Drop for StopOnDrop<'_, C> {
    fn drop(&mut self) {
        self.0.context().desk().stop();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_refusal_has_its_class() {
        use RDKafkaErrorCode as Code;
        let class = |code| Refusal::of(&KafkaError::ConsumerCommit(code));
        for code in [
            Code::FencedInstanceId,
            Code::FencedMemberEpoch,
            Code::IllegalGeneration,
            Code::RebalanceInProgress,
            Code::StaleMemberEpoch,
            Code::UnknownMemberId,
        ] {
            assert_eq!(class(code), Refusal::NotOurs, "{code:?}");
        }
        for code in [
            Code::NotCoordinator,
            Code::CoordinatorNotAvailable,
            Code::CoordinatorLoadInProgress,
            Code::OperationTimedOut,
            Code::RequestTimedOut,
            Code::BrokerTransportFailure,
            Code::AllBrokersDown,
            Code::WaitingForCoordinator,
            Code::UnknownTopicOrPartition,
        ] {
            assert_eq!(class(code), Refusal::Passing, "{code:?}");
        }
        for code in [
            Code::GroupAuthorizationFailed,
            Code::TopicAuthorizationFailed,
            Code::OffsetMetadataTooLarge,
        ] {
            assert!(matches!(class(code), Refusal::Lasting(_)), "{code:?}");
        }
    }
}
