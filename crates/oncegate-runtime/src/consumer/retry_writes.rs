//! Records which writes to retry topics fail, for the status.
//!
//! A message whose copy cannot be written waits in this process instead, and is written again only
//! if its next attempt fails, which may be hours later or never. So the failure ends not only with
//! the next write to the topic, but also when no message waits here because of it.

use std::collections::BTreeSet;
use std::fmt::Display;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};

use crate::health::{FailureLog, SourceFailure};

/// The name of the operation that writes to retry topics, in metrics and in the status.
pub(super) const RETRY: &str = "retry";

/// The writes to retry topics that have failed and not succeeded since.
#[derive(Debug, Default)]
pub(super) struct RetryWrites {
    failures: FailureLog,
    unwritten: Mutex<Unwritten>,
}

/// The messages that wait here because their copies could not be written.
#[derive(Debug, Default)]
struct Unwritten {
    /// By the wait of the retry topic that could not be written, and by a number.
    messages: BTreeSet<(Duration, u64)>,
    last_number: u64,
}

/// A message that waits here because its copy could not be written. It is counted until this is
/// dropped.
#[derive(Debug)]
pub(super) struct UnwrittenRetry {
    writes: Arc<RetryWrites>,
    entry: (Duration, u64),
}

impl RetryWrites {
    /// Notes that the topic with this wait could not be written. The message keeps what is returned
    /// while it waits here.
    pub(super) fn failed(self: &Arc<Self>, wait: Duration, error: &dyn Display) -> UnwrittenRetry {
        let mut unwritten = self.unwritten();
        unwritten.last_number += 1;
        let entry = (wait, unwritten.last_number);
        unwritten.messages.insert(entry);
        self.failures.failed(Instant::now(), RETRY, error);
        UnwrittenRetry {
            writes: Arc::clone(self),
            entry,
        }
    }

    /// Notes that the topic with this wait was written.
    pub(super) fn succeeded(&self, wait: Duration) {
        self.remove(|(of_topic, _)| *of_topic == wait);
    }

    /// Returns the failure, if writes fail as of `now`.
    pub(super) fn at(&self, now: Instant) -> Vec<SourceFailure> {
        self.failures.at(now)
    }

    fn remove(&self, is_over: impl Fn(&(Duration, u64)) -> bool) {
        let mut unwritten = self.unwritten();
        if unwritten.messages.is_empty() {
            return;
        }
        unwritten.messages.retain(|entry| !is_over(entry));
        if unwritten.messages.is_empty() {
            self.failures.succeeded(RETRY);
        }
    }

    fn unwritten(&self) -> MutexGuard<'_, Unwritten> {
        self.unwritten.lock()
    }
}

impl Drop for UnwrittenRetry {
    fn drop(&mut self) {
        self.writes.remove(|entry| *entry == self.entry);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHORT: Duration = Duration::from_secs(30);
    const LONG: Duration = Duration::from_secs(600);

    fn count(writes: &RetryWrites) -> u64 {
        writes
            .at(Instant::now())
            .first()
            .map_or(0, |failure| failure.failures)
    }

    // invariant: stall-unreported
    #[test]
    fn a_failure_lasts_until_its_topic_is_written_or_none_waits() {
        let writes = Arc::new(RetryWrites::default());
        let first = writes.failed(SHORT, &"denied");
        let second = writes.failed(SHORT, &"denied");
        writes.succeeded(LONG);
        assert_eq!(count(&writes), 2, "another topic says nothing of this one");
        drop(first);
        assert_eq!(count(&writes), 2, "a message still waits");
        writes.succeeded(SHORT);
        assert_eq!(count(&writes), 0);
        let third = writes.failed(LONG, &"denied");
        drop(second);
        assert_eq!(
            count(&writes),
            1,
            "a message of before does not end a later failure"
        );
        drop(third);
        assert_eq!(count(&writes), 0, "no message waits");
    }
}
