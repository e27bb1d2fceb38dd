//! Lets consumers continue that have stopped at their dead-letter limit.

use oncegate_core::key::Scope;
use oncegate_core::store::{DeadLetterStop, ScopeDescriptor, Store, StoreError};

use oncegate_runtime::gate::replace_dead_letter_stop;

/// Accepts that a consumer of the scope has given up as many messages as its limit allows: the next
/// process may give up as many again. Returns the stop that was accepted; `None` if there was none.
///
/// Without it, a process that starts stops again at the first message that it would have to give
/// up, unless a message succeeds before.
///
/// # Errors
/// When the store does not answer, or the scope's descriptor cannot be read.
pub async fn accept_dead_letters(
    store: &dyn Store,
    scope: &Scope,
) -> Result<Option<DeadLetterStop>, StoreError> {
    replace_dead_letter_stop(store, scope, None).await
}

/// Returns the stop of the scope's last consumer that reached its dead-letter limit; `None` when
/// there is none, or the scope was never opened.
///
/// # Errors
/// When the store does not answer, or the scope's descriptor cannot be read.
pub async fn dead_letter_stop_of(
    store: &dyn Store,
    scope: &Scope,
) -> Result<Option<DeadLetterStop>, StoreError> {
    let Some(text) = store.descriptor(scope).await? else {
        return Ok(None);
    };
    Ok(ScopeDescriptor::parse(scope, &text)?.dead_letter_stop)
}
