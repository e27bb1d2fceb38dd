//! The pace of a route's handlers, and how many messages are claimed at once because of it.
//!
//! A claim is made only for what begins within [`BOUND`]: a process that dies, or loses its leases,
//! then makes suspects of few messages, and what waits for a slow neighbour is claimed by a process
//! that has time for it. Handlers that end within microseconds are claimed by hundreds, because a
//! call of the store for each would cost more than they do.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed, Ordering::SeqCst};
use std::time::Duration;

use tokio::sync::Notify;

/// The longest time that a claimed message may wait until its handler begins; and the longest time
/// that a unit calls handlers one after another before it records what has ended, and lets other
/// tasks run.
pub(super) const BOUND: Duration = Duration::from_millis(4);

/// The most messages of a unit.
pub(super) const UNIT_MOST: usize = 256;

/// The weight of the newest time in an average is one part in this many. One slow handler among
/// quick ones makes the next units small at once, and some hundred quick ones make them large
/// again.
const NEWEST: u64 = 16;

/// The times that recent handlers of a route have taken.
///
/// Threads may overwrite each other's updates: the averages are hints, not counts.
#[derive(Debug, Default)]
pub(super) struct Pace {
    /// The time for which a handler holds its permit, in nanoseconds; 0 before the first has ended.
    permit_held: AtomicU64,
    /// The time for which a handler's first poll holds its thread, in nanoseconds; 0 before the
    /// first.
    thread_held: AtomicU64,
    /// The claimed messages whose handlers have not begun.
    claimed: AtomicUsize,
    /// A message was not claimed because too many are.
    is_awaited: AtomicBool,
    /// Told when a message begins that a claim waits for.
    begun: Arc<Notify>,
}

impl Pace {
    /// The pace of a route whose handlers have not run. `begun` is told when a message begins after
    /// [`may_claim`](Self::may_claim) was refused.
    pub(super) fn new(begun: Arc<Notify>) -> Self {
        Self {
            begun,
            ..Self::default()
        }
    }

    /// Notes how long the first poll of a handler held its thread.
    pub(super) fn note_poll(&self, took: Duration) {
        note(&self.thread_held, took);
    }

    /// Notes how long a handler held its permit.
    pub(super) fn note_run(&self, took: Duration) {
        note(&self.permit_held, took);
    }

    /// Returns how many messages are claimed for each permit of a unit.
    pub(super) fn per_permit(&self) -> usize {
        within_bound(&self.permit_held)
    }

    /// Returns the most messages of a unit, however many permits it has: their handlers are called
    /// one after another.
    pub(super) fn unit_most(&self) -> usize {
        within_bound(&self.thread_held)
    }

    /// Returns whether another message may be claimed now. Handlers that hold their threads for
    /// longer than the bound make those wait that are claimed behind them, so no more are claimed
    /// than there are threads to begin them.
    pub(super) fn may_claim(&self, threads: usize) -> bool {
        if self.unit_most() > 1 || self.claimed.load(SeqCst) < threads {
            return true;
        }
        self.is_awaited.store(true, SeqCst);
        // A message that has begun before this may not have seen it.
        self.claimed.load(SeqCst) < threads
    }

    /// Counts messages that are claimed, or about to be.
    pub(super) fn claim(&self, messages: usize) {
        self.claimed.fetch_add(messages, SeqCst);
    }

    /// Counts a message whose handler begins, or that will not begin under its claim.
    pub(super) fn unclaim(&self) {
        self.claimed.fetch_sub(1, SeqCst);
        if self.is_awaited.load(SeqCst) && self.is_awaited.swap(false, SeqCst) {
            self.begun.notify_one();
        }
    }
}

/// Adds a time to an average. The first one is the average.
fn note(average: &AtomicU64, took: Duration) {
    let took = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX).max(1);
    let before = average.load(Relaxed);
    let after = if before == 0 {
        took
    } else {
        before - before / NEWEST + took / NEWEST
    };
    average.store(after.max(1), Relaxed);
}

/// Returns how many that take as long as the average fit into the bound, at least 1. Before the
/// first is known, it may take any time.
fn within_bound(average: &AtomicU64) -> usize {
    let bound = u64::try_from(BOUND.as_nanos()).unwrap_or(u64::MAX);
    match average.load(Relaxed) {
        0 => 1,
        average => usize::try_from(bound / average)
            .unwrap_or(UNIT_MOST)
            .clamp(1, UNIT_MOST),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MICRO: Duration = Duration::from_micros(1);

    fn paced(polls: Duration, runs: Duration) -> Pace {
        let pace = Pace::default();
        pace.note_poll(polls);
        pace.note_run(runs);
        pace
    }

    #[test]
    fn what_begins_within_the_bound_is_claimed() {
        let pace = Pace::default();
        assert_eq!((pace.per_permit(), pace.unit_most()), (1, 1), "unknown");
        let rows = [
            (MICRO * 10, MICRO * 10, (256, 256)),
            (MICRO * 100, MICRO * 100, (40, 40)),
            (MICRO * 10, MICRO * 1_000, (4, 256)),
            (MICRO * 10, MICRO * 100_000, (1, 256)),
            (MICRO * 100_000, MICRO * 100_000, (1, 1)),
        ];
        for (polls, runs, expected) in rows {
            let pace = paced(polls, runs);
            assert_eq!(
                (pace.per_permit(), pace.unit_most()),
                expected,
                "{polls:?} {runs:?}"
            );
        }
    }

    #[test]
    fn one_slow_handler_makes_units_small_until_many_are_quick() {
        let pace = paced(MICRO * 10, MICRO * 10);
        pace.note_poll(MICRO * 100_000);
        assert_eq!(pace.unit_most(), 1);
        (0..200).for_each(|_| pace.note_poll(MICRO * 10));
        assert!(pace.unit_most() > 200, "{pace:?}");
    }

    #[test]
    fn behind_handlers_that_hold_their_threads_few_are_claimed() {
        let quick = paced(MICRO * 10, MICRO * 10);
        quick.claim(1_000);
        assert!(quick.may_claim(2));
        for pace in [Pace::default(), paced(BOUND * 2, BOUND * 2)] {
            pace.claim(1);
            assert!(pace.may_claim(2));
            pace.claim(1);
            assert!(!pace.may_claim(2));
            pace.unclaim();
            assert!(pace.may_claim(2));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_refused_claim_hears_of_the_next_beginning() {
        let pace = Pace::default();
        pace.claim(2);
        assert!(!pace.may_claim(2));
        pace.unclaim();
        pace.begun.notified().await;
    }
}
