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

/// The consequence of an attempt that ended without an outcome, so that its effect may have
/// happened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(
    feature = "config",
    derive(serde::Deserialize, serde::Serialize, schemars::JsonSchema),
    serde(rename_all = "snake_case")
)]
#[non_exhaustive]
pub enum AfterUnknown {
    /// Another attempt, marked as recovered. The default.
    #[default]
    Retry,
    /// No attempt: the message is given up, and its dead letter has the cause `outcome_unknown`. A
    /// person who has looked downstream says what is right: `oncegate complete`, or a redrive.
    #[cfg_attr(feature = "config", serde(alias = "give-up"))]
    GiveUp,
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
    /// An earlier attempt ended without an outcome, and must not be followed by another.
    OutcomeUnknown,
}

/// Returns why an attempt that was granted must not run; `None` if it may. `is_unknown` tells
/// whether an earlier attempt ended without an outcome; `limit` is `None` where it is not looked
/// at.
///
/// This is the one place where a second run after an unknown outcome is decided: such an attempt is
/// always granted first, because only its claim shows that the earlier one is over.
pub(crate) fn before_run(
    attempt: u32,
    is_unknown: bool,
    after_unknown: AfterUnknown,
    limit: Option<AttemptLimit>,
) -> Option<GiveUp> {
    if is_unknown && after_unknown == AfterUnknown::GiveUp {
        return Some(GiveUp::OutcomeUnknown);
    }
    limit
        .is_some_and(|limit| limit.is_over(attempt))
        .then_some(GiveUp::AttemptsUsedUp)
}

/// The beginning of the reason of every message that is given up because an outcome is unknown.
pub const OUTCOME_UNKNOWN: &str = "outcome unknown: ";

/// Returns the reason of a message that is given up at the grant of this attempt, because an
/// earlier one ended without an outcome. `last` is what this process knows of that one.
pub(crate) fn outcome_unknown(attempt: u32, last: Option<&str>) -> String {
    let earlier = match attempt.saturating_sub(1) {
        0 => "an attempt".to_owned(),
        earlier => format!("attempt {earlier}"),
    };
    let process = std::process::id();
    let host = match std::env::var("HOSTNAME") {
        Ok(host) if !host.is_empty() => format!(" on {host}"),
        _ => String::new(),
    };
    let last = match last {
        Some(last) => format!(" ({last})"),
        None => String::new(),
    };
    format!(
        "{OUTCOME_UNKNOWN}{earlier} ended without reporting one{last}, so its effect may have happened; found by process {process}{host}"
    )
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

    // invariant: outcome-unknown
    #[test]
    fn only_the_setting_lets_a_run_follow_an_unknown_outcome() {
        use AfterUnknown::{GiveUp as Give, Retry};
        let limit = Some(AttemptLimit(3));
        let unknown = Some(GiveUp::OutcomeUnknown);
        let used_up = Some(GiveUp::AttemptsUsedUp);
        let table = [
            // is unknown, setting, at the last attempt, over the limit
            (false, Retry, None, used_up),
            (false, Give, None, used_up),
            (true, Retry, None, used_up),
            (true, Give, unknown, unknown),
        ];
        for (is_unknown, setting, last, over) in table {
            let found = [3, 4].map(|attempt| before_run(attempt, is_unknown, setting, limit));
            assert_eq!(found, [last, over], "{is_unknown} {setting:?}");
            let without_limit = before_run(4, is_unknown, setting, None);
            assert_eq!(without_limit, last, "{is_unknown} {setting:?}");
        }
    }

    #[test]
    fn the_reason_names_the_attempt_and_fits_into_a_record() {
        let reason = outcome_unknown(3, Some("cancelled"));
        assert!(
            reason.starts_with("outcome unknown: attempt 2 ended") && reason.contains("cancelled"),
            "{reason}"
        );
        assert!(outcome_unknown(1, None).contains("an attempt ended"));
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
