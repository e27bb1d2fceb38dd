//! The verdict of a trial.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::time::Duration;

use oncegate_core::reason::counted;
use schemars::JsonSchema;
use serde::{Serialize, Serializer};

use crate::defect::Defect;
use crate::fault::Fault;
use crate::history::{Event, What};
use crate::judge::Violation;
use crate::schedule::Schedule;
use crate::trial::Progress;

/// The most events of a finding's timeline.
const TIMELINE_MOST: usize = 400;
/// The share of the faults that must have begun for a trial that passes, in percent.
const LEAST_TRIED_PERCENT: usize = 75;

/// The verdict of a trial: the defects that were found, each with the simplest round that shows it.
#[derive(Clone, Debug)]
pub struct Verdict {
    /// The seed of the trial.
    pub seed: u64,
    /// The number of rounds that were played, the first one without faults among them.
    pub rounds: u64,
    /// The number of messages that were sent.
    pub messages: u64,
    /// The number of runs of a handler.
    pub runs: u64,
    /// The number of effects that happened.
    pub effects: u64,
    /// The number of calls that could not be assigned to a sample, and were not judged.
    pub unassigned: u64,
    /// The number of times that each fault has begun.
    pub faults: BTreeMap<Fault, u64>,
    /// The faults that the trial was to try; none where it repeats one round.
    pub asked_for: BTreeSet<Fault>,
    /// The defects, one finding for each kind: first those that need no fault.
    pub findings: Vec<Finding>,
    /// The time that the trial took.
    pub took: Duration,
}

/// A defect that was found, in the simplest round that shows it.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct Finding {
    /// The violation; its places of events are those of [`timeline`](Self::timeline).
    #[serde(flatten)]
    pub violation: Violation,
    /// The defect of another finding that may be the only reason for this one.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Defect")]
    pub follows: Option<Defect>,
    /// The number of the round.
    pub round: u64,
    /// The faults of the round that the defect needs.
    pub faults: Vec<Fault>,
    /// The other faults of the round: without them, the defect was found as well.
    pub left_out: Vec<Fault>,
    /// The samples to which the round was reduced, because the defect needs no others; empty when
    /// all are needed.
    #[schemars(inner(range(min = 1)))]
    pub only_samples: Vec<usize>,
    /// The number of rounds in which the defect was found.
    pub rounds: u64,
    /// The time for which the trial had run when the defect was first found.
    #[serde(rename = "found_after_seconds", serialize_with = "as_seconds")]
    #[schemars(with = "f64", range(min = 0))]
    pub found_after: Duration,
    /// The events of the round that concern the sample, or all processes.
    pub timeline: Vec<Event>,
}

fn as_seconds<S: Serializer>(time: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_f64(time.as_secs_f64())
}

impl Verdict {
    pub(crate) fn new(seed: u64) -> Self {
        Self {
            seed,
            rounds: 0,
            messages: 0,
            runs: 0,
            effects: 0,
            unassigned: 0,
            faults: BTreeMap::new(),
            asked_for: BTreeSet::new(),
            findings: Vec::new(),
            took: Duration::ZERO,
        }
    }

    /// Returns whether nothing was found.
    pub fn is_clean(&self) -> bool {
        self.findings.is_empty()
    }

    /// Returns whether enough of the faults were tried, three of four, for a trial that passes.
    pub fn is_complete(&self) -> bool {
        let tried = self.asked_for.len() - self.untried().len();
        tried * 100 >= self.asked_for.len() * LEAST_TRIED_PERCENT
    }

    /// Returns the faults that the trial was to try, and that have not begun: it was too short for
    /// them, or what they begin with never happened.
    pub fn untried(&self) -> Vec<Fault> {
        Fault::ALL
            .into_iter()
            .filter(|fault| self.is_untried(*fault))
            .collect()
    }

    fn is_untried(&self, fault: Fault) -> bool {
        self.asked_for.contains(&fault) && !self.faults.contains_key(&fault)
    }

    /// Returns the findings without those that may only follow from others.
    pub fn roots(&self) -> impl Iterator<Item = &Finding> {
        self.findings
            .iter()
            .filter(|finding| finding.follows.is_none())
    }

    /// Returns the kinds of defects that were found.
    pub fn defects(&self) -> BTreeSet<Defect> {
        self.findings
            .iter()
            .map(|finding| finding.violation.defect)
            .collect()
    }

    /// Ends a test that has found something, or in which too few of the faults were tried.
    ///
    /// # Panics
    /// When a defect was found; the text has each, with the seed and the round that repeat it. Also
    /// when the verdict is not [complete](Self::is_complete).
    #[track_caller]
    pub fn assert_clean(&self) {
        assert!(self.is_clean() && self.is_complete(), "{self}");
    }

