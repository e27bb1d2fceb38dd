//! A held message: its visibility, and what it needs when.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// The time for which a message can be held. SQS ends its visibility timeout 12 hours after the
/// receive, whatever was extended. A minute less, because the queue's time began before ours.
pub(crate) const HOLD_MOST: Duration = Duration::from_secs(12 * 3_600 - 60);
/// A visibility timeout is extended when half of it is over.
pub(crate) const EXTENDS_PER_VISIBILITY: u32 = 2;
/// A visibility timeout is extended a sixth of it earlier if a call is sent anyway.
const EARLY_PER_VISIBILITY: u32 = 6;
/// An extension without an answer is repeated after another tenth of the visibility timeout.
pub(crate) const REPEATS_PER_VISIBILITY: u32 = 10;
/// A message counts as lost when a fifth of its visibility timeout is left.
pub(crate) const MARGIN_OF_VISIBILITY: u32 = 5;
/// The part of the visibility timeout that a delete may wait for others to fill its batch: a tenth,
/// at most five seconds. If the message is delivered again because of it, its record answers.
const DELETE_WAITS_PER_VISIBILITY: u32 = 10;
const DELETE_WAIT_MAX: Duration = Duration::from_secs(5);

/// The broker's id of a message.
pub(crate) type MessageId = Arc<str>;

/// A flag shared by the messages of one group from one receive. The queue delivers no other message
/// of the group while one of them is held.
pub(crate) type Group = Arc<AtomicBool>;

/// A held message.
#[derive(Debug)]
pub(crate) struct Entry {
    pub(crate) delivery: u64,
    /// The newest receipt handle: each receive invalidates the older ones.
    pub(crate) handle: Arc<str>,
    pub(crate) received_at: Instant,
    /// From then on the queue may deliver it to other consumers.
    pub(crate) visible_at: Instant,
    pub(crate) extend_at: Instant,
    pub(crate) extending: bool,
    pub(crate) state: EntryState,
    pub(crate) failures: u32,
    pub(crate) lost: CancellationToken,
    /// `true` if it was lost and received again while its owner still had it.
    pub(crate) regained: bool,
    pub(crate) group: Option<Group>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EntryState {
    InHand,
    Acked,
    Returning { due_at: Instant },
}

/// An entry of a call: a message and its receipt handle at that time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Target {
    pub(crate) id: MessageId,
    pub(crate) handle: Arc<str>,
}

/// The need of a message at a given time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Need {
    Nothing,
    Extension,
    /// An extension, but only if a call is sent anyway.
    ExtensionSoon,
    /// The note that it is lost, because the message may become visible at any moment.
    Loss,
    /// The removal of its entry: the message is visible again, and no call is needed.
    Forgetting,
}

impl Entry {
    pub(crate) fn need(&self, now: Instant, visibility: Duration) -> Need {
        if self.state != EntryState::InHand {
            return if now >= self.visible_at {
                Need::Forgetting
            } else {
                Need::Nothing
            };
        }
        if !self.is_ours() {
            return Need::Nothing;
        }
        if now + visibility / MARGIN_OF_VISIBILITY >= self.visible_at {
            return Need::Loss;
        }
        if self.extending || self.next_visibility(now, visibility).is_none() {
            return Need::Nothing;
        }
        if now >= self.extend_at {
            return Need::Extension;
        }
        let soon = now + visibility / EARLY_PER_VISIBILITY >= self.extend_at;
        if soon {
            Need::ExtensionSoon
        } else {
            Need::Nothing
        }
    }

    pub(crate) fn target(&self, id: &MessageId) -> Target {
        Target {
            id: Arc::clone(id),
            handle: Arc::clone(&self.handle),
        }
    }

    /// Returns the visibility timeout to set at `now`: `visibility`, or the rest of the time that
    /// the queue allows a message to be held. `None` when it is already hidden for nearly that
    /// long.
    pub(crate) fn next_visibility(&self, now: Instant, visibility: Duration) -> Option<Duration> {
        let left = (self.received_at + HOLD_MOST).saturating_duration_since(now);
        // The queue counts whole seconds, and our calls round up.
        let next = Duration::from_secs(visibility.min(left).as_secs());
        (now + next > self.visible_at + visibility / REPEATS_PER_VISIBILITY).then_some(next)
    }

    /// Returns until when its delete may wait at `now`. The rest of its visibility timeout, a fifth
    /// at least, is left for repeats.
    pub(crate) fn delete_by(&self, now: Instant, visibility: Duration) -> Instant {
        let wait = (visibility / DELETE_WAITS_PER_VISIBILITY).min(DELETE_WAIT_MAX);
        let hidden = self.visible_at.saturating_duration_since(now);
        now + wait.min(hidden.saturating_sub(visibility / MARGIN_OF_VISIBILITY))
    }

    /// Returns whether the queue still hides it for us.
    pub(crate) fn is_ours(&self) -> bool {
        self.regained || !self.lost.is_cancelled()
    }

    /// Marks the message as lost; `true` when it was not lost before.
    pub(crate) fn lose(&mut self) -> bool {
        let first = !self.lost.is_cancelled();
        self.regained = false;
        self.break_group();
        self.lost.cancel();
        first
    }

    /// Stops later messages of its group from running before this one is received again.
    pub(crate) fn break_group(&self) {
        if let Some(broken) = &self.group {
            broken.store(true, Relaxed);
        }
    }
}
