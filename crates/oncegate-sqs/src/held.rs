//! The messages of a queue that are held: received, and neither deleted nor returned yet.
//!
//! This module does no I/O and reads no clock. It decides when a message's visibility is extended,
//! when it is lost, and which messages are due to be deleted or returned.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::entry::{
    EXTENDS_PER_VISIBILITY, Entry, EntryState, HOLD_MOST, MARGIN_OF_VISIBILITY, Need,
    REPEATS_PER_VISIBILITY,
};
pub(crate) use super::entry::{Group, MessageId, Target};
use super::outbox::{BATCH_ENTRIES, Outbox};
use oncegate_runtime::backoff::Backoff;

/// The time that a return, or a delete that the later messages of its group wait for, may wait for
/// others to fill its batch.
const SHORT_WAIT: Duration = Duration::from_millis(50);
/// The delays between attempts to delete or return a message.
const REPEAT_BACKOFF: Backoff = Backoff::new(Duration::from_millis(100), Duration::from_secs(5));

/// The messages held.
#[derive(Debug)]
pub(crate) struct Held {
    visibility: Duration,
    entries: HashMap<MessageId, Entry>,
    deletes: Outbox<MessageId>,
    returns: Outbox<MessageId>,
    /// The number of messages in hand: neither acknowledged nor returned.
    in_hand: usize,
    acked: usize,
    next_delivery: u64,
}

/// A delivery that is now held.
#[derive(Debug)]
pub(crate) struct Admitted {
    /// Distinguishes this delivery from a later one of the same message.
    pub(crate) delivery: u64,
    /// Fires when the message may be visible again.
    pub(crate) lost: CancellationToken,
}

/// A visibility timeout to set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Change {
    pub(crate) target: Target,
    pub(crate) visibility: Duration,
    /// `true` if the message is kept; otherwise it is returned.
    pub(crate) keep: bool,
}

/// The answer of a call for one entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EntryResult {
    Done,
    /// The receipt handle is no longer valid: the message was received again, or deleted.
    Gone,
    /// The entry failed and may be retried.
    Failed,
}

/// The work that is due at a given time.
#[derive(Debug, Default)]
pub(crate) struct DueWork {
    /// Visibility timeouts to extend, at most [`BATCH_ENTRIES`] in each batch.
    pub(crate) extends: Vec<Vec<Change>>,
    /// The number of messages lost.
    pub(crate) lost: u64,
    /// The number of acknowledged messages that will be delivered again, because they could not be
    /// deleted in time.
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

    /// Returns whether no message is in hand, and no call to the queue is due.
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
        let visible_at = now + self.visibility;
        let extend_at = now + self.visibility / EXTENDS_PER_VISIBILITY;
        if let Some(entry) = self.entries.get_mut(id) {
            if !matches!(entry.state, EntryState::Returning { .. }) {
                entry.handle = handle;
                entry.received_at = now;
                entry.visible_at = visible_at;
                entry.extend_at = extend_at;
                entry.regained = entry.lost.is_cancelled();
                return None;
            }
            // It was received again before it was returned, so there is nothing left to return.
            self.entries.remove(id);
        }
        self.next_delivery += 1;
        let delivery = self.next_delivery;
        let lost = CancellationToken::new();
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

    /// Returns whether an attempt may begin: the message is still ours, and no earlier one of its
    /// group was returned.
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

    /// Returns whether the queue has left this delivery to us so far.
    pub(crate) fn is_ours(&mut self, id: &MessageId, delivery: u64) -> bool {
        self.in_hand_mut(id, delivery)
            .is_some_and(|entry| entry.is_ours())
    }

    /// Acknowledges a message, so that it is deleted. A lost message is left to its next delivery,
    /// unless that delivery came to us.
    pub(crate) fn ack(&mut self, now: Instant, id: &MessageId, delivery: u64) {
        let visibility = self.visibility;
        let is_last = self.in_hand == 1;
        let Some(entry) = self
            .in_hand_mut(id, delivery)
            .filter(|entry| entry.is_ours())
        else {
            return;
        };
        entry.state = EntryState::Acked;
        // Later messages of the group come only after the delete; after the last message in hand,
        // nothing fills its batch.
        let send_by = match (&entry.group, is_last) {
            (Some(_), true) => now,
            (Some(_), false) => now + SHORT_WAIT,
            (None, _) => entry.delete_by(now, visibility),
        };
        self.in_hand -= 1;
        self.acked += 1;
        self.deletes.push(send_by, Arc::clone(id));
    }

