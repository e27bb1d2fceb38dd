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
    /// A result was too large, could not be encoded, or the result store did not take it: the record says that the
    /// work is done, without it.
    ResultNotKept {
        /// The gate's scope.
        scope: &'a str,
    },
    /// A duplicate's large result is missing or damaged in the result store.
    ResultLost {
        /// The gate's scope.
        scope: &'a str,
    },
    /// The result store gave no answer; it is asked again.
    ResultStoreError {
        /// The gate's scope.
        scope: &'a str,
        /// `put` or `get`.
        operation: &'static str,
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
    /// An HTTP request under an idempotency key was answered.
    Answered {
        /// The gate's scope.
        scope: &'a str,
        /// `handled`, `replayed`, `released`, `given-up`, `unguarded`, or the name of a problem.
        answer: &'static str,
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
    /// The store has noticed that it has forgotten records: some messages may run again.
    StoreLost {
        /// The gate's scope.
        scope: &'a str,
    },
    /// Dispatching has stopped because the store does not answer, or goes on again.
    StorePaused {
        /// Whether it has stopped.
        paused: bool,
    },
    /// A handler that fails for all alike is paused, probed with one message, or goes on.
    BreakerChanged {
        /// The gate's scope.
        scope: &'a str,
        /// What it is now.
        state: BreakerState,
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
    /// The group had dropped this member of a Kafka group, and another one joins in its place: what was received and
    /// not committed is delivered again.
    MemberReplaced {
        /// `poll_interval`, `dropped`, or `static_member` (its id is still held).
        cause: &'static str,
    },
    /// A topic was deleted and made again: it is read from its beginning.
    TopicMadeAgain,
    /// Messages were deleted from their topic before they were received, by its retention for example.
    MessagesGone {
        /// How many offsets that were, at the most: a compacted topic has fewer messages.
        count: u64,
    },
    /// The source reported its committed position.
    Committed {
        /// How many partitions moved.
        partitions: usize,
    },
    /// The source could not do something, or a dead letter could not be written; it is tried again.
    SourceError {
        /// `commit`, `fetch`, `broker`, `receive`, `delete`, `visibility` or `dead_letter`.
        operation: &'static str,
    },
    /// An SQS queue was called: what SQS charges for.
    SqsCalled {
        /// `receive`, `delete` or `visibility`.
        operation: &'static str,
    },
    /// Messages of an SQS queue are held for another visibility timeout.
    SqsVisibilityExtended {
        /// How many.
        count: u64,
    },
    /// The queue has taken messages back, or may do so at any moment: their handlers are cancelled, and nothing
    /// is deleted.
    SqsVisibilityLost {
        /// How many.
        count: u64,
    },
    /// Messages were handed back to an SQS queue: for a retry, or unstarted at a stop.
    SqsHandedBack {
        /// How many.
        count: u64,
    },
    /// Finished messages could not be deleted before the queue delivers them again; their records answer them.
    SqsDeleteFailed {
        /// How many.
        count: u64,
    },
    /// A message was received for the last time before the queue's redrive policy takes it.
    SqsLastReceive,
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

/// Whether a handler's messages run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum BreakerState {
    /// They run.
    Closed,
    /// They wait.
    Open,
    /// They wait, but for one that finds out whether the handler works again.
    HalfOpen,
}

impl BreakerState {
    /// The label in metrics.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Closed => "closed",
            Self::Open => "open",
            Self::HalfOpen => "half_open",
        }
    }
}

/// Why a handler ran once more: the whole list of what the promise leaves open.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ExtraRunCause {
    /// A claim was taken over whose owner had ended without a word.
    CrashTakeover,
    /// This process lost its lease while its handler ran; another one may run it now.
    LeaseLost,
    /// The store has lost data: a completion found no record, or a message that was there before the loss runs for
    /// the first time as far as the store knows.
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

