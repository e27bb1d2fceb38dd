//! An operator's pause of a scope, as the scope's descriptor holds it.

use oncegate_core::key::Scope;
use oncegate_core::store::{Pause, ScopeDescriptor, Store, StoreError};

use super::OpenGate;
use super::scope_descriptor::change;

impl OpenGate {
    /// Returns whether an operator has paused the scope, as the descriptor said at the last check
    /// for a loss. Costs one load.
    pub(crate) fn is_paused(&self) -> bool {
        self.losses
            .as_ref()
            .is_some_and(|losses| losses.is_paused())
    }

    /// The operator's pause, as [`is_paused`](Self::is_paused) knows of it.
    pub(crate) fn pause(&self) -> Option<Pause> {
        self.losses.as_ref()?.pause()
    }
}

/// Writes an operator's pause into the scope's descriptor, unless there is one. Returns the
/// descriptor as it was before; `None` for a scope that was never opened, which stays so.
///
/// # Errors
/// When the store does not answer, the descriptor cannot be read, or other processes keep changing
/// it.
pub async fn write_pause(
    store: &dyn Store,
    scope: &Scope,
    pause: &Pause,
) -> Result<Option<ScopeDescriptor>, StoreError> {
    let changed = change(store, scope, |held| ScopeDescriptor {
        pause: held.pause.clone().or_else(|| Some(pause.clone())),
        ..held
    });
    changed.await
}

/// Removes the pause from the scope's descriptor. Returns the descriptor as it was before; `None`
/// for a scope that was never opened.
///
/// # Errors
/// As [`write_pause`].
pub async fn remove_pause(
    store: &dyn Store,
    scope: &Scope,
) -> Result<Option<ScopeDescriptor>, StoreError> {
    let changed = change(store, scope, |held| ScopeDescriptor {
        pause: None,
        ..held
    });
    changed.await
}
