//! How an attempt ends: what [`attempt`](super::attempt) returns, and [`settle`](super::settle) acts on.

use std::time::Duration;

use oncegate_core::record::TokenTag;
use oncegate_core::store::StoreError;

use super::breaker::FailureCount;
use crate::backoff::Backoff;
use crate::dead_letters::DeadLetterCause;
use crate::gate::Lease;
use crate::health::WaitCause;

/// How an attempt ended.
#[derive(Debug)]
pub(super) enum Ending {
    /// COMPLETED is in the store, written by this attempt.
    Completed,
    /// COMPLETED was in the store, and the handler's `duplicate` has been called.
    Duplicate,
    /// FAILED is in the store, and the dead letter is written.
    HandedOver,
    /// The message must go to the dead letters.
    ///
    /// `attempts` is how many attempts ran.
    GiveUp { lease: Option<Lease>, cause: DeadLetterCause, reason: String, attempts: u32 },
    /// FAILED is in the store, but no dead letter has been written.
    NotHandedOver { reason: String, by: TokenTag },
    /// The handler failed; another attempt may follow.
    Retry { lease: Lease, delay: Duration, count: FailureCount, reason: String },
    /// The message cannot be done yet: its handler wants it after the delay.
    Later { lease: Lease, delay: Duration, reason: String },
    /// The outcome of this attempt is unknown: its effect may have happened, and may still be in progress. Its lease
    /// must be over before another attempt begins.
    Lapsing { attempt: u32, lasts: Duration, reason: String },
    /// Another owner holds the key, or held it and may come back, or the message is not due.
    NotNow { ask_again_in: Duration, cause: WaitCause },
    /// The retry is not due, and the wait is longer than a claim can last.
    NotDue { due_in: Duration },
    /// The store did not answer the claim.
    NoAnswer { error: StoreError },
}

/// The delays before a busy key is claimed again: its run elsewhere may end long before the lease does.
pub(super) const BUSY_BACKOFF: Backoff = Backoff::new(Duration::from_millis(50), Duration::from_secs(10));
