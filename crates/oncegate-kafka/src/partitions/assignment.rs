//! A partition of this member, from its assignment to its revocation: the offsets received, and
//! those that may be committed.
//!
//! Offsets are received, finished and committed under one lock that knows the epoch, and anything
//! from an epoch that is over is ignored.
//!
//! This file does not depend on a broker.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};

use super::clock::Clock;
use super::fetch_limits::{Backlog, Totals};
pub(crate) use super::ledger::Begin;
use super::ledger::Ledger;
use super::partition::Partition;
use super::standing::{PartitionReport, Standing};
use super::watermark::Watermark;

/// The state that all partitions of a member share.
#[derive(Debug, Default)]
pub(super) struct Shared {
    clock: Clock,
    last_epoch: AtomicU64,
    pub(super) totals: Arc<Totals>,
    /// Used only to wait for `drained`.
    draining: Mutex<()>,
    drained: Condvar,
}

impl Shared {
    pub(super) fn counted_in(totals: Arc<Totals>) -> Self {
        Self {
            totals,
            ..Self::default()
        }
    }

    #[cfg(test)]
    pub(super) fn with_clock(clock: Clock) -> Self {
        Self {
            clock,
            ..Self::default()
        }
    }

    fn next_epoch(&self) -> u64 {
        self.last_epoch.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// Waits until no attempt is `running`, and returns how many still run at `deadline`.
    pub(super) fn wait_drained(&self, running: impl Fn() -> u32, deadline: Instant) -> u32 {
        let mut draining = self.draining.lock();
        loop {
            let still = running();
            let left = deadline.saturating_duration_since(Instant::now());
            if still == 0 || left.is_zero() {
                return still;
            }
            self.drained.wait_for(&mut draining, left);
        }
    }
}

/// A partition, from its assignment to its revocation.
#[derive(Debug)]
pub(crate) struct Assignment {
    partition: Partition,
    /// The number of running attempts; the highest bit is set once the partition is being revoked.
    /// One word, so that no attempt can start between the check of the bit and the increment.
    attempts: AtomicU32,
    /// The number of received messages that wait until they are due, in a retry topic.
    waiting: AtomicUsize,
    /// Start of the epoch; times in the ledger are milliseconds since then.
    begun: Instant,
    ledger: Mutex<Ledger>,
    shared: Arc<Shared>,
}

const REVOKED: u32 = 1 << 31;

/// The position with which a held partition is assigned. Nothing is read from it.
pub(crate) const PLACEHOLDER: i64 = 0;

/// The position of a received message in its epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Receipt {
    epoch: u64,
    number: u64,
}

/// The result of recording a received offset.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Received {
    pub(crate) receipt: Receipt,
    /// The number of messages that a crash now would deliver again.
    pub(crate) span: usize,
    /// `true` if the log went back, so that a new epoch has begun: it was truncated, or the topic
    /// was recreated.
    pub(crate) rewound: bool,
}

/// A position to commit.
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

    /// Records that the broker has this position.
    pub(super) fn committed(&self) {
        let mut ledger = self.assignment.ledger();
        if ledger.epoch == Some(self.epoch) {
            ledger.watermark.committed(self.position);
            ledger.due_at_ms = None;
            ledger.mark_due(self.assignment.now_ms());
        }
    }
}

impl Assignment {
    /// Begins an epoch.
    pub(super) fn new(
        partition: Partition,
        watermark: Watermark,
        begin: Begin,
        shared: Arc<Shared>,
    ) -> Self {
        let mut ledger = Ledger {
            begin,
            ..Ledger::new(shared.next_epoch(), watermark)
        };
        ledger.mark_due(0);
        Self {
            partition,
            attempts: AtomicU32::new(0),
            waiting: AtomicUsize::new(0),
            begun: shared.clock.now(),
            ledger: Mutex::new(ledger),
            shared,
        }
    }

    pub(crate) fn partition(&self) -> &Partition {
        &self.partition
    }

    /// Records a received offset; `None` when the partition is no longer ours, or not read yet.
    pub(crate) fn receive(&self, offset: i64) -> Option<Received> {
        let now_ms = self.now_ms();
        self.change(|ledger| {
            let mut epoch = ledger.epoch?;
            if ledger.begin != Begin::Begun {
                return None;
            }
            let (number, rewound) = match ledger.watermark.receive(offset, now_ms) {
                Some(number) => (number, false),
                None => {
                    epoch = self.shared.next_epoch();
                    // The committed position is beyond this offset: the next owner would skip the
                    // messages in between.
                    *ledger = Ledger::new(epoch, Watermark::starting_at(offset));
                    let number = ledger.watermark.receive(offset, now_ms)?;
                    ledger.mark_due(now_ms);
                    (number, true)
                }
            };
            ledger.delivered_at_ms = now_ms;
            Some(Received {
                receipt: Receipt { epoch, number },
                span: ledger.watermark.span(),
                rewound,
            })
        })
    }

