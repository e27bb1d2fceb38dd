//! The errors of gates.

use oncegate_core::key::{KeyError, KeySpecError, PrepareError};
use oncegate_core::store::StoreError;

use crate::results::ResultStoreError;

/// The reason why a gate cannot be used. Nothing has been claimed when it is returned.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GateError {
    /// A setting makes no sense.
    #[error("gate `{scope}`: {what}")]
    Settings {
        /// The gate's scope.
        scope: String,
        /// The setting, and what to change.
        what: String,
    },
    /// The scope, key or fingerprint specification makes no sense.
    #[error(transparent)]
    Key(#[from] KeySpecError),
    /// The records of this scope were made by another specification of key or fingerprint.
    ///
    /// With the new specification none of them would match, and every message of a replay would run
    /// again.
    #[error(
        "the records of scope `{scope}` were made by another key specification: go back to it, or use a new scope \
         and know that messages completed under the old one will run again.\n  the store has: {held}\n  this gate:     {ours}"
    )]
    OtherDescriptor {
        /// The gate's scope.
        scope: String,
        /// The specification in the store.
        held: String,
        /// The specification of this gate.
        ours: String,
    },
    /// No key could be made of the message.
    #[error("no key: {0}")]
    BadKey(#[from] KeyError),
    /// The format of the key needs something that did not come, such as a schema: ask again.
    #[error(transparent)]
    Format(#[from] PrepareError),
    /// The store did not answer.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The [`large_results`](super::Gate::large_results) did not answer: ask again.
    #[error(transparent)]
    Results(#[from] ResultStoreError),
}
