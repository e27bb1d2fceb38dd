//! The start of the messages of a route that is handled in batches: together, once a batch is full
//! or has waited.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use super::index::GatherQueue;
use crate::batch::BatchLimits;

/// The limits of the routes that are handled in batches, and since when their batches wait.
#[derive(Debug, Default)]
pub(super) struct Gathering {
    /// By the number of their route.
    limits: BTreeMap<usize, BatchLimits>,
    /// The message with which the wait of a route's batch began, by its arrival, and when that was.
    since: BTreeMap<usize, (u64, Instant)>,
    /// Messages may still arrive.
    pub(super) more_may_arrive: bool,
}

impl Gathering {
    pub(super) fn new(limits: BTreeMap<usize, BatchLimits>) -> Self {
        Self {
            limits,
            since: BTreeMap::new(),
            more_may_arrive: true,
        }
    }

    /// The limits of the route's batches; `None` if its messages run one by one.
    pub(super) fn limits(&self, route: usize) -> Option<&BatchLimits> {
        self.limits.get(&route)
    }

    /// Notes which batches have begun to wait by now. The wait goes on as long as the message with
    /// which it began is among the waiting ones.
    pub(super) fn note(&mut self, queues: &BTreeMap<usize, GatherQueue>, now: Instant) {
        self.since.retain(|route, (first, _)| {
            queues
                .get(route)
                .is_some_and(|queue| queue.ready.contains_key(first))
        });
        for (route, queue) in queues {
            if let Some((first, _)) = queue.ready.first_key_value() {
                self.since.entry(*route).or_insert((*first, now));
            }
        }
    }

    /// Returns whether the route's batch starts now. `is_anything_running`: a message that runs may
    /// make another one ready by its end.
    pub(super) fn is_due(
        &self,
        route: usize,
        queue: &GatherQueue,
        now: Instant,
        is_anything_running: bool,
    ) -> bool {
        let Some(limits) = self.limits(route) else {
            return true;
        };
        let is_full = queue.ready.len() >= limits.messages || queue.bytes >= limits.bytes;
        is_full
            || self.ends_at(route, limits.wait, now) <= now
            || !(self.more_may_arrive || is_anything_running)
    }

    /// Returns when the wait of the next batch ends, other than those that wait for a permit.
    pub(super) fn next_end(
        &self,
        queues: &BTreeMap<usize, GatherQueue>,
        now: Instant,
    ) -> Option<Instant> {
        let ends = queues.keys().filter_map(|route| {
            let wait = self.limits(*route)?.wait;
            Some(self.ends_at(*route, wait, now))
        });
        ends.filter(|at| *at > now).min()
    }

    /// A wait that is not noted yet begins now.
    fn ends_at(&self, route: usize, wait: Duration, now: Instant) -> Instant {
        self.since.get(&route).map_or(now, |(_, since)| *since) + wait
    }
}
