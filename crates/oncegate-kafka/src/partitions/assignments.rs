//! Tracks which partitions this member owns, in which epoch, and which offsets may be committed.
//!
//! Kafka does not check who commits: it accepts a commit for another member's partition, and right
//! after a rejoin even a commit by a zombie. So ownership is decided here. Each assignment of a
//! partition is an epoch of its own.
//!
//! This file does not depend on a broker.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use parking_lot::{Mutex, MutexGuard};

use super::assignment::{Assignment, Begin, Due, Shared};
#[cfg(test)]
use super::clock::Clock;
use super::fetch_limits::Totals;
use super::partition::Partition;
use super::partition_map::PartitionMap;
use super::standing::{PartitionReport, ReadState, Standing};
use super::watermark::Watermark;

/// The partitions that this member owns now.
#[derive(Debug, Default)]
pub(crate) struct Assignments {
    current: Mutex<PartitionMap<Arc<Assignment>>>,
    /// Grows with every change of `current`, so that holders of a copy know when it is old.
    generation: AtomicU64,
    /// `true` once a partition may have only offsets without messages after those received.
    may_pass: AtomicBool,
    /// `true` once the client has reported something of our partitions.
    has_reports: AtomicBool,
    shared: Arc<Shared>,
}

impl Assignments {
    /// Creates the assignments of a member that is counted in these totals.
    pub(crate) fn counted_in(totals: Arc<Totals>) -> Self {
        Self {
            shared: Arc::new(Shared::counted_in(totals)),
            ..Self::default()
        }
    }

    /// Creates the assignments of a member with this clock.
    #[cfg(test)]
    pub(super) fn with_clock(clock: impl Fn() -> Instant + Send + Sync + 'static) -> Self {
        Self {
            shared: Arc::new(Shared::with_clock(Clock::new(clock))),
            ..Self::default()
        }
    }

    /// Begins an epoch for each of these partitions, which are read from the position in `begin`.
    pub(crate) fn assign(&self, partitions: impl IntoIterator<Item = Partition>, begin: Begin) {
        let mut current = self.current();
        for partition in partitions {
            // A partition that is already ours was assigned again without a revoke, so its state
            // may be wrong.
            self.begin(&mut current, partition, Watermark::default(), begin);
        }
        self.generation.fetch_add(1, Ordering::Release);
    }

    /// Begins another epoch of a partition whose log was replaced; `false` when the partition is
    /// not ours.
    ///
    /// A new log begins at 0. That position is committed until messages are finished, so that the
    /// last epoch's position does not stay at the broker.
    pub(crate) fn restart(&self, partition: &Partition) -> bool {
        let mut current = self.current();
        if current.of(partition).is_none() {
            return false;
        }
        self.begin(
            &mut current,
            partition.clone(),
            Watermark::starting_at(0),
            Begin::Begun,
        );
        self.generation.fetch_add(1, Ordering::Release);
        true
    }

    fn begin(
        &self,
        current: &mut PartitionMap<Arc<Assignment>>,
        partition: Partition,
        watermark: Watermark,
        begin: Begin,
    ) {
        let assignment = Assignment::new(
            partition.clone(),
            watermark,
            begin,
            Arc::clone(&self.shared),
        );
        match current.insert(&partition, Arc::new(assignment)) {
            Some(former) => {
                former.forbid();
                former.end();
            }
            None => self.shared.totals.partition_assigned(),
        }
    }

    /// Stops attempts from starting for these partitions. Running attempts may still finish.
    pub(crate) fn begin_revoke(&self, partitions: &[Partition]) -> Vec<Arc<Assignment>> {
        let current = self.current();
        let revoked: Vec<_> = partitions
            .iter()
            .filter_map(|one| current.of(one).cloned())
            .collect();
        revoked.iter().for_each(|assignment| assignment.forbid());
        revoked
    }

    /// Waits until no attempt runs, and returns how many still run at `deadline`.
    pub(crate) fn wait_drained(&self, revoked: &[Arc<Assignment>], deadline: Instant) -> u32 {
        self.shared.wait_drained(
            || revoked.iter().map(|assignment| assignment.running()).sum(),
            deadline,
        )
    }

