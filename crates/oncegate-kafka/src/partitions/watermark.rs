//! Computes which offset of a partition may be committed.

use std::collections::VecDeque;

/// The received offsets of one partition in one epoch, in order, and which of them are finished.
///
/// Only received offsets count. A topic has gaps (compaction, transaction markers, aborted
/// messages), so "the next offset" may never arrive.
///
/// Every operation is O(1), amortised: a slot is pushed once and popped once.
#[derive(Debug, Default)]
pub(crate) struct Watermark {
    /// The received offsets from the first incomplete one on. The front is never complete.
    outstanding: VecDeque<Slot>,
    /// The number of slots popped from the front; also the number of the slot now at the front.
    finished: u64,
    last_received: Option<i64>,
    /// Every offset before this one has been received or has no message (transaction marker,
    /// aborted message).
    passed: Option<i64>,
    committed: Option<i64>,
    /// The position to commit while nothing is finished, if the broker's position is wrong.
    base: Option<i64>,
}

#[derive(Clone, Copy, Debug)]
struct Slot {
    offset: i64,
    /// The time at which it was received, in milliseconds on its owner's clock, times two; plus one
    /// once it is complete. Packed into one word, so that a slot takes 16 bytes.
    at_ms_and_complete: u64,
}

impl Slot {
    fn new(offset: i64, at_ms: u64) -> Self {
        Self {
            offset,
            at_ms_and_complete: at_ms << 1,
        }
    }

    fn at_ms(self) -> u64 {
        self.at_ms_and_complete >> 1
    }

    fn is_complete(self) -> bool {
        self.at_ms_and_complete & 1 == 1
    }

    fn set_complete(&mut self) {
        self.at_ms_and_complete |= 1;
    }
}

impl Watermark {
    /// Returns a watermark whose position is `base` until messages are finished, because the
    /// broker's position is wrong.
    pub(crate) fn starting_at(base: i64) -> Self {
        Self {
            base: Some(base),
            ..Self::default()
        }
    }

    /// Records an offset received at `at_ms`, and returns its number for
    /// [`complete`](Self::complete).
    ///
    /// `None` when the offset is not greater than all received ones: the log went back, and this
    /// epoch is over.
    pub(crate) fn receive(&mut self, offset: i64, at_ms: u64) -> Option<u64> {
        let behind = self.last_received.is_some_and(|last| offset <= last);
        if behind || self.passed.is_some_and(|passed| offset < passed) {
            return None;
        }
        self.last_received = Some(offset);
        self.outstanding.push_back(Slot::new(offset, at_ms));
        Some(self.finished + self.outstanding.len() as u64 - 1)
    }

    /// Marks the message of this number as finished. `false` when it was finished already.
    pub(crate) fn complete(&mut self, number: u64) -> bool {
        let index = number
            .checked_sub(self.finished)
            .and_then(|index| usize::try_from(index).ok());
        let Some(slot) = index.and_then(|index| self.outstanding.get_mut(index)) else {
            return false;
        };
        if slot.is_complete() {
            return false;
        }
        slot.set_complete();
        while self
            .outstanding
            .front()
            .is_some_and(|front| front.is_complete())
        {
            self.outstanding.pop_front();
            self.finished += 1;
        }
        true
    }

    /// Records that no message before `offset` will arrive: the offsets that were not received have
    /// no message.
    pub(crate) fn pass(&mut self, offset: i64) {
        self.passed = self.passed.max(Some(offset));
    }

    /// Returns the offset from which the next owner must read: the first incomplete one, else the
    /// one after the last.
    ///
    /// `None` while nothing at the front is finished or passed, unless the watermark was created
    /// with a base. It only grows.
    pub(crate) fn position(&self) -> Option<i64> {
        if self.finished == 0 && self.passed.is_none() {
            return self.base;
        }
        self.first_unfinished()
    }

    /// Returns the position if the broker does not have it yet.
    pub(crate) fn due(&self) -> Option<i64> {
        self.position()
            .filter(|position| self.committed.is_none_or(|committed| committed < *position))
    }

    /// Records that the broker has this position.
    pub(crate) fn committed(&mut self, position: i64) {
        self.committed = self.committed.max(Some(position));
    }

    /// Returns the first unfinished offset, which may be the next one to arrive; `None` before
    /// anything is known.
    pub(crate) fn first_unfinished(&self) -> Option<i64> {
        let next = || {
            self.last_received
                .map(|last| last + 1)
                .max(self.passed)
                .or(self.base)
        };
        self.outstanding
            .front()
            .map(|front| front.offset)
            .or_else(next)
    }

    /// Returns the last received offset.
    pub(crate) fn last_received(&self) -> Option<i64> {
        self.last_received
    }

    /// Returns the position that we last committed.
    pub(crate) fn last_committed(&self) -> Option<i64> {
        self.committed
    }

    /// Returns when the first unfinished message was received, in milliseconds on its owner's
    /// clock.
    pub(crate) fn oldest_at_ms(&self) -> Option<u64> {
        self.outstanding.front().map(|front| front.at_ms())
    }

    /// Returns how many messages would be delivered again after a crash now: those from the first
    /// incomplete one on.
    pub(crate) fn span(&self) -> usize {
        self.outstanding.len()
    }
}
