//! Effects that happened twice, or were taken for others.

use std::collections::BTreeSet;

use super::{Judgement, words_of};
use crate::defect::Defect;
use crate::effects::judge_effects;
use crate::facts::Effect;
use crate::fault::Fault;

impl Judgement<'_> {
    /// Different effects have different downstream keys.
    pub(super) fn shared_keys(&mut self) {
        let facts = self.facts;
        for call in facts.calls.values() {
            let Some(first) = call.repeats.and_then(|first| facts.calls.get(&first)) else {
                continue;
            };
            let (Some(sample), Some(other)) = (call.sample, first.sample) else {
                continue;
            };
            if (sample == other && call.step == first.step) || self.excused.contains(&sample) {
                continue;
            }
            let what = format!(
                "the effect of {} had the Idempotency-Key of {} and did not happen",
                name_of(sample, &call.step),
                name_of(other, &first.step).trim_end_matches(',')
            );
            self.found(
                Defect::SharedDownstreamKey,
                Some(sample),
                what,
                vec![first.called, call.called],
            );
            self.excused.insert(sample);
        }
    }

    /// A call that is repeated under its key has the same body.
    pub(super) fn changed_bodies(&mut self) {
        let facts = self.facts;
        let mut named = BTreeSet::new();
        for call in facts.calls.values().filter(|call| call.has_other_body) {
            let Some(first) = call.repeats.and_then(|first| facts.calls.get(&first)) else {
                continue;
            };
            let Some(sample) = call.sample.filter(|_| call.sample == first.sample) else {
                continue;
            };
            if call.step != first.step || self.excused.contains(&sample) || !named.insert(sample) {
                continue;
            }
            let mut after = facts.faults_between(sample, first.called, call.called);
            after.retain(|fault| fault.explains_a_repetition());
            let what = format!(
                "the effect of sample {sample} was requested again{} under its Idempotency-Key, with another body",
                words_of(&after)
            );
            self.found_after(
                Defect::ChangingBody,
                Some(sample),
                what,
                vec![first.called, call.called],
                after,
            );
        }
    }

    /// An effect happens once.
    pub(super) fn doubles(&mut self) {
        let facts = self.facts;
        let performed = facts.performed();
        let happened = performed
            .iter()
            .map(|(effect, calls)| (*effect, calls.len() as u64))
            .collect();
        let all = performed.keys().copied().collect();
        // A fault before the first effect may be why another run has it, too.
        let found = judge_effects(&BTreeSet::new(), &all, &happened, |effect| {
            let last = performed.get(effect).and_then(|calls| calls.last());
            last.map_or(0, |last| {
                facts.explanations(facts.first_run(effect.0), last.place())
            })
        });
        for one in found.repeated {
            let (sample, step) = one.effect;
            let effects = performed
                .get(&one.effect)
                .map(Vec::as_slice)
                .unwrap_or_default();
            let [first, again, ..] = effects else {
                continue;
            };
            if self.excused.contains(&sample) {
                continue;
            }
            let mut after = facts.faults_between(sample, first.called, again.place());
            after.retain(|fault| fault.explains_a_repetition());
            let defect = self.cause_of_double(first, again);
            let step = if step.is_empty() {
                String::new()
            } else {
                format!(" {step:?}")
            };
            let keys = match (&first.idempotency_key, &again.idempotency_key) {
                (None, _) | (_, None) => "without an Idempotency-Key",
                _ => "under different Idempotency-Keys",
            };
            let why = words_of_repetition(&after, one.explained);
            let what = format!(
                "the effect{step} of sample {sample} happened {} times{why}, {keys}",
                one.times
            );
            let places = effects
                .iter()
                .filter_map(|effect| effect.performed)
                .collect();
            self.found_repeated((defect, sample), one.unexplained(), what, places, after);
        }
    }

    /// The witness lists an effect once.
    pub(super) fn listed_twice(&mut self) {
        let facts = self.facts;
        let happened = facts
            .listed
            .iter()
            .map(|(effect, places)| (effect, places.len() as u64))
            .collect();
        let all = facts.listed.keys().collect();
        let found = judge_effects(&BTreeSet::new(), &all, &happened, |(sample, _)| {
            facts.explanations(facts.first_run(*sample), usize::MAX)
        });
        for one in found.repeated {
            let (sample, step) = one.effect;
            if self.excused.contains(sample) {
                continue;
            }
            let mut after = facts.faults_between(*sample, facts.first_run(*sample), usize::MAX);
            after.retain(|fault| fault.explains_a_repetition());
            let step = if step.is_empty() {
                String::new()
            } else {
                format!(" {step:?}")
            };
            let why = words_of_repetition(&after, one.explained);
            let what = format!(
                "the witness lists the effect{step} of sample {sample} {} times{why}",
                one.times
            );
            let places = facts.listed.get(one.effect).cloned().unwrap_or_default();
            self.found_repeated(
                (Defect::RepeatedEffect, *sample),
                one.unexplained(),
                what,
                places,
                after,
            );
        }
    }

    fn cause_of_double(&self, first: &Effect, again: &Effect) -> Defect {
        let run = again.run.and_then(|run| self.facts.runs.get(&run));
        match (&first.idempotency_key, &again.idempotency_key) {
            _ if again.in_duplicate => Defect::EffectInDuplicate,
            (None, _) | (_, None)
                if run.is_some_and(|run| run.cancelled.is_some_and(|at| at < again.called)) =>
            {
                Defect::EffectAfterCancel
            }
            (None, _) | (_, None) => Defect::NoDownstreamKey,
            _ => Defect::ChangingDownstreamKey,
        }
    }
}

/// The effect of a step of a sample, in words.
fn name_of(sample: usize, step: &str) -> String {
    if step.is_empty() {
        format!("sample {sample}")
    } else {
        format!("sample {sample}, step {step:?},")
    }
}

/// The cause of a repeated effect, in words.
fn words_of_repetition(after: &[Fault], explained: u64) -> String {
    if explained == 0 {
        " though no fault explains it".to_owned()
    } else {
        words_of(after)
    }
}