    /// Returns whether a defect was found that keeps a handler from calling the downstream service
    /// at all.
    pub(crate) fn explains_silence(&self) -> bool {
        let explains = [
            Defect::NoKey,
            Defect::GaveUp,
            Defect::Unfinished,
            Defect::ConsumerFailed,
        ];
        self.findings
            .iter()
            .any(|finding| explains.contains(&finding.violation.defect))
    }

    pub(crate) fn progress(&self) -> Progress {
        Progress {
            rounds: self.rounds,
            messages: self.messages,
            faults: self.faults.values().sum(),
            defects: self.findings.len(),
        }
    }

    pub(crate) fn add(
        &mut self,
        schedule: &Schedule,
        events: &[Event],
        violations: Vec<Violation>,
    ) {
        self.rounds += 1;
        for event in events {
            match &event.what {
                What::Produced { .. } => self.messages += 1,
                What::Began { .. } => self.runs += 1,
                What::Performed { .. } => self.effects += 1,
                What::Listed { sample, .. } => {
                    self.effects += 1;
                    self.unassigned += u64::from(sample.is_none() && !schedule.has(Fault::Poison));
                }
                What::FaultBegan { fault, .. } => *self.faults.entry(*fault).or_default() += 1,
                // The values of poison are those of no sample.
                What::Called { sample: None, .. } if !schedule.has(Fault::Poison) => {
                    self.unassigned += 1;
                }
                _ => {}
            }
        }
        self.add_violations(schedule, events, violations);
    }

    /// Adds what a round has shown.
    pub(crate) fn add_violations(
        &mut self,
        schedule: &Schedule,
        events: &[Event],
        violations: Vec<Violation>,
    ) {
        let mut counted = BTreeSet::new();
        for violation in violations {
            let is_first = counted.insert(violation.defect);
            self.add_finding(
                Finding::new(schedule, events, violation, self.took),
                is_first,
            );
        }
    }

    /// Replaces the finding of this defect by that of a round with fewer faults or samples, if the
    /// round shows it, too.
    pub(crate) fn simplify(
        &mut self,
        defect: Defect,
        schedule: &Schedule,
        events: &[Event],
        violations: Vec<Violation>,
    ) -> bool {
        let known = self
            .findings
            .iter_mut()
            .find(|finding| finding.violation.defect == defect);
        let same = violations
            .into_iter()
            .find(|violation| violation.defect == defect);
        let (Some(known), Some(violation)) = (known, same) else {
            return false;
        };
        let mut left_out = std::mem::take(&mut known.left_out);
        left_out.extend(known.faults.iter().filter(|fault| !schedule.has(**fault)));
        let rounds = known.rounds;
        *known = Finding {
            rounds,
            left_out,
            ..Finding::new(schedule, events, violation, known.found_after)
        };
        true
    }

    /// Orders the findings, those that need no fault first, and marks those that may follow from
    /// another one.
    pub(crate) fn put_in_order(&mut self) {
        self.findings
            .sort_by_key(|finding| (finding.needs_fault(), finding.violation.defect));
        let found: Vec<Root> = self.findings.iter().map(Root::of).collect();
        for finding in &mut self.findings {
            let own = Root::of(finding);
            let root = found.iter().find(|root| root.may_explain(own));
            finding.follows = root.map(|root| root.defect);
        }
    }

    /// Keeps the simplest finding of each defect.
    fn add_finding(&mut self, finding: Finding, is_first_of_round: bool) {
        let same = self
            .findings
            .iter_mut()
            .find(|known| known.violation.defect == finding.violation.defect);
        let Some(known) = same else {
            self.findings.push(finding);
            self.findings
                .sort_by_key(|finding| finding.violation.defect);
            return;
        };
        let rounds = known.rounds + u64::from(is_first_of_round);
        // The first rounds have the faults that happen most often.
        if (finding.faults.len(), finding.round) < (known.faults.len(), known.round) {
            *known = Finding {
                found_after: known.found_after,
                ..finding
            };
        }
        known.rounds = rounds;
    }
}

/// A finding, as the possible reason for another one.
#[derive(Clone, Copy)]
struct Root {
    defect: Defect,
    needs_fault: bool,
}

impl Root {
    fn of(finding: &Finding) -> Self {
        Self {
            defect: finding.violation.defect,
            needs_fault: finding.needs_fault(),
        }
    }

