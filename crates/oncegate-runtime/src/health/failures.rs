//! Records the operations of a source that fail, with their first time, count and last error.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};

use super::{Phase, Reason, SOURCE_LIMIT, SourceFailure, Status};

/// The longest error that a status shows, in bytes.
const ERROR_MAX_BYTES: usize = 500;

/// Operations without which messages are not delivered, those of some partitions at least.
const DELIVERING: [&str; 10] = [
    "open", "receive", "broker", "fetch", "login", "join", "offset", "read", "schema", "payload",
];

/// The operations that have failed and not succeeded since. Shared by the code that calls a broker
/// and the code that reads a status.
#[derive(Debug, Default)]
pub struct FailureLog {
    /// `true` when `failing` is not empty: a success, which may occur for each message, then costs
    /// one load.
    any: AtomicBool,
    failing: Mutex<BTreeMap<&'static str, Failing>>,
}

#[derive(Debug)]
struct Failing {
    first: Instant,
    last: Instant,
    count: u64,
    error: String,
}

impl Failing {
    fn failure(&self, operation: &str, now: Instant) -> SourceFailure {
        SourceFailure {
            operation: operation.to_owned(),
            error: self.error.clone(),
            lasts: now.saturating_duration_since(self.first),
            failed_ago: now.saturating_duration_since(self.last),
            failures: self.count,
            stops_delivery: DELIVERING.contains(&operation),
        }
    }
}

impl FailureLog {
    /// Notes that an operation failed at `now`.
    pub fn failed(&self, now: Instant, operation: &'static str, error: &dyn Display) {
        let mut error = error.to_string();
        let end = (0..=ERROR_MAX_BYTES.min(error.len()))
            .rev()
            .find(|end| error.is_char_boundary(*end));
        error.truncate(end.unwrap_or_default());
        let mut failing = self.lock();
        let entry = failing.entry(operation).or_insert_with(|| Failing {
            first: now,
            last: now,
            count: 0,
            error: String::new(),
        });
        entry.last = now;
        entry.error = error;
        entry.count = entry.count.saturating_add(1);
        self.any.store(true, Ordering::Release);
    }

    /// Notes that an operation succeeded, which ends its failures.
    pub fn succeeded(&self, operation: &'static str) {
        if !self.any.load(Ordering::Acquire) {
            return;
        }
        let mut failing = self.lock();
        failing.remove(operation);
        self.any.store(!failing.is_empty(), Ordering::Release);
    }

    /// Returns every operation that fails as of `now`.
    pub fn at(&self, now: Instant) -> Vec<SourceFailure> {
        self.lock()
            .iter()
            .map(|(operation, failing)| failing.failure(operation, now))
            .collect()
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<&'static str, Failing>> {
        self.failing.lock()
    }
}

/// Returns the reasons for a source's failures. While the consumer starts, the first failure counts
/// at once; while it stops, failures to receive do not count.
pub(super) fn reasons(status: &Status) -> impl Iterator<Item = Reason> {
    let limit = if status.phase == Phase::Starting {
        Duration::ZERO
    } else {
        SOURCE_LIMIT
    };
    let is_stopping = status.phase == Phase::Stopping;
    status
        .source
        .failures
        .iter()
        .filter(move |failure| failure.lasts >= limit && !(failure.stops_delivery && is_stopping))
        .map(|failure| Reason::SourceFails {
            operation: failure.operation.clone(),
            error: failure.error.clone(),
            lasts: failure.lasts,
            stops_delivery: failure.stops_delivery,
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_failure_and_the_last_error_stand_until_a_success() {
        let log = FailureLog::default();
        let start = Instant::now();
        let second = Duration::from_secs(1);
        log.failed(start, "receive", &"connection refused");
        log.failed(start + second * 5, "receive", &"AccessDenied");
        log.failed(start + second * 6, "delete", &"é".repeat(400));
        let failures = log.at(start + second * 65);
        let [delete, receive] = failures.try_into().expect("two operations fail");
        assert_eq!(
            (receive.operation.as_str(), receive.error.as_str()),
            ("receive", "AccessDenied")
        );
        assert_eq!(
            (receive.lasts, receive.failed_ago),
            (Duration::from_secs(65), Duration::from_secs(60))
        );
        assert_eq!((receive.failures, receive.stops_delivery), (2, true));
        assert_eq!(
            (delete.error.len(), delete.stops_delivery),
            (ERROR_MAX_BYTES, false)
        );
        log.succeeded("receive");
        assert_eq!(log.at(start + second * 66).len(), 1);
        log.succeeded("delete");
        assert_eq!(log.at(start + second * 66), []);
        log.failed(start + second * 70, "receive", &"again");
        assert_eq!(
            log.at(start + second * 70)[0].lasts,
            Duration::ZERO,
            "a new failure has a new beginning"
        );
    }
}
