//! The messages of a queue that are held: received, and neither deleted nor returned yet.
//!
//! This module does no I/O and reads no clock. It decides when a message's visibility is extended,
//! when it is lost, and which messages are due to be deleted or returned.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::outbox::Outbox;
use oncegate_runtime::backoff::Backoff;

/// The most entries in one call to SQS.
pub(crate) const BATCH_ENTRIES: usize = 10;
/// How long a message can be held. SQS ends its visibility timeout 12 hours after the receive,
/// whatever was extended. A minute less, because the queue's time began before ours.
const HOLD_MOST: Duration = Duration::from_secs(12 * 3_600 - 60);
/// A visibility timeout is extended when half of it is over.
const EXTENDS_PER_VISIBILITY: u32 = 2;
/// It is extended a sixth of it earlier if a call is sent anyway.
const EARLY_PER_VISIBILITY: u32 = 6;
/// An extension without an answer is repeated after another tenth of the visibility timeout.
const REPEATS_PER_VISIBILITY: u32 = 10;
/// The handler is cancelled when a fifth of the visibility timeout is left.
const MARGIN_OF_VISIBILITY: u32 = 5;
/// How long a delete may wait for others to fill its batch: a tenth of the visibility timeout, at
/// most five seconds. If the message is delivered again because of it, its record answers.
const DELETE_WAITS_PER_VISIBILITY: u32 = 10;
const DELETE_WAIT_MAX: Duration = Duration::from_secs(5);
/// How long a return, or a delete that the later messages of its group wait for, may wait for
/// others to fill its batch.
const SHORT_WAIT: Duration = Duration::from_millis(50);
/// The delays between attempts to delete or return a message.
const REPEAT_BACKOFF: Backoff = Backoff::new(Duration::from_millis(100), Duration::from_secs(5));

/// The broker's id of a message.
pub(crate) type MessageId = Arc<str>;

/// A flag shared by the messages of one group from one receive. The queue delivers no other message
/// of the group while one of them is held.
pub(crate) type Group = Arc<AtomicBool>;

/// All messages held.
#[derive(Debug)]
pub(crate) struct Held {
    visibility: Duration,
    entries: HashMap<MessageId, Entry>,
    deletes: Outbox<MessageId>,
    returns: Outbox<MessageId>,
    /// How many messages are in hand: neither acknowledged nor returned.
    in_hand: usize,
    acked: usize,
    next_delivery: u64,
}

/// One message.
#[derive(Debug)]
struct Entry {
    delivery: u64,
    /// The newest receipt handle: each receive invalidates the older ones.
    handle: Arc<str>,
    received_at: Instant,
    /// From then on the queue may deliver it to other consumers.
    visible_at: Instant,
    extend_at: Instant,
    extending: bool,
    state: EntryState,
    failures: u32,
    lost: CancellationToken,
    /// Whether it was lost and received again while its owner still had it.
    regained: bool,
    group: Option<Group>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum EntryState {
    InHand,
    Acked,
    Returning { due_at: Instant },
}

/// A delivery that is now held.
#[derive(Debug)]
pub(crate) struct Admitted {
    /// Distinguishes this delivery from a later one of the same message.
    pub(crate) delivery: u64,
    /// Fires when the message may be visible again.
    pub(crate) lost: CancellationToken,
}

/// One entry of a call: a message and its receipt handle at that time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Target {
    pub(crate) id: MessageId,
    pub(crate) handle: Arc<str>,
}

/// A visibility timeout to set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Change {
    pub(crate) target: Target,
    pub(crate) visibility: Duration,
    /// Whether the message is kept; otherwise it is returned.
    pub(crate) keep: bool,
}

/// The answer of a call for one entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    Done,
    /// The receipt handle is no longer valid: the message was received again, or deleted.
    Gone,
    /// The entry failed and may be retried.
    Failed,
}

/// What is due at a given time.
#[derive(Debug, Default)]
pub(crate) struct Look {
    /// Visibility timeouts to extend, at most [`BATCH_ENTRIES`] in each batch.
    pub(crate) extends: Vec<Vec<Change>>,
    /// How many messages were lost.
    pub(crate) lost: u64,
    /// How many acknowledged messages will be delivered again, because they could not be deleted in
    /// time.
    pub(crate) undeleted: u64,
}

impl Held {
    pub(crate) fn new(visibility: Duration) -> Self {
        Self {
            visibility,
            entries: HashMap::new(),
            deletes: Outbox::default(),
            returns: Outbox::default(),
            in_hand: 0,
            acked: 0,
            next_delivery: 0,
        }
    }