    /// Records that a message is finished; `false` when its epoch is over or it was finished
    /// already.
    pub(crate) fn complete(&self, receipt: Receipt) -> bool {
        self.change(|ledger| {
            let news =
                ledger.epoch == Some(receipt.epoch) && ledger.watermark.complete(receipt.number);
            if news && ledger.due_at_ms.is_none() {
                ledger.mark_due(self.now_ms());
            }
            news
        })
    }

    /// Returns the position if it has moved since its last commit.
    pub(super) fn due(self: &Arc<Self>) -> Option<Due> {
        let ledger = self.ledger();
        let epoch = ledger.epoch?;
        let position = ledger.watermark.due()?;
        Some(Due {
            assignment: Arc::clone(self),
            epoch,
            position,
        })
    }

    /// Returns `true` while the starting position is not known.
    pub(super) fn is_unresolved(&self) -> bool {
        self.ledger().begin == Begin::Unresolved
    }

    /// Sets where the partition begins; `is_committed` when the broker has that position already.
    pub(crate) fn resolve(&self, position: i64, is_committed: bool) {
        let mut ledger = self.ledger();
        if ledger.epoch.is_none() || ledger.begin != Begin::Unresolved {
            return;
        }
        ledger.begin = Begin::At(position);
        ledger.watermark = Watermark::starting_at(position);
        if is_committed {
            ledger.watermark.committed(position);
        }
        ledger.mark_due(self.now_ms());
    }

    /// Returns where the client must seek before the partition is read, once that position is
    /// committed.
    pub(crate) fn begins_at(&self) -> Option<i64> {
        let ledger = self.ledger();
        match ledger.begin {
            Begin::At(position) if ledger.watermark.due().is_none() => Some(position),
            _ => None,
        }
    }

    /// Returns whether the starting position is settled, so that the partition may be read.
    pub(crate) fn has_begun(&self) -> bool {
        self.ledger().begin == Begin::Begun
    }

    /// Records that the client has sought to its starting position: from now on its position is
    /// from this epoch.
    pub(crate) fn begun(&self) {
        let mut ledger = self.ledger();
        if let Begin::At(position) = ledger.begin {
            ledger.sought = Some(position);
        }
        ledger.begin = Begin::Begun;
        ledger.is_position_ours = true;
    }

    /// Returns where the client must seek again, if it has left this position for another one by
    /// itself.
    ///
    /// A partition that is held is assigned with the position [`PLACEHOLDER`]. The client may have
    /// requested that before it was paused; if the log no longer has it, the client goes to the
    /// log's beginning, even after it was sought elsewhere (librdkafka 2.12).
    pub(crate) fn seeks_again_after(&self, left: i64) -> Option<i64> {
        let ledger = self.ledger();
        let is_untouched = ledger.epoch.is_some() && ledger.watermark.last_received().is_none();
        ledger
            .sought
            .filter(|sought| is_untouched && left == PLACEHOLDER && *sought != PLACEHOLDER)
    }

    /// Returns where the client must seek again before it reads on at `offset`, because it had left
    /// [`PLACEHOLDER`] by itself before it was sought: the log's beginning may have arrived late.
    pub(crate) fn seeks_again_before(&self, offset: i64) -> Option<i64> {
        let sought = self.seeks_again_after(PLACEHOLDER)?;
        (sought < offset).then_some(sought)
    }

    /// Records that the client has no position in the partition: its next one is from this epoch.
    pub(crate) fn has_no_position(&self) {
        let mut ledger = self.ledger();
        ledger.is_position_ours = ledger.begin == Begin::Begun;
    }

    /// Records that the client has returned every message before `position`.
    pub(crate) fn passes(&self, position: i64) {
        let mut ledger = self.ledger();
        let ours = ledger.is_position_ours || ledger.watermark.last_received().is_some();
        if ledger.epoch.is_some() && ledger.begin == Begin::Begun && ours {
            ledger.watermark.pass(position);
            ledger.mark_due(self.now_ms());
        }
    }

    /// Records whether the partition is paused because too many of its messages are unfinished, or
    /// not due.
    pub(crate) fn set_crowded(&self, crowded: bool) {
        self.ledger().crowded = crowded;
    }

    /// Records what the client reports of the partition. Returns whether there may be only offsets
    /// without messages after those received.
    pub(super) fn reported(&self, report: PartitionReport) -> bool {
        let mut ledger = self.ledger();
        ledger.note_end(report.end, self.now_ms());
        if report.has_begun {
            ledger.unread_at_ms = None;
            ledger.is_read = true;
        } else {
            ledger.unread_at_ms.get_or_insert(self.now_ms());
        }
        ledger.may_pass()
    }

