//! The rounds of a trial, each played with a store and a scope of its own, and those of findings
//! made shorter.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use oncegate_core::key::Scope;
use oncegate_runtime::{Message, Origin};

use crate::defect::Defect;
use crate::facts::{Facts, Steps};
use crate::fault::Fault;
use crate::history::{Event, Form, Outcome, What};
use crate::judge::{Violation, judge, judge_keys};
use crate::round::{Round, RoundError, RoundSettings, play};
use crate::samples::Samples;
use crate::schedule::Schedule;
use crate::trial::TrialError;
use crate::verdict::Verdict;

/// The parts of which the rounds of a trial are made.
pub(crate) struct Rounds {
    pub(crate) seed: u64,
    pub(crate) faults: Vec<Fault>,
    /// The faults that are left out of every round but the first.
    pub(crate) left_out: Vec<Fault>,
    /// The samples of every round but the first; empty for all.
    pub(crate) only_samples: Vec<usize>,
    /// The most samples of the first round, and of the others; all if there is none. A slow handler
    /// would use up the time of the trial for them, and most faults would never begin.
    pub(crate) most_of_first: Option<usize>,
    pub(crate) most_of_others: Option<usize>,
    pub(crate) samples: Arc<Samples>,
    pub(crate) settings: Arc<RoundSettings>,
    /// The number of rounds that were played: the number of the next scope.
    pub(crate) played: AtomicU64,
}

/// A round that has ended.
pub(crate) struct Played {
    pub(crate) schedule: Schedule,
    pub(crate) events: Vec<Event>,
}

/// A finding that may need less than its round has.
struct Candidate {
    defect: Defect,
    sample: Option<usize>,
    /// The shortest schedule so far that has shown it.
    schedule: Schedule,
}

impl Rounds {
    pub(crate) async fn play(&self, number: u64) -> Result<Played, TrialError> {
        self.play_schedule(self.schedule(number)).await
    }

    fn schedule(&self, number: u64) -> Schedule {
        let schedule = Schedule::new(self.seed, number, self.samples.count(), &self.faults);
        let most = if number == 0 {
            self.most_of_first
        } else {
            self.most_of_others
        };
        let left_out = if number == 0 { &[][..] } else { &self.left_out };
        let schedule = left_out
            .iter()
            .fold(schedule, |schedule, fault| schedule.without(*fault));
        if !self.only_samples.is_empty() {
            return schedule.with_only(&self.only_samples);
        }
        most.map_or(schedule.clone(), |most| schedule.with_most(most))
    }

    /// Plays a round of one sample without faults, and returns how long its handler ran; `None` if
    /// it has not completed.
    pub(crate) async fn handler_time(&self) -> Result<Option<Duration>, TrialError> {
        let schedule = Schedule::new(self.seed, 0, self.samples.count(), &[]).with_most(1);
        let events = self.play_schedule(schedule).await?.events;
        let runs = Facts::of(&events).runs;
        let completed = runs
            .values()
            .filter(|run| run.has(Outcome::Completed))
            .filter_map(|run| {
                let began = events.get(run.began)?.at_ms;
                Some(Duration::from_millis(
                    events.get(run.ended?.0)?.at_ms.saturating_sub(began),
                ))
            });
        Ok(completed.max())
    }

    /// Judges the keys of all samples, of which the first round has a part. Returns the whole of
    /// that round, too.
    pub(crate) fn judged_keys(&self) -> Result<(Schedule, Vec<Violation>), TrialError> {
        let key = self
            .settings
            .key
            .compile(&self.settings.scope)
            .map_err(TrialError::Key)?;
        let whole = Schedule::new(self.seed, 0, self.samples.count(), &self.faults);
        let mut rng = fastrand::Rng::with_seed(self.seed);
        let produced = whole.messages.iter().enumerate().map(|(message, planned)| {
            let payload = match planned.form {
                Form::Duplicate => self.samples.duplicate(planned.sample, &mut rng),
                _ => self.samples.original(planned.sample),
            };
            let route = Arc::clone(&self.settings.route);
            let origin = Origin::Other(message.to_string().into());
            let key = key
                .derive(
                    &route,
                    &Message::new(Arc::clone(&route), origin, Some(payload)),
                )
                .ok();
            let key = key.map(|key| key.as_str().to_owned());
            let what = What::Produced {
                message,
                sample: planned.sample,
                form: planned.form,
                key,
            };
            Event {
                at_ms: 0,
                process: None,
                what,
            }
        });
        let violations = judge_keys(&produced.collect::<Vec<_>>());
        Ok((whole, violations))
    }

