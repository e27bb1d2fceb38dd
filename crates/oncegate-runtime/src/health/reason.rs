//! The reasons for which a consumer is not healthy.

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::seconds;
use super::stage::{Run, Unfinished};
use super::status::{BreakerStatus, Refusals, ScopePause};
use super::words::Words;

/// Something that is wrong. Its `Display` names what to look at, and contains nothing of a payload.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "reason", rename_all = "snake_case")]
#[non_exhaustive]
pub enum Reason {
    /// The consumer has not begun to receive.
    Starting,
    /// The consumer was asked to stop, and lets running handlers end.
    Stopping,
    /// The consumer has ended.
    Stopped {
        /// The reason that it ended by itself; `None` when it was asked to stop.
        error: Option<String>,
    },
    /// A shard of a scope's store does not answer: no message with a key there runs, and none is
    /// acknowledged.
    StoreAway {
        /// The scope.
        scope: String,
        /// The store's last error.
        error: String,
        /// The duration so far.
        #[serde(rename = "for_seconds", with = "seconds")]
        lasts: Duration,
        /// `true` when no shard is known to answer, so that nothing runs at all: each is away, or
        /// was not asked since the first outage began.
        all: bool,
    },
    /// A scope is halted, because its store has lost records: the store answers, and no message
    /// with a key there runs before an operator accepts the loss.
    Halted {
        /// The scope.
        scope: String,
        /// The loss, and what to do.
        error: String,
        /// `true` when nothing runs at all, because every other scope waits for its store, too.
        all: bool,
    },
    /// An operation of the source fails repeatedly: the broker is away, does not answer, or
    /// refuses.
    SourceFails {
        /// The operation: `receive`, `delete`, `visibility`, `broker`, `fetch`, `join`, `offset`,
        /// `read`, `dead_letter`, or `open` at the start.
        operation: String,
        /// The last error.
        error: String,
        /// The time since the first failure.
        #[serde(rename = "for_seconds", with = "seconds")]
        lasts: Duration,
        /// `true` when messages are not delivered because of it, those of some partitions at least.
        stops_delivery: bool,
    },
    /// A handler fails for all messages alike: its circuit breaker is open, and one message at a
    /// time probes.
    HandlerPaused {
        /// The scope.
        scope: String,
        /// `true` when every handler is paused, so that only probes run.
        all: bool,
        /// The open breaker.
        #[serde(default)]
        breaker: Option<BreakerStatus>,
    },
    /// An operator has paused the scope: no attempt begins.
    PausedByOperator {
        /// The scope.
        scope: String,
        /// The pause.
        pause: ScopePause,
        /// `true` when every scope of the consumer is paused.
        all: bool,
    },
    /// A message keeps failing.
    KeepsFailing {
        /// The message.
        message: Unfinished,
    },
    /// A handler takes far longer than usual.
    SlowHandler {
        /// The run.
        run: Run,
        /// The 99th percentile of the handlers' times.
        #[serde(rename = "usual_seconds", with = "seconds")]
        usual: Duration,
    },
    /// A handler has run for longer than allowed, was cancelled, and has not returned.
    OverdueHandler {
        /// The run.
        run: Run,
    },
    /// Every permit is held by a handler that has run for longer than allowed.
    NoPermitLeft {
        /// The number of permits.
        permits: u32,
    },
    /// Messages are ready and permits are free, but no handler starts.
    NothingStarts {
        /// The number of ready messages.
        ready: usize,
        /// The duration so far.
        #[serde(rename = "for_seconds", with = "seconds")]
        lasts: Duration,
    },
    /// The outcome of a handler that has ended cannot be stored, so its message is not
    /// acknowledged.
    NotStored {
        /// The run.
        run: Run,
    },
    /// A partition has messages and delivers none.
    NothingDelivered {
        /// The topic or queue.
        topic: String,
        /// The partition.
        partition: i32,
        /// The number of messages that wait there.
        undelivered: u64,
        /// The time since the last delivery.
        #[serde(rename = "for_seconds", with = "seconds")]
        lasts: Duration,
    },
    /// The broker's client is not polled.
    NotPolled {
        /// The duration so far.
        #[serde(rename = "for_seconds", with = "seconds")]
        lasts: Duration,
    },
    /// The broker's client has no connection to any broker.
    NotConnected {
        /// The duration so far.
        #[serde(rename = "for_seconds", with = "seconds")]
        lasts: Duration,
        /// `true` when the brokers answer another client of this process.
        others_connect: bool,
    },
    /// The consumer's own loop does not run: handlers block the threads of its runtime.
    Blocked {
        /// The duration so far.
        #[serde(rename = "for_seconds", with = "seconds")]
        lasts: Duration,
    },
    /// Messages of a partition are behind a transaction that stays open: no consumer gets them.
    OpenTransaction {
        /// The topic.
        topic: String,
        /// The partition.
        partition: i32,
        /// The number of offsets that wait, those of the transaction included.
        withheld: u64,
        /// The duration so far.
        #[serde(rename = "for_seconds", with = "seconds")]
        lasts: Duration,
    },
    /// Finished messages are not committed: after a crash they would be delivered again.
    NotCommitted {
        /// The topic.
        topic: String,
        /// The partition.
        partition: i32,
        /// The duration so far.
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
        /// The duration so far.
        #[serde(rename = "for_seconds", with = "seconds")]
        lasts: Duration,
    },
    /// A message must run alone, and other handlers take so long that it has to try again.
    WaitsAlone {
        /// The message that waits.
        message: Unfinished,
    },
    /// A message waits because its record cannot be read.
    Unreadable {
        /// The message that waits.
        message: Unfinished,
    },
    /// A dead letter cannot be written. Its message is not acknowledged, and holds no permit in the
    /// meantime.
    LetterNotWritten {
        /// The run.
        run: Run,
    },
    /// No message proceeds: each one that could is waiting for its dead letter to be written, or is
    /// behind such a message.
    OnlyLettersLeft {
        /// The number of dead letters that cannot be written.
        letters: u32,
    },
    /// No process of the worker is ready, so no message is handled.
    WorkerNotReady {
        /// The reason.
        why: String,
    },
    /// Processes of the worker end one after another, and no message between them has an outcome.
    WorkerEnds {
        /// The number of ends in a row.
        in_a_row: u32,
        /// The last end.
        why: String,
        /// `true` when they are so many that nothing is handled.
        all: bool,
    },
    /// Many messages were given up; at the dead-letter limit the consumer stops.
    ManyDeadLetters(Refusals),
}

