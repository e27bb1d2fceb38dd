//! Collects pending calls to the queue into batches.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::time::Duration;

use tokio::time::Instant;

use super::held::BATCH_ENTRIES;

/// How long an incomplete batch waits for more entries.
const LINGER: Duration = Duration::from_millis(50);

/// Pending entries in their order; those that failed come later.
#[derive(Debug)]
pub(crate) struct Outbox<T> {
    ready: VecDeque<(Instant, T)>,
    later: BinaryHeap<Reverse<(Instant, T)>>,
}

impl<T: Ord> Outbox<T> {
    pub(crate) fn push(&mut self, now: Instant, what: T) {
        self.ready.push_back((now, what));
    }

    pub(crate) fn push_later(&mut self, at: Instant, what: T) {
        self.later.push(Reverse((at, what)));
    }

    /// Takes the complete batches, and an incomplete one when it has waited long enough or with `all`.
    pub(crate) fn take(&mut self, now: Instant, all: bool) -> Vec<Vec<T>> {
        while self.later.peek().is_some_and(|Reverse((at, _))| *at <= now) {
            let Some(Reverse((at, what))) = self.later.pop() else { break };
            self.ready.push_back((at, what));
        }
        let mut batches = Vec::new();
        while self.ready.len() >= BATCH_ENTRIES
            || self.ready.front().is_some_and(|(since, _)| all || *since + LINGER <= now)
        {
            let batch = self.ready.drain(..self.ready.len().min(BATCH_ENTRIES));
            batches.push(batch.map(|(_, what)| what).collect());
        }
        batches
    }

    /// Returns when a batch must be sent, complete or not.
    pub(crate) fn next_wake(&self) -> Option<Instant> {
        let ready = self.ready.front().map(|(since, _)| *since + LINGER);
        let later = self.later.peek().map(|Reverse((at, _))| *at);
        ready.into_iter().chain(later).min()
    }
}

impl<T: Ord> Default for Outbox<T> {
    fn default() -> Self {
        Self { ready: VecDeque::new(), later: BinaryHeap::new() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_are_complete_or_have_waited() {
        let (mut outbox, start) = (Outbox::default(), Instant::now());
        (0..23).for_each(|n| outbox.push(start, n));
        let batches = outbox.take(start, false);
        assert_eq!(batches, [(0..10).collect::<Vec<_>>(), (10..20).collect()]);
        assert_eq!(outbox.next_wake(), Some(start + LINGER));
        assert!(outbox.take(start + LINGER / 2, false).is_empty());
        assert_eq!(outbox.take(start + LINGER, false), [[20, 21, 22]]);
        assert_eq!(outbox.next_wake(), None);
        outbox.push(start, 23);
        assert_eq!(outbox.take(start, true), [[23]]);
    }

    #[test]
    fn what_failed_waits_for_its_time() {
        let (mut outbox, start) = (Outbox::default(), Instant::now());
        outbox.push_later(start + LINGER * 3, 1);
        assert_eq!(outbox.next_wake(), Some(start + LINGER * 3));
        assert!(outbox.take(start + LINGER * 2, true).is_empty());
        assert_eq!(outbox.take(start + LINGER * 3, true), [[1]]);
    }
}