    /// Returns a message to the queue, which delivers it again after `delay`. The result is `false`
    /// when it was not in hand.
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
        let is_visible = now >= entry.visible_at;
        let is_extending = entry.extending;
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
    pub(crate) fn due(&mut self, now: Instant) -> DueWork {
        let visibility = self.visibility;
        let mut work = DueWork::default();
        let mut due = Vec::new();
        let mut early = Vec::new();
        let mut over = Vec::new();
        for (id, entry) in &mut self.entries {
            match entry.need(now, visibility) {
                Need::Nothing => {}
                Need::Extension => due.push(entry.target(id)),
                Need::ExtensionSoon => early.push(entry.target(id)),
                Need::Loss => work.lost += u64::from(entry.lose()),
                Need::Forgetting => over.push(Arc::clone(id)),
            }
        }
        for id in over {
            work.undeleted += u64::from(self.forget(&id) == Some(EntryState::Acked));
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
            work.extends.push(changes.collect());
        }
        work
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
        let entries = &self.entries;
        self.deletes
            .take(now, all)
            .into_iter()
            .map(|batch| {
                let targets = batch.into_iter().filter_map(|id| {
                    let entry = entries
                        .get(&id)
                        .filter(|entry| entry.state == EntryState::Acked)?;
                    Some(entry.target(&id))
                });
                targets.collect::<Vec<_>>()
            })
            .filter(|batch| !batch.is_empty())
            .collect()
    }

    /// Takes the visibility changes of returned messages, at most [`BATCH_ENTRIES`] in each batch.
    pub(crate) fn take_returns(&mut self, now: Instant, all: bool) -> Vec<Vec<Change>> {
        let entries = &self.entries;
        self.returns
            .take(now, all)
            .into_iter()
            .map(|batch| {
                let changes = batch.into_iter().filter_map(|id| {
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
                });
                changes.collect::<Vec<_>>()
            })
            .filter(|batch| !batch.is_empty())
            .collect()
    }

    /// Records the answer to a delete. Returns whether the delete is no longer possible.
    pub(crate) fn note_delete(
        &mut self,
        now: Instant,
        target: &Target,
        answer: EntryResult,
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
            EntryResult::Done | EntryResult::Gone if entry.handle != target.handle => {
                self.deletes.push(now, Arc::clone(&target.id));
            }
            // Without a valid receipt handle, the message may come as another delivery, which its
            // record answers.
            EntryResult::Done | EntryResult::Gone => {
                self.forget(&target.id);
                return answer == EntryResult::Gone;
            }
            EntryResult::Failed => {
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
        answer: EntryResult,
        fraction: f64,
    ) -> bool {
        let id = &change.target.id;
        let visibility = self.visibility;
        let Some(entry) = self.entries.get_mut(id) else {
            return false;
        };
        if change.keep {
            entry.extending = false;
            let current = entry.handle == change.target.handle;
            if answer == EntryResult::Done && current {
                entry.visible_at = sent_at + change.visibility;
                entry.extend_at = sent_at + change.visibility / EXTENDS_PER_VISIBILITY;
            } else if answer == EntryResult::Failed {
                entry.extend_at = now + visibility / REPEATS_PER_VISIBILITY;
            }
            // It was returned meanwhile, and waited for this answer.
            if matches!(entry.state, EntryState::Returning { .. }) {
                self.returns.push(now + SHORT_WAIT, Arc::clone(id));
                return false;
            }
            let lost = answer == EntryResult::Gone && current && entry.state == EntryState::InHand;
            return lost && entry.lose();
        }
        if !matches!(entry.state, EntryState::Returning { .. })
            || entry.handle != change.target.handle
        {
            return false;
        }
        match answer {
            EntryResult::Done | EntryResult::Gone => {
                self.forget(id);
            }
            EntryResult::Failed => {
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

#[cfg(test)]
#[path = "held_tests.rs"]
mod tests;
