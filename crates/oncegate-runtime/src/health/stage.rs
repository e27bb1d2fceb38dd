//! The stages of messages in a consumer: the attempts in progress, and the messages that wait.

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::seconds;
use super::words::Words;

/// An attempt in progress.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Run {
    /// The gate's scope.
    pub scope: String,
    /// The origin of the message.
    pub origin: String,
    /// The stage of its attempt.
    pub stage: Stage,
    /// The time in this stage.
    #[serde(rename = "in_stage_for_seconds", with = "seconds")]
    pub in_stage_for: Duration,
    /// The longest time that a handler may run.
    #[serde(rename = "max_run_seconds", with = "seconds")]
    pub max_run: Duration,
}

impl Run {
    /// Returns whether its handler has run for longer than allowed.
    pub(crate) fn is_overdue(&self) -> bool {
        matches!(self.stage, Stage::Running | Stage::Answering) && self.in_stage_for > self.max_run
    }
}

impl fmt::Display for Run {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { scope, origin, .. } = self;
        write!(
            f,
            "the handler of {origin} in `{scope}` has run for {}",
            Words(self.in_stage_for)
        )
    }
}

/// The stage of a message in the consumer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Stage {
    /// Behind another in its lane.
    Behind,
    /// First in its lanes, waiting for a permit.
    Ready,
    /// Waiting until its time comes.
    Parked(WaitCause),
    /// The message's shard of the store is away.
    HeldBack,
    /// Claiming its key.
    Claiming,
    /// Waiting for its handler's turn; the key is claimed.
    Claimed,
    /// Waiting until nothing else runs in this process.
    Quarantined,
    /// The handler runs.
    Running,
    /// The handler's `duplicate` runs.
    Answering,
    /// The outcome is being stored.
    Ending,
    /// The dead letter is being written.
    DeadLettering,
}

impl fmt::Display for Stage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Behind => "waits behind another",
            Self::Ready => "waits for a permit",
            Self::Parked(WaitCause::Retry) => "waits for its retry",
            Self::Parked(WaitCause::Later) => "waits until its handler wants it again",
            Self::Parked(WaitCause::Busy) => "waits for another worker",
            Self::Parked(WaitCause::Lapse) => "waits until its own lease is over",
            Self::Parked(WaitCause::Unreadable) => "waits, for its record cannot be read",
            Self::Parked(WaitCause::Result) => "waits for the result store",
            Self::Parked(WaitCause::Breaker) => "waits for its handler, which is paused",
            Self::Parked(WaitCause::Operator) => "waits, for an operator has paused its scope",
            Self::Parked(WaitCause::Tenant) => "waits for another of its tenant",
            Self::Parked(WaitCause::Alone) => "waits to run alone",
            Self::HeldBack => "waits for its store",
            Self::Claiming => "is being claimed",
            Self::Claimed => "is claimed, and waits for its turn",
            Self::Quarantined => "waits to run alone",
            Self::Running => "is running",
            Self::Answering => "is being answered as a duplicate",
            Self::Ending => "is being completed",
            Self::DeadLettering => "is being written to the dead letters",
        })
    }
}

/// The cause for which a message waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum WaitCause {
    /// The next attempt is not due.
    Retry,
    /// The message cannot be done yet: its handler wants it later.
    Later,
    /// Another worker has its key, or its record's retry is not due.
    Busy,
    /// The lease must be over first: the handler was cancelled and has not returned an outcome.
    Lapse,
    /// The record cannot be read.
    Unreadable,
    /// The result store does not answer.
    Result,
    /// The handler's circuit breaker is open.
    Breaker,
    /// An operator has paused the scope.
    Operator,
    /// The tenant has as many handlers running as allowed.
    Tenant,
    /// Earlier attempts ended their processes, so it must run alone, and other handlers run.
    Alone,
}

/// A message that is not finished.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Unfinished {
    /// The gate's scope.
    pub scope: String,
    /// The origin.
    pub origin: String,
    /// The stage.
    pub stage: Stage,
    /// The time in this stage; for a parked message, since it first waited for this cause.
    #[serde(rename = "in_stage_for_seconds", with = "seconds")]
    pub in_stage_for: Duration,
    /// Time since it was received.
    #[serde(rename = "age_seconds", with = "seconds")]
    pub age: Duration,
    /// The key of its record, `scope:digest`. `None` while a first attempt is in progress, and for
    /// a message without a key.
    #[serde(default)]
    pub key: Option<String>,
    /// The time until its next attempt; `None` when it waits for no point in time.
    #[serde(rename = "next_try_seconds", with = "seconds::optional", default)]
    pub next_try: Option<Duration>,
    /// The failed attempts, as far as this process knows of them.
    #[serde(default)]
    pub failed: Option<FailedAttempts>,
}

/// The failed attempts of a message.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct FailedAttempts {
    /// The number of failed attempts: those that its record counts, or those of this process if
    /// they are more. Failures in an outage are not counted by a record.
    pub times: u32,
    /// The time since the first of them in this process.
    #[serde(rename = "for_seconds", with = "seconds")]
    pub lasts: Duration,
    /// The beginning of the last reason, up to 500 bytes, as the handler gave it.
    pub reason: String,
}

/// The longest reason that a status shows, in bytes.
const REASON_MAX_BYTES: usize = 500;

/// Returns the part of a reason that a status shows.
pub(crate) fn beginning(reason: &str) -> &str {
    let end = reason.floor_char_boundary(REASON_MAX_BYTES);
    reason.get(..end).unwrap_or_default()
}

impl fmt::Display for Unfinished {
    /// `pay/0@703 failed 14 times, next try in 23 s: ledger 7 is locked`, or for one that has
    /// not failed `pay/0@703, which waits for another worker for 3 min`
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(failed) = &self.failed {
            let times = failed.times;
            let word = if times == 1 { "time" } else { "times" };
            write!(f, "{} failed {times} {word}, ", self.origin)?;
            return match (self.stage, self.next_try) {
                (Stage::Parked(WaitCause::Retry), Some(next)) if next.is_zero() => {
                    write!(f, "next try now: {}", failed.reason)
                }
                (Stage::Parked(WaitCause::Retry), Some(next)) => {
                    write!(f, "next try in {}: {}", Words(next), failed.reason)
                }
                (stage, _) => write!(f, "and {stage}: {}", failed.reason),
            };
        }
        write!(
            f,
            "{}, which {} for {}",
            self.origin,
            self.stage,
            Words(self.in_stage_for)
        )
    }
}
