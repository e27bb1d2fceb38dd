//! A history, ordered by what it says about messages, runs and calls.

use std::collections::{BTreeMap, BTreeSet};

use crate::fault::Fault;
use crate::history::{CallAnswer, Event, Form, Outcome, What};

/// A message that was sent.
#[derive(Debug)]
pub(crate) struct Sent {
    pub(crate) sample: usize,
    pub(crate) form: Form,
    pub(crate) key: Option<String>,
}

impl Sent {
    /// Returns whether the message stands for its sample: it is the sample or a duplicate of it.
    pub(crate) fn is_event(&self) -> bool {
        matches!(self.form, Form::Original | Form::Duplicate)
    }
}

/// A run of a handler.
#[derive(Debug)]
pub(crate) struct Run {
    pub(crate) process: Option<u32>,
    /// The sample, unless the message is poison.
    pub(crate) sample: Option<usize>,
    pub(crate) began: usize,
    pub(crate) cancelled: Option<usize>,
    pub(crate) ended: Option<(usize, Outcome)>,
    pub(crate) result: Option<String>,
}

impl Run {
    pub(crate) fn has(&self, outcome: Outcome) -> bool {
        self.ended.is_some_and(|(_, ended)| ended == outcome)
    }
}

/// A call of the downstream service.
#[derive(Debug)]
pub(crate) struct Effect {
    pub(crate) called: usize,
    pub(crate) process: Option<u32>,
    pub(crate) sample: Option<usize>,
    pub(crate) step: String,
    pub(crate) idempotency_key: Option<String>,
    pub(crate) run: Option<u64>,
    pub(crate) in_duplicate: bool,
    /// The place of the event that says that it had its effect.
    pub(crate) performed: Option<usize>,
    /// The first call with its key.
    pub(crate) repeats: Option<u64>,
    /// `true` if the body differs from that of the first call with its key.
    pub(crate) has_other_body: bool,
    pub(crate) answer: Option<CallAnswer>,
}

impl Effect {
    /// The place of the effect, or else of its call.
    pub(crate) fn place(&self) -> usize {
        self.performed.unwrap_or(self.called)
    }

    /// Returns whether the call had no effect, and the handler was not told of one.
    pub(crate) fn is_refused(&self) -> bool {
        let is_unanswered = matches!(self.answer, Some(CallAnswer::Refused | CallAnswer::Lost));
        is_unanswered && self.performed.is_none() && self.repeats.is_none()
    }
}

/// The effects that a sample has, by their steps.
pub(crate) type Steps = BTreeMap<usize, BTreeSet<String>>;

/// The facts of a history. Places are indices of its events.
#[derive(Debug, Default)]
pub(crate) struct Facts {
    pub(crate) sent: BTreeMap<usize, Sent>,
    pub(crate) runs: BTreeMap<u64, Run>,
    pub(crate) calls: BTreeMap<u64, Effect>,
    pub(crate) faults: Vec<(usize, Fault, Option<usize>)>,
    /// The messages that became dead letters, with place and cause.
    pub(crate) letters: BTreeMap<usize, (usize, &'static str)>,
    pub(crate) unfinished: Vec<(usize, usize)>,
    /// The effects that the witness has listed, by sample and step.
    pub(crate) listed: BTreeMap<(usize, String), Vec<usize>>,
    pub(crate) hung: Vec<usize>,
    pub(crate) failed: Vec<(usize, String)>,
    pub(crate) stopping: Option<usize>,
}

impl Facts {
    pub(crate) fn of(events: &[Event]) -> Self {
        let mut facts = Self::default();
        for (place, event) in events.iter().enumerate() {
            facts.add(place, event);
        }
        facts
    }

    fn add(&mut self, place: usize, event: &Event) {
        match &event.what {
            What::Produced {
                message,
                sample,
                form,
                key,
            } => {
                let sent = Sent {
                    sample: *sample,
                    form: *form,
                    key: key.clone(),
                };
                self.sent.insert(*message, sent);
            }
            What::Began { run, message, .. } => {
                let of_event = self.sent.get(message).filter(|sent| sent.is_event());
                let run_facts = Run {
                    process: event.process,
                    sample: of_event.map(|sent| sent.sample),
                    began: place,
                    cancelled: None,
                    ended: None,
                    result: None,
                };
                self.runs.insert(*run, run_facts);
            }
            What::Cancelled { run } => {
                if let Some(run) = self.runs.get_mut(run) {
                    run.cancelled = Some(place);
                }
            }
            What::Ended {
                run,
                outcome,
                result,
            } => {
                if let Some(run) = self.runs.get_mut(run) {
                    run.ended = Some((place, *outcome));
                    run.result.clone_from(result);
                }
            }
            What::FaultBegan { fault, sample } => self.faults.push((place, *fault, *sample)),
            What::DeadLettered { message, cause } => {
                self.letters.insert(*message, (place, cause));
            }
            What::Listed {
                sample: Some(sample),
                step,
                ..
            } => {
                self.listed
                    .entry((*sample, step.clone()))
                    .or_default()
                    .push(place);
            }
            What::Unfinished { message } => self.unfinished.push((place, *message)),
            What::Hung => self.hung.push(place),
            What::ConsumerFailed { error } => self.failed.push((place, error.clone())),
            What::Stopping => self.stopping = Some(place),
            _ => self.add_call(place, event),
        }
    }

