//! The rounds of a trial, each played with a store and a scope of its own, and those of findings made shorter.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use oncegate_core::key::Scope;

use crate::defect::Defect;
use crate::facts::Steps;
use crate::fault::Fault;
use crate::history::Event;
use crate::judge::judge;
use crate::round::{Round, RoundError, RoundSettings, play};
use crate::samples::Samples;
use crate::schedule::Schedule;
use crate::trial::TrialError;
use crate::verdict::Verdict;

/// What the rounds of a trial are made of.
pub(crate) struct Rounds {
    pub(crate) seed: u64,
    pub(crate) faults: Vec<Fault>,
    /// What is left out of every round but the first.
    pub(crate) left_out: Vec<Fault>,
    /// The samples of every round but the first; empty for all.
    pub(crate) only_samples: Vec<usize>,
    pub(crate) samples: Arc<Samples>,
    pub(crate) settings: Arc<RoundSettings>,
    /// How many were played: the number of the next scope.
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
        if number == 0 {
            return schedule;
        }
        let schedule = self.left_out.iter().fold(schedule, |schedule, fault| schedule.without(*fault));
        if self.only_samples.is_empty() { schedule } else { schedule.with_only(&self.only_samples) }
    }

    /// Leaves out faults and samples that findings do not need.
    pub(crate) async fn shorten(&self, verdict: &mut Verdict, expected: &Steps) -> Result<(), TrialError> {
        let candidates = verdict.findings.iter().map(|finding| Candidate {
            defect: finding.violation.defect,
            sample: finding.violation.sample,
            schedule: self.schedule(finding.round),
        });
        for mut candidate in candidates.collect::<Vec<_>>() {
            // The first round has every sample, because it shows which effects each of them has.
            if candidate.schedule.round > 0 {
                self.leave_faults_out(&mut candidate, verdict, expected).await?;
                self.leave_samples_out(&mut candidate, verdict, expected).await?;
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
            if !shorter.faults.is_empty() && self.shows(candidate.defect, &shorter, verdict, expected).await?
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
            if self.shows(candidate.defect, &alone, verdict, expected).await? {
                return Ok(());
            }
        }
        for sample in samples.into_iter().filter(|sample| !own.contains(sample)) {
            let mut others = candidate.schedule.samples();
            others.remove(&sample);
            let others: Vec<usize> = others.into_iter().collect();
            let shorter = candidate.schedule.clone().with_only(&others);
            if !others.is_empty() && self.shows(candidate.defect, &shorter, verdict, expected).await? {
                candidate.schedule = shorter;
            }
        }
        Ok(())
    }

    /// Plays a shorter schedule. If it shows the defect, too, the finding is replaced by that of this round.
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
        let round = Round::new(schedule.clone(), samples, &key, store, topic, scope, settings);
        let events = play(round).await.map_err(|error| match error {
            RoundError::Launch(error) => TrialError::Launch(error),
            RoundError::Broker(error) => TrialError::Broker(error),
            RoundError::Witness(error) => TrialError::Witness(error),
        })?;
        Ok(Played { schedule, events })
    }
}