impl Event<'_> {
    /// The name and label under which the event is counted, and how much it counts. The label is empty where
    /// the event has no kinds. The one place that names what oncegate counts.
    pub const fn metric(&self) -> (&'static str, &'static str, u64) {
        match *self {
            Self::Claimed { verdict, .. } => ("claims", verdict, 1),
            Self::HandlerRan { outcome, .. } => ("handler_runs", outcome.as_str(), 1),
            Self::ExtraRun { cause, .. } => ("extra_runs", cause.as_str(), 1),
            Self::CompleteLost { .. } => ("complete_lost", "", 1),
            Self::FingerprintUncompared { .. } => ("fingerprints_uncompared", "", 1),
            Self::ResultNotKept { .. } => ("results_not_kept", "", 1),
            Self::ResultLost { .. } => ("results_lost", "", 1),
            Self::ResultStoreError { operation, .. } => ("result_store_errors", operation, 1),
            Self::DuplicateHookFailed { .. } => ("duplicate_hooks_failed", "", 1),
            Self::Retried { .. } => ("retries", "", 1),
            Self::DeadLettered { cause, .. } => ("dead_letters", cause.as_str(), 1),
            Self::Answered { answer, .. } => ("answers", answer, 1),
            Self::Acked { count } => ("acks", "", count),
            Self::StoreError { class, .. } => ("store_errors", class, 1),
            Self::StoreLost { .. } => ("store_losses", "", 1),
            Self::StorePaused { paused: true } => ("store_paused", "paused", 1),
            Self::StorePaused { paused: false } => ("store_paused", "resumed", 1),
            Self::BreakerChanged { state, .. } => ("breaker_changes", state.as_str(), 1),
            Self::Quarantined { .. } => ("quarantined", "", 1),
            Self::Rebalanced { .. } => ("rebalances", "", 1),
            Self::MemberReplaced { cause } => ("members_replaced", cause, 1),
            Self::TopicMadeAgain => ("topics_made_again", "", 1),
            Self::MessagesGone { count } => ("messages_gone", "", count),
            Self::Committed { .. } => ("commits", "", 1),
            Self::SourceError { operation } => ("source_errors", operation, 1),
            Self::SqsCalled { operation } => ("sqs_calls", operation, 1),
            Self::SqsVisibilityExtended { count } => ("sqs_visibility_extensions", "", count),
            Self::SqsVisibilityLost { count } => ("sqs_visibility_lost", "", count),
            Self::SqsHandedBack { count } => ("sqs_handed_back", "", count),
            Self::SqsDeleteFailed { count } => ("sqs_deletes_failed", "", count),
            Self::SqsLastReceive => ("sqs_last_receives", "", 1),
        }
    }
}

/// What happens for each message: counted without a lock.
const FREQUENT: [(&str, &str); 4] =
    [("claims", "granted"), ("claims", "completed"), ("handler_runs", "succeeded"), ("acks", "")];

/// Counts events by [name and label](Event::metric).
#[derive(Debug, Default)]
pub struct Counters {
    frequent: [AtomicU64; FREQUENT.len()],
    counts: Mutex<BTreeMap<(&'static str, &'static str), u64>>,
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

    /// Every count so far that is not zero, by name and label.
    pub fn snapshot(&self) -> BTreeMap<(&'static str, &'static str), u64> {
        let mut counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let frequent =
            FREQUENT.into_iter().zip(&self.frequent).map(|(metric, count)| (metric, count.load(Relaxed)));
        counts.extend(frequent.filter(|(_, count)| *count > 0));
        counts
    }
}

impl Observer for Counters {
    fn observe(&self, event: Event<'_>) {
        let (name, label, count) = event.metric();
        let frequent = FREQUENT.into_iter().zip(&self.frequent).find(|(metric, _)| *metric == (name, label));
        if let Some((_, counter)) = frequent {
            counter.fetch_add(count, Relaxed);
            return;
        }
        *self.counts.lock().unwrap_or_else(PoisonError::into_inner).entry((name, label)).or_default() +=
            count;
    }
}
