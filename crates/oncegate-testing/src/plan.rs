//! The rounds that a trial plays, and their sizes.

use std::time::Duration;

use crate::facts::Steps;
use crate::judge::judge;
use crate::rounds::Played;
use crate::trial::ProgressHook;
use crate::verdict::Verdict;

/// The rounds to play.
pub(crate) struct Plan {
    pub(crate) rounds: u64,
    pub(crate) time: Option<Duration>,
    pub(crate) only: Option<u64>,
    pub(crate) parallel: usize,
    pub(crate) progress: Option<Box<ProgressHook>>,
}

/// The first round may use up this part of the time of a trial.
const FIRST_ROUND_PARTS: u32 = 4;
/// The number of runs of a handler for a sample of a round with faults, in the mean.
const RUNS_PER_SAMPLE: u32 = 3;

impl Plan {
    /// The time of a trial that has one.
    pub(crate) fn timed(&self) -> Option<Duration> {
        self.time.filter(|_| self.only.is_none())
    }

    /// The number of samples that the first round may have with a handler that runs for so long.
    pub(crate) fn most_of_first(&self, handler: Option<Duration>) -> Option<usize> {
        let time = self.timed()? / FIRST_ROUND_PARTS;
        Some(fitting(time, handler?))
    }

    /// The number of samples that the other rounds may have, so that each fault begins in the time
    /// that is left.
    pub(crate) fn most_of_others(
        &self,
        handler: Option<Duration>,
        elapsed: Duration,
        faults: usize,
    ) -> Option<usize> {
        let left = self.timed()?.saturating_sub(elapsed);
        let parallel = u32::try_from(self.parallel).unwrap_or(u32::MAX);
        let rounds = u32::try_from(faults)
            .unwrap_or(u32::MAX)
            .div_ceil(parallel)
            .max(1);
        Some(fitting(left / rounds, handler? * RUNS_PER_SAMPLE))
    }

    pub(crate) fn add(&self, verdict: &mut Verdict, played: &Played, expected: &Steps) {
        let violations = judge(&played.events, expected);
        verdict.add(&played.schedule, &played.events, violations);
        if let Some(progress) = &self.progress {
            progress(&verdict.progress());
        }
    }
}

/// The number of times that a handler can run in this time, one run after the other: once at least.
fn fitting(time: Duration, handler: Duration) -> usize {
    let times = time
        .as_millis()
        .checked_div(handler.as_millis())
        .unwrap_or(u128::MAX);
    usize::try_from(times).unwrap_or(usize::MAX).max(1)
}