    fn may_explain(self, other: Self) -> bool {
        match (self.needs_fault, other.needs_fault) {
            // What happens without a fault does not follow from what needs one.
            (true, false) => false,
            (false, true) => {
                let leads_to = self.defect.leads_to().iter();
                leads_to
                    .chain(self.defect.leads_to_under_faults())
                    .any(|defect| *defect == other.defect)
            }
            _ => self.defect.leads_to().contains(&other.defect),
        }
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_clean() {
            let faults: u64 = self.faults.values().sum();
            write!(
                f,
                "nothing found in {} with {} and {} (seed {})",
                counted(self.rounds, "round"),
                counted(self.messages, "message"),
                counted(faults, "fault"),
                self.seed
            )?;
            let untried = self.untried();
            let of = self.asked_for.len();
            if !self.is_complete() {
                let tried = of - untried.len();
                write!(
                    f,
                    ", but only {tried} of {of} faults were tried: not {}",
                    names(&untried)
                )?;
            }
            return Ok(());
        }
        for finding in &self.findings {
            let Violation { defect, what, .. } = &finding.violation;
            let without = match finding.left_out.as_slice() {
                [] => String::new(),
                left_out => format!(" without {left_out:?}"),
            };
            let only = match finding.only_samples.as_slice() {
                [] => String::new(),
                samples => format!(", only samples {samples:?}"),
            };
            writeln!(
                f,
                "{defect}: {what} (seed {}, round {}{without}{only})",
                self.seed, finding.round
            )?;
            writeln!(f, "    {} {}", defect.meaning(), defect.remedy())?;
        }
        Ok(())
    }
}

impl Finding {
    /// Returns whether the defect shows only in a round with faults. The first round has none: its
    /// duplicates are what producers send every day.
    fn needs_fault(&self) -> bool {
        self.round > 0 && !self.faults.is_empty()
    }

    fn new(
        schedule: &Schedule,
        events: &[Event],
        mut violation: Violation,
        found_after: Duration,
    ) -> Self {
        let places = timeline(events, violation.sample);
        violation.events = violation
            .events
            .iter()
            .filter_map(|place| places.binary_search(place).ok())
            .collect();
        let timeline = places
            .iter()
            .filter_map(|place| events.get(*place))
            .cloned()
            .collect();
        Self {
            violation,
            follows: None,
            round: schedule.round,
            faults: schedule.faults.clone(),
            left_out: Vec::new(),
            only_samples: schedule.only_samples.clone(),
            rounds: 1,
            found_after,
            timeline,
        }
    }
}

/// The names of faults, with commas.
fn names(faults: &[Fault]) -> String {
    faults
        .iter()
        .map(|fault| fault.as_str())
        .collect::<Vec<_>>()
        .join(", ")
}

/// The places of the events that concern the sample or all processes.
fn timeline(events: &[Event], sample: Option<usize>) -> Vec<usize> {
    let mut messages = BTreeSet::new();
    let mut keys = BTreeSet::new();
    let mut runs = BTreeSet::new();
    let mut calls = BTreeSet::new();
    let mut places = Vec::new();
    for (place, event) in events.iter().enumerate() {
        let concerns = match &event.what {
            What::Produced {
                message,
                sample: of,
                key,
                ..
            } => {
                let concerns = sample.is_none_or(|sample| sample == *of);
                if concerns {
                    messages.insert(*message);
                    keys.extend(key.as_deref());
                }
                concerns
            }
            What::Delivered { message }
            | What::ToldOfDuplicate { message }
            | What::Acked { message, .. }
            | What::DeadLettered { message, .. }
            | What::Unfinished { message } => messages.contains(message),
            What::Claimed { key, .. } | What::Completed { key, .. } => keys.contains(key.as_str()),
            What::Began { run, message, .. } => messages.contains(message) && runs.insert(*run),
            What::Cancelled { run } | What::Ended { run, .. } => runs.contains(run),
            What::Called {
                call, sample: of, ..
            } => (sample.is_none() || *of == sample) && calls.insert(*call),
            What::Performed { call }
            | What::Repeated { call, .. }
            | What::Returned { call, .. } => calls.contains(call),
            What::Listed { sample: of, .. } => sample.is_none() || *of == sample,
            What::FaultBegan { fault, sample: of } => {
                !fault.concerns_one_sample() || sample.is_none() || *of == sample
            }
            _ => true,
        };
        if concerns && places.len() < TIMELINE_MOST {
            places.push(place);
        }
    }
    places
}

#[cfg(test)]
mod tests {
    use super::*;

    fn root(defect: Defect, needs_fault: bool) -> Root {
        Root {
            defect,
            needs_fault,
        }
    }

    #[test]
    fn what_needs_no_fault_does_not_follow_from_what_needs_one() {
        use Defect::{AnsweredTooEarly, KeyTooNarrow, LostEffect};
        for (cause, result, follows) in [
            (root(AnsweredTooEarly, true), root(LostEffect, false), false),
            (root(AnsweredTooEarly, false), root(LostEffect, false), true),
            (root(AnsweredTooEarly, true), root(LostEffect, true), true),
            (root(LostEffect, false), root(AnsweredTooEarly, true), true),
            (root(LostEffect, true), root(AnsweredTooEarly, true), false),
            (
                root(LostEffect, false),
                root(AnsweredTooEarly, false),
                false,
            ),
            (root(KeyTooNarrow, false), root(LostEffect, true), true),
        ] {
            let of = (cause.defect, cause.needs_fault, result.needs_fault);
            assert_eq!(cause.may_explain(result), follows, "{of:?}");
        }
    }
}
