//! Accepts a loss of records, so that a halted scope continues.

use oncegate_core::key::Scope;
use oncegate_core::store::{Epoch, Halt, ScopeDescriptor, Store, StoreError};

/// The most writes of the descriptor when other processes change it meanwhile.
const MAX_WRITES: u32 = 8;

/// The outcome of accepting a loss.
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use = "only an accepted loss lets the scope continue"]
pub enum AcceptedLoss {
    /// The scope continues, within seconds in every process. Messages whose records are lost run
    /// again when they are redelivered, each counted as `extra_runs{store_loss}`. The value is the
    /// halt that was accepted.
    Accepted(Halt),
    /// The scope is not halted. Nothing was changed.
    NotHalted,
    /// The scope is halted for another reason than the one that the caller has seen. Nothing was
    /// changed.
    Changed(Halt),
}

/// Lets a scope continue that [`OnStoreLoss::Halt`](oncegate_runtime::OnStoreLoss::Halt) has
/// halted, if the halt is still the one that the caller has `seen`.
///
/// # Errors
/// When the store does not answer, or the scope's descriptor cannot be read.
pub async fn accept_loss(
    store: &dyn Store,
    scope: &Scope,
    seen: &Halt,
) -> Result<AcceptedLoss, StoreError> {
    for _ in 0..MAX_WRITES {
        let Some(text) = store.descriptor(scope).await? else {
            return Ok(AcceptedLoss::NotHalted);
        };
        let held = ScopeDescriptor::parse(scope, &text)?;
        let Some(halt) = held.halt.clone() else {
            return Ok(AcceptedLoss::NotHalted);
        };
        if halt.reason != seen.reason || halt.at_ms != seen.at_ms {
            return Ok(AcceptedLoss::Changed(halt));
        }
        let next = held
            .succeed(Epoch::from_bits(rand::random()), &[], halt.at_ms)
            .to_text()?;
        if store.describe(scope, Some(&text), &next).await? == next {
            return Ok(AcceptedLoss::Accepted(halt));
        }
    }
    Err(StoreError::unavailable(
        "other processes keep changing the scope's descriptor",
    ))
}

/// Returns the halt of a scope; `None` when it is not halted, or was never opened.
///
/// # Errors
/// When the store does not answer, or the scope's descriptor cannot be read.
pub async fn halt_of(store: &dyn Store, scope: &Scope) -> Result<Option<Halt>, StoreError> {
    let Some(text) = store.descriptor(scope).await? else {
        return Ok(None);
    };
    Ok(ScopeDescriptor::parse(scope, &text)?.halt)
}
