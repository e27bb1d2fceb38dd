//! The health of a running consumer: what it does now, and whether that is well.
//!
//! [`Consumer::monitor`](crate::Consumer::monitor) returns a [`Monitor`](crate::consumer::Monitor),
//! which reports a [`Status`] (facts) and a [`Health`] (their meaning, in words). The facts come
//! from the consumer and its source; one pure function, [`Health::of`], decides what they mean.
//!
//! There are two questions, for two kinds of probes:
//!
//! - [`Health::is_live`], for `/healthz`: `false` only when a restart would help.
//! - [`Health::is_ready`], for `/readyz`: `false` also while it starts or stops, while no shard of
//!   its store is known to answer (also when no message has asked it, after [`STORE_LIMIT`]), while
//!   its source delivers no messages because its calls fail ([`SOURCE_LIMIT`]), while nothing
//!   proceeds because dead letters cannot be written, while an operator has paused all of its
//!   scopes, and while the processes of its worker are not ready or end without an outcome.
//!
//! # What counts as a stall
//!
//! An old message alone is no stall: behind a backlog every message is old. A message that waits
//! for a reason is none either: its retry is not due, another worker has its key, it is behind such
//! a message, or it waits for a permit while others run. Nor is a handler that runs within its
//! `max_run`: it is reported as slow when it takes longer than its lease and longer than three
//! times the 99th percentile. A stall is a consumer that has work and does none:
//!
//! | sign | limit |
//! |---|---|
//! | messages are ready and permits are free, and no handler starts | [`QUIET_LIMIT`] |
//! | a partition has messages and delivers none, though it is not paused and no limit is reached | [`QUIET_LIMIT`] |
//! | the broker's client is not polled | [`POLL_LIMIT`] |
//! | the broker's client has no connection, though brokers answer another one; it is replaced | [`CONNECTION_LIMIT`] |
//! | the consumer's own loop does not run, because handlers block the runtime's threads | [`LOOP_LIMIT`] |
//! | every permit is held by a handler that has run for longer than allowed | [`Gate::max_run`](crate::Gate::max_run) |

mod failures;
mod reason;
mod rules;
mod seconds;
mod stage;
mod status;
mod waits;
mod words;

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

pub use failures::FailureLog;
pub use reason::Reason;
pub(crate) use stage::beginning;
pub use stage::{FailedAttempts, Run, Stage, Unfinished, WaitCause};
pub use status::{
    BreakerStatus, Messages, PartitionStatus, PauseCause, Permits, Phase, Rates, Refusals,
    ScopePause, ScopeStatus, SourceFailure, SourceStatus, Status, StoreOutage, WorkerStatus,
};

/// The shortest time without any delivery or end, although there is work, that counts as a stall:
/// 30 s.
pub const QUIET_LIMIT: Duration = Duration::from_secs(30);
/// The longest time of a broker's client without a poll: 60 s. A revoke that waits for handlers
/// takes less.
pub const POLL_LIMIT: Duration = Duration::from_secs(60);
/// The longest time of a broker's client without any connection: 30 s. While no broker answers
/// another client either, the consumer is not ready, but a restart would not help.
pub const CONNECTION_LIMIT: Duration = Duration::from_secs(30);
/// The longest time between two runs of the consumer's loop: 10 s. It is scheduled every second.
pub const LOOP_LIMIT: Duration = Duration::from_secs(10);
/// The time that an operation of the source fails before it counts: 10 s. Shorter failures are
/// retried and pass.
pub const SOURCE_LIMIT: Duration = Duration::from_secs(10);
/// The time that the checks of a store fail before it counts as away though no message has found it
/// so: 10 s. A store that gives a message no answer counts at once.
pub const STORE_LIMIT: Duration = Duration::from_secs(10);
/// The longest time that commits may lag behind the finished messages: 30 s.
pub const COMMIT_LIMIT: Duration = Duration::from_secs(30);
/// The number of failed attempts of one message from which on a consumer counts as degraded: 5.
pub const FAILURES_REPORTED: u32 = 5;
/// A transaction that keeps messages from being read may be open for this long: the default of
/// `transaction.timeout.ms`.
pub const TRANSACTION_LIMIT: Duration = Duration::from_secs(60);

/// The health of a consumer, with the reasons if something is wrong.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "health", rename_all = "snake_case")]
pub enum Health {
    /// Nothing is wrong.
    Healthy,
    /// The consumer continues, or waits for a known cause.
    Degraded {
        /// The reasons.
        reasons: Vec<Reason>,
    },
    /// The consumer has work and does none.
    Stalled {
        /// The reasons, and everything else that is wrong.
        reasons: Vec<Reason>,
    },
}

impl Health {
    /// Judges a status. It uses nothing else, and no clock.
    pub fn of(status: &Status) -> Self {
        let reasons = rules::reasons(status);
        if reasons.iter().any(Reason::is_stall) {
            Self::Stalled { reasons }
        } else if reasons.is_empty() {
            Self::Healthy
        } else {
            Self::Degraded { reasons }
        }
    }

    /// Returns everything that is wrong.
    pub fn reasons(&self) -> &[Reason] {
        match self {
            Self::Healthy => &[],
            Self::Degraded { reasons } | Self::Stalled { reasons } => reasons,
        }
    }

    /// Returns `false` when a restart of the process would help: for `/healthz`.
    ///
    /// A restart does not help when a store or broker is away, or a handler is slow.
    pub fn is_live(&self) -> bool {
        !self.reasons().iter().any(Reason::is_stall)
    }

    /// Returns whether the consumer receives and handles messages: for `/readyz`. `false` also
    /// while it starts or stops.
    pub fn is_ready(&self) -> bool {
        !self
            .reasons()
            .iter()
            .any(|reason| reason.is_stall() || reason.is_standstill())
    }
}

impl fmt::Display for Health {
    /// `healthy`, or `degraded: …; …`, or `stalled: …; …`
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Healthy => "healthy",
            Self::Degraded { .. } => "degraded",
            Self::Stalled { .. } => "stalled",
        })?;
        for (n, reason) in self.reasons().iter().enumerate() {
            write!(f, "{} {reason}", if n == 0 { ":" } else { ";" })?;
        }
        Ok(())
    }
}
