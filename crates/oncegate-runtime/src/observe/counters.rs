//! Counts of events in memory.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use parking_lot::Mutex;

use super::{Event, Observer};

/// Events that occur for each message: counted without a lock.
const FREQUENT: [(&str, &str); 6] = [
    ("claims", "granted"),
    ("claims", "completed"),
    ("store_calls", "claim"),
    ("store_calls", "complete"),
    ("handler_runs", "succeeded"),
    ("acks", ""),
];

/// Counts events by [name and label](Event::metric).
#[derive(Debug, Default)]
pub struct Counters {
    frequent: [AtomicU64; FREQUENT.len()],
    counts: Mutex<BTreeMap<(&'static str, &'static str), u64>>,
}

impl Counters {
    /// Returns the count of `name` with `label`, such as `("extra_runs", "crash_takeover")`.
    pub fn get(&self, name: &str, label: &str) -> u64 {
        self.snapshot()
            .iter()
            .find(|((n, l), _)| *n == name && *l == label)
            .map_or(0, |(_, count)| *count)
    }

    /// Returns the count of `name` with any label.
    pub fn total(&self, name: &str) -> u64 {
        self.snapshot()
            .iter()
            .filter(|((n, _), _)| *n == name)
            .map(|(_, count)| count)
            .sum()
    }

    /// Returns every count so far that is not zero, by name and label.
    pub fn snapshot(&self) -> BTreeMap<(&'static str, &'static str), u64> {
        let mut counts = self.counts.lock().clone();
        let frequent = FREQUENT
            .into_iter()
            .zip(&self.frequent)
            .map(|(metric, count)| (metric, count.load(Relaxed)));
        counts.extend(frequent.filter(|(_, count)| *count > 0));
        counts
    }
}

impl Observer for Counters {
    fn observe(&self, event: Event<'_>) {
        let (name, label, count) = event.metric();
        let frequent = FREQUENT
            .into_iter()
            .zip(&self.frequent)
            .find(|(metric, _)| *metric == (name, label));
        if let Some((_, counter)) = frequent {
            counter.fetch_add(count, Relaxed);
            return;
        }
        *self.counts.lock().entry((name, label)).or_default() += count;
    }
}
