//! Which partitions are ours, since when, and what of them may be committed.
//!
//! Kafka does not check who commits: it takes a commit for another member's partition, and right after a
//! rejoin even a zombie's. So ownership is decided here. Every assignment of a partition is an epoch of its
//! own; offsets are received, finished and committed under one lock that knows the epoch, and what comes
//! from an epoch that is over is ignored.
//!
//! Nothing in this file knows a broker.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use super::watermark::Watermark;

/// A partition of a topic.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Partition {
    pub(crate) topic: Arc<str>,
    pub(crate) number: i32,
}

impl fmt::Display for Partition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.topic, self.number)
    }
}

/// The partitions that this member owns now.
#[derive(Debug, Default)]
pub(crate) struct Assignments {
    current: Mutex<HashMap<Partition, Arc<Assignment>>>,
    /// Grows with every change of `current`, so that others know when their copy is old.
    generation: AtomicU64,
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    last_epoch: AtomicU64,
    /// Guards nothing but the wait for `drained`.
    draining: Mutex<()>,
    drained: Condvar,
}

impl Shared {
    fn next_epoch(&self) -> u64 {
        self.last_epoch.fetch_add(1, Ordering::Relaxed) + 1
    }
}

/// One partition, from its assignment to its revocation.
#[derive(Debug)]
pub(crate) struct Assignment {
    partition: Partition,
    /// How many attempts run, and in its highest bit whether the partition is being revoked. One word, so
    /// that no attempt can start between "is it revoked?" and "count me".
    attempts: AtomicU32,
    ledger: Mutex<Ledger>,
    shared: Arc<Shared>,
}

const REVOKED: u32 = 1 << 31;

#[derive(Debug)]
struct Ledger {
    /// `None` once the partition is given away.
    epoch: Option<u64>,
    watermark: Watermark,
}

/// Where a received message stands in its epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Receipt {
    epoch: u64,
    number: u64,
}

/// What became of a received offset.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Received {
    pub(crate) receipt: Receipt,
    /// How many messages a successor would get again after a crash now.
    pub(crate) span: usize,
    /// The log went back, so a new epoch has begun: it was truncated, or the topic was made again.
    pub(crate) rewound: bool,
}

/// A position that the broker should hear of.
#[derive(Debug)]
pub(crate) struct Due {
    assignment: Arc<Assignment>,
    epoch: u64,
    pub(crate) position: i64,
}

impl Due {
    pub(crate) fn partition(&self) -> &Partition {
        &self.assignment.partition
    }
}

impl Assignments {
    /// Begins an epoch for each of these partitions.
    pub(crate) fn assign(&self, partitions: impl IntoIterator<Item = Partition>) {
        let mut current = self.current();
        for partition in partitions {
            // One that is ours already was assigned without a word in between: what it knows may be wrong.
            self.begin(&mut current, partition, Watermark::default());
        }
        self.generation.fetch_add(1, Ordering::Release);
    }

    /// Begins another epoch of a partition that is read anew, because its log is another one than it was;
    /// `false` when the partition is not ours. With `base`, that is what the broker hears until messages are
    /// finished, so that what it has of the former epoch does not stay.
    pub(crate) fn restart(&self, partition: &Partition, base: Option<i64>) -> bool {
        let mut current = self.current();
        if !current.contains_key(partition) {
            return false;
        }
        let watermark = base.map_or_else(Watermark::default, Watermark::starting_at);
        self.begin(&mut current, partition.clone(), watermark);
        self.generation.fetch_add(1, Ordering::Release);
        true
    }

    fn begin(
        &self,
        current: &mut HashMap<Partition, Arc<Assignment>>,
        partition: Partition,
        watermark: Watermark,
    ) {
        let ledger = Ledger { epoch: Some(self.shared.next_epoch()), watermark };
        let assignment = Arc::new(Assignment {
            partition: partition.clone(),
            attempts: AtomicU32::new(0),
            ledger: Mutex::new(ledger),
            shared: Arc::clone(&self.shared),
        });
        if let Some(former) = current.insert(partition, assignment) {
            former.forbid();
            former.end();
        }
    }

    /// From now on no attempt starts for these partitions. What has started may still be finished.
    pub(crate) fn begin_revoke(&self, partitions: &[Partition]) -> Vec<Arc<Assignment>> {
        let current = self.current();
        let revoked: Vec<_> = partitions.iter().filter_map(|one| current.get(one).cloned()).collect();
        revoked.iter().for_each(|assignment| assignment.forbid());
        revoked
    }

