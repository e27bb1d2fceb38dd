//! The pace of a route's handlers, and how many messages are claimed at once because of it.
//!
//! A claim is made only for what begins within [`BOUND`]: a process that dies, or loses its leases,
//! then makes suspects of few messages, and what waits for a slow neighbour is claimed by a process
//! that has time for it. Handlers that end within microseconds are claimed by hundreds, because a
//! call of the store for each would cost more than they do.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

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

/// The number of messages that begin at once before it is known how long they hold their threads.
const FIRST_TURNS: usize = 8;

/// The number of groups of shards: a cluster seldom has more shards.
const SHARD_GROUPS: usize = 16;

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
    /// For each group of shards, the right to claim what holds its thread.
    turns: Vec<Arc<Semaphore>>,
    /// The same while no handler has run: a few more begin, which may end at once.
    first_turns: Vec<Arc<Semaphore>>,
}

/// The right to claim a message whose handler will hold its thread, until it begins.
pub(super) type ClaimTurn = OwnedSemaphorePermit;

impl Pace {
    /// The pace of a route whose handlers have not run, and are begun by so many threads.
    pub(super) fn new(threads: usize) -> Self {
        Self {
            turns: turns(threads.max(1)),
            first_turns: turns(threads.max(FIRST_TURNS)),
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

    /// Returns whether a handler is known to end within the bound, its wait for a process that
    /// runs it included.
    pub(super) fn is_quick(&self) -> bool {
        let bound = u64::try_from(BOUND.as_nanos()).unwrap_or(u64::MAX);
        (1..=bound).contains(&self.permit_held.load(Relaxed))
    }

    /// Waits until a message of this shard may be claimed; `None` if it need not wait for that.
    ///
    /// Handlers that hold their threads for long make those wait that are claimed behind them, and
    /// every other task of their runtime. So no more are claimed than there are threads to begin
    /// them. A shard that does not answer holds up no other one.
    pub(super) async fn turn(&self, shard: u64) -> Option<ClaimTurn> {
        if self.unit_most() > 1 {
            return None;
        }
        let group = usize::try_from(shard).unwrap_or_default() % SHARD_GROUPS;
        let is_unknown = self.thread_held.load(Relaxed) == 0;
        let turns = if is_unknown {
            &self.first_turns
        } else {
            &self.turns
        };
        let turns = Arc::clone(turns.get(group)?);
        turns.acquire_owned().await.ok()
    }
}

fn turns(most: usize) -> Vec<Arc<Semaphore>> {
    (0..SHARD_GROUPS)
        .map(|_| Arc::new(Semaphore::new(most)))
        .collect()
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
    use tokio::time::timeout;

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

    #[tokio::test(start_paused = true)]
    async fn behind_handlers_that_hold_their_threads_few_are_claimed() {
        let limit = Duration::from_secs(1);
        let quick = Pace::new(1);
        quick.note_poll(MICRO * 10);
        assert!(quick.turn(0).await.is_none(), "no turn is needed");
        let slow = Pace::new(1);
        slow.note_poll(BOUND * 2);
        for (pace, most) in [(Pace::new(1), FIRST_TURNS), (slow, 1)] {
            for _ in 1..most {
                pace.turn(0).await.unwrap().forget();
            }
            let first = pace.turn(0).await;
            assert!(first.is_some());
            assert!(timeout(limit, pace.turn(0)).await.is_err(), "{most}");
            assert!(pace.turn(1).await.is_some(), "another shard");
            drop(first);
            assert!(pace.turn(0).await.is_some());
        }
    }
}
