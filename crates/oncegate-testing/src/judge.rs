//! The verdict on a handler: a pure function of a history.
//!
//! Only harm is a violation: an effect that is lost or happens twice, an answer that differs, a
//! message that is never finished, a key that merges or splits events. The rest of the history says
//! where the harm comes from, and so which defect it is. A repetition under the same
//! `Idempotency-Key` is no second effect.

mod doubles;

use std::collections::{BTreeMap, BTreeSet};

use schemars::JsonSchema;
use serde::Serialize;

use crate::defect::Defect;
use crate::effects::judge_effects;
use crate::facts::{Effect, Facts, Run, Steps};
use crate::fault::Fault;
use crate::history::{Event, Outcome};
use crate::round::STOP_DEADLINE_MS;

/// Something that must not happen, and what shows it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct Violation {
    /// The kind of defect.
    pub defect: Defect,
    /// The sample that it happened to, from 1, if it concerns a single one.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(with = "usize", range(min = 1))]
    pub sample: Option<usize>,
    /// The violation in one sentence.
    pub what: String,
    /// The faults that the violation follows from.
    pub after: Vec<Fault>,
    /// The number of repetitions of the effect that no fault of the round explains. Either oncegate
    /// did not call the handler again because of a fault, so the handler has repeated the effect by
    /// itself, or a lease was lost on a busy machine.
    #[serde(skip_serializing_if = "is_zero")]
    #[schemars(range(min = 1))]
    pub unexplained: u64,
    /// The places in the timeline of the events that show it.
    pub events: Vec<usize>,
}

fn is_zero(count: &u64) -> bool {
    *count == 0
}

/// Judges the events of one round.
///
/// `expected` has the steps that each sample's handler has without faults, as [`steps`] returns
/// them for such a round. A sample that is missing there was not sent: it needs one effect, of any
/// step. One without any step has lost its effect without a fault.
pub fn judge(events: &[Event], expected: &BTreeMap<usize, BTreeSet<String>>) -> Vec<Violation> {
    let facts = Facts::of(events);
    let mut judgement = Judgement {
        violations: Vec::new(),
        events,
        facts: &facts,
        excused: BTreeSet::new(),
    };
    judgement.keys();
    judgement.dead_letters();
    judgement.shared_keys();
    judgement.changed_bodies();
    judgement.doubles();
    judgement.listed_twice();
    judgement.early_answers();
    judgement.losses(expected);
    judgement.unexpected(expected);
    judgement.results();
    judgement.ends();
    judgement.violations
}

/// Judges the keys of messages alone, of which none needs to have been delivered.
pub(crate) fn judge_keys(events: &[Event]) -> Vec<Violation> {
    let facts = Facts::of(events);
    let mut judgement = Judgement {
        violations: Vec::new(),
        events,
        facts: &facts,
        excused: BTreeSet::new(),
    };
    judgement.keys();
    judgement.violations
}

/// Returns the steps whose effects each sample had that was sent.
pub fn steps(events: &[Event]) -> BTreeMap<usize, BTreeSet<String>> {
    Facts::of(events).expected()
}

struct Judgement<'a> {
    violations: Vec<Violation>,
    events: &'a [Event],
    facts: &'a Facts,
    /// Samples whose effects follow from a violation that is named already.
    excused: BTreeSet<usize>,
}

