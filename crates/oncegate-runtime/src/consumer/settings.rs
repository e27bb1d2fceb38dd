//! The settings of a consumer, and their check: a setting that makes no sense is refused by its
//! name.

use std::time::Duration;

use oncegate_core::key::Key;
use oncegate_core::settings::Finding;
#[cfg(feature = "config")]
use oncegate_core::settings::{OptionalTime, Size, Time};

use super::breaker::Breaker;
use super::dead_letter_limit::DeadLetterLimit;
use super::error::ConsumerError;
use crate::backoff::{Backoff, LONGEST_TIME};
use crate::batch::BatchLimits;
use crate::gate::{AfterUnknown, Gate, GateSettings};
use crate::running::policy::AttemptLimit;
use crate::source::Terms;

/// The shortest limit of a transaction of a transactional handler.
const SHORTEST_TRANSACTION: Duration = Duration::from_millis(100);

/// The longest limit of such a transaction: while it is open, the database cannot remove old
/// versions of rows.
const LONGEST_TRANSACTION: Duration = Duration::from_secs(3_600);

/// The order in which messages run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(
    feature = "config",
    derive(serde::Deserialize, serde::Serialize, schemars::JsonSchema),
    serde(rename_all = "kebab-case")
)]
#[non_exhaustive]
pub enum Ordering {
    /// Messages of a partition (or of a queue's group) run one after another.
    Partition,
    /// Messages with the same broker key run one after another; messages without a key have no
    /// order. The default.
    #[default]
    Key,
    /// Any order.
    Unordered,
}

/// The treatment of a message of which no key can be made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(
    feature = "config",
    derive(serde::Deserialize, serde::Serialize, schemars::JsonSchema),
    serde(rename_all = "kebab-case")
)]
#[non_exhaustive]
pub enum BadKeys {
    /// The message is sent to the dead letters. The default.
    #[default]
    DeadLetter,
    /// The consumer stops at it, and does not acknowledge it.
    Refuse,
}

/// The treatment of a dead letter of this consumer's own scope that is delivered to it again,
/// unchanged, while the message's record says that it has failed.
///
/// An operator who moves dead letters back with the tools of the broker (the redrive of an SQS
/// console, `StartMessageMoveTask`) wants them to run. The record says that the message is in the
/// dead letters, and this delivery is that letter: to acknowledge it would lose the message.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(
    feature = "config",
    derive(serde::Deserialize, serde::Serialize, schemars::JsonSchema),
    serde(rename_all = "kebab-case")
)]
#[non_exhaustive]
pub enum ReturnedLetters {
    /// The record is reopened, and the message runs again as attempt 1, counted as
    /// `extra_runs{reset}`. The default.
    #[default]
    Reopen,
    /// The message is written to the dead letters again, with the reason that its record has. Only
    /// a redrive by oncegate makes it run.
    WriteBack,
}

/// The relation of a run's span to the trace of the message's producer.
///
/// The program's propagator defines which headers carry that trace:
/// `opentelemetry::global::set_text_map_propagator`.
#[cfg(feature = "otel")]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum TraceParent {
    /// The span is a child of the producer's span. The default.
    #[default]
    Child,
    /// The span begins a new trace, which is linked to the producer's: for traces that must not
    /// last as long as messages wait.
    Link,
}

