//! Requests for commits, and the part of a client's context that the commit thread needs.

use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};
use rdkafka::consumer::ConsumerContext;

use crate::partitions::assignments::Assignments;
use oncegate_runtime::health::FailureLog;
use oncegate_runtime::observe::Observer;

/// Delay before a commit is requested again after the brokers were too busy for it.
const REPEAT_PAUSE: Duration = Duration::from_millis(100);

/// The context of a client through which positions are committed. Its callbacks assign and revoke
/// partitions.
pub(crate) trait CommitContext: ConsumerContext {
    /// Returns where commits through this client are requested.
    fn desk(&self) -> &CommitDesk;

    /// Returns the partitions whose positions are committed.
    fn assignments(&self) -> &Assignments;

    /// Returns the operations that fail now.
    fn failures(&self) -> &FailureLog;

    /// Returns the observer of commits.
    fn observer(&self) -> &dyn Observer;

    /// Returns the metadata to store with each position now.
    fn annotation(&self) -> Option<String>;

    /// Returns whether a group without committed offsets begins at the end.
    fn begins_at_end(&self) -> bool;
}

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
    /// The member is none any more, so others have the partitions already.
    Lost(String),
    /// The brokers are busy or unreachable: they may have no position, and a retry may soon
    /// succeed.
    Busy(String),
    /// The commit failed: the broker may have no position.
    Failed(String),
}

impl CommitDesk {
    /// Requests a commit of everything that is due, and waits for its outcome until `deadline`.
    /// Repeats the request while the brokers are busy.
    pub(crate) fn commit_now(&self, deadline: Instant) -> CommitOutcome {
        loop {
            let outcome = self.one_round(deadline);
            let again = Instant::now() + REPEAT_PAUSE;
            if !matches!(outcome, CommitOutcome::Busy(_))
                || again >= deadline
                || !self.pause_until(again)
            {
                return outcome;
            }
        }
    }

    /// Does the same for the last commit of a member that is about to leave. A rebalancing group
    /// rejects commits, and the client takes part in the rebalance by itself: repeats the request
    /// until that is over, or the member `is_lost`.
    pub(crate) fn commit_last(
        &self,
        deadline: Instant,
        is_lost: impl Fn() -> bool,
    ) -> CommitOutcome {
        loop {
            let outcome = self.commit_now(deadline);
            let again = Instant::now() + REPEAT_PAUSE;
            match outcome {
                CommitOutcome::NotOurs(error) if is_lost() => return CommitOutcome::Lost(error),
                CommitOutcome::NotOurs(_) if again < deadline && self.pause_until(again) => {}
                outcome => return outcome,
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
            self.changed.wait_for(&mut orders, left);
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
                return CommitOutcome::Failed(
                    "the broker did not answer a commit in time".to_owned(),
                );
            }
            self.changed.wait_for(&mut orders, left);
        }
        orders.outcome.clone()
    }

    /// Stops commits; the thread ends after the running one.
    pub(crate) fn stop(&self) {
        self.orders().stopped = true;
        self.changed.notify_all();
    }

    /// Returns whether commits have stopped: on request, or because their thread has panicked.
    pub(crate) fn is_stopped(&self) -> bool {
        self.orders().stopped
    }

    /// Waits for a request, or for the interval to pass. Returns the number of the newest request;
    /// `None` to end.
    pub(crate) fn next(&self, interval: Duration) -> Option<u64> {
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
            self.changed.wait_for(&mut orders, left);
        }
    }

    pub(crate) fn finish(&self, round: u64, outcome: CommitOutcome) {
        let mut orders = self.orders();
        orders.done = round;
        orders.outcome = outcome;
        self.changed.notify_all();
    }

    fn orders(&self) -> MutexGuard<'_, Orders> {
        self.orders.lock()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    #[test]
    fn a_request_for_a_commit_ends_at_its_limit() {
        let desk = CommitDesk::default();
        let outcome = desk.commit_now(Instant::now());
        assert!(
            matches!(outcome, CommitOutcome::Failed(_)),
            "no thread commits here"
        );
    }

    #[test]
    fn a_commit_is_repeated_while_the_brokers_are_busy() {
        let desk = CommitDesk::default();
        let far = Instant::now() + Duration::from_secs(60);
        let busy = || CommitOutcome::Busy("waiting for the coordinator".to_owned());
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| desk.commit_now(far));
            for outcome in [busy(), busy(), CommitOutcome::Committed] {
                let round = loop {
                    assert!(!waiting.is_finished(), "it must ask again");
                    let round = desk
                        .next(Duration::from_millis(1))
                        .expect("the desk is open");
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
            assert!(!matches!(
                waiting.join().expect("no panic"),
                CommitOutcome::Committed
            ));
        });
    }

    #[test]
    fn stopping_answers_pending_commits() {
        let desk = CommitDesk::default();
        let far = Instant::now() + Duration::from_secs(60);
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| desk.commit_now(far));
            while desk.orders().asked == 0 {
                std::thread::yield_now();
            }
            desk.stop();
            assert!(matches!(
                waiting.join().expect("no panic"),
                CommitOutcome::Failed(_)
            ));
        });
        assert!(matches!(desk.commit_now(far), CommitOutcome::Failed(_)));
        assert!(desk.next(Duration::from_secs(60)).is_none());
        assert!(Instant::now() < far);
    }

    /// The group may have ended the member's session a moment before, which the client learns by
    /// the refusal.
    #[test]
    fn a_member_that_is_lost_repeats_no_last_commit() {
        let desk = CommitDesk::default();
        let far = Instant::now() + Duration::from_secs(60);
        let refused = CommitOutcome::NotOurs("unknown member".to_owned());
        let lost = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let last = scope.spawn(|| desk.commit_last(far, || lost.load(Ordering::Relaxed)));
            let round = desk.next(Duration::from_secs(60)).expect("an order");
            desk.finish(round, refused.clone());
            let again = loop {
                let next = desk.next(Duration::from_millis(1)).expect("it is open");
                if next > round {
                    break next;
                }
            };
            lost.store(true, Ordering::Relaxed);
            desk.finish(again, refused);
            assert_eq!(
                last.join().expect("no panic"),
                CommitOutcome::Lost("unknown member".to_owned())
            );
        });
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
            assert_eq!(
                second.join().expect("no panic"),
                CommitOutcome::NotOurs("moved".to_owned())
            );
        });
    }
}