    /// Returns how many messages are neither acknowledged nor returned.
    pub(crate) fn in_hand(&self) -> usize {
        self.in_hand
    }

    /// Returns how many messages are acknowledged and not deleted yet.
    pub(crate) fn undeleted(&self) -> usize {
        self.acked
    }

    /// Returns how many deletes there are beyond an incomplete batch, which waits for more.
    pub(crate) fn overdue_deletes(&self) -> usize {
        self.acked.saturating_sub(BATCH_ENTRIES - 1)
    }

    /// Returns when the oldest message that is neither deleted nor returned was received.
    pub(crate) fn oldest(&self) -> Option<Instant> {
        self.entries.values().map(|entry| entry.received_at).min()
    }

    /// Whether no message is in hand, and no call to the queue is due.
    pub(crate) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Holds a message received at `now`. `None` when it is held already: then only its receipt
    /// handle is updated.
    pub(crate) fn admit(
        &mut self,
        now: Instant,
        id: &MessageId,
        handle: Arc<str>,
        group: Option<Group>,
    ) -> Option<Admitted> {
        let (visible_at, extend_at) = (
            now + self.visibility,
            now + self.visibility / EXTENDS_PER_VISIBILITY,
        );
        if let Some(entry) = self.entries.get_mut(id) {
            if !matches!(entry.state, EntryState::Returning { .. }) {
                (entry.handle, entry.received_at) = (handle, now);
                (entry.visible_at, entry.extend_at) = (visible_at, extend_at);
                entry.regained = entry.lost.is_cancelled();
                return None;
            }
            // It was received again before it was returned, so there is nothing left to return.
            self.entries.remove(id);
        }
        self.next_delivery += 1;
        let (delivery, lost) = (self.next_delivery, CancellationToken::new());
        let entry = Entry {
            delivery,
            handle,
            received_at: now,
            visible_at,
            extend_at,
            extending: false,
            state: EntryState::InHand,
            failures: 0,
            lost: lost.clone(),
            regained: false,
            group,
        };
        self.entries.insert(Arc::clone(id), entry);
        self.in_hand += 1;
        Some(Admitted { delivery, lost })
    }

    fn in_hand_mut(&mut self, id: &MessageId, delivery: u64) -> Option<&mut Entry> {
        self.entries
            .get_mut(id)
            .filter(|entry| entry.delivery == delivery && entry.state == EntryState::InHand)
    }

    /// Whether an attempt may begin: the message is still ours, and no earlier one of its group was
    /// returned.
    pub(crate) fn may_start(&mut self, now: Instant, id: &MessageId, delivery: u64) -> bool {
        let margin = self.visibility / MARGIN_OF_VISIBILITY;
        self.in_hand_mut(id, delivery).is_some_and(|entry| {
            let in_order = entry
                .group
                .as_ref()
                .is_none_or(|broken| !broken.load(Relaxed));
            in_order && !entry.lost.is_cancelled() && now + margin < entry.visible_at
        })
    }

    /// Whether the queue has left this delivery to us so far.
    pub(crate) fn is_ours(&mut self, id: &MessageId, delivery: u64) -> bool {
        self.in_hand_mut(id, delivery)
            .is_some_and(|entry| entry.is_ours())
    }

    /// Acknowledges a message, so that it is deleted. A lost message is left to its next delivery,
    /// unless that delivery came to us.
    pub(crate) fn ack(&mut self, now: Instant, id: &MessageId, delivery: u64) {
        let (visibility, is_last) = (self.visibility, self.in_hand == 1);
        let Some(entry) = self
            .in_hand_mut(id, delivery)
            .filter(|entry| entry.is_ours())
        else {
            return;
        };
        entry.state = EntryState::Acked;
        let send_by = match (&entry.group, is_last) {
            (Some(_), true) => now,
            (Some(_), false) => now + SHORT_WAIT,
            (None, _) => entry.delete_by(now, visibility),
        };
        self.in_hand -= 1;
        self.acked += 1;
        self.deletes.push(send_by, Arc::clone(id));
    }

    /// Returns a message to the queue, which delivers it again after `delay`. `false` when it was
    /// not in hand.
    pub(crate) fn give_back(
        &mut self,
        now: Instant,
        id: &MessageId,
        delivery: u64,
        delay: Duration,
    ) -> bool {
        let Some(entry) = self.in_hand_mut(id, delivery) else {
            return false;
        };
        entry.break_group();
        let (is_visible, is_extending) = (now >= entry.visible_at, entry.extending);
        if is_visible {
            self.forget(id);
            return true;
        }
        entry.state = EntryState::Returning {
            due_at: now + delay,
        };
        self.in_hand -= 1;
        // A heartbeat in flight would overwrite the delay. Its answer will put the message into the
        // outbox.
        if !is_extending {
            self.returns.push(now + SHORT_WAIT, Arc::clone(id));
        }
        true
    }