/// The settings of a consumer that do not concern its source, gates, handlers or dead letters.
#[derive(Clone, Copy, Debug, PartialEq)]
#[cfg_attr(
    feature = "config",
    derive(serde::Deserialize, serde::Serialize, schemars::JsonSchema),
    serde(default, deny_unknown_fields)
)]
pub struct ConsumerSettings {
    /// What happens to a message without a derivable key: `dead-letter` gives it up, `refuse` stops
    /// the consumer.
    #[cfg_attr(feature = "config", serde(rename = "strictness"))]
    pub bad_keys: BadKeys,
    /// What happens to a dead letter of this consumer that is delivered to it again, as by the
    /// redrive of an SQS console, while its record says that it has failed: `reopen` runs it again,
    /// counted as `extra_runs{reset}`; `write-back` writes it to the dead letters again.
    pub returned_letters: ReturnedLetters,
    /// The most attempts for a message, including those of killed workers; 1 to 254.
    pub max_attempts: u32,
    /// The waits between attempts.
    ///
    /// The longest may be 365 days.
    pub backoff: Backoff,
    /// The order in which messages run: `key`, `partition` or `unordered`.
    pub ordering: Ordering,
    /// Accept that later messages of the same key or partition overtake a message in a retry topic.
    ///
    /// A source with retry topics needs this, or the order `unordered`: a message can wait in a
    /// retry topic or keep its place, but not both.
    pub overtaking_retries: bool,
    /// How many messages the worker handles at a time.
    ///
    /// Waiting, parked and delayed messages do not count. From a queue, at most this many messages
    /// are received at a time. With a batch handler these are calls, and a queue gives as many
    /// messages as they can take.
    pub concurrency: u32,
    /// How many of them for one tenant; `key` must have a `tenant`. As many as for all, unless set.
    ///
    /// One tenant cannot starve the others then. In a batch, each message counts as one. A message
    /// over the limit waits until one of the tenant's handlers finishes. It still counts as in
    /// flight, and it keeps its place in its order.
    pub tenant_limit: Option<u32>,
    /// How many messages may wait between the source and the ack.
    pub in_flight_messages: usize,
    /// How many bytes of them.
    ///
    /// It bounds memory. A single message that is larger still passes, alone.
    #[cfg_attr(feature = "config", serde(with = "Size"))]
    pub in_flight_bytes: usize,
    /// How long the start waits for a store, a broker or a queue that is away.
    ///
    /// After that the consumer ends with the server's error. It does not wait for a server that
    /// answers and refuses. While it waits the consumer is live but not ready, and its status has
    /// the error.
    #[cfg_attr(feature = "config", serde(with = "Time"))]
    pub start_patience: Duration,
    /// How long running work may go on after a stop.
    ///
    /// Then it is cancelled. The source gets the rest of this time, and at least five seconds, to
    /// commit and leave.
    #[cfg_attr(feature = "config", serde(with = "Time"))]
    pub stop_deadline: Duration,
    /// The dead-letter limit: the consumer stops when it gives up too many messages.
    ///
    /// The stop is kept in the store of the gate, so a restart does not forget it: the next process
    /// stops again at the first message that it would have to give up. It is over when a message
    /// succeeds (for a share: when the share is lower), under a higher limit, or when an operator
    /// accepts it: `oncegate accept dead-letters`, or `oncegate::admin::accept_dead_letters`.
    pub dead_letter_limit: DeadLetterLimit,
    /// The circuit breaker: pauses the worker when too many messages fail.
    ///
    /// Something the handler needs is down then. While the breaker is open the handler is paused,
    /// one message at a time probes, and failures cost no attempt until a probe succeeds. Each
    /// route has its own breaker. The scope's descriptor in the store says that one is open: a
    /// process that starts then begins with an open breaker, so restarts in an outage cost no
    /// attempts.
    pub breaker: Breaker,
    /// Fail open: when the store has been away for so long, messages run without it, and
    /// repetitions run again, until it answers. Without it they wait.
    ///
    /// This gives up the promise for as long as the store is away. A message may run that was
    /// completed before, that another process runs at the same time, or that is delivered again,
    /// then or later: these runs leave no record. Each is counted as `extra_runs{fail_open}`, and
    /// the handler can see it by `Attempt::is_fail_open` and `Attempt::recovered`. What stays: a
    /// message is acknowledged only after its handler has succeeded, failures are retried and
    /// counted in this process, messages keep their order, and a message that cannot succeed goes
    /// to the dead letters. The consumer does not wait longer than this for a completion that was
    /// in progress when the store went away; the gate continues it in the background.
    ///
    /// A store that answers with an error is not away: the consumer waits for a record that cannot
    /// be read and for a store that refuses. A consumer does not start without its store. Choose a
    /// time longer than a failover. Gates that are transactional or fenced refuse this setting:
    /// without the store there is no transaction and no fencing token.
    #[cfg_attr(feature = "config", serde(with = "OptionalTime"))]
    pub fail_open_after: Option<Duration>,
    /// The relation of a run's span to the producer's trace.
    #[cfg(feature = "otel")]
    #[cfg_attr(feature = "config", serde(skip))]
    pub trace_parent: TraceParent,
}

