//! The choice of the messages that start with the next permit.

use std::ops::Bound;
use std::time::Instant;

use super::outages::StoreAccess;
use super::state::{Facts, MessageEvent};
use super::{NextStart, Schedule};
use crate::consumer::lanes::PlaceId;

/// The message or the batch that starts next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Turn {
    Of(PlaceId),
    OfBatch(usize),
}

impl<T> Schedule<T> {
    /// Returns whether something can start when a permit is free. The waits of batches begin here.
    pub(in crate::consumer) fn can_start(&mut self, now: Instant) -> bool {
        self.gathering.note(&self.index.gathering, now);
        !self.index.found.is_empty() || self.turn(now).is_some()
    }

    /// Returns whether the prefetch found messages completed that are not answered yet, of a route
    /// that `may` begin.
    pub(in crate::consumer) fn has_found(&self, may: impl Fn(usize) -> bool) -> bool {
        self.found(may).next().is_some()
    }

    /// Starts answering up to `most` of the messages that the prefetch found completed, of routes
    /// that `may` begin.
    pub(in crate::consumer) fn start_answers(
        &mut self,
        most: usize,
        may: impl Fn(usize) -> bool,
    ) -> Vec<(PlaceId, T)> {
        let facts = Facts {
            tenant_is_full: false,
            shard: None,
            access: StoreAccess::Open,
        };
        let places: Vec<PlaceId> = self.found(may).take(most).collect();
        let started = places.into_iter().filter_map(|place| {
            self.apply(place, MessageEvent::Offered(facts));
            Some((place, self.table.get_mut(place)?.content.take()?))
        });
        started.collect()
    }

    /// The messages that the prefetch found completed, of routes that `may` begin, by age.
    fn found(&self, may: impl Fn(usize) -> bool) -> impl Iterator<Item = PlaceId> {
        let found = self.index.found.values().copied();
        found.filter(move |place| {
            let scheduled = self.table.get(*place);
            scheduled.is_some_and(|scheduled| may(scheduled.fixed.route))
        })
    }

    /// Returns what starts next: a due probe of a store, or the oldest message that is ready, with
    /// the others of its batch.
    pub(in crate::consumer) fn next_start(&self, now: Instant) -> Option<NextStart> {
        match self.turn(now)? {
            Turn::Of(place) => Some(NextStart::One(place)),
            Turn::OfBatch(route) => Some(NextStart::Batch(self.next_batch(route))),
        }
    }

    fn turn(&self, now: Instant) -> Option<Turn> {
        // A probe is first: the messages of its shard wait for what it finds out.
        if let Some(place) = self.due_probe(now) {
            return Some(Turn::Of(place));
        }
        let is_anything_running = self.index.counts.running > 0;
        let gathered = self.index.gathering.iter();
        let due = gathered.filter(|(route, queue)| {
            self.gathering
                .is_due(**route, queue, now, is_anything_running)
        });
        let batches = due.filter_map(|(route, queue)| {
            let (arrival, _) = queue.ready.first_key_value()?;
            Some((*arrival, Turn::OfBatch(*route)))
        });
        let alone = self
            .next_alone()
            .map(|(arrival, place)| (arrival, Turn::Of(place)));
        batches
            .chain(alone)
            .min_by_key(|(arrival, _)| *arrival)
            .map(|(_, turn)| turn)
    }

    /// The message that is to find out now whether its shard answers again: the next one after the
    /// message that asked last.
    fn due_probe(&self, now: Instant) -> Option<PlaceId> {
        let mut due = self.index.shards.iter().filter(|(shard, queue)| {
            let probe_at = self.outages.probe_at(**shard);
            queue.probes == 0 && probe_at.is_some_and(|at| at <= now)
        });
        due.find_map(|(shard, queue)| {
            let asked_last = self.outages.asked_last(*shard)?;
            let after = (Bound::Excluded(asked_last), Bound::Unbounded);
            let next = queue.waiting.range(after).next();
            next.or_else(|| queue.waiting.first_key_value())
        })
        .map(|(_, place)| *place)
    }

    /// The oldest message that is ready and starts alone; in doubt, the oldest that was not delayed
    /// yet.
    fn next_alone(&self) -> Option<(u64, PlaceId)> {
        let mut ready = self
            .index
            .ready
            .iter()
            .map(|(arrival, place)| (*arrival, *place));
        let oldest = ready.clone().next();
        let new = self
            .spares_retries
            .then(|| ready.find(|(_, place)| self.is_new(*place)))
            .flatten();
        new.or(oldest)
    }

    /// Returns whether the message was not delayed yet.
    fn is_new(&self, place: PlaceId) -> bool {
        let scheduled = self.table.get(place);
        scheduled.is_some_and(|scheduled| scheduled.last_delay.is_none())
    }

    /// The oldest ready messages of the route, within the limits of a batch.
    fn next_batch(&self, route: usize) -> Vec<PlaceId> {
        let (Some(queue), Some(limits)) = (
            self.index.gathering.get(&route),
            self.gathering.limits(route),
        ) else {
            return Vec::new();
        };
        let mut bytes = 0_usize;
        let oldest = queue.ready.values().copied().take(limits.messages);
        let batch = oldest.take_while(|place| {
            let before = bytes;
            bytes += self
                .table
                .get(*place)
                .map_or(0, |scheduled| scheduled.fixed.bytes);
            // A message larger than the limit is a batch of its own.
            before == 0 || bytes <= limits.bytes
        });
        batch.collect()
    }

    /// Returns when something may start by the passing of time alone. `now` is excluded: what is
    /// due already waits for a permit.
    pub(in crate::consumer) fn next_wake(&self, now: Instant) -> Option<Instant> {
        let delayed = self
            .index
            .delayed
            .first_key_value()
            .map(|((until, _), _)| *until);
        let probed = self
            .index
            .shards
            .iter()
            .filter(|(_, queue)| queue.probes == 0 && !queue.waiting.is_empty());
        let probes = probed
            .filter_map(|(shard, _)| self.outages.probe_at(*shard))
            .filter(|at| *at > now);
        let batch = self.gathering.next_end(&self.index.gathering, now);
        probes
            .chain(delayed)
            .chain(batch)
            .chain(self.outages.next_bypass())
            .min()
    }

    /// Returns how many ready messages wait for their batch, and not for a permit.
    pub(in crate::consumer) fn gathering(&self, now: Instant) -> usize {
        let is_anything_running = self.index.counts.running > 0;
        let queues = self.index.gathering.iter();
        let waiting = queues.filter(|(route, queue)| {
            !self
                .gathering
                .is_due(**route, queue, now, is_anything_running)
        });
        waiting.map(|(_, queue)| queue.ready.len()).sum()
    }
}