    /// Finds messages whose visibility timeout is due to be extended, and messages that have lost
    /// it.
    pub(crate) fn look(&mut self, now: Instant) -> Look {
        let (visibility, mut look) = (self.visibility, Look::default());
        let (mut due, mut early, mut over) = (Vec::new(), Vec::new(), Vec::new());
        for (id, entry) in &mut self.entries {
            match entry.need(now, visibility) {
                Need::Nothing => {}
                Need::Extension => due.push(entry.target(id)),
                Need::ExtensionSoon => early.push(entry.target(id)),
                Need::Loss => look.lost += u64::from(entry.lose()),
                Need::Forgetting => over.push(Arc::clone(id)),
            }
        }
        for id in over {
            look.undeleted += u64::from(self.forget(&id) == Some(EntryState::Acked));
        }
        if !due.is_empty() {
            // A call that is sent anyway includes messages that would need an extension soon.
            early.truncate(due.len().next_multiple_of(BATCH_ENTRIES) - due.len());
            due.append(&mut early);
        }
        for chunk in due.chunks(BATCH_ENTRIES) {
            let changes = chunk
                .iter()
                .cloned()
                .filter_map(|target| self.extending(now, target));
            look.extends.push(changes.collect());
        }
        look
    }

    fn extending(&mut self, now: Instant, target: Target) -> Option<Change> {
        let entry = self.entries.get_mut(&target.id)?;
        let visibility = entry.next_visibility(now, self.visibility)?;
        entry.extending = true;
        Some(Change {
            target,
            visibility,
            keep: true,
        })
    }

    /// Takes the deletes that are due, at most [`BATCH_ENTRIES`] in each batch. With `all`, the
    /// incomplete batch as well, because nothing will fill it soon.
    pub(crate) fn take_deletes(&mut self, now: Instant, all: bool) -> Vec<Vec<Target>> {
        let batches = self.deletes.take(now, all).into_iter();
        let entries = &self.entries;
        let target = |id: MessageId| {
            let entry = entries
                .get(&id)
                .filter(|entry| entry.state == EntryState::Acked)?;
            Some(entry.target(&id))
        };
        let batches = batches.map(|batch| batch.into_iter().filter_map(target).collect::<Vec<_>>());
        batches.filter(|batch| !batch.is_empty()).collect()
    }

    /// Takes the visibility changes of returned messages, at most [`BATCH_ENTRIES`] in each batch.
    pub(crate) fn take_returns(&mut self, now: Instant, all: bool) -> Vec<Vec<Change>> {
        let batches = self.returns.take(now, all).into_iter();
        let entries = &self.entries;
        let change = |id: MessageId| {
            let entry = entries.get(&id)?;
            let EntryState::Returning { due_at } = entry.state else {
                return None;
            };
            let delay = due_at.saturating_duration_since(now);
            let most = (entry.received_at + HOLD_MOST).saturating_duration_since(now);
            Some(Change {
                target: entry.target(&id),
                visibility: delay.min(most),
                keep: false,
            })
        };
        let batches = batches.map(|batch| batch.into_iter().filter_map(change).collect::<Vec<_>>());
        batches.filter(|batch| !batch.is_empty()).collect()
    }

    /// Records the answer to a delete. Returns whether the delete is no longer possible.
    pub(crate) fn note_delete(
        &mut self,
        now: Instant,
        target: &Target,
        answer: Answer,
        fraction: f64,
    ) -> bool {
        let Some(entry) = self
            .entries
            .get_mut(&target.id)
            .filter(|entry| entry.state == EntryState::Acked)
        else {
            return false;
        };
        match answer {
            // It was received again meanwhile, and only the newest receipt handle is sure to delete
            // it.
            Answer::Done | Answer::Gone if entry.handle != target.handle => {
                self.deletes.push(now, Arc::clone(&target.id));
            }
            // Without a valid receipt handle, the message may come as another delivery, which its
            // record answers.
            Answer::Done | Answer::Gone => {
                self.forget(&target.id);
                return answer == Answer::Gone;
            }
            Answer::Failed => {
                entry.failures += 1;
                let again_at = now + REPEAT_BACKOFF.wait(entry.failures, fraction);
                self.deletes.push_later(again_at, Arc::clone(&target.id));
            }
        }
        false
    }

