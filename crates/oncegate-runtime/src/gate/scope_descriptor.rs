//! The scope's descriptor as a gate finds it, when it opens and at each check for a loss; and its
//! changes.

use std::sync::Arc;

use oncegate_core::key::Scope;
use oncegate_core::store::{ScopeDescriptor, Store, StoreError};

use super::GateError;

/// The number of tries to write a descriptor when other processes change it in the meantime.
pub(super) const MAX_WRITES: u32 = 8;

/// Returns the descriptor that the store holds, after writing `first` if there was none, or raising
/// the longest lease to that of `first`.
pub(super) async fn at_start(
    store: &dyn Store,
    scope: &Scope,
    first: &ScopeDescriptor,
) -> Result<ScopeDescriptor, GateError> {
    let mut held = store.describe(scope, None, &first.to_text()?).await?;
    for _ in 0..MAX_WRITES {
        let known = ScopeDescriptor::parse(scope, &held)?;
        if known.keys != first.keys {
            let scope = scope.as_str().to_owned();
            let ours = first.keys.clone();
            return Err(GateError::OtherDescriptor {
                scope,
                held: known.keys,
                ours,
            });
        }
        if known.longest_lease_ms >= first.longest_lease_ms {
            return Ok(known);
        }
        let raised = ScopeDescriptor {
            longest_lease_ms: first.longest_lease_ms,
            ..known
        };
        held = store
            .describe(scope, Some(&held), &raised.to_text()?)
            .await?;
    }
    Err(other_processes_change_it().into())
}

/// Changes the scope's descriptor, and returns it as it was before. `None`: the scope was never
/// opened, and stays so.
///
/// # Errors
/// When the store does not answer, the descriptor cannot be read, or other processes keep changing
/// it.
pub(super) async fn change(
    store: &dyn Store,
    scope: &Scope,
    change: impl Fn(ScopeDescriptor) -> ScopeDescriptor + Send,
) -> Result<Option<ScopeDescriptor>, StoreError> {
    for _ in 0..MAX_WRITES {
        let Some(text) = store.descriptor(scope).await? else {
            return Ok(None);
        };
        let before = ScopeDescriptor::parse(scope, &text)?;
        let next = change(before.clone());
        if next == before {
            return Ok(Some(before));
        }
        let next = next.to_text()?;
        if store.describe(scope, Some(&text), &next).await? == next {
            return Ok(Some(before));
        }
    }
    Err(other_processes_change_it())
}

fn other_processes_change_it() -> StoreError {
    StoreError::unavailable("other processes keep changing the scope's descriptor")
}

/// Returns why no claim of a halted scope is granted.
pub(super) fn halted(scope: &Scope, reason: &str) -> Arc<str> {
    format!(
        "scope `{scope}` is halted because the store has lost records ({reason}): find out what would run again with \
         `oncegate replay`, then let it go on with `oncegate accept loss --scope {scope}`; \
         on_store_loss = \"continue\" goes on by itself"
    )
    .into()
}

/// The result of comparing the descriptors.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Comparison {
    /// The descriptor is the known one, perhaps at a later sequence number.
    Same(ScopeDescriptor),
    /// The scope is halted, or a loss was accepted.
    Adopt(ScopeDescriptor),
    /// Records are lost, with the reason.
    Lost(&'static str),
}

/// Compares the descriptor in the store with the known one.
pub(super) fn compare(
    known: &ScopeDescriptor,
    confirmed_sequence: u64,
    held: Option<ScopeDescriptor>,
) -> Comparison {
    let Some(held) = held else {
        return Comparison::Lost("the scope's descriptor is gone");
    };
    match (held.halt.is_some(), held.epoch == known.epoch) {
        (true, _) => Comparison::Adopt(held),
        (false, true) if known.halt.is_some() => {
            Comparison::Lost("the scope's halt is gone, and no loss was accepted")
        }
        (false, true) if held.sequence < confirmed_sequence => {
            Comparison::Lost("an earlier state of the store was put back")
        }
        (false, true) => Comparison::Same(held),
        (false, false) if held.accepted_epochs.contains(&known.epoch) => Comparison::Adopt(held),
        (false, false) => Comparison::Lost("the store was emptied, and the scope was set up again"),
    }
}

#[cfg(test)]
mod tests {
    use oncegate_core::record::StoreTime;
    use oncegate_core::store::{Epoch, Halt, MemoryStore};

    use super::*;

    fn first(keys: &str, epoch: u128, longest_lease_ms: u64) -> ScopeDescriptor {
        ScopeDescriptor {
            longest_lease_ms,
            ..ScopeDescriptor::new(keys, Epoch::from_bits(epoch))
        }
    }

    // invariant: clock-goes-back
    #[tokio::test]
    async fn the_descriptor_has_the_longest_lease_of_gates_in_any_order() {
        let store = MemoryStore::with_clock(StoreTime::default);
        let scope = Scope::new("billing").unwrap();

        for (epoch, lease_ms, longest_ms) in
            [(1, 5_000, 5_000), (2, 60_000, 60_000), (3, 1_000, 60_000)]
        {
            let first = first("{}", epoch, lease_ms);
            let held = at_start(&store, &scope, &first).await.unwrap();
            assert_eq!(
                (held.longest_lease_ms, held.epoch),
                (longest_ms, Epoch::from_bits(1))
            );
            let text = store.descriptor(&scope).await.unwrap().unwrap();
            assert_eq!(ScopeDescriptor::parse(&scope, &text).unwrap(), held);
        }
        let other = first(r#"{"key":1}"#, 4, 90_000);
        let other = at_start(&store, &scope, &other).await.unwrap_err();
        assert!(
            matches!(other, GateError::OtherDescriptor { .. }),
            "{other:?}"
        );
    }

    fn is_lost(finding: Comparison) -> bool {
        matches!(finding, Comparison::Lost(_))
    }

    #[test]
    fn each_difference_of_two_descriptors_has_its_finding() {
        let known = ScopeDescriptor {
            sequence: 7,
            ..ScopeDescriptor::new("{}", Epoch::from_bits(1))
        };
        let halted = ScopeDescriptor {
            halt: Some(Halt::new(1, "gone", Vec::new())),
            ..known.clone()
        };
        let remade = ScopeDescriptor::new("{}", Epoch::from_bits(2));
        let accepted = known.succeed(Epoch::from_bits(2), &[], 1);
        let at = |sequence| ScopeDescriptor {
            sequence,
            ..known.clone()
        };
        assert!(
            is_lost(compare(&known, 6, None)),
            "an absent descriptor is never new"
        );
        assert!(is_lost(compare(&known, 6, Some(remade))));
        assert!(
            is_lost(compare(&known, 6, Some(at(5)))),
            "restored to an earlier state"
        );
        assert!(
            is_lost(compare(&halted, 6, Some(known.clone()))),
            "a halt ends by acceptance alone"
        );
        // The last number may be lost with a replica that lagged behind nothing else.
        for later in [6, 7, 8] {
            assert_eq!(
                compare(&known, 6, Some(at(later))),
                Comparison::Same(at(later))
            );
        }
        for adopted in [halted.clone(), accepted.clone()] {
            assert_eq!(
                compare(&known, 6, Some(adopted.clone())),
                Comparison::Adopt(adopted)
            );
        }
        assert_eq!(
            compare(&halted, 6, Some(accepted.clone())),
            Comparison::Adopt(accepted)
        );
    }
}
