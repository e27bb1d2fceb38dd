//! The ends of handlers and of attempts, as [`unit`](super::unit) passes them to
//! [`settle`](super::settle).

use std::time::Duration;

use oncegate_core::record::TokenTag;
use oncegate_core::store::StoreError;

use super::breaker::FailureCount;
use crate::backoff::Backoff;
use crate::dead_letters::DeadLetterCause;
use crate::failure::Failure;
use crate::gate::Lease;
use crate::handler::Encoded;
use crate::health::WaitCause;
use crate::observe::RunOutcome;
use crate::running::policy::outcome_of;

/// The end of an attempt.
#[derive(Debug)]
pub(super) enum End {
    /// COMPLETED is in the store, written by this attempt.
    Completed,
    /// COMPLETED was in the store, and the handler's `duplicate` has been called.
    Duplicate,
    /// FAILED is in the store, and the dead letter is written.
    HandedOver,
    /// The message must go to the dead letters.
    ///
    /// `attempts` is how many attempts ran.
    GiveUp {
        lease: Option<Box<Lease>>,
        cause: DeadLetterCause,
        reason: String,
        attempts: u32,
    },
    /// FAILED is in the store, but no dead letter has been written.
    NotHandedOver { reason: String, by: TokenTag },
    /// The handler failed; another attempt may follow.
    Retry {
        lease: Box<Lease>,
        delay: Duration,
        count: FailureCount,
        reason: String,
    },
    /// The message cannot be done yet: its handler wants it after the delay.
    Later {
        lease: Box<Lease>,
        delay: Duration,
        reason: String,
    },
    /// The outcome of this attempt is unknown: its effect may have happened, and may still be in
    /// progress. Its lease must be over before another attempt begins.
    Lapsing {
        attempt: u32,
        lasts: Duration,
        reason: String,
    },
    /// The same, of an attempt that is not the message's fault: its handler was dropped, or has
    /// failed while its circuit breaker is open. The store lets the next attempt wait as long as
    /// the lease would have lasted.
    Discarded { lease: Box<Lease>, reason: String },
    /// Another owner holds the key, or held it and may come back, or the message is not due.
    NotNow {
        ask_again_in: Duration,
        cause: WaitCause,
    },
    /// The retry is not due, and the wait is longer than a claim can last.
    NotDue { due_in: Duration },
    /// The store did not answer the claim.
    NoAnswer { error: StoreError },
}

impl End {
    /// Another owner took over. Its outcome counts, so the key is claimed again to learn it.
    pub(super) const TAKEN_OVER: Self = Self::NotNow {
        ask_again_in: Duration::ZERO,
        cause: WaitCause::Busy,
    };

    /// The end of an attempt whose outcome is unknown.
    pub(super) fn unknown(lease: Lease, reason: String, count: FailureCount) -> Self {
        match count {
            FailureCount::Counted => Self::lapsing(&lease, reason),
            FailureCount::Uncounted => Self::Discarded {
                lease: Box::new(lease),
                reason,
            },
        }
    }

    /// The end without a write: the lease lapses, and the next attempt is flagged as recovered.
    pub(super) fn lapsing(lease: &Lease, reason: String) -> Self {
        Self::Lapsing {
            attempt: lease.attempt().number(),
            lasts: lease.remaining(),
            reason,
        }
    }
}

/// The delays before a busy key is claimed again: its run elsewhere may end long before the lease
/// does.
pub(super) const BUSY_BACKOFF: Backoff =
    Backoff::new(Duration::from_millis(50), Duration::from_secs(10));

/// The longest time until the store treats a claim released without delay as due, or a lease as
/// over: it counts whole milliseconds.
pub(super) const RELEASED_IS_DUE: Duration = Duration::from_millis(2);

/// The reason of a handler that panicked.
pub(super) const PANICKED: &str = "the handler panicked";

/// The reason of an attempt whose handler was dropped after its cancellation.
pub(super) const CANCELLED: &str = "the handler was cancelled, and did not end in time";

/// The end of a handler for one message.
#[derive(Debug)]
pub(super) enum Ran {
    Returned(Result<Encoded, Failure>),
    Panicked,
    /// The handler did not end in time after its cancellation.
    Cancelled,
}

impl Ran {
    pub(super) fn failure(&self) -> Option<&Failure> {
        match self {
            Self::Returned(Err(failure)) => Some(failure),
            _ => None,
        }
    }

    /// The run, as events name it.
    pub(super) fn outcome(&self) -> RunOutcome {
        match self {
            Self::Returned(Ok(_)) => RunOutcome::Succeeded,
            Self::Returned(Err(failure)) => outcome_of(failure),
            Self::Panicked => RunOutcome::Panicked,
            Self::Cancelled => RunOutcome::Cancelled,
        }
    }
}