    pub(super) fn standing(&self) -> Standing {
        let now_ms = self.now_ms();
        let ledger = self.ledger();
        let watermark = &ledger.watermark;
        Standing {
            partition: self.partition.clone(),
            received: watermark.last_received(),
            span: watermark.span(),
            watermark: watermark.first_unfinished(),
            committed: watermark.last_committed(),
            uncommitted_for: ledger.due_at_ms.map(|at_ms| ago(now_ms, at_ms)),
            delivered_ago: ago(now_ms, ledger.delivered_at_ms),
            oldest_unfinished: watermark.oldest_at_ms().map(|at_ms| ago(now_ms, at_ms)),
            crowded: ledger.crowded,
            waiting: self.waiting(),
            end: ledger.end,
            withheld_for: ledger.withheld_at_ms.map(|at_ms| ago(now_ms, at_ms)),
        }
    }

    /// Returns for how long the client has reported that it has not begun to read the partition.
    pub(super) fn unread_for(&self) -> Option<Duration> {
        let unread_at_ms = self.ledger().unread_at_ms?;
        Some(ago(self.now_ms(), unread_at_ms))
    }

    /// Returns whether the client has reported that it reads the partition.
    pub(super) fn is_read(&self) -> bool {
        self.ledger().is_read
    }

    /// Returns the milliseconds since the assignment.
    fn now_ms(&self) -> u64 {
        let elapsed = self
            .shared
            .clock
            .now()
            .saturating_duration_since(self.begun);
        u64::try_from(elapsed.as_millis()).unwrap_or(u64::MAX)
    }

    /// Counts an attempt. Returns `false`, without counting, once the partition is being revoked.
    pub(crate) fn start(&self) -> bool {
        self.attempts
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, |attempts| {
                (attempts & REVOKED == 0).then_some(attempts + 1)
            })
            .is_ok()
    }

    /// Ends the attempt that [`start`](Self::start) counted.
    pub(crate) fn stop(&self) {
        let before = self.attempts.fetch_sub(1, Ordering::AcqRel);
        debug_assert_ne!(before & !REVOKED, 0, "stop without a start");
        if before == REVOKED | 1 {
            // Taking the lock orders this after the drain's check of the count, so the drain cannot
            // miss the wake-up.
            drop(self.shared.draining.lock());
            self.shared.drained.notify_all();
        }
    }

    /// Counts a received message that is not due.
    pub(crate) fn waits(&self) {
        self.waiting.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a message that waited and is due now.
    pub(crate) fn waits_no_more(&self) {
        self.waiting.fetch_sub(1, Ordering::Relaxed);
    }

    /// Returns how many received messages wait until they are due.
    pub(crate) fn waiting(&self) -> usize {
        self.waiting.load(Ordering::Relaxed)
    }

    /// Returns whether attempts may no longer start.
    pub(crate) fn is_revoked(&self) -> bool {
        self.attempts.load(Ordering::Acquire) & REVOKED != 0
    }

    /// Returns how many messages would be delivered again after a crash now.
    pub(crate) fn span(&self) -> usize {
        self.ledger().watermark.span()
    }

    /// Returns what has been received from this partition, whose span is known, and from all of
    /// them.
    pub(crate) fn backlog(&self, span: usize) -> Backlog {
        self.shared.totals.backlog(span, self.waiting())
    }

    pub(super) fn running(&self) -> u32 {
        self.attempts.load(Ordering::Acquire) & !REVOKED
    }

    pub(super) fn forbid(&self) {
        self.attempts.fetch_or(REVOKED, Ordering::AcqRel);
    }

    pub(super) fn end(&self) {
        self.change(|ledger| {
            ledger.epoch = None;
            ledger.watermark = Watermark::default();
            ledger.due_at_ms = None;
        });
    }

    /// Changes the ledger, and counts what that means for all partitions together.
    fn change<T>(&self, change: impl FnOnce(&mut Ledger) -> T) -> T {
        let mut ledger = self.ledger();
        let before = ledger.watermark.span();
        let changed = change(&mut ledger);
        self.shared
            .totals
            .span_changed(before, ledger.watermark.span());
        changed
    }

    fn ledger(&self) -> MutexGuard<'_, Ledger> {
        self.ledger.lock()
    }
}

/// Returns the time from one moment of an assignment to a later one.
fn ago(now_ms: u64, at_ms: u64) -> Duration {
    Duration::from_millis(now_ms.saturating_sub(at_ms))
}

#[cfg(test)]
#[path = "assignment_tests.rs"]
mod tests;
