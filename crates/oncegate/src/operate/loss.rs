//! Accepting a loss of records, so that a halted scope goes on.

use oncegate_core::key::Scope;
use oncegate_core::store::{Epoch, Halt, ScopeDescriptor, Store, StoreError};

/// How often the descriptor is written again that a process has changed meanwhile.
const MAX_WRITES: u32 = 8;

/// What accepting a loss came to.
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use = "only an accepted loss lets the scope go on"]
pub enum AcceptedLoss {
    /// The scope goes on, within seconds in every process: messages whose records are lost run again when they are
    /// delivered again, each counted as `extra_runs{store_loss}`. This is what had halted it.
    Accepted(Halt),
    /// The scope is not halted. Nothing was changed.
    NotHalted,
    /// The scope was halted again, for another reason than the one that the caller has seen. Nothing was changed.
    Changed(Halt),
}

/// Lets a scope go on that [`OnStoreLoss::Halt`](crate::OnStoreLoss::Halt) has halted, provided it is still halted for what
/// the caller has `seen`.
///
/// # Errors
/// When the store gives no answer, or the scope's descriptor cannot be read.
pub async fn accept_loss(store: &dyn Store, scope: &Scope, seen: &Halt) -> Result<AcceptedLoss, StoreError> {
    for _ in 0..MAX_WRITES {
        let Some(text) = store.descriptor(scope).await? else { return Ok(AcceptedLoss::NotHalted) };
        let held = ScopeDescriptor::parse(scope, &text)?;
        let Some(halt) = held.halt.clone() else { return Ok(AcceptedLoss::NotHalted) };
        if halt.reason != seen.reason || halt.at_ms != seen.at_ms {
            return Ok(AcceptedLoss::Changed(halt));
        }
        let next = held.succeed(Epoch::from_bits(rand::random()), &[], halt.at_ms).to_text()?;
        if store.describe(scope, Some(&text), &next).await? == next {
            return Ok(AcceptedLoss::Accepted(halt));
        }
    }
    Err(StoreError::unavailable("other processes keep changing the scope's descriptor"))
}

/// Why a scope is halted; `None` when it is not, or was never opened.
///
/// # Errors
/// When the store gives no answer, or the scope's descriptor cannot be read.
pub async fn halt_of(store: &dyn Store, scope: &Scope) -> Result<Option<Halt>, StoreError> {
    let Some(text) = store.descriptor(scope).await? else { return Ok(None) };
    Ok(ScopeDescriptor::parse(scope, &text)?.halt)
}
