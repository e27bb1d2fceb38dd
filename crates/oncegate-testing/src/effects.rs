//! The one place that decides about effects: which are lost, which happened again, and whether that
//! is explained.

use std::collections::{BTreeMap, BTreeSet};

/// An effect that happened more than once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Repetition<E> {
    /// The effect.
    pub effect: E,
    /// The number of times that it happened: twice or more.
    pub times: u64,
    /// The number of its repetitions that counted faults explain.
    pub explained: u64,
}

impl<E> Repetition<E> {
    /// Returns how many repetitions no counted fault explains.
    pub fn unexplained(&self) -> u64 {
        (self.times - 1).saturating_sub(self.explained)
    }
}

/// The findings of [`judge_effects`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct EffectFindings<E> {
    /// Effects that had to happen and did not.
    pub lost: BTreeSet<E>,
    /// Effects that nothing asked for.
    pub unasked: BTreeSet<E>,
    /// Effects that happened more than once.
    pub repeated: Vec<Repetition<E>>,
}

impl<E> EffectFindings<E> {
    /// Returns how many effects were second ones, explained or not.
    pub fn second_effects(&self) -> u64 {
        self.repeated
            .iter()
            .map(|repeated| repeated.times - 1)
            .sum()
    }

    /// Returns the effects with more repetitions than counted faults explain.
    pub fn unexplained(&self) -> impl Iterator<Item = &Repetition<E>> {
        self.repeated
            .iter()
            .filter(|repeated| repeated.unexplained() > 0)
    }
}

/// Compares the effects that happened with those that had to.
///
/// `wanted` are the effects that had to happen at least once. `allowed` are those that something
/// asked for but that may be missing, because their messages are dead letters. `happened` says how
/// often each effect happened, and `explanations` how many counted faults can each have repeated
/// it: kills, takeovers, losses of the store.
pub fn judge_effects<E: Ord + Clone>(
    wanted: &BTreeSet<E>,
    allowed: &BTreeSet<E>,
    happened: &BTreeMap<E, u64>,
    explanations: impl Fn(&E) -> u64,
) -> EffectFindings<E> {
    let repeated = happened
        .iter()
        .filter(|(_, times)| **times > 1)
        .map(|(effect, times)| Repetition {
            effect: effect.clone(),
            times: *times,
            explained: explanations(effect).min(times - 1),
        })
        .collect();
    let lost = wanted
        .iter()
        .filter(|effect| happened.get(*effect).is_none_or(|times| *times == 0))
        .cloned()
        .collect();
    let unasked = happened
        .iter()
        .filter(|(_, times)| **times > 0)
        .map(|(effect, _)| effect)
        .filter(|effect| !wanted.contains(*effect) && !allowed.contains(*effect))
        .cloned()
        .collect();
    EffectFindings {
        lost,
        unasked,
        repeated,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(
        happened: &[(&str, u64)],
        explained: u64,
        lost: &[&str],
        unasked: &[&str],
        unexplained: &[(&str, u64)],
    ) {
        let wanted = BTreeSet::from(["a".to_owned(), "b".to_owned()]);
        let allowed = BTreeSet::from(["c".to_owned()]);
        let happened = happened
            .iter()
            .map(|(effect, times)| ((*effect).to_owned(), *times))
            .collect();
        let found = judge_effects(&wanted, &allowed, &happened, |_| explained);
        assert!(found.lost.iter().eq(lost.iter()), "{found:?}");
        assert!(found.unasked.iter().eq(unasked.iter()), "{found:?}");
        let too_many: Vec<(&str, u64)> = found
            .unexplained()
            .map(|one| (one.effect.as_str(), one.unexplained()))
            .collect();
        assert_eq!(too_many, unexplained);
    }

    // invariant: one-judge-of-effects
    #[test]
    fn only_a_missing_effect_that_had_to_happen_is_lost() {
        check(&[("a", 1), ("b", 1)], 0, &[], &[], &[]);
        check(&[("a", 1), ("b", 0)], 0, &["b"], &[], &[]);
        check(&[("a", 1), ("b", 1), ("c", 1)], 0, &[], &[], &[]);
        check(&[("a", 1), ("b", 1), ("d", 1)], 0, &[], &["d"], &[]);
    }

    // invariant: one-judge-of-effects
    #[test]
    fn each_fault_explains_one_repetition_of_an_effect() {
        check(&[("a", 2), ("b", 1)], 0, &[], &[], &[("a", 1)]);
        check(&[("a", 2), ("b", 1)], 1, &[], &[], &[]);
        check(&[("a", 4), ("b", 2)], 1, &[], &[], &[("a", 2)]);
        check(&[("a", 4), ("b", 2)], u64::MAX, &[], &[], &[]);
    }

    // invariant: one-judge-of-effects
    #[test]
    fn second_effects_are_counted_whether_explained_or_not() {
        let happened = BTreeMap::from([(1, 3), (2, 2), (3, 1)]);
        let all = BTreeSet::from([1, 2, 3]);
        let found = judge_effects(&all, &BTreeSet::new(), &happened, |_| 1);
        assert_eq!(found.second_effects(), 3);
    }
}