impl Reason {
    /// Returns whether there is work and none of it is done, so that a restart would help.
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

    /// Returns whether no message is handled because of it, for a reason that a restart would not
    /// fix.
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
                | Self::Halted { all: true, .. }
                | Self::HandlerPaused { all: true, .. }
                | Self::PausedByOperator { all: true, .. }
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
            Self::Halted { .. } => "halted",
            Self::SourceFails { .. } => "source_fails",
            Self::HandlerPaused { .. } => "handler_paused",
            Self::PausedByOperator { .. } => "paused_by_operator",
            Self::KeepsFailing { .. } => "keeps_failing",
            Self::SlowHandler { .. } => "slow_handler",
            Self::OverdueHandler { .. } => "overdue_handler",
            Self::NoPermitLeft { .. } => "no_permit_left",
            Self::NothingStarts { .. } => "nothing_starts",
            Self::NotStored { .. } => "not_stored",
            Self::NothingDelivered { .. } => "nothing_delivered",
            Self::NotPolled { .. } => "not_polled",
            Self::NotConnected { .. } => "not_connected",
            Self::Blocked { .. } => "blocked",
            Self::OpenTransaction { .. } => "open_transaction",
            Self::NotCommitted { .. } => "not_committed",
            Self::SpanFull { .. } => "span_full",
            Self::BusyElsewhere { .. } => "busy_elsewhere",
            Self::WaitsAlone { .. } => "waits_alone",
            Self::Unreadable { .. } => "unreadable",
            Self::LetterNotWritten { .. } => "letter_not_written",
            Self::OnlyLettersLeft { .. } => "only_letters_left",
            Self::WorkerNotReady { .. } => "worker_not_ready",
            Self::WorkerEnds { .. } => "worker_ends",
            Self::ManyDeadLetters(_) => "many_dead_letters",
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
            Self::Halted { error, .. } => f.write_str(error),
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
            Self::HandlerPaused { scope, breaker, .. } => {
                write!(
                    f,
                    "the handler of `{scope}` fails for all alike, and is paused"
                )?;
                breaker.as_ref().map_or(Ok(()), |breaker| breaker.fmt(f))
            }
            Self::PausedByOperator { scope, pause, .. } => {
                write!(f, "`{scope}` is {pause}")
            }
            Self::KeepsFailing { message } => message.fmt(f),
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
            Self::OpenTransaction {
                topic,
                partition,
                withheld,
                lasts,
            } => write!(
                f,
                "{topic}/{partition}: {withheld} offsets wait behind a transaction that has been open for {}; it ends \
                 by its producer or after its transaction.timeout.ms, and kafka-transactions.sh lists and aborts it",
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
                    "{topic}/{partition} is paused: too much waits behind its first unfinished message: {first}"
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
            Self::WaitsAlone { message } => {
                write!(
                    f,
                    "{} has waited for {} to run alone, because earlier attempts ended their processes; other handlers take long",
                    message.origin,
                    Words(message.in_stage_for)
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
            Self::ManyDeadLetters(refusals) => write!(
                f,
                "{} messages in a row were given up; at {} the consumer stops",
                refusals.in_a_row, refusals.most_in_a_row
            ),
        }
    }
}
