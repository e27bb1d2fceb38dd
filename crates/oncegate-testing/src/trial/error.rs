//! The errors of a trial.

use std::time::Duration;

use oncegate_core::key::{KeySpecError, Scope};
use oncegate_runtime::BoxError;

use crate::samples::BadSamples;

/// The length that a scope may have, so that the number of the round fits behind it.
pub(super) const SCOPE_MAX_BYTES: usize = Scope::MAX_BYTES - 21;

/// The reason why a trial has no verdict.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TrialError {
    /// No key is set.
    #[error("the trial has no key; call `Trial::key`")]
    NoKey,
    /// The key makes no sense.
    #[error("the key cannot be used")]
    Key(#[source] KeySpecError),
    /// The messages cannot be used.
    #[error(transparent)]
    Samples(#[from] BadSamples),
    /// The lease is too short or too long.
    #[error("the lease is {lease:?}; it must be 100 ms to one minute")]
    Lease {
        /// The lease.
        lease: Duration,
    },
    /// The handler was called, and had no effect for any sample, although there were no faults.
    #[error(
        "no call arrived at the downstream service, and no witness lists an effect, so nothing can be judged; let the handler call the service for each effect, or list the effects"
    )]
    NoEffects,
    /// The scope is too long, or has characters that a scope must not have.
    #[error(
        "the scope {scope:?} must be 1 to {SCOPE_MAX_BYTES} of A-Z a-z 0-9 . _ -; change `Trial::scope`"
    )]
    Scope {
        /// The scope.
        scope: String,
    },
    /// The store of a round cannot be opened.
    #[error("the store of a round cannot be opened")]
    Store(#[source] BoxError),
    /// The broker of [`Trial::broker`](super::Trial::broker) has failed.
    #[error("the broker of the trial has failed")]
    Broker(#[source] BoxError),
    /// The effects of a round cannot be listed.
    #[error("the effects of a round cannot be listed")]
    Witness(#[source] BoxError),
    /// A handler cannot be started.
    #[error("the handler cannot be started")]
    Launch(#[source] BoxError),
}
