//! What oncegate tells the outside about itself: one trait, one enum.

use std::fmt;
use std::time::Duration;

use crate::dead_letters::DeadLetterCause;
use crate::message::Origin;

mod catalogue;
mod counters;

pub use catalogue::{CATALOGUE, Kind, Metric};
pub use counters::Counters;

/// Gets every event. Called on the hot path: count, do not block.
pub trait Observer: Send + Sync + fmt::Debug {
    /// Something happened.
    fn observe(&self, event: Event<'_>);
}

/// Something that happened. No event carries payload or key material; the reason of a dead letter is as careful as
/// the handler that gave it.
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
    /// The store was asked, and has answered or failed to.
    StoreCalled {
        /// The gate's scope.
        scope: &'a str,
        /// `claim`, `extend`, `complete`, `release`, `fail`, `hand_over` or `reopen`.
        operation: &'static str,
        /// How long that took, the wait for its batch included.
        took: Duration,
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
    /// The store has confirmed a completion.
    Completed {
        /// The gate's scope.
        scope: &'a str,
        /// How large the stored result is; of a large one, its reference.
        result_bytes: u64,
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
    /// The gate's journal has not written entries down: they came faster than it takes them, or it takes none.
    JournalDropped {
        /// The gate's scope.
        scope: &'a str,
        /// How many.
        entries: u64,
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
        /// Where the message came from.
        origin: &'a Origin,
        /// Why, in words: a handler's own, where it gave up or failed too often.
        reason: &'a str,
    },
    /// An HTTP request under an idempotency key was answered.
    Answered {
        /// The gate's scope.
        scope: &'a str,
        /// `handled`, `replayed`, `released`, `given-up`, `fail_open`, or the name of a problem.
        answer: &'static str,
    },
    /// Messages were acknowledged to the source.
    Acked {
        /// The gate's scope.
        scope: &'a str,
        /// How many.
        count: u64,
        /// How long ago the broker got the message, by this machine's clock, if its handler has just succeeded and
        /// the broker says when. A clock that is behind the broker's makes it zero.
        age: Option<Duration>,
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
    /// Partitions are no longer fetched, and what was prefetched of them is thrown away.
    SourcePaused {
        /// `full` (nobody receives), or `span` (too much of a partition is unfinished).
        cause: &'static str,
    },
    /// The client was a member of its Kafka group no more, and another one joins in its place: what was received and
    /// not committed is delivered again.
    MemberReplaced {
        /// `poll_interval`, `dropped`, `disconnected` (no connection, though the brokers answer another client), or
        /// `static_member` (its id is still held).
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
        /// `commit`, `fetch`, `broker`, `receive`, `delete`, `visibility`, `dead_letter`, `retry`, or `open` at the
        /// start.
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
    /// A handler has ended, the store gave no answer to its completion, and its lease ran out meanwhile: unless the
    /// completion is there, another handler runs.
    CompleteUnknown,
    /// The store has lost data: a completion found no record, or a message that was there before the loss runs for
    /// the first time as far as the store knows.
    StoreLoss,
    /// The message is older than the retention, so its completed record may be forgotten.
    Retention,
    /// An operator reopened the record.
    Reset,
    /// The store was away, and the consumer or the layer fails open: the handler ran without asking it, or a completion
    /// was not waited for.
    FailOpen,
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
            Self::CompleteUnknown => "complete_unknown",
            Self::StoreLoss => "store_loss",
            Self::Retention => "retention",
            Self::Reset => "reset",
            Self::FailOpen => "fail_open",
        }
    }
}