impl Default for ConsumerSettings {
    fn default() -> Self {
        Self::DEFAULT
    }
}

/// What the settings of a consumer must suit: one of its routes, and its source.
#[derive(Clone, Copy, Debug)]
pub struct RouteTerms<'a> {
    /// The scope of the route's gate.
    pub scope: &'a str,
    /// The key of the gate.
    pub key: &'a Key,
    /// The settings of the gate.
    pub gate: &'a GateSettings,
    /// The limits of batches, if the handler gets many messages at a time.
    pub batch: Option<&'a BatchLimits>,
    /// `true` if messages wait in retry topics of the source.
    pub has_retry_topics: bool,
}

impl ConsumerSettings {
    /// The limit of attempts, for the table that decides by it.
    pub(crate) fn attempt_limit(&self) -> AttemptLimit {
        AttemptLimit(self.max_attempts)
    }

    /// The defaults.
    pub const DEFAULT: Self = Self {
        bad_keys: BadKeys::DeadLetter,
        returned_letters: ReturnedLetters::Reopen,
        max_attempts: 10,
        backoff: Backoff::DEFAULT,
        ordering: Ordering::Key,
        overtaking_retries: false,
        concurrency: 64,
        tenant_limit: None,
        in_flight_messages: 10_000,
        in_flight_bytes: 64 * 1024 * 1024,
        start_patience: Duration::from_secs(300),
        stop_deadline: Duration::from_secs(20),
        dead_letter_limit: DeadLetterLimit::DEFAULT,
        breaker: Breaker::DEFAULT,
        fail_open_after: None,
        #[cfg(feature = "otel")]
        trace_parent: TraceParent::Child,
    };

    /// Returns what is wrong with these settings alone.
    pub fn check(&self) -> Vec<Finding> {
        let mut findings = self.check_numbers();
        let breaker = self.breaker.on.then_some(&self.breaker);
        let longest = [
            ("stop_deadline", self.stop_deadline),
            ("start_patience", self.start_patience),
            ("fail_open_after", self.fail_open_after.unwrap_or_default()),
            ("backoff", self.backoff.most()),
            (
                "breaker.most",
                breaker.map(|breaker| breaker.most).unwrap_or_default(),
            ),
        ];
        let too_long = longest.iter().filter(|(_, time)| *time > LONGEST_TIME);
        findings.extend(
            too_long
                .map(|(name, _)| Finding::new(name, format!("`{name}` must be at most 365 days"))),
        );
        findings.extend(breaker.map(Breaker::check).unwrap_or_default());
        findings
    }

    fn check_numbers(&self) -> Vec<Finding> {
        let wrong = [
            (
                self.concurrency == 0 || self.concurrency > 100_000,
                "concurrency",
                "`concurrency` must be between 1 and 100,000",
            ),
            (
                self.max_attempts == 0 || self.max_attempts > 254,
                "max_attempts",
                "`max_attempts` must be between 1 and 254",
            ),
            (
                self.in_flight_messages == 0,
                "in_flight_messages",
                "`in_flight_messages` must be at least 1",
            ),
            (
                self.in_flight_bytes == 0,
                "in_flight_bytes",
                "`in_flight_bytes` must be at least 1",
            ),
            (
                self.tenant_limit == Some(0),
                "tenant_limit",
                "`tenant_limit` must be at least 1",
            ),
        ];
        let wrong = wrong.into_iter().filter(|(is_wrong, ..)| *is_wrong);
        wrong
            .map(|(_, setting, what)| Finding::new(setting, what))
            .collect()
    }

