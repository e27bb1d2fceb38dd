//! The events that oncegate reports: one trait, one enum.

use std::fmt;
use std::time::Duration;

use crate::dead_letters::DeadLetterCause;
use crate::message::Origin;

mod catalogue;
mod counters;
mod measures;

pub use catalogue::{CATALOGUE, Kind, Metric};
pub use counters::Counters;

/// Receives every event. It is called on the hot path: count, do not block.
pub trait Observer: Send + Sync + fmt::Debug {
    /// Something happened.
    fn observe(&self, event: Event<'_>);
}

/// Something that happened. No event contains payload or key material, except that the reason of a
/// dead letter is the handler's own text.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum Event<'a> {
    /// The store answered a claim (or the prefetch found a completed record).
    Claimed {
        /// The gate's scope.
        scope: &'a str,
        /// `granted`, `completed`, `busy`, `failed` or `mismatch`.
        verdict: &'static str,
    },
    /// The store was called, and has answered or failed to answer.
    StoreCalled {
        /// The gate's scope.
        scope: &'a str,
        /// `claim`, `extend`, `complete`, `release`, `fail`, `hand_over` or `reopen`.
        operation: &'static str,
        /// The duration, including the wait for its batch.
        took: Duration,
    },
    /// A handler returned.
    HandlerRan {
        /// The gate's scope.
        scope: &'a str,
        /// The outcome of the run.
        outcome: RunOutcome,
        /// The duration of the run.
        took: Duration,
    },
    /// A handler runs, or has run, once more than the messages with this key alone would require.
    ExtraRun {
        /// The gate's scope.
        scope: &'a str,
        /// The cause.
        cause: ExtraRunCause,
    },
    /// A batch handler is called. The messages of the call are counted as its runs.
    BatchCalled {
        /// The gate's scope.
        scope: &'a str,
        /// The purpose of the call.
        call: BatchCall,
    },
    /// The store has confirmed a completion.
    Completed {
        /// The gate's scope.
        scope: &'a str,
        /// The size of the stored result; for a large one, the size of its reference.
        result_bytes: u64,
    },
    /// A completion found that its claim belongs to another owner: nothing was acknowledged.
    CompleteLost {
        /// The gate's scope.
        scope: &'a str,
    },
    /// The records of key and claim carry fingerprints of different specifications, so they were
    /// not compared.
    FingerprintUncompared {
        /// The gate's scope.
        scope: &'a str,
    },
    /// A duplicate has another content than the message that was handled. One key in sixteen is
    /// looked at, in scopes without a fingerprint.
    OtherContent {
        /// The gate's scope.
        scope: &'a str,
    },
    /// A result was too large, could not be encoded, or was not taken by the result store: the
    /// record holds that the work is done, without the result.
    ResultNotKept {
        /// The gate's scope.
        scope: &'a str,
    },
    /// A duplicate's large result is missing or damaged in the result store.
    ResultLost {
        /// The gate's scope.
        scope: &'a str,
    },
    /// The result store did not answer; the call is repeated.
    ResultStoreError {
        /// The gate's scope.
        scope: &'a str,
        /// `put` or `get`.
        operation: &'static str,
    },
    /// The gate's journal has dropped entries: they came faster than it writes them, or it cannot
    /// be written.
    JournalDropped {
        /// The gate's scope.
        scope: &'a str,
        /// The number of entries.
        entries: u64,
    },
    /// `Handler::duplicate` has failed every time; the message was acknowledged all the same.
    DuplicateHookFailed {
        /// The gate's scope.
        scope: &'a str,
    },
    /// A failed message waits for its next attempt. One that its handler wants later has not
    /// failed.
    Retried {
        /// The gate's scope.
        scope: &'a str,
    },
    /// A message is durably in the dead letters.
    DeadLettered {
        /// The gate's scope.
        scope: &'a str,
        /// The cause.
        cause: DeadLetterCause,
        /// The origin of the message.
        origin: &'a Origin,
        /// The reason in words: the handler's own text, if it gave up or failed too often.
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
        /// The number of messages.
        count: u64,
        /// The time since the broker received the message, by this machine's clock, if its handler
        /// has just succeeded and the broker gives a timestamp. Zero if this clock is behind the
        /// broker's.
        age: Option<Duration>,
    },
    /// The store did not answer for a key.
    StoreError {
        /// The gate's scope.
        scope: &'a str,
        /// `unavailable`, `unknown`, `unreadable` or `refused`.
        class: &'static str,
    },
    /// The store has lost records, and noticed it: some messages may run again.
    StoreLost {
        /// The gate's scope.
        scope: &'a str,
    },
    /// Dispatching has stopped because the store does not answer, or continues again.
    StorePaused {
        /// `true` when dispatching has stopped.
        paused: bool,
    },
    /// The circuit breaker of a handler, which fails for all messages alike, has changed its state.
    BreakerChanged {
        /// The gate's scope.
        scope: &'a str,
        /// The new state.
        state: BreakerState,
    },
    /// A message runs alone in its process, because earlier attempts have ended without an outcome.
    Quarantined {
        /// The gate's scope.
        scope: &'a str,
    },
    /// Partitions were assigned or revoked.
    Rebalanced {
        /// The number of assigned partitions.
        assigned: usize,
        /// The number of revoked partitions.
        revoked: usize,
    },
    /// Partitions are no longer fetched, and prefetched messages of them are discarded.
    SourcePaused {
        /// `full` (a limit in flight is reached), or `span` (too much of a partition is
        /// unfinished).
        cause: &'static str,
    },
    /// The client is no longer a member of its group, and another client joins in its place:
    /// messages that were received and not committed are delivered again.
    MemberReplaced {
        /// `poll_interval`, `dropped`, `disconnected` (no connection, though the brokers answer
        /// another client), `unread` (it is connected, and does not begin to read a partition),
        /// `login` (a changed password or certificate is used from now on), or `static_member` (its
        /// id is still held).
        cause: &'static str,
    },
    /// A topic was deleted and created again: it is read from its beginning.
    TopicMadeAgain,
    /// Messages were deleted from their topic before they were received, by its retention for
    /// example.
    MessagesGone {
        /// The number of skipped offsets: a compacted topic may have fewer messages.
        count: u64,
    },
    /// The source reported its committed position.
    Committed {
        /// The number of partitions that moved.
        partitions: usize,
    },
    /// An operation of the source failed, or a dead letter could not be written; it is tried again.
    SourceError {
        /// `commit`, `fetch`, `broker`, `receive`, `delete`, `visibility`, `dead_letter`, `retry`,
        /// or `open` at the start.
        operation: &'static str,
    },
    /// Something happened at the source's broker that only this kind of source has, such as the
    /// extension of a visibility timeout.
    Source {
        /// The name of the source and what happened: `sqs_visibility_lost`. The documentation of
        /// the source has them all.
        event: &'static str,
        /// The number of times, or of messages.
        count: u64,
    },
    /// A relay has published a message of an outbox, and the broker has confirmed it.
    OutboxPublished {
        /// The time since the message was written, by the database's clock.
        age: Duration,
    },
    /// A relay could not publish a message, or could not reach its outbox; it tries again.
    OutboxFailed {
        /// `refused` or `unconfirmed` by the broker, or `store`.
        class: &'static str,
    },
    /// A relay has removed messages that were sent and whose retention is over.
    OutboxPurged {
        /// The number of messages.
        count: u64,
    },
    /// A relay leads its outbox, or does no longer.
    OutboxLeaderChanged {
        /// `took`, `lost` or `resigned`.
        change: &'static str,
    },
}

