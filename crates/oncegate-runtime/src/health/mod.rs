//! The health of a running consumer: what it does now, and whether that is well.
//!
//! [`Consumer::monitor`](crate::Consumer::monitor) returns a [`Monitor`](crate::consumer::Monitor),
//! which reports a [`Status`] (facts) and a [`Health`] (what they mean, in words). The facts come
//! from the consumer and its source; one pure function, [`Health::of`], decides what they mean.
//!
//! There are two questions, for two kinds of probes:
//!
//! - [`Health::is_live`], for `/healthz`: `false` only when a restart would help.
//! - [`Health::is_ready`], for `/readyz`: `false` also while it starts or stops, while no shard of
//!   its store is known to answer (also when no message has asked it, after [`STORE_LIMIT`]), while
//!   its source delivers no messages because its calls fail ([`SOURCE_LIMIT`]), while nothing
//!   proceeds because dead letters cannot be written, and while the processes of its worker are not
//!   ready or end without an outcome.
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
mod rules;
mod seconds;
mod status;

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

pub use failures::FailureLog;
pub use status::{
    Messages, PartitionStatus, PauseCause, Permits, Phase, Rates, Refusals, Run, ScopeStatus,
    SourceFailure, SourceStatus, Stage, Status, StoreOutage, Unfinished, WaitCause, WorkerStatus,
};

/// The shortest time without any delivery or end, although there is work, that counts as a stall:
/// 30 s.
pub const QUIET_LIMIT: Duration = Duration::from_secs(30);
/// How long a broker's client may go without a poll: 60 s. A revoke that waits for handlers takes
/// less.
pub const POLL_LIMIT: Duration = Duration::from_secs(60);
/// How long a broker's client may be without any connection: 30 s. While no broker answers another
/// client either, the consumer is not ready, but a restart would not help.
pub const CONNECTION_LIMIT: Duration = Duration::from_secs(30);
/// How long the consumer's loop may go without running: 10 s. It is scheduled every second.
pub const LOOP_LIMIT: Duration = Duration::from_secs(10);
/// How long an operation of the source may fail before it counts: 10 s. Shorter failures are
/// retried and pass.
pub const SOURCE_LIMIT: Duration = Duration::from_secs(10);
/// How long the checks of a store may fail before it counts as away though no message has found it
/// so: 10 s. A store that gives a message no answer counts at once.
pub const STORE_LIMIT: Duration = Duration::from_secs(10);
/// How long commits may lag behind the finished messages: 30 s.
pub const COMMIT_LIMIT: Duration = Duration::from_secs(30);

