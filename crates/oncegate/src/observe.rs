//! What oncegate tells the outside about itself: one trait, one enum.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use crate::dead_letters::DeadLetterCause;

/// Gets every event. Called on the hot path: count, do not block.
pub trait Observer: Send + Sync + fmt::Debug {
    /// Something happened.
    fn observe(&self, event: Event<'_>);
}

/// Something that happened. No event carries payload or key material.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum Event<'a> {
    /// The store answered a claim (or a look-ahead found a completed record).
    Claimed {
        /// The gate's scope.
        scope: &'a str,
        /// `granted`, `completed`, `busy`, `failed` or `mismatch`.
        verdict: &'static str,
    },
    /// A handler returned.
    HandlerRan {
        /// The gate's scope.
        scope: &'a str,
        /// How it ended.
        outcome: RunOutcome,
        /// How long it ran.
        took: Duration,
    },
    /// A handler runs, or has run, once more than the key's messages alone would ask for.
    ExtraRun {
        /// The gate's scope.
        scope: &'a str,
        /// Why.
        cause: ExtraRunCause,
    },
    /// A completion found that the claim was no longer its own: nothing was acknowledged.
    CompleteLost {
        /// The gate's scope.
        scope: &'a str,
    },
    /// The records of key and claim carry fingerprints of different specifications, so they were not compared.
    FingerprintUncompared {
        /// The gate's scope.
        scope: &'a str,
    },
    /// A result was too large or could not be encoded: the record says that the work is done, without it.
    ResultNotKept {
        /// The gate's scope.
        scope: &'a str,
    },
    /// `Handler::duplicate` has failed every time; the message was acknowledged all the same.
    DuplicateHookFailed {
        /// The gate's scope.
        scope: &'a str,
    },
    /// A failed message waits for its next attempt.
    Retried {
        /// The gate's scope.
        scope: &'a str,
    },
    /// A message is durably in the dead letters.
    DeadLettered {
        /// The gate's scope.
        scope: &'a str,
        /// Why.
        cause: DeadLetterCause,
    },
    /// Messages were acknowledged to the source.
    Acked {
        /// How many.
        count: u64,
    },
    /// The store gave no answer about a key.
    StoreError {
        /// The gate's scope.
        scope: &'a str,
        /// `unavailable`, `unknown`, `unreadable` or `refused`.
        class: &'static str,
    },
    /// Dispatching has stopped because the store does not answer, or goes on again.
    StorePaused {
        /// Whether it has stopped.
        paused: bool,
    },
    /// A message runs alone in its process, because its attempts have ended without a word before.
    Quarantined {
        /// The gate's scope.
        scope: &'a str,
    },
    /// Partitions came or went.
    Rebalanced {
        /// How many came.
        assigned: usize,
        /// How many went.
        revoked: usize,
    },
    /// The source reported its committed position.
    Committed {
        /// How many partitions moved.
        partitions: usize,
    },
    /// The source could not commit or fetch; it tries again by itself.
    SourceError {
        /// `commit`, `fetch` or `broker`.
        operation: &'static str,
    },
}

/// How a handler ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum RunOutcome {
    /// It returned a result.
    Succeeded,
    /// It failed and wants another attempt.
    Failed,
    /// It gave up.
    GaveUp,
    /// It panicked.
    Panicked,
    /// It was cancelled and did not return in time.
    Cancelled,
}

/// Why a handler ran once more: the whole list of what the promise leaves open.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ExtraRunCause {
    /// A claim was taken over whose owner had ended without a word.
    CrashTakeover,
    /// This process lost its lease while its handler ran; another one may run it now.
    LeaseLost,
    /// A completion found no record: the store has lost data.
    StoreLoss,
    /// The message is older than the retention, so its completed record may be forgotten.
    Retention,
    /// An operator reopened the record.
    Reset,
}

