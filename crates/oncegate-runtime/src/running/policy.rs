//! The consequence of an attempt that has no result: one table for every door. It has no clock, no
//! store and no message.

use std::time::Duration;

use crate::failure::{Advice, Failure};
use crate::observe::RunOutcome;

/// The number of attempts after which a message is given up.
///
/// Only attempts that began are compared: one that ends its process has begun, too, so the next
/// grant is over the limit, and ends the message without a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttemptLimit(pub u32);

impl AttemptLimit {
    /// Returns whether the attempt with this number must not run: all were used before.
    pub fn is_over(self, attempt: u32) -> bool {
        attempt > self.0
    }

    /// The reason for which a message is given up whose attempt, of this number, must not run.
    pub(crate) fn used_up(attempt: u32) -> String {
        let attempts = attempt.saturating_sub(1);
        format!("{attempts} attempts have failed or ended their process")
    }

    /// Returns whether the attempt with this number is the last one, if it counts.
    pub fn is_last(self, attempt: u32) -> bool {
        attempt >= self.0
    }
}

/// A run that has failed, as events name it.
pub(crate) fn outcome_of(failure: &Failure) -> RunOutcome {
    match failure.advice() {
        Advice::GiveUp => RunOutcome::GaveUp,
        Advice::Later { .. } => RunOutcome::Later,
        _ => RunOutcome::Failed,
    }
}

/// The consequence of an attempt that has no result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Consequence {
    /// No attempt more.
    GiveUp(GiveUp),
    /// Another attempt, after this long or the back-off's delay.
    Retry {
        after: Option<Duration>,
        counted: bool,
    },
    /// The same after this long; this attempt was no failure.
    Later { after: Duration },
    /// Another attempt when this one's lease is over, because its effect may have happened.
    Unknown,
}

/// The reason for which a message is given up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum GiveUp {
    /// The handler says so.
    Permanent,
    AttemptsUsedUp,
}

/// Returns the consequence of a failure. `counted` tells whether a failure of this attempt counts:
/// one that something else has cut short does not.
pub(crate) fn after_failure(
    advice: Advice,
    attempt: u32,
    counted: bool,
    limit: AttemptLimit,
) -> Consequence {
    let (after, counted) = match advice {
        Advice::GiveUp => return Consequence::GiveUp(GiveUp::Permanent),
        Advice::Later { after } => return Consequence::Later { after },
        Advice::Unknown => return Consequence::Unknown,
        Advice::NotRun => (None, false),
        Advice::Retry { after } => (after, counted),
    };
    if counted && limit.is_last(attempt) {
        return Consequence::GiveUp(GiveUp::AttemptsUsedUp);
    }
    Consequence::Retry { after, counted }
}

#[cfg(test)]
mod tests {
    use super::*;

    const AFTER: Duration = Duration::from_secs(7);

    #[test]
    fn every_failure_has_one_consequence() {
        let retry = Advice::Retry { after: None };
        let asked = Advice::Retry { after: Some(AFTER) };
        let later = Advice::Later { after: AFTER };
        let again = |after, counted| Consequence::Retry { after, counted };
        let permanent = Consequence::GiveUp(GiveUp::Permanent);
        let used_up = Consequence::GiveUp(GiveUp::AttemptsUsedUp);
        let table = [
            // advice, counted, before the last attempt, at the last one
            (retry, true, again(None, true), used_up),
            (asked, true, again(Some(AFTER), true), used_up),
            (retry, false, again(None, false), again(None, false)),
            (Advice::NotRun, true, again(None, false), again(None, false)),
            (
                later,
                true,
                Consequence::Later { after: AFTER },
                Consequence::Later { after: AFTER },
            ),
            (
                Advice::Unknown,
                true,
                Consequence::Unknown,
                Consequence::Unknown,
            ),
            (Advice::GiveUp, true, permanent, permanent),
            (Advice::GiveUp, false, permanent, permanent),
        ];
        let limit = AttemptLimit(3);
        for (advice, counted, before, at_last) in table {
            for (attempt, expected) in [(1, before), (2, before), (3, at_last), (4, at_last)] {
                assert_eq!(
                    after_failure(advice, attempt, counted, limit),
                    expected,
                    "{advice:?} of attempt {attempt}, counted: {counted}"
                );
            }
        }
    }

    #[test]
    fn a_grant_over_the_limit_does_not_run() {
        let limit = AttemptLimit(3);
        assert_eq!(
            [2, 3, 4].map(|attempt| limit.is_over(attempt)),
            [false, false, true]
        );
    }
}