    /// Ends all epochs at once, because we are no longer a member. Returns how many partitions
    /// there were.
    pub(crate) fn end_all(&self) -> usize {
        let ours = self.all();
        ours.iter().for_each(|assignment| assignment.forbid());
        self.end(&ours);
        ours.len()
    }

    /// Ends the epochs of these assignments: none of their offsets is committed afterwards.
    pub(crate) fn end(&self, revoked: &[Arc<Assignment>]) {
        let mut current = self.current();
        for assignment in revoked {
            assignment.end();
            if current
                .of(assignment.partition())
                .is_some_and(|now| Arc::ptr_eq(now, assignment))
            {
                current.remove(assignment.partition());
                self.shared.totals.partition_ended();
            }
        }
        self.generation.fetch_add(1, Ordering::Release);
    }

    /// Returns the positions of our partitions that have moved since their last commit.
    pub(crate) fn due(&self) -> Vec<Due> {
        self.current()
            .values()
            .filter_map(Assignment::due)
            .collect()
    }

    /// Returns whether the position of one of these has moved since its last commit.
    pub(crate) fn are_due(&self, ours: &[Arc<Assignment>]) -> bool {
        ours.iter().any(|assignment| assignment.due().is_some())
    }

    /// Records that the broker has these positions.
    pub(crate) fn committed(&self, done: &[Due]) {
        done.iter().for_each(Due::committed);
    }

    /// Records what the client reports of a partition.
    pub(crate) fn reported(&self, topic: &str, number: i32, report: PartitionReport) {
        let current = self.current();
        if let Some(assignment) = current.get(topic, number) {
            if assignment.reported(report) {
                self.may_pass.store(true, Ordering::Release);
            }
            self.has_reports.store(true, Ordering::Release);
        }
    }

    /// Returns what the client has reported since the last call; `None` when that is not enough to
    /// say anything.
    ///
    /// Partitions whose position the client must not decide do not count.
    pub(crate) fn reading(&self) -> Option<ReadState> {
        if !self.has_reports.swap(false, Ordering::AcqRel) {
            return None;
        }
        let current = self.current();
        let ours: Vec<_> = current
            .values()
            .filter(|one| !one.is_revoked() && one.has_begun())
            .collect();
        let unread = ours
            .iter()
            .filter_map(|one| Some((one.unread_for()?, one.partition())));
        let count = unread.clone().count();
        if let Some((lasts, partition)) = unread.max_by_key(|(lasts, _)| *lasts) {
            return Some(ReadState::Unread {
                partition: partition.clone(),
                count,
                lasts,
            });
        }
        let is_all = !ours.is_empty() && ours.iter().all(|one| one.is_read());
        is_all.then_some(ReadState::All)
    }

    /// Returns whether the client's positions should be read because of a report since the last
    /// call.
    pub(crate) fn may_pass(&self) -> bool {
        self.may_pass.swap(false, Ordering::AcqRel)
    }

    /// Returns the partitions whose starting position is not known yet.
    pub(crate) fn unresolved(&self) -> Vec<Arc<Assignment>> {
        self.current()
            .values()
            .filter(|one| one.is_unresolved())
            .cloned()
            .collect()
    }

    /// Returns the partition's assignment, if it is ours.
    pub(crate) fn get(&self, partition: &Partition) -> Option<Arc<Assignment>> {
        self.current().of(partition).cloned()
    }

    /// Returns the progress of each of our partitions, by topic and number.
    pub(crate) fn standings(&self) -> Vec<Standing> {
        let mut standings: Vec<_> = self
            .all()
            .iter()
            .map(|assignment| assignment.standing())
            .collect();
        standings.sort_by(|a, b| {
            (&a.partition.topic, a.partition.number).cmp(&(&b.partition.topic, b.partition.number))
        });
        standings
    }

    /// Returns every partition that is ours now.
    pub(crate) fn all(&self) -> Vec<Arc<Assignment>> {
        self.current().values().cloned().collect()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.current().is_empty()
    }

    /// Returns a number that changes whenever [`all`](Self::all) does.
    pub(crate) fn generation(&self) -> u64 {
        self.generation.load(Ordering::Acquire)
    }

    fn current(&self) -> MutexGuard<'_, PartitionMap<Arc<Assignment>>> {
        self.current.lock()
    }
}

#[cfg(test)]
#[path = "assignments_tests.rs"]
pub(crate) mod tests;
