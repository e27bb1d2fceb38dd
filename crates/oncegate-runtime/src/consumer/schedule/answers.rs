//! The answers of stores to attempts, and what follows for the messages that wait for one.

use std::time::Instant;

use oncegate_core::store::StoreError;

use super::Schedule;
use super::outages::Shard;
use super::state::{MessageEvent, MessageState};
use crate::consumer::lanes::PlaceId;
use crate::health::WaitCause;

impl<T> Schedule<T> {
    /// Notes that the shard did not answer the attempt of this message, which may have been the
    /// shard's probe. Returns whether an outage begins with this. `fraction` is random.
    pub(in crate::consumer) fn no_answer(
        &mut self,
        shard: Shard,
        place: PlaceId,
        error: &StoreError,
        now: Instant,
        fraction: f64,
    ) -> bool {
        let was_probe = self.is_probe(place);
        let Some(scheduled) = self.table.get_mut(place) else {
            return false;
        };
        let before = scheduled.unanswered;
        let unanswered = self.outages.unanswered(shard, before, fraction);
        scheduled.unanswered = Some(unanswered);
        if unanswered.waits_alone.is_some() {
            // Once, and then ever more rarely.
            if unanswered.alone.is_power_of_two() {
                let tries = unanswered.alone;
                tracing::warn!(%error, tries, "the store answers for other keys; a message waits by itself");
            }
            return false;
        }
        let arrival = scheduled.fixed.arrival;
        self.outages
            .no_answer((shard, arrival), (error, was_probe), now, fraction)
    }

    /// Returns the event for a message whose attempt had no answer: it waits with its shard, or by
    /// itself.
    pub(super) fn unanswered(&mut self, place: PlaceId, now: Instant) -> MessageEvent {
        let scheduled = self.table.get_mut(place);
        let unanswered = scheduled.and_then(|scheduled| scheduled.unanswered.as_mut());
        match unanswered.and_then(|unanswered| unanswered.waits_alone.take()) {
            Some(wait) => self.delay(place, wait, WaitCause::Unreadable, now),
            None => MessageEvent::NoAnswer,
        }
    }

    /// Notes that the shard answered the attempt of this message, which may go on. If that was a
    /// probe, the shard's messages may start. Returns whether that ends an outage.
    pub(in crate::consumer) fn answered(
        &mut self,
        shard: Shard,
        place: PlaceId,
        now: Instant,
    ) -> bool {
        if let Some(scheduled) = self.table.get_mut(place) {
            scheduled.unanswered = None;
        }
        let was_probe = self.is_probe(place);
        if !was_probe && self.outages.is_away(shard) {
            // It began before the outage, and may have had its answer before, too.
            self.outages.probe_at_once(shard, now);
            return false;
        }
        // What its end says later is no news of the shard: another outage may have begun by then.
        self.apply(place, MessageEvent::StoreAnswers);
        let is_over = self.outages.answered(shard);
        if is_over {
            self.release_waiting(shard);
        }
        is_over
    }

    /// Returns whether the message runs to ask a shard that is away.
    fn is_probe(&self, place: PlaceId) -> bool {
        let state = self.table.get(place).map(|scheduled| scheduled.state);
        matches!(state, Some(MessageState::Running { is_probe: true, .. }))
    }

    /// Makes the messages ready that wait for the shard.
    pub(super) fn release_waiting(&mut self, shard: Shard) {
        let waiting = self
            .index
            .shards
            .get(&shard)
            .into_iter()
            .flat_map(|queue| queue.waiting.values());
        let released: Vec<PlaceId> = waiting.copied().collect();
        released
            .into_iter()
            .for_each(|place| self.apply(place, MessageEvent::StoreAnswers));
    }
}
