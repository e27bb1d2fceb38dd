//! The stop of a consumer at its dead-letter limit, as the scope's descriptor holds it.

use oncegate_core::key::Scope;
use oncegate_core::store::{DeadLetterStop, ScopeDescriptor, Store, StoreError};

use super::OpenGate;
use super::scope_descriptor::change;

impl OpenGate {
    /// The stop of an earlier process, as the descriptor held it when the gate was opened.
    pub(crate) fn dead_letter_stop(&self) -> Option<DeadLetterStop> {
        self.losses.as_ref()?.dead_letter_stop()
    }

    /// Writes a stop into the descriptor, or removes the one that is there. Returns the one that
    /// was there.
    ///
    /// # Errors
    /// When the store does not answer, or other processes keep changing the descriptor.
    pub(crate) async fn set_dead_letter_stop(
        &self,
        stop: Option<&DeadLetterStop>,
    ) -> Result<Option<DeadLetterStop>, StoreError> {
        replace_dead_letter_stop(&*self.store, &self.scope, stop).await
    }
}

/// Replaces the stop in the scope's descriptor, and returns the one that was there. A scope that
/// was never opened has no descriptor, and stays as it is.
///
/// # Errors
/// When the store does not answer, or other processes keep changing the descriptor.
pub async fn replace_dead_letter_stop(
    store: &dyn Store,
    scope: &Scope,
    stop: Option<&DeadLetterStop>,
) -> Result<Option<DeadLetterStop>, StoreError> {
    let before = change(store, scope, |held| ScopeDescriptor {
        dead_letter_stop: stop.cloned(),
        ..held
    });
    Ok(before.await?.and_then(|before| before.dead_letter_stop))
}
