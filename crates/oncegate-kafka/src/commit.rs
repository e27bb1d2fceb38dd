//! Commits offsets on a thread of its own.
//!
//! Only a synchronous commit reports its failure, and it has no time limit: it takes 6 s in a rebalance and 31 s with
//! the broker down. So commits run beside the poll thread, at most one at a time. A revoke requests a commit here and
//! waits within its own limit. One at a time also means that no earlier commit is still in flight when a later one
//! has been answered.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rdkafka::TopicPartitionList;
use rdkafka::consumer::{BaseConsumer, CommitMode, Consumer};
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::topic_partition_list::Offset;

use super::assignment::Due;
use super::begin::Beginnings;
use super::member::MemberContext;
use oncegate_runtime::observe::Event;
use oncegate_runtime::source::CommitAnnotation;

/// Delay before a commit is requested again after the brokers were too busy for it.
const REPEAT_PAUSE: Duration = Duration::from_millis(100);

/// The name of the operation, in metrics and in the status.
const COMMIT: &str = "commit";

/// Takes requests for commits, and reports their outcome.
#[derive(Debug, Default)]
pub(crate) struct CommitDesk {
    orders: Mutex<Orders>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Orders {
    /// Rounds requested and rounds done; they are equal when there is nothing to do.
    asked: u64,
    done: u64,
    outcome: CommitOutcome,
    stopped: bool,
}

/// The outcome of a round of commits.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) enum CommitOutcome {
    /// The broker has every position.
    #[default]
    Committed,
    /// The group has a newer generation: the partitions belong to another member, or will.
    NotOurs(String),
    /// The brokers are busy or unreachable: they may have no position, and a retry may soon succeed.
    Busy(String),
    /// The commit failed: the broker may have no position.
    Failed(String),
}

impl CommitDesk {
    /// Requests a commit of everything that is due, and waits for its outcome until `deadline`. Repeats the request
    /// while the brokers are busy.
    pub(crate) fn commit_now(&self, deadline: Instant) -> CommitOutcome {
        loop {
            let outcome = self.one_round(deadline);
            let again = Instant::now() + REPEAT_PAUSE;
            if !matches!(outcome, CommitOutcome::Busy(_)) || again >= deadline || !self.pause_until(again) {
                return outcome;
            }
        }
    }

    /// Does the same for the last commit of a member that is about to leave. A rebalancing group rejects commits, and
    /// the client takes part in the rebalance by itself: repeats the request until that is over, or the member
    /// `is_lost`.
    pub(crate) fn commit_last(&self, deadline: Instant, is_lost: impl Fn() -> bool) -> CommitOutcome {
        loop {
            let outcome = self.commit_now(deadline);
            let again = Instant::now() + REPEAT_PAUSE;
            let refused = matches!(outcome, CommitOutcome::NotOurs(_)) && !is_lost();
            if !refused || again >= deadline || !self.pause_until(again) {
                return outcome;
            }
        }
    }

    /// Requests a round, and does not wait for it.
    pub(crate) fn ask(&self) {
        self.orders().asked += 1;
        self.changed.notify_all();
    }