impl RunOutcome {
    /// One lower-case word for metrics.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Succeeded => "succeeded",
            Self::Failed => "failed",
            Self::GaveUp => "gave_up",
            Self::Panicked => "panicked",
            Self::Cancelled => "cancelled",
        }
    }
}

impl ExtraRunCause {
    /// The label in metrics.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::CrashTakeover => "crash_takeover",
            Self::LeaseLost => "lease_lost",
            Self::StoreLoss => "store_loss",
            Self::Retention => "retention",
            Self::Reset => "reset",
        }
    }
}

/// Counts events by kind and label. The names are those of the metrics, without their prefix.
#[derive(Debug, Default)]
pub struct Counters {
    counts: Mutex<BTreeMap<(&'static str, &'static str), u64>>,
    completed: AtomicU64,
    granted: AtomicU64,
    succeeded: AtomicU64,
    acked: AtomicU64,
}

impl Counters {
    /// How often `name` was counted with `label`, such as `("extra_runs", "crash_takeover")`.
    pub fn get(&self, name: &str, label: &str) -> u64 {
        self.snapshot().iter().find(|((n, l), _)| *n == name && *l == label).map_or(0, |(_, count)| *count)
    }

    /// How often `name` was counted with any label.
    pub fn total(&self, name: &str) -> u64 {
        self.snapshot().iter().filter(|((n, _), _)| *n == name).map(|(_, count)| count).sum()
    }

    /// Every count so far, by name and label.
    pub fn snapshot(&self) -> BTreeMap<(&'static str, &'static str), u64> {
        let mut counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner).clone();
        for (name, label, count) in [
            ("claims", "completed", &self.completed),
            ("claims", "granted", &self.granted),
            ("handler_runs", "succeeded", &self.succeeded),
            ("acks", "", &self.acked),
        ] {
            match count.load(Relaxed) {
                0 => {}
                count => *counts.entry((name, label)).or_default() += count,
            }
        }
        counts
    }

    fn add(&self, name: &'static str, label: &'static str) {
        *self.counts.lock().unwrap_or_else(PoisonError::into_inner).entry((name, label)).or_default() += 1;
    }
}

impl Observer for Counters {
    fn observe(&self, event: Event<'_>) {
        match event {
            Event::Claimed { verdict: "completed", .. } => _ = self.completed.fetch_add(1, Relaxed),
            Event::Claimed { verdict: "granted", .. } => _ = self.granted.fetch_add(1, Relaxed),
            Event::Claimed { verdict, .. } => self.add("claims", verdict),
            Event::HandlerRan { outcome: RunOutcome::Succeeded, .. } => {
                _ = self.succeeded.fetch_add(1, Relaxed)
            }
            Event::HandlerRan { outcome, .. } => self.add("handler_runs", outcome.as_str()),
            Event::Acked { count } => _ = self.acked.fetch_add(count, Relaxed),
            Event::ExtraRun { cause, .. } => self.add("extra_runs", cause.as_str()),
            Event::DeadLettered { cause, .. } => self.add("dead_letters", cause.as_str()),
            Event::StoreError { class, .. } => self.add("store_errors", class),
            Event::SourceError { operation } => self.add("source_errors", operation),
            Event::StorePaused { paused } => {
                self.add("store_paused", if paused { "paused" } else { "resumed" })
            }
            Event::CompleteLost { .. } => self.add("complete_lost", ""),
            Event::FingerprintUncompared { .. } => self.add("fingerprints_uncompared", ""),
            Event::ResultNotKept { .. } => self.add("results_not_kept", ""),
            Event::DuplicateHookFailed { .. } => self.add("duplicate_hooks_failed", ""),
            Event::Retried { .. } => self.add("retries", ""),
            Event::Quarantined { .. } => self.add("quarantined", ""),
            Event::Rebalanced { .. } => self.add("rebalances", ""),
            Event::Committed { .. } => self.add("commits", ""),
        }
    }
}
