//! Collects pending calls to the queue into batches.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

use tokio::time::Instant;

/// The most entries in one call to SQS.
pub(crate) const BATCH_ENTRIES: usize = 10;

/// Pending entries in their order; those that failed come later.
#[derive(Debug)]
pub(crate) struct Outbox<T> {
    ready: VecDeque<T>,
    /// The time at which the ready entries must be sent, even in an incomplete batch.
    send_by: Option<Instant>,
    later: BinaryHeap<Reverse<(Instant, T)>>,
}

impl<T: Ord> Outbox<T> {
    /// Adds an entry that may wait until `send_by` for others to fill its batch.
    pub(crate) fn push(&mut self, send_by: Instant, what: T) {
        self.ready.push_back(what);
        self.send_by = self.send_by.into_iter().chain([send_by]).min();
    }

    pub(crate) fn push_later(&mut self, at: Instant, what: T) {
        self.later.push(Reverse((at, what)));
    }

    /// Takes the complete batches, and an incomplete one when an entry has waited long enough or
    /// with `all`.
    pub(crate) fn take(&mut self, now: Instant, all: bool) -> Vec<Vec<T>> {
        while self.later.peek().is_some_and(|Reverse((at, _))| *at <= now) {
            let Some(Reverse((at, what))) = self.later.pop() else {
                break;
            };
            self.push(at, what);
        }
        let all = all || self.send_by.is_some_and(|send_by| send_by <= now);
        let mut batches = Vec::new();
        while self.ready.len() >= BATCH_ENTRIES || (all && !self.ready.is_empty()) {
            batches.push(
                self.ready
                    .drain(..self.ready.len().min(BATCH_ENTRIES))
                    .collect(),
            );
        }
        if self.ready.is_empty() {
            self.send_by = None;
        }
        batches
    }

    /// Returns when a batch must be sent, complete or not.
    pub(crate) fn next_wake(&self) -> Option<Instant> {
        let later = self.later.peek().map(|Reverse((at, _))| *at);
        self.send_by.into_iter().chain(later).min()
    }
}

impl<T: Ord> Default for Outbox<T> {
    fn default() -> Self {
        Self {
            ready: VecDeque::new(),
            send_by: None,
            later: BinaryHeap::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const WAIT: Duration = Duration::from_millis(50);

    #[test]
    fn batches_are_complete_or_have_waited() {
        let mut outbox = Outbox::default();
        let start = Instant::now();
        (0..23).for_each(|n| outbox.push(start + WAIT, n));
        let batches = outbox.take(start, false);
        assert_eq!(batches, [(0..10).collect::<Vec<_>>(), (10..20).collect()]);
        assert_eq!(outbox.next_wake(), Some(start + WAIT));
        assert!(outbox.take(start + WAIT / 2, false).is_empty());
        assert_eq!(outbox.take(start + WAIT, false), [[20, 21, 22]]);
        assert_eq!(outbox.next_wake(), None);
        outbox.push(start + WAIT, 23);
        assert_eq!(outbox.take(start, true), [[23]]);
    }

    #[test]
    fn the_most_urgent_entry_takes_the_others_along() {
        let mut outbox = Outbox::default();
        let start = Instant::now();
        outbox.push(start + WAIT * 4, 1);
        outbox.push(start + WAIT, 2);
        assert_eq!(outbox.next_wake(), Some(start + WAIT));
        assert_eq!(outbox.take(start + WAIT, false), [[1, 2]]);
    }

    #[test]
    fn what_failed_waits_for_its_time() {
        let mut outbox = Outbox::default();
        let start = Instant::now();
        outbox.push_later(start + WAIT * 3, 1);
        assert_eq!(outbox.next_wake(), Some(start + WAIT * 3));
        assert!(outbox.take(start + WAIT * 2, true).is_empty());
        assert_eq!(outbox.take(start + WAIT * 3, true), [[1]]);
    }
}