    /// Returns what does not suit a route, or is wrong with the limits of its batches.
    pub fn check_route(&self, terms: &RouteTerms<'_>) -> Vec<Finding> {
        let RouteTerms { scope, gate, .. } = *terms;
        let mut findings = Vec::new();
        let ordering = self.ordering;
        let is_ordered = ordering != Ordering::Unordered && !self.overtaking_retries;
        if is_ordered && terms.has_retry_topics {
            findings.push(Finding::new(
                "ordering",
                format!(
                    "`ordering` is {ordering:?}, and a message that waits in a retry topic is overtaken: choose \
                     `Ordering::Unordered`, or accept it by `overtaking_retries`"
                ),
            ));
        }
        if self.fail_open_after.is_some() && (gate.transactional || gate.fenced) {
            findings.push(Finding::new(
                "fail_open_after",
                format!(
                    "`fail_open_after` is set, and the gate `{scope}` is transactional or fenced: without its store \
                     there is no transaction and no fencing token"
                ),
            ));
        }
        if self.fail_open_after.is_some() && gate.after_unknown() == AfterUnknown::GiveUp {
            findings.push(Finding::new(
                "fail_open_after",
                format!(
                    "`fail_open_after` is set, and `after_unknown` of `{scope}` is give_up: without its store nothing \
                     is known of earlier attempts, so a message could run twice; leave one of them out"
                ),
            ));
        }
        if self.tenant_limit.is_some() && !terms.key.has_tenant() {
            findings.push(Finding::new(
                "tenant_limit",
                format!(
                    "`tenant_limit` is set, and the key of `{scope}` has no tenant: set `Key::tenant`"
                ),
            ));
        }
        if let Some(batch) = terms.batch {
            findings.extend(batch.check());
            let most = self.in_flight_messages;
            if batch.messages > most {
                findings.push(Finding::new(
                    "batch.messages",
                    format!(
                        "`batch.messages` is {}, and `in_flight_messages` lets {most} in: raise it, or make batches smaller",
                        batch.messages
                    ),
                ));
            }
        }
        findings
    }

    /// Returns the first setting that does not suit a transactional handler.
    pub(super) fn check_transactional<'a>(
        &self,
        routes: impl Iterator<Item = TransactionalTerms<'a>>,
    ) -> Result<(), ConsumerError> {
        for TransactionalTerms {
            gate,
            limit,
            is_batched,
        } in routes
        {
            let scope = gate.scope();
            let retention = gate.settings.retention;
            if self.fail_open_after.is_some() {
                return refuse(format!(
                    "`fail_open_after` is set, and the handler of `{scope}` is transactional: without its store there \
                     is no transaction"
                ));
            }
            if is_batched && gate.settings.fenced {
                return refuse(format!(
                    "the gate `{scope}` is fenced, and its handler is `Transactional::batched`: a fencing token comes \
                     with a claim, and a batch makes none. Remove `Gate::fenced`, or use `Transactional::new`"
                ));
            }
            if limit < SHORTEST_TRANSACTION || limit > LONGEST_TRANSACTION {
                return refuse(format!(
                    "`Transactional::limit` of `{scope}` is {limit:?}; it must be between 100 ms and an hour"
                ));
            }
            // The retention counts from the beginning of a transaction.
            if retention < limit * 2 {
                return refuse(format!(
                    "`retention` of `{scope}` is {retention:?}; it must be at least twice `Transactional::limit` ({limit:?})"
                ));
            }
        }
        Ok(())
    }
}

fn refuse(what: impl Into<String>) -> Result<(), ConsumerError> {
    Err(ConsumerError::Settings(what.into()))
}

/// The terms on which a transactional handler and its gate must agree.
pub(super) struct TransactionalTerms<'a> {
    pub(super) gate: &'a Gate,
    /// The limit of its transactions.
    pub(super) limit: Duration,
    /// `true` if a transaction has a batch of messages.
    pub(super) is_batched: bool,
}

impl Default for Terms {
    /// The defaults of a consumer and a gate.
    fn default() -> Self {
        Self {
            max_attempts: ConsumerSettings::DEFAULT.max_attempts,
            lease: GateSettings::DEFAULT.lease,
            retention: GateSettings::DEFAULT.retention,
            stop_deadline: ConsumerSettings::DEFAULT.stop_deadline,
            max_run: GateSettings::DEFAULT.max_run,
        }
    }
}
