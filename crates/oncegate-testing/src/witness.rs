//! Effects that happen elsewhere than in the downstream service, and are listed by a witness of the
//! user.

use std::collections::BTreeMap;

use async_trait::async_trait;
use oncegate_runtime::BoxError;
use serde_json::Value;

/// Lists the effects that handlers have had in a file or a table.
///
/// It is asked at the end of each round, when all processes have stopped, and before it if rounds
/// share what is listed.
#[async_trait]
pub trait Witness: Send + Sync + 'static {
    /// Lists the effects of a round, or of all rounds so far: JSON values with the business fields
    /// by which the events are recognised. A member `step` tells several effects of one event
    /// apart.
    ///
    /// `round` is the name that [`Downstream::round`](crate::Downstream::round) gives to handlers.
    ///
    /// # Errors
    /// When the list cannot be read; the trial ends with the error, because a missing list would
    /// look like lost effects.
    async fn effects(&self, round: &str) -> Result<Vec<Value>, BoxError>;

    /// Returns whether rounds share what is listed, so that a round's effects are those that were
    /// not there before it. Then only one round may run at a time, see
    /// [`Trial::parallel`](crate::Trial::parallel).
    fn is_shared(&self) -> bool;
}

/// The effects that were not there before.
pub(crate) fn added(before: &[Value], after: Vec<Value>) -> Vec<Value> {
    let mut known: BTreeMap<String, usize> = BTreeMap::new();
    for effect in before {
        *known.entry(effect.to_string()).or_default() += 1;
    }
    let mut effects = after;
    effects.retain(|effect| match known.get_mut(&effect.to_string()) {
        Some(left) if *left > 0 => {
            *left -= 1;
            false
        }
        _ => true,
    });
    effects
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn an_effect_that_was_there_before_is_not_counted_again() {
        let one = json!({"order": 1});
        let two = json!({"order": 2});
        let both = vec![one.clone(), two.clone(), one.clone()];
        assert_eq!(
            added(&[one.clone(), two], both.clone()),
            [one],
            "the same row twice is two effects"
        );
        assert_eq!(added(&[], both.clone()), both);
    }
}
