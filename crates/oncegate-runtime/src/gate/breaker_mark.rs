//! The mark of a handler's open circuit breaker, as the scope's descriptor holds it.

use oncegate_core::store::{ScopeDescriptor, StoreError};

use super::OpenGate;
use super::scope_descriptor::change;

impl OpenGate {
    /// Returns whether the breaker of a process was open, as the descriptor held it when the gate
    /// was opened.
    pub(crate) fn is_breaker_marked_open(&self) -> bool {
        self.losses
            .as_ref()
            .is_some_and(|losses| losses.is_breaker_marked_open())
    }

    /// Writes into the descriptor whether the breaker is open. It writes nothing if the descriptor
    /// says so already.
    ///
    /// # Errors
    /// When the store does not answer, the descriptor cannot be read, or other processes keep
    /// changing it.
    pub(crate) async fn mark_breaker(&self, is_open: bool) -> Result<(), StoreError> {
        let changed = change(&*self.store, &self.scope, |held| ScopeDescriptor {
            breaker_open: is_open,
            ..held
        });
        changed.await.map(drop)
    }
}