impl Judgement<'_> {
    fn found(&mut self, defect: Defect, sample: Option<usize>, what: String, events: Vec<usize>) {
        self.found_after(defect, sample, what, events, Vec::new());
    }

    fn found_after(
        &mut self,
        defect: Defect,
        sample: Option<usize>,
        what: String,
        events: Vec<usize>,
        after: Vec<Fault>,
    ) {
        self.violations.push(Violation {
            defect,
            sample,
            what,
            after,
            unexplained: 0,
            events,
        });
    }

    fn found_repeated(
        &mut self,
        (defect, sample): (Defect, usize),
        unexplained: u64,
        what: String,
        events: Vec<usize>,
        after: Vec<Fault>,
    ) {
        self.violations.push(Violation {
            defect,
            sample: Some(sample),
            what,
            after,
            unexplained,
            events,
        });
    }

    /// Different events have different keys, and each event has one.
    fn keys(&mut self) {
        let keys = self.facts.keys();
        let mut owners: BTreeMap<&str, BTreeSet<usize>> = BTreeMap::new();
        for (sample, keys) in &keys {
            for key in keys {
                owners.entry(key).or_default().insert(*sample);
            }
            match keys.len() {
                0 => {
                    self.excused.insert(*sample);
                    self.found(
                        Defect::NoKey,
                        Some(*sample),
                        format!("no key can be derived from sample {sample}"),
                        vec![],
                    );
                }
                1 => {}
                count => {
                    self.excused.insert(*sample);
                    let what =
                        format!("sample {sample} has {count} keys: duplicates of it run again");
                    self.found(Defect::KeyTooWide, Some(*sample), what, vec![]);
                }
            }
        }
        let mut shared: BTreeSet<BTreeSet<usize>> = BTreeSet::new();
        shared.extend(owners.into_values().filter(|samples| samples.len() > 1));
        for samples in shared {
            self.excused.extend(&samples);
            let names: Vec<String> = samples.iter().map(ToString::to_string).collect();
            let what = format!("samples {} have the same key", names.join(" and "));
            self.found(Defect::KeyTooNarrow, samples.first().copied(), what, vec![]);
        }
    }

    /// No sample becomes a dead letter: every fault of a trial passes.
    fn dead_letters(&mut self) {
        for (message, (place, cause)) in &self.facts.letters {
            let Some(sent) = self.facts.sent.get(message).filter(|sent| sent.is_event()) else {
                continue;
            };
            if self.excused.contains(&sent.sample) || *cause == "bad_key" {
                continue;
            }
            let runs = self
                .facts
                .runs
                .values()
                .filter(|run| run.sample == Some(sent.sample));
            // What the handler did, and not what came between it and the dead letter.
            let gave_up = runs.clone().any(|run| run.has(Outcome::GaveUp));
            let cause = if gave_up { "permanent" } else { cause };
            let began = runs.map(|run| run.began).min().unwrap_or(*place);
            let after = self.facts.faults_between(sent.sample, began, *place);
            let what = format!(
                "sample {} became a dead letter ({cause}){}",
                sent.sample,
                words_of(&after)
            );
            let sample = sent.sample;
            self.found_after(Defect::GaveUp, Some(sample), what, vec![*place], after);
            self.excused.insert(sample);
        }
    }

    /// A handler returns after its effects.
    fn early_answers(&mut self) {
        for effect in self
            .facts
            .calls
            .values()
            .filter(|effect| effect.run.is_none() && !effect.in_duplicate)
        {
            let Some(sample) = effect
                .sample
                .filter(|sample| !self.excused.contains(sample))
            else {
                continue;
            };
            let mut of_sample = self
                .facts
                .runs
                .values()
                .filter(|run| run.sample == Some(sample));
            let answered = of_sample.find_map(|run| {
                let (ended, outcome) = run.ended?;
                let here = run.process == effect.process && ended < effect.called;
                (here && outcome == Outcome::Completed && self.calls_in(run) == 0).then_some(ended)
            });
            if let Some(ended) = answered {
                let what = format!(
                    "the handler had reported success for sample {sample} before it began its effect"
                );
                self.found(
                    Defect::AnsweredTooEarly,
                    Some(sample),
                    what,
                    vec![ended, effect.called],
                );
                self.excused.insert(sample);
            }
        }
    }

    fn calls_in(&self, run: &Run) -> usize {
        self.facts
            .calls
            .values()
            .filter(|effect| {
                effect
                    .run
                    .and_then(|number| self.facts.runs.get(&number))
                    .is_some_and(|of| std::ptr::eq(of, run))
            })
            .count()
    }

    /// Every event has all its effects.
    fn losses(&mut self, expected: &Steps) {
        let had = self.facts.steps();
        let unfinished: BTreeSet<usize> = (self.facts.unfinished.iter())
            .filter_map(|(_, message)| self.facts.sent.get(message).map(|sent| sent.sample))
            .collect();
        let mut wanted: BTreeSet<(usize, &str)> = BTreeSet::new();
        for sample in self.facts.samples() {
            if self.excused.contains(&sample) || unfinished.contains(&sample) {
                continue;
            }
            match (expected.get(&sample), had.get(&sample)) {
                (Some(steps), _) if !steps.is_empty() => {
                    wanted.extend(steps.iter().map(|step| (sample, step.as_str())));
                }
                // Any step will do.
                (_, Some(_)) => {}
                (_, None) => drop(wanted.insert((sample, ""))),
            }
        }
        let mut happened: BTreeMap<(usize, &str), u64> = BTreeMap::new();
        for (sample, steps) in &had {
            happened.extend(steps.iter().map(|step| ((*sample, step.as_str()), 1)));
        }
        let lost = judge_effects(&wanted, &BTreeSet::new(), &happened, |_| 0).lost;
        let mut named = BTreeSet::new();
        for (sample, step) in lost.into_iter().filter(|(sample, _)| named.insert(*sample)) {
            let needs_no_fault = expected.get(&sample).is_some_and(BTreeSet::is_empty);
            self.loss(sample, step, needs_no_fault);
        }
    }

    /// No effect needs a fault to happen.
    fn unexpected(&mut self, expected: &Steps) {
        let mut found: BTreeMap<usize, (usize, String)> = BTreeMap::new();
        for effect in self.facts.calls.values() {
            let (Some(sample), Some(place)) = (effect.sample, effect.performed) else {
                continue;
            };
            let is_expected = expected
                .get(&sample)
                .is_none_or(|steps| steps.is_empty() || steps.contains(&effect.step));
            if !is_expected && !effect.in_duplicate && !self.excused.contains(&sample) {
                found.entry(sample).or_insert((place, effect.step.clone()));
            }
        }
        for (sample, (place, step)) in found {
            let after = self
                .facts
                .faults_between(sample, self.facts.first_run(sample), place);
            let what = format!(
                "the effect {step:?} of sample {sample} happened{}, and without a fault it does not",
                words_of(&after)
            );
            self.found_after(
                Defect::UnexpectedEffect,
                Some(sample),
                what,
                vec![place],
                after,
            );
        }
    }

    fn loss(&mut self, sample: usize, step: &str, needs_no_fault: bool) {
        let runs: Vec<&Run> = self
            .facts
            .runs
            .values()
            .filter(|run| run.sample == Some(sample))
            .collect();
        let last = runs.iter().rev().find(|run| run.has(Outcome::Completed));
        let ended = last
            .and_then(|run| run.ended)
            .map_or(usize::MAX, |(place, _)| place);
        let began = runs.iter().map(|run| run.began).min().unwrap_or(0);
        // Also those after the run: a kill loses what it has left for later.
        let after = self.facts.faults_between(sample, began, usize::MAX);
        let calls: Vec<&Effect> = self
            .facts
            .calls
            .values()
            .filter(|call| call.sample == Some(sample))
            .collect();
        let was_killed = after.iter().any(|fault| {
            matches!(
                fault,
                Fault::KillAfterCompleted | Fault::KillBeforeCompleted | Fault::StoreLoss
            )
        });
        let has_failed = runs.iter().any(|run| {
            run.ended
                .is_some_and(|(_, outcome)| outcome != Outcome::Completed)
        });
        let (defect, why) = if calls
            .iter()
            .filter(|call| last.is_some_and(|run| call.called > run.began && call.called < ended))
            .any(|call| call.is_refused())
        {
            (
                Defect::SwallowedError,
                "the handler reported success although the call had failed",
            )
        } else if needs_no_fault {
            (
                Defect::LostEffect,
                "it was handled without it, as it is without a fault",
            )
        } else if calls.is_empty() && last.is_some() && was_killed {
            (
                Defect::AnsweredTooEarly,
                "the handler had reported success before the process was killed",
            )
        } else if last.is_some() && has_failed {
            (
                Defect::MarkedBeforeEffect,
                "an attempt failed, and the next one reported success without the effect",
            )
        } else {
            (Defect::LostEffect, "it was handled without it")
        };
        let step = if step.is_empty() {
            String::new()
        } else {
            format!(" {step:?}")
        };
        let what = format!(
            "the effect{step} of sample {sample} never happened{}: {why}",
            words_of(&after)
        );
        let mut places: Vec<usize> = runs.iter().map(|run| run.began).collect();
        places.extend(
            runs.iter()
                .filter_map(|run| run.ended.map(|(place, _)| place)),
        );
        self.found_after(defect, Some(sample), what, places, after);
    }

    /// Runs for one event return one result.
    fn results(&mut self) {
        let mut results: BTreeMap<usize, BTreeMap<&str, usize>> = BTreeMap::new();
        for run in self
            .facts
            .runs
            .values()
            .filter(|run| run.has(Outcome::Completed))
        {
            if let (Some(sample), Some(result), Some((place, _))) =
                (run.sample, &run.result, run.ended)
            {
                results
                    .entry(sample)
                    .or_default()
                    .entry(result)
                    .or_insert(place);
            }
        }
        for (sample, results) in results {
            // What happens twice has different answers, and that is named already.
            let is_named = self
                .violations
                .iter()
                .any(|violation| violation.sample == Some(sample));
            if results.len() > 1 && !self.excused.contains(&sample) && !is_named {
                let what = format!(
                    "runs for sample {sample} returned {} different results",
                    results.len()
                );
                self.found(
                    Defect::DifferentResults,
                    Some(sample),
                    what,
                    results.into_values().collect(),
                );
            }
        }
    }

    /// Every message is finished, and everything ends when it is asked to.
    fn ends(&mut self) {
        for (place, error) in &self.facts.failed {
            self.found(
                Defect::ConsumerFailed,
                None,
                format!("a consumer failed: {error}"),
                vec![*place],
            );
        }
        let mut named = BTreeSet::new();
        for (place, message) in &self.facts.unfinished {
            let Some(sent) = self
                .facts
                .sent
                .get(message)
                .filter(|sent| sent.form != crate::history::Form::Poison)
            else {
                continue;
            };
            if named.insert(sent.sample) && !self.excused.contains(&sent.sample) {
                let what = format!("a message of sample {} was never finished", sent.sample);
                self.found(Defect::Unfinished, Some(sent.sample), what, vec![*place]);
            }
        }
        // A run whose lease was lost is dropped, too, but not after the time that a stop gives it.
        let until_ms = self
            .facts
            .stopping
            .and_then(|place| self.at_ms(place))
            .map_or(u64::MAX, |at_ms| at_ms + STOP_DEADLINE_MS);
        let dropped = self.facts.runs.values().find_map(|run| match run.ended {
            Some((place, Outcome::Dropped)) if self.at_ms(place) >= Some(until_ms) => Some(place),
            _ => None,
        });
        if let Some(place) = self.facts.hung.first().copied().or(dropped) {
            let what = "a handler or worker did not end after it was asked to stop".to_owned();
            self.found(Defect::DoesNotStop, None, what, vec![place]);
        }
    }

    /// The time of the event at this place.
    fn at_ms(&self, place: usize) -> Option<u64> {
        self.events.get(place).map(|event| event.at_ms)
    }
}

/// The faults in words: " after kill-after-effect".
fn words_of(faults: &[Fault]) -> String {
    let names: Vec<&str> = faults.iter().map(|fault| fault.as_str()).collect();
    if names.is_empty() {
        String::new()
    } else {
        format!(" after {}", names.join(", "))
    }
}

#[cfg(test)]
#[path = "judge_tests.rs"]
mod tests;