    /// Records the answer to a visibility change sent at `sent_at`. Returns whether the message was
    /// lost.
    pub(crate) fn note_change(
        &mut self,
        now: Instant,
        sent_at: Instant,
        change: &Change,
        answer: Answer,
        fraction: f64,
    ) -> bool {
        let (id, visibility) = (&change.target.id, self.visibility);
        let Some(entry) = self.entries.get_mut(id) else {
            return false;
        };
        if change.keep {
            entry.extending = false;
            let current = entry.handle == change.target.handle;
            if answer == Answer::Done && current {
                entry.visible_at = sent_at + change.visibility;
                entry.extend_at = sent_at + change.visibility / EXTENDS_PER_VISIBILITY;
            } else if answer == Answer::Failed {
                entry.extend_at = now + visibility / REPEATS_PER_VISIBILITY;
            }
            if matches!(entry.state, EntryState::Returning { .. }) {
                self.returns.push(now + SHORT_WAIT, Arc::clone(id));
                return false;
            }
            let lost = answer == Answer::Gone && current && entry.state == EntryState::InHand;
            return lost && entry.lose();
        }
        if !matches!(entry.state, EntryState::Returning { .. })
            || entry.handle != change.target.handle
        {
            return false;
        }
        match answer {
            Answer::Done | Answer::Gone => {
                self.forget(id);
            }
            Answer::Failed => {
                entry.failures += 1;
                let again_at = now + REPEAT_BACKOFF.wait(entry.failures, fraction);
                self.returns.push_later(again_at, Arc::clone(id));
            }
        }
        false
    }

    /// Returns when something is next due by time.
    pub(crate) fn next_wake(&self) -> Option<Instant> {
        self.deletes
            .next_wake()
            .into_iter()
            .chain(self.returns.next_wake())
            .min()
    }

    fn forget(&mut self, id: &MessageId) -> Option<EntryState> {
        let state = self.entries.remove(id)?.state;
        match state {
            EntryState::InHand => self.in_hand -= 1,
            EntryState::Acked => self.acked -= 1,
            EntryState::Returning { .. } => {}
        }
        Some(state)
    }
}

/// What a message needs at a given time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Need {
    Nothing,
    Extension,
    /// An extension, but only if a call is sent anyway.
    ExtensionSoon,
    /// Its handler must be cancelled, because the message may become visible at any moment.
    Loss,
    /// Its entry must be removed: the message is visible again, and no call is needed.
    Forgetting,
}

impl Entry {
    fn need(&self, now: Instant, visibility: Duration) -> Need {
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

    fn target(&self, id: &MessageId) -> Target {
        Target {
            id: Arc::clone(id),
            handle: Arc::clone(&self.handle),
        }
    }

    /// Returns the visibility timeout to set at `now`: `visibility`, or the rest of the time that
    /// the queue allows a message to be held. `None` when it is already hidden for nearly that
    /// long.
    fn next_visibility(&self, now: Instant, visibility: Duration) -> Option<Duration> {
        let left = (self.received_at + HOLD_MOST).saturating_duration_since(now);
        // The queue counts whole seconds, and our calls round up.
        let next = Duration::from_secs(visibility.min(left).as_secs());
        (now + next > self.visible_at + visibility / REPEATS_PER_VISIBILITY).then_some(next)
    }

    /// Returns until when its delete may wait at `now`. The rest of its visibility timeout, a fifth
    /// at least, is left for repeats.
    fn delete_by(&self, now: Instant, visibility: Duration) -> Instant {
        let wait = (visibility / DELETE_WAITS_PER_VISIBILITY).min(DELETE_WAIT_MAX);
        let hidden = self.visible_at.saturating_duration_since(now);
        now + wait.min(hidden.saturating_sub(visibility / MARGIN_OF_VISIBILITY))
    }

    /// Whether the queue still hides it for us.
    fn is_ours(&self) -> bool {
        self.regained || !self.lost.is_cancelled()
    }

    /// Marks the message as lost; `true` when it was not lost before.
    fn lose(&mut self) -> bool {
        let first = !self.lost.is_cancelled();
        self.regained = false;
        self.break_group();
        self.lost.cancel();
        first
    }

    /// Stops later messages of its group from running before this one is received again.
    fn break_group(&self) {
        if let Some(broken) = &self.group {
            broken.store(true, Relaxed);
        }
    }
}

#[cfg(test)]
#[path = "held_tests.rs"]
mod tests;
