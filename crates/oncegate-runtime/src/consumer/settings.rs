//! The settings of a consumer, and their check: a setting that makes no sense is refused by its
//! name.

use std::time::Duration;

use super::breaker::Breaker;
use super::error::ConsumerError;
use crate::backoff::{Backoff, LONGEST_TIME};
use crate::gate::Gate;
use crate::source::Terms;

/// The shortest limit of a transaction of a transactional handler.
const SHORTEST_TRANSACTION: Duration = Duration::from_millis(100);

/// The longest limit of such a transaction: while it is open, the database cannot remove old
/// versions of rows.
const LONGEST_TRANSACTION: Duration = Duration::from_secs(3_600);

/// The order in which messages run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
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

#[derive(Clone, Copy, Debug)]
pub(super) struct ConsumerSettings {
    pub(super) concurrency: u32,
    pub(super) ordering: Ordering,
    pub(super) max_attempts: u32,
    pub(super) backoff: Backoff,
    pub(super) bad_keys: BadKeys,
    pub(super) returned_letters: ReturnedLetters,
    pub(super) tenant_limit: Option<u32>,
    pub(super) stop_deadline: Duration,
    pub(super) start_patience: Duration,
    pub(super) overtaking_retries: bool,
    pub(super) fail_open_after: Option<Duration>,
    pub(super) breaker: Option<Breaker>,
    pub(super) most_messages: usize,
    pub(super) most_bytes: usize,
    #[cfg(feature = "otel")]
    pub(super) trace_parent: TraceParent,
}

impl Default for ConsumerSettings {
    fn default() -> Self {
        Self {
            concurrency: Self::CONCURRENCY,
            ordering: Ordering::default(),
            max_attempts: Self::MAX_ATTEMPTS,
            backoff: Self::BACKOFF,
            bad_keys: BadKeys::default(),
            returned_letters: ReturnedLetters::default(),
            tenant_limit: None,
            stop_deadline: Self::STOP_DEADLINE,
            start_patience: Self::START_PATIENCE,
            overtaking_retries: false,
            fail_open_after: None,
            breaker: Some(Breaker::default()),
            most_messages: Self::IN_FLIGHT_MESSAGES,
            most_bytes: Self::IN_FLIGHT_BYTES,
            #[cfg(feature = "otel")]
            trace_parent: TraceParent::default(),
        }
    }
}

impl ConsumerSettings {
    pub(super) const CONCURRENCY: u32 = 64;
    pub(super) const IN_FLIGHT_MESSAGES: usize = 10_000;
    pub(super) const IN_FLIGHT_BYTES: usize = 64 * 1024 * 1024;
    pub(super) const BACKOFF: Backoff =
        Backoff::new(Duration::from_millis(100), Duration::from_secs(30));
    pub(super) const MAX_ATTEMPTS: u32 = 10;
    pub(super) const STOP_DEADLINE: Duration = Duration::from_secs(20);
    pub(super) const START_PATIENCE: Duration = Duration::from_secs(300);

    /// Returns the first setting that makes no sense, for these routes and their gates, and a
    /// source that has retry topics or not.
    pub(super) fn check(
        &self,
        routes: &[(Option<&str>, &Gate)],
        has_retry_topics: bool,
    ) -> Result<(), ConsumerError> {
        self.check_limits()?;
        let ordering = self.ordering;
        let is_ordered = ordering != Ordering::Unordered && !self.overtaking_retries;
        if is_ordered && has_retry_topics {
            return refuse(format!(
                "`ordering` is {ordering:?}, and a message that waits in a retry topic is overtaken: choose \
                 `Ordering::Unordered`, or accept it by `overtaking_retries`"
            ));
        }
        let needs_store = routes
            .iter()
            .find(|(_, gate)| gate.settings().transactional || gate.settings().fenced);
        if let (Some(_), Some((_, gate))) = (self.fail_open_after, needs_store) {
            let scope = gate.scope();
            return refuse(format!(
                "`fail_open_after` is set, and the gate `{scope}` is transactional or fenced: without its store \
                 there is no transaction and no fencing_token"
            ));
        }
        if self.tenant_limit == Some(0) {
            return refuse("`tenant_limit` must be at least 1");
        }
        let without_tenant = routes.iter().find(|(_, gate)| !gate.key().has_tenant());
        if let (Some(_), Some((_, gate))) = (self.tenant_limit, without_tenant) {
            let scope = gate.scope();
            return refuse(format!(
                "`tenant_limit` is set, and the key of `{scope}` has no tenant: set `Key::tenant`"
            ));
        }
        if let Some(defect) = self.breaker.as_ref().and_then(Breaker::defect) {
            return refuse(defect);
        }
        let mut names: Vec<&str> = routes.iter().filter_map(|(name, _)| *name).collect();
        names.sort_unstable();
        match names.windows(2).find(|pair| pair.first() == pair.last()) {
            Some(pair) => refuse(format!(
                "the route `{}` is given twice",
                pair.first().copied().unwrap_or_default()
            )),
            None => Ok(()),
        }
    }

    /// Returns the first number or time that is out of its limits.
    fn check_limits(&self) -> Result<(), ConsumerError> {
        let ConsumerSettings {
            concurrency,
            max_attempts,
            ..
        } = *self;
        if concurrency == 0 || concurrency > 100_000 {
            return refuse("`concurrency` must be between 1 and 100,000");
        }
        if max_attempts == 0 || max_attempts > 254 {
            return refuse("`max_attempts` must be between 1 and 254");
        }
        let longest = [
            ("stop_deadline", self.stop_deadline),
            ("start_patience", self.start_patience),
            ("fail_open_after", self.fail_open_after.unwrap_or_default()),
            ("backoff", self.backoff.most()),
            (
                "breaker.pause",
                self.breaker
                    .map(|breaker| breaker.pause.most())
                    .unwrap_or_default(),
            ),
        ];
        if let Some((name, _)) = longest.iter().find(|(_, time)| *time > LONGEST_TIME) {
            return refuse(format!("`{name}` must be at most 365 days"));
        }
        if self.most_messages == 0 || self.most_bytes == 0 {
            return refuse("`in_flight` must let at least one message and one byte in");
        }
        Ok(())
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
            let retention = gate.settings().retention;
            if self.fail_open_after.is_some() {
                return refuse(format!(
                    "`fail_open_after` is set, and the handler of `{scope}` is transactional: without its store there \
                     is no transaction"
                ));
            }
            if is_batched && gate.settings().fenced {
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
            max_attempts: ConsumerSettings::MAX_ATTEMPTS,
            lease: Gate::DEFAULT_LEASE,
            retention: Gate::DEFAULT_RETENTION,
            stop_deadline: ConsumerSettings::STOP_DEADLINE,
            max_run: Gate::DEFAULT_MAX_RUN,
        }
    }
}