/// Whether a consumer is healthy, and if not, why not.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "health", rename_all = "snake_case")]
pub enum Health {
    /// Nothing is wrong.
    Healthy,
    /// It continues, or waits for a known cause.
    Degraded {
        /// What is wrong.
        reasons: Vec<Reason>,
    },
    /// It has work and does none.
    Stalled {
        /// Why, and what else is wrong.
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

    /// Returns what is wrong; empty when nothing is.
    pub fn reasons(&self) -> &[Reason] {
        match self {
            Self::Healthy => &[],
            Self::Degraded { reasons } | Self::Stalled { reasons } => reasons,
        }
    }

    /// Returns `false` when a restart of the process would help: for `/healthz`.
    ///
    /// A store or broker that is away is no such case, and neither is a slow handler.
    pub fn is_live(&self) -> bool {
        !self.reasons().iter().any(Reason::is_stall)
    }

    /// Whether it receives and handles messages: for `/readyz`. `false` also while it starts or
    /// stops.
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

/// Something that is wrong. Its `Display` names what to look at, and contains nothing of a payload.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "reason", rename_all = "snake_case")]
#[non_exhaustive]
pub enum Reason {
    /// It has not begun to receive.
    Starting,
    /// It was asked to stop, and lets running handlers end.
    Stopping,
    /// It has ended.
    Stopped {
        /// Why it ended by itself; `None` when it was asked to stop.
        error: Option<String>,
    },
    /// A shard of a scope's store does not answer: no message with a key there runs, and none is
    /// acknowledged.
    StoreAway {
        /// The scope.
        scope: String,
        /// The store's last error.
        error: String,
        /// For how long.
        #[serde(rename = "for_seconds", with = "seconds")]
        lasts: Duration,
        /// Whether no shard is known to answer, so that nothing runs at all: each is away, or was
        /// not asked since the first outage began.
        all: bool,
    },
    /// An operation of the source fails repeatedly: the broker is away, does not answer, or
    /// refuses.
    SourceFails {
        /// Which: `receive`, `delete`, `visibility`, `broker`, `fetch`, `join`, `offset`, `read`,
        /// `dead_letter`, or `open` at the start.
        operation: String,
        /// The last error.
        error: String,
        /// Since the first failure.
        #[serde(rename = "for_seconds", with = "seconds")]
        lasts: Duration,
        /// Whether messages are not delivered because of it, those of some partitions at least.
        stops_delivery: bool,
    },
    /// A handler fails for all messages alike: its circuit breaker is open, and one message at a
    /// time probes.
    HandlerPaused {
        /// The scope.
        scope: String,
        /// Whether every handler is paused, so that only probes run.
        all: bool,
    },
    /// A handler takes far longer than usual.
    SlowHandler {
        /// Which.
        run: Run,
        /// The 99th percentile of the handlers' times.
        #[serde(rename = "usual_seconds", with = "seconds")]
        usual: Duration,
    },
    /// A handler has run for longer than allowed, was cancelled, and has not returned.
    OverdueHandler {
        /// Which.
        run: Run,
    },
    /// Every permit is held by a handler that has run for longer than allowed.
    NoPermitLeft {
        /// How many there are.
        permits: u32,
    },
    /// Messages are ready and permits are free, but no handler starts.
    NothingStarts {
        /// How many are ready.
        ready: usize,
        /// For how long.
        #[serde(rename = "for_seconds", with = "seconds")]
        lasts: Duration,
    },
    /// The outcome of a handler that has ended cannot be stored, so its message is not
    /// acknowledged.
    NotStored {
        /// Which.
        run: Run,
    },
    /// A partition has messages and delivers none.
    NothingDelivered {
        /// The topic or queue.
        topic: String,
        /// The partition.
        partition: i32,
        /// How many messages are waiting there.
        undelivered: u64,
        /// For how long nothing has been delivered.
        #[serde(rename = "for_seconds", with = "seconds")]
        lasts: Duration,
    },
    /// The broker's client is not polled.
    NotPolled {
        /// For how long.
        #[serde(rename = "for_seconds", with = "seconds")]
        lasts: Duration,
    },
    /// The broker's client has no connection to any broker.
    NotConnected {
        /// For how long.
        #[serde(rename = "for_seconds", with = "seconds")]
        lasts: Duration,
        /// Whether the brokers answer another client of this process.
        others_connect: bool,
    },
    /// The consumer's own loop does not run: handlers block the threads of its runtime.
    Blocked {
        /// For how long.
        #[serde(rename = "for_seconds", with = "seconds")]
        lasts: Duration,
    },
    /// Finished messages are not committed: after a crash they would be delivered again.
    NotCommitted {
        /// The topic.
        topic: String,
        /// The partition.
        partition: i32,
        /// For how long.
        #[serde(rename = "for_seconds", with = "seconds")]
        lasts: Duration,
    },
    /// So much of a partition waits behind its first unfinished message that its fetching is
    /// paused.
    SpanFull {
        /// The topic.
        topic: String,
        /// The partition.
        partition: i32,
        /// The first unfinished message, if it is known.
        first: Option<Unfinished>,
    },
    /// Another worker has held a message's key for longer than a run may take.
    BusyElsewhere {
        /// The message that waits.
        message: Unfinished,
        /// For how long.
        #[serde(rename = "for_seconds", with = "seconds")]
        lasts: Duration,
    },
    /// A message waits because its record cannot be read.
    Unreadable {
        /// The message that waits.
        message: Unfinished,
    },
    /// A dead letter cannot be written. Its message is not acknowledged, and holds no permit in the
    /// meantime.
    LetterNotWritten {
        /// Which.
        run: Run,
    },
    /// No message proceeds: each one that could is waiting for its dead letter to be written, or is
    /// behind such a message.
    OnlyLettersLeft {
        /// How many dead letters cannot be written.
        letters: u32,
    },
    /// No process of the worker is ready, so no message is handled.
    WorkerNotReady {
        /// Why not.
        why: String,
    },
    /// Processes of the worker end one after another, and no message between them has an outcome.
    WorkerEnds {
        /// How many in a row.
        in_a_row: u32,
        /// How the last of them has ended.
        why: String,
        /// Whether they are so many that nothing is handled.
        all: bool,
    },
    /// Many messages were given up; at the dead-letter limit the consumer stops.
    Flood(Refusals),
}

impl Reason {
    /// Whether there is work and none of it is done, so that a restart would help.
    pub fn is_stall(&self) -> bool {
        matches!(
            self,
            Self::NoPermitLeft { .. }
                | Self::NothingStarts { .. }
                | Self::NothingDelivered { .. }
                | Self::NotPolled { .. }
                | Self::NotConnected {
                    others_connect: true,
                    ..
                }
                | Self::Blocked { .. }
                | Self::Stopped { error: Some(_) }
        )
    }

    /// Whether no message is handled because of it, for a reason that a restart would not fix.
    pub(crate) fn is_standstill(&self) -> bool {
        matches!(
            self,
            Self::Starting
                | Self::Stopping
                | Self::Stopped { error: None }
                | Self::NotConnected {
                    others_connect: false,
                    ..
                }
                | Self::StoreAway { all: true, .. }
                | Self::HandlerPaused { all: true, .. }
                | Self::SourceFails {
                    stops_delivery: true,
                    ..
                }
                | Self::OnlyLettersLeft { .. }
                | Self::WorkerNotReady { .. }
                | Self::WorkerEnds { all: true, .. }
        )
    }

    /// The name in metrics: lower case, one word.
    pub const fn as_str(&self) -> &'static str {
        match self {
            Self::Starting => "starting",
            Self::Stopping => "stopping",
            Self::Stopped { .. } => "stopped",
            Self::StoreAway { .. } => "store_away",
            Self::SourceFails { .. } => "source_fails",
            Self::HandlerPaused { .. } => "handler_paused",
            Self::SlowHandler { .. } => "slow_handler",
            Self::OverdueHandler { .. } => "overdue_handler",
            Self::NoPermitLeft { .. } => "no_permit_left",
            Self::NothingStarts { .. } => "nothing_starts",
            Self::NotStored { .. } => "not_stored",
            Self::NothingDelivered { .. } => "nothing_delivered",
            Self::NotPolled { .. } => "not_polled",
            Self::NotConnected { .. } => "not_connected",
            Self::Blocked { .. } => "blocked",
            Self::NotCommitted { .. } => "not_committed",
            Self::SpanFull { .. } => "span_full",
            Self::BusyElsewhere { .. } => "busy_elsewhere",
            Self::Unreadable { .. } => "unreadable",
            Self::LetterNotWritten { .. } => "letter_not_written",
            Self::OnlyLettersLeft { .. } => "only_letters_left",
            Self::WorkerNotReady { .. } => "worker_not_ready",
            Self::WorkerEnds { .. } => "worker_ends",
            Self::Flood(_) => "flood",
        }
    }
}

impl fmt::Display for Reason {
    #[expect(
        clippy::too_many_lines,
        reason = "one sentence for each reason, and nothing else"
    )]
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Starting => f.write_str("it is starting"),
            Self::Stopping => f.write_str("it is stopping"),
            Self::Stopped { error: None } => f.write_str("it was stopped"),
            Self::Stopped { error: Some(error) } => write!(f, "it has ended: {error}"),
            Self::StoreAway {
                scope,
                error,
                lasts,
                ..
            } => {
                write!(
                    f,
                    "the store of `{scope}` has been failing for {}: {error}",
                    Words(*lasts)
                )
            }
            Self::SourceFails {
                operation,
                error,
                lasts,
                ..
            } => {
                write!(
                    f,
                    "the source's operation `{operation}` has failed for {}: {error}",
                    Words(*lasts)
                )
            }
            Self::HandlerPaused { scope, .. } => {
                write!(
                    f,
                    "the handler of `{scope}` fails for all alike, and is paused"
                )
            }
            Self::SlowHandler { run, usual } => {
                write!(f, "{run}; 99 of 100 take no more than {}", Words(*usual))
            }
            Self::OverdueHandler { run } => {
                write!(
                    f,
                    "{run}, longer than `max_run` ({}), and does not return",
                    Words(run.max_run)
                )
            }
            Self::NoPermitLeft { permits } => {
                write!(
                    f,
                    "all {permits} permits are with handlers that have run for longer than they may"
                )
            }
            Self::NothingStarts { ready, lasts } => {
                write!(
                    f,
                    "{ready} messages are ready and permits are free, and nothing has started for {}",
                    Words(*lasts)
                )
            }
            Self::NotStored { run } => {
                write!(
                    f,
                    "{}: its outcome cannot be stored, for {}",
                    run.origin,
                    Words(run.in_stage_for)
                )
            }
            Self::NothingDelivered {
                topic,
                partition,
                undelivered,
                lasts,
            } => write!(
                f,
                "{topic}/{partition} has {undelivered} messages and has delivered none for {}",
                Words(*lasts)
            ),
            Self::NotPolled { lasts } => {
                write!(
                    f,
                    "the broker's client has not been polled for {}",
                    Words(*lasts)
                )
            }
            Self::NotConnected {
                lasts,
                others_connect: true,
            } => write!(
                f,
                "the broker's client has had no connection for {}, though the brokers answer another one",
                Words(*lasts)
            ),
            Self::NotConnected {
                lasts,
                others_connect: false,
            } => {
                write!(f, "no broker has been reachable for {}", Words(*lasts))
            }
            Self::Blocked { lasts } => write!(
                f,
                "the consumer has had no turn for {}: handlers block the threads of its runtime",
                Words(*lasts)
            ),
            Self::NotCommitted {
                topic,
                partition,
                lasts,
            } => {
                write!(
                    f,
                    "what is finished of {topic}/{partition} has not been committed for {}",
                    Words(*lasts)
                )
            }
            Self::SpanFull {
                topic,
                partition,
                first: None,
            } => {
                write!(
                    f,
                    "{topic}/{partition} is paused: too much waits behind its first unfinished message"
                )
            }
            Self::SpanFull {
                topic,
                partition,
                first: Some(first),
            } => {
                write!(
                    f,
                    "{topic}/{partition} is paused: too much waits behind {first}"
                )
            }
            Self::BusyElsewhere { message, lasts } => {
                write!(
                    f,
                    "{}: another worker has had its key for {}",
                    message.origin,
                    Words(*lasts)
                )
            }
            Self::Unreadable { message } => {
                write!(
                    f,
                    "{}: its record cannot be read, see the log",
                    message.origin
                )
            }
            Self::LetterNotWritten { run } => {
                write!(
                    f,
                    "{}: its dead letter cannot be written, for {}",
                    run.origin,
                    Words(run.in_stage_for)
                )
            }
            Self::OnlyLettersLeft { letters } => write!(
                f,
                "{letters} dead letters cannot be written, and no other message can be handled before they are"
            ),
            Self::WorkerNotReady { why } => write!(f, "the worker is not ready: {why}"),
            Self::WorkerEnds { in_a_row, why, .. } => {
                write!(
                    f,
                    "the worker has ended {in_a_row} times in a row without an outcome: {why}"
                )
            }
            Self::Flood(refusals) => write!(
                f,
                "{} messages in a row were given up; at {} the consumer stops",
                refusals.in_a_row, refusals.most_in_a_row
            ),
        }
    }
}

/// A duration in a readable unit.
struct Words(Duration);

impl fmt::Display for Words {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let seconds = self.0.as_secs();
        match seconds {
            0 => write!(f, "{} ms", self.0.as_millis()),
            1..=119 => write!(f, "{seconds} s"),
            120..=7_199 => write!(f, "{} min", seconds / 60),
            _ => write!(f, "{} h", seconds / 3_600),
        }
    }
}