    /// Leaves out faults and samples that findings do not need.
    pub(crate) async fn shorten(
        &self,
        verdict: &mut Verdict,
        expected: &Steps,
    ) -> Result<(), TrialError> {
        let candidates = verdict.findings.iter().map(|finding| Candidate {
            defect: finding.violation.defect,
            sample: finding.violation.sample,
            schedule: self.schedule(finding.round),
        });
        for mut candidate in candidates.collect::<Vec<_>>() {
            // The first round has every sample, because it shows which effects each of them has.
            if candidate.schedule.round > 0 {
                self.leave_faults_out(&mut candidate, verdict, expected)
                    .await?;
                self.leave_samples_out(&mut candidate, verdict, expected)
                    .await?;
            }
        }
        Ok(())
    }

    /// Leaves out one fault after the other. One stays, because a round without any shows nothing.
    async fn leave_faults_out(
        &self,
        candidate: &mut Candidate,
        verdict: &mut Verdict,
        expected: &Steps,
    ) -> Result<(), TrialError> {
        for fault in candidate.schedule.faults.clone() {
            let shorter = candidate.schedule.clone().without(fault);
            if !shorter.faults.is_empty()
                && self
                    .shows(candidate.defect, &shorter, verdict, expected)
                    .await?
            {
                candidate.schedule = shorter;
            }
        }
        Ok(())
    }

    /// Leaves out all samples but the one of the finding; if it needs more, one after the other.
    async fn leave_samples_out(
        &self,
        candidate: &mut Candidate,
        verdict: &mut Verdict,
        expected: &Steps,
    ) -> Result<(), TrialError> {
        let samples = candidate.schedule.samples();
        let own: Vec<usize> = candidate.sample.into_iter().collect();
        if !own.is_empty() && samples.len() > 1 {
            let alone = candidate.schedule.clone().with_only(&own);
            if self
                .shows(candidate.defect, &alone, verdict, expected)
                .await?
            {
                return Ok(());
            }
        }
        for sample in samples.into_iter().filter(|sample| !own.contains(sample)) {
            let mut others = candidate.schedule.samples();
            others.remove(&sample);
            let others: Vec<usize> = others.into_iter().collect();
            let shorter = candidate.schedule.clone().with_only(&others);
            if !others.is_empty()
                && self
                    .shows(candidate.defect, &shorter, verdict, expected)
                    .await?
            {
                candidate.schedule = shorter;
            }
        }
        Ok(())
    }

    /// Plays a shorter schedule. If it shows the defect, too, the finding is replaced by that of
    /// this round.
    async fn shows(
        &self,
        defect: Defect,
        schedule: &Schedule,
        verdict: &mut Verdict,
        expected: &Steps,
    ) -> Result<bool, TrialError> {
        let played = self.play_schedule(schedule.clone()).await?;
        let violations = judge(&played.events, expected);
        Ok(verdict.simplify(defect, &played.schedule, &played.events, violations))
    }

    async fn play_schedule(&self, schedule: Schedule) -> Result<Played, TrialError> {
        let number = self.played.fetch_add(1, Ordering::Relaxed);
        let scope = format!("{}-{number}", self.settings.scope);
        let scope = Scope::new(scope).map_err(TrialError::Key)?;
        let key = self.settings.key.compile(&scope).map_err(TrialError::Key)?;
        let store = (self.settings.open)().await.map_err(TrialError::Store)?;
        let topic = match &self.settings.broker {
            Some(broker) => {
                let topic = broker.topic(scope.as_str(), schedule.partitions).await;
                Some(topic.map_err(TrialError::Broker)?)
            }
            None => None,
        };
        let settings = Arc::clone(&self.settings);
        let samples = Arc::clone(&self.samples);
        let round = Round::new(
            schedule.clone(),
            samples,
            &key,
            store,
            topic,
            scope,
            settings,
        );
        let events = play(round).await.map_err(|error| match error {
            RoundError::Launch(error) => TrialError::Launch(error),
            RoundError::Broker(error) => TrialError::Broker(error),
            RoundError::Witness(error) => TrialError::Witness(error),
        })?;
        Ok(Played { schedule, events })
    }
}