    /// Waits until `end`; `false` when commits have stopped.
    fn pause_until(&self, end: Instant) -> bool {
        let mut orders = self.orders();
        while !orders.stopped {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return true;
            }
            orders = self.changed.wait_timeout(orders, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        false
    }

    fn one_round(&self, deadline: Instant) -> CommitOutcome {
        let mut orders = self.orders();
        if orders.stopped {
            return CommitOutcome::Failed("the commit thread has ended".to_owned());
        }
        orders.asked += 1;
        let round = orders.asked;
        self.changed.notify_all();
        while orders.done < round {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() || orders.stopped {
                return CommitOutcome::Failed("the broker did not answer a commit in time".to_owned());
            }
            orders = self.changed.wait_timeout(orders, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        orders.outcome.clone()
    }

    /// Stops commits; the thread ends after the running one.
    pub(crate) fn stop(&self) {
        self.orders().stopped = true;
        self.changed.notify_all();
    }

    /// Whether commits have stopped: on request, or because their thread has panicked.
    pub(crate) fn is_stopped(&self) -> bool {
        self.orders().stopped
    }

    /// Waits for a request, or for the interval to pass. Returns the number of the newest request; `None` to end.
    fn next(&self, interval: Duration) -> Option<u64> {
        let deadline = Instant::now() + interval;
        let mut orders = self.orders();
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            if orders.stopped {
                return None;
            }
            if orders.asked > orders.done || left.is_zero() {
                return Some(orders.asked);
            }
            orders = self.changed.wait_timeout(orders, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn finish(&self, round: u64, outcome: CommitOutcome) {
        let mut orders = self.orders();
        orders.done = round;
        orders.outcome = outcome;
        self.changed.notify_all();
    }

    fn orders(&self) -> MutexGuard<'_, Orders> {
        self.orders.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Runs the commit thread: commits what is due, at each interval and on request, until commits stop.
fn run(consumer: &BaseConsumer<MemberContext>, interval: Duration) {
    let desk = consumer.context().desk();
    let assignments = &consumer.context().member().assignments;
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

fn commit_due(consumer: &BaseConsumer<MemberContext>) -> CommitOutcome {
    let member = consumer.context().member();
    let due = member.assignments.due();
    if due.is_empty() {
        // What could not be committed is not ours any more.
        member.failures.succeeded(COMMIT);
        return CommitOutcome::Committed;
    }
    let annotation = member.annotation.as_ref().map(CommitAnnotation::text);
    let committed = list(&due, annotation.as_deref());
    let committed = committed.and_then(|list| consumer.commit(&list, CommitMode::Sync));
    let Err(error) = committed else {
        member.assignments.committed(&due);
        member.failures.succeeded(COMMIT);
        member.observer.observe(Event::Committed { partitions: due.len() });
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
            member.failures.failed(Instant::now(), COMMIT, &error);
            CommitOutcome::Busy(error.to_string())
        }
        Refusal::Lasting(change) => {
            tracing::error!(%error, partitions, change, "Kafka rejects our commits; retrying until the cause is fixed");
            member.failures.failed(Instant::now(), COMMIT, &format_args!("{error}: {change}"));
            CommitOutcome::Failed(error.to_string())
        }
    };
    member.observer.observe(Event::SourceError { operation: COMMIT });
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

/// The class of a rejected commit. In every class the positions stay due and nothing counts as committed: the next
/// round commits what is still ours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Refusal {
    /// The member or its generation is no longer valid. Every healthy group answers this during a rebalance.
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
            Some(InvalidCommitOffsetSize | OffsetMetadataTooLarge) => {
                Self::Lasting("the broker's offset.metadata.max.bytes or message.max.bytes is too small")
            }
            Some(InvalidGroupId) => Self::Lasting("the broker does not accept the name of the group"),
            _ => Self::Passing,
        }
    }
}

/// Starts the thread that commits through this client.
pub(crate) fn spawn(
    consumer: Arc<BaseConsumer<MemberContext>>,
    interval: Duration,
) -> std::io::Result<std::thread::JoinHandle<()>> {
    let body = move || {
        // A caller must not wait for a thread that has panicked.
        let _stop = StopOnDrop(&consumer);
        run(&consumer, interval);
    };
    std::thread::Builder::new().name("oncegate-commit".to_owned()).spawn(body)
}

struct StopOnDrop<'a>(&'a BaseConsumer<MemberContext>);

impl Drop for StopOnDrop<'_> {
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
        for code in
            [Code::GroupAuthorizationFailed, Code::TopicAuthorizationFailed, Code::OffsetMetadataTooLarge]
        {
            assert!(matches!(class(code), Refusal::Lasting(_)), "{code:?}");
        }
    }

    #[test]
    fn whoever_asks_for_a_commit_waits_no_longer_than_he_can() {
        let desk = CommitDesk::default();
        let outcome = desk.commit_now(Instant::now());
        assert!(matches!(outcome, CommitOutcome::Failed(_)), "no thread commits here");
    }

    #[test]
    fn whoever_asks_for_a_commit_asks_again_while_the_brokers_are_busy() {
        let desk = CommitDesk::default();
        let far = Instant::now() + Duration::from_secs(60);
        let busy = || CommitOutcome::Busy("waiting for the coordinator".to_owned());
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| desk.commit_now(far));
            for outcome in [busy(), busy(), CommitOutcome::Committed] {
                let round = loop {
                    assert!(!waiting.is_finished(), "it must ask again");
                    let round = desk.next(Duration::from_millis(1)).expect("the desk is open");
                    if round > desk.orders().done {
                        break round;
                    }
                };
                desk.finish(round, outcome);
            }
            assert_eq!(waiting.join().expect("no panic"), CommitOutcome::Committed);
        });
        // With too little time left, the request fails.
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| desk.commit_now(Instant::now() + REPEAT_PAUSE / 2));
            let round = desk.next(Duration::from_secs(60)).expect("an order");
            desk.finish(round, busy());
            assert!(!matches!(waiting.join().expect("no panic"), CommitOutcome::Committed));
        });
    }

    #[test]
    fn a_desk_that_stops_sends_everybody_home() {
        let desk = CommitDesk::default();
        let far = Instant::now() + Duration::from_secs(60);
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| desk.commit_now(far));
            while desk.orders().asked == 0 {
                std::thread::yield_now();
            }
            desk.stop();
            assert!(matches!(waiting.join().expect("no panic"), CommitOutcome::Failed(_)));
        });
        assert!(matches!(desk.commit_now(far), CommitOutcome::Failed(_)));
        assert!(desk.next(Duration::from_secs(60)).is_none());
        assert!(Instant::now() < far);
    }

    #[test]
    fn an_order_that_comes_during_a_round_gets_a_round_of_its_own() {
        let desk = CommitDesk::default();
        let far = Instant::now() + Duration::from_secs(60);
        std::thread::scope(|scope| {
            let first = scope.spawn(|| desk.commit_now(far));
            let round = desk.next(Duration::from_secs(60)).expect("an order");
            let second = scope.spawn(|| desk.commit_now(far));
            while desk.orders().asked == round {
                std::thread::yield_now();
            }
            desk.finish(round, CommitOutcome::Committed);
            assert_eq!(first.join().expect("no panic"), CommitOutcome::Committed);
            let round = desk.next(Duration::from_secs(60)).expect("another order");
            desk.finish(round, CommitOutcome::NotOurs("moved".to_owned()));
            assert_eq!(second.join().expect("no panic"), CommitOutcome::NotOurs("moved".to_owned()));
        });
    }
}