/// The outcome of a run of a handler.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum RunOutcome {
    /// The handler returned a result.
    Succeeded,
    /// The handler failed and wants another attempt.
    Failed,
    /// The message cannot be done yet: the handler wants it later.
    Later,
    /// The handler gave up.
    GaveUp,
    /// The handler panicked.
    Panicked,
    /// The handler was cancelled and did not return in time.
    Cancelled,
}

/// The purpose of a call of a batch handler.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum BatchCall {
    /// The call handles a new batch.
    Gathered,
    /// The call handles a part of a batch, of which a call failed for all messages.
    Split,
}

impl BatchCall {
    /// The label in metrics.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Gathered => "gathered",
            Self::Split => "split",
        }
    }
}

/// The state of a handler's circuit breaker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum BreakerState {
    /// Messages run.
    Closed,
    /// Messages wait.
    Open,
    /// Messages wait, except for one that probes whether the handler works again.
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

/// The cause for which a handler ran once more: the complete list of the causes that the promise
/// allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ExtraRunCause {
    /// A claim was taken over whose owner had ended without an outcome.
    CrashTakeover,
    /// The process has dropped a handler that had not ended in time after its cancellation: it took
    /// longer than `max_run`, or a stop did not wait for it; or the outcome of a run is unknown
    /// that has probed a handler whose circuit breaker is open. The run that follows, here or in
    /// another process, is no takeover. A process that dies before the store has answered counts
    /// none.
    Discarded,
    /// The process lost its lease while its handler ran: the record was deleted, or another process
    /// has taken over.
    LeaseLost,
    /// A handler had ended, the store did not answer its completion, its lease ran out in the
    /// meantime, and another process has taken over.
    CompleteUnknown,
    /// The store has lost data: a completion found no record, or a message that existed before the
    /// loss runs for the first time as far as the store knows.
    StoreLoss,
    /// The message is older than the retention, so its completed record may have expired.
    Retention,
    /// An operator reopened the record.
    Reset,
    /// The store was away, and the consumer or the layer fails open: the handler ran without it, or
    /// did not wait for its completion.
    FailOpen,
}

impl RunOutcome {
    /// The name in metrics: lower case, one word.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Succeeded => "succeeded",
            Self::Failed => "failed",
            Self::Later => "later",
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
            Self::Discarded => "discarded",
            Self::LeaseLost => "lease_lost",
            Self::CompleteUnknown => "complete_unknown",
            Self::StoreLoss => "store_loss",
            Self::Retention => "retention",
            Self::Reset => "reset",
            Self::FailOpen => "fail_open",
        }
    }
}