    fn add_call(&mut self, place: usize, event: &Event) {
        match &event.what {
            What::Called {
                call,
                sample,
                step,
                idempotency_key,
                run,
                in_duplicate,
            } => {
                let effect = Effect {
                    called: place,
                    process: event.process,
                    sample: *sample,
                    step: step.clone(),
                    idempotency_key: idempotency_key.clone(),
                    run: *run,
                    in_duplicate: *in_duplicate,
                    performed: None,
                    repeats: None,
                    has_other_body: false,
                    answer: None,
                };
                self.calls.insert(*call, effect);
            }
            What::Performed { call } => self.change(*call, |effect| effect.performed = Some(place)),
            What::Repeated {
                call,
                first,
                other_body,
            } => self.change(*call, |effect| {
                effect.repeats = Some(*first);
                effect.has_other_body = *other_body;
            }),
            What::Returned { call, answer } => {
                self.change(*call, |effect| effect.answer = Some(*answer));
            }
            _ => {}
        }
    }

    fn change(&mut self, call: u64, change: impl FnOnce(&mut Effect)) {
        if let Some(effect) = self.calls.get_mut(&call) {
            change(effect);
        }
    }

    /// The numbers of the samples whose events were sent.
    pub(crate) fn samples(&self) -> BTreeSet<usize> {
        self.sent
            .values()
            .filter(|sent| sent.is_event())
            .map(|sent| sent.sample)
            .collect()
    }

    /// The keys of each sample.
    pub(crate) fn keys(&self) -> BTreeMap<usize, BTreeSet<&str>> {
        let mut keys: BTreeMap<usize, BTreeSet<&str>> = BTreeMap::new();
        for sent in self.sent.values().filter(|sent| sent.is_event()) {
            keys.entry(sent.sample)
                .or_default()
                .extend(sent.key.as_deref());
        }
        keys
    }

    /// The calls that had an effect, by sample and step, in the order of their effects.
    pub(crate) fn performed(&self) -> BTreeMap<(usize, &str), Vec<&Effect>> {
        let mut performed: BTreeMap<(usize, &str), Vec<&Effect>> = BTreeMap::new();
        for effect in self
            .calls
            .values()
            .filter(|effect| effect.performed.is_some())
        {
            if let Some(sample) = effect.sample {
                performed
                    .entry((sample, &effect.step))
                    .or_default()
                    .push(effect);
            }
        }
        for effects in performed.values_mut() {
            effects.sort_by_key(|effect| effect.performed);
        }
        performed
    }

    /// The steps that had an effect, by sample.
    pub(crate) fn steps(&self) -> Steps {
        let mut steps = Steps::new();
        for (sample, step) in self.performed().into_keys() {
            steps.entry(sample).or_default().insert(step.to_owned());
        }
        for (sample, step) in self.listed.keys() {
            steps.entry(*sample).or_default().insert(step.clone());
        }
        steps
    }

    /// The steps that had an effect, by sample; a sample that was sent and had none has no step.
    pub(crate) fn expected(&self) -> Steps {
        let mut steps = self.steps();
        for sample in self.samples() {
            steps.entry(sample).or_default();
        }
        steps
    }

    /// The place where the first run for the sample began; 0 when there was none.
    pub(crate) fn first_run(&self, sample: usize) -> usize {
        let runs = self.runs.values().filter(|run| run.sample == Some(sample));
        runs.map(|run| run.began).min().unwrap_or(0)
    }

    /// The number of repetitions of an effect that the faults between two places can explain: one
    /// each, whichever sample they began with, because the messages of a batch run again together.
    pub(crate) fn explanations(&self, from: usize, to: usize) -> u64 {
        let mut count = 0;
        for (place, fault, _) in &self.faults {
            if !fault.explains_a_repetition() {
                continue;
            }
            if fault.lasts_all_round() {
                return u64::MAX;
            }
            count += u64::from(Self::is_between(*place, from, to));
        }
        count
    }

    /// A fault begins with its call, so it may stand right before the first effect.
    fn is_between(place: usize, from: usize, to: usize) -> bool {
        place <= to && place + 4 >= from
    }

    /// The faults that concern the sample, or all, between two places.
    pub(crate) fn faults_between(&self, sample: usize, from: usize, to: usize) -> Vec<Fault> {
        let mut faults = Vec::new();
        for (place, fault, of_sample) in &self.faults {
            let concerns = !fault.concerns_one_sample()
                || of_sample.is_none_or(|of_sample| of_sample == sample);
            if Self::is_between(*place, from, to) && concerns && !faults.contains(fault) {
                faults.push(*fault);
            }
        }
        faults
    }
}
