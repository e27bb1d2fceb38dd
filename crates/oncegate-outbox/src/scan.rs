//! The place up to which an outbox was read beside what is held back.
//!
//! # Not obvious
//!
//! Implementation notes: facts that this code depends on.
//!
//! - The messages of a part of a topic that is held back are read, since a store does not know
//!   parts, and passed over. So the next read begins behind them.
//! - A message behind that place is read only if no message of its key up to there waits
//!   ([`HeldBack::up_to`]). The read decides that by one snapshot, so no message overtakes another,
//!   whatever becomes visible or free in the meantime.
//! - Sequences are given before a commit: a message may become visible before the place. So the
//!   outbox is read from its beginning again after a while.

use std::time::Duration;

use tokio::time::Instant;

use super::HeldBack;
use super::held_back::HeldOrders;

/// The longest time before an outbox is read from its beginning again.
const RESCAN_AFTER: Duration = Duration::from_secs(10);

/// A pass through the messages of an outbox.
#[derive(Debug)]
pub(super) struct Scan {
    up_to: Option<i64>,
    began: Instant,
}

impl Scan {
    pub(super) fn new(now: Instant) -> Self {
        Self {
            up_to: None,
            began: now,
        }
    }

    /// Adds what was passed over to what is held back. A new pass begins when that is due.
    pub(super) fn and(&mut self, held_back: HeldBack, held: &HeldOrders, now: Instant) -> HeldBack {
        let is_due = now >= self.began + RESCAN_AFTER
            || held.holds_no_place()
            || held.is_due_since(self.began, now);
        if is_due {
            *self = Self::new(now);
        }
        HeldBack {
            up_to: self.up_to,
            ..held_back
        }
    }

    /// Notes a read up to this sequence; `is_passing`: some of its messages are not tried now.
    pub(super) fn note_read(&mut self, last: Option<i64>, is_passing: bool) {
        if is_passing || self.up_to.is_some() {
            self.up_to = last.or(self.up_to);
        }
    }

    /// Notes that there are no more messages.
    pub(super) fn note_end(&mut self, held: &mut HeldOrders, now: Instant) {
        if self.up_to.is_some() && held.forget_tried(now) {
            *self = Self::new(now);
        }
    }
}