    /// Waits until nothing runs that has started, and returns how many attempts still run at `deadline`.
    pub(crate) fn wait_drained(&self, revoked: &[Arc<Assignment>], deadline: Instant) -> u32 {
        let running = || revoked.iter().map(|assignment| assignment.running()).sum();
        let mut draining = self.shared.draining.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            let (still, left) = (running(), deadline.saturating_duration_since(Instant::now()));
            if still == 0 || left.is_zero() {
                return still;
            }
            draining =
                self.shared.drained.wait_timeout(draining, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// All epochs are over at once: we are no member any more. Returns how many partitions there were.
    pub(crate) fn end_all(&self) -> usize {
        let ours = self.all();
        ours.iter().for_each(|assignment| assignment.forbid());
        self.end(&ours);
        ours.len()
    }

    /// The epochs of these assignments are over: nothing of them is ever committed again.
    pub(crate) fn end(&self, revoked: &[Arc<Assignment>]) {
        let mut current = self.current();
        for assignment in revoked {
            assignment.end();
            if current.get(&assignment.partition).is_some_and(|now| Arc::ptr_eq(now, assignment)) {
                current.remove(&assignment.partition);
            }
        }
        self.generation.fetch_add(1, Ordering::Release);
    }

    /// The positions that have moved since the broker heard of them, of partitions that are ours.
    pub(crate) fn due(&self) -> Vec<Due> {
        let current = self.current();
        let due = |assignment: &Arc<Assignment>| {
            let ledger = assignment.ledger();
            let (epoch, position) = (ledger.epoch?, ledger.watermark.due()?);
            Some(Due { assignment: Arc::clone(assignment), epoch, position })
        };
        current.values().filter_map(due).collect()
    }

    /// The broker has these positions.
    pub(crate) fn committed(&self, done: &[Due]) {
        for due in done {
            let mut ledger = due.assignment.ledger();
            if ledger.epoch == Some(due.epoch) {
                ledger.watermark.committed(due.position);
            }
        }
    }

    /// Every partition that is ours now.
    pub(crate) fn all(&self) -> Vec<Arc<Assignment>> {
        self.current().values().cloned().collect()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.current().is_empty()
    }

    /// Changes whenever [`all`](Self::all) does.
    pub(crate) fn generation(&self) -> u64 {
        self.generation.load(Ordering::Acquire)
    }

    fn current(&self) -> MutexGuard<'_, HashMap<Partition, Arc<Assignment>>> {
        self.current.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Assignment {
    pub(crate) fn partition(&self) -> &Partition {
        &self.partition
    }

    /// Takes note of a received offset; `None` when the partition is no longer ours.
    pub(crate) fn receive(&self, offset: i64) -> Option<Received> {
        let mut ledger = self.ledger();
        let mut epoch = ledger.epoch?;
        let (number, rewound) = match ledger.watermark.receive(offset) {
            Some(number) => (number, false),
            None => {
                epoch = self.shared.next_epoch();
                // What the broker has lies beyond this offset: a successor would skip what is in between.
                *ledger = Ledger { epoch: Some(epoch), watermark: Watermark::starting_at(offset) };
                (ledger.watermark.receive(offset)?, true)
            }
        };
        Some(Received { receipt: Receipt { epoch, number }, span: ledger.watermark.span(), rewound })
    }

    /// Takes note that a message is finished for good; `false` when that no longer matters.
    pub(crate) fn complete(&self, receipt: Receipt) -> bool {
        let mut ledger = self.ledger();
        ledger.epoch == Some(receipt.epoch) && ledger.watermark.complete(receipt.number)
    }

    /// Counts an attempt; `false`, and nothing is counted, once the partition is being revoked.
    pub(crate) fn start(&self) -> bool {
        let count = |attempts: u32| (attempts & REVOKED == 0).then_some(attempts + 1);
        self.attempts.fetch_update(Ordering::AcqRel, Ordering::Acquire, count).is_ok()
    }

    /// The attempt that [`start`](Self::start) counted has ended.
    pub(crate) fn stop(&self) {
        let before = self.attempts.fetch_sub(1, Ordering::AcqRel);
        debug_assert_ne!(before & !REVOKED, 0, "stop without a start");
        if before == REVOKED | 1 {
            // Taking the lock puts this behind the drain's look at the count, so it cannot sleep through it.
            drop(self.shared.draining.lock().unwrap_or_else(PoisonError::into_inner));
            self.shared.drained.notify_all();
        }
    }

    /// Whether attempts are no longer allowed to start.
    pub(crate) fn is_revoked(&self) -> bool {
        self.attempts.load(Ordering::Acquire) & REVOKED != 0
    }

    /// How many messages a successor would get again after a crash now.
    pub(crate) fn span(&self) -> usize {
        self.ledger().watermark.span()
    }

    fn running(&self) -> u32 {
        self.attempts.load(Ordering::Acquire) & !REVOKED
    }

    fn forbid(&self) {
        self.attempts.fetch_or(REVOKED, Ordering::AcqRel);
    }

    fn end(&self) {
        let mut ledger = self.ledger();
        ledger.epoch = None;
        ledger.watermark = Watermark::default();
    }

    fn ledger(&self) -> MutexGuard<'_, Ledger> {
        self.ledger.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
#[path = "assignment_tests.rs"]
mod tests;
