//! The consumer as users make it: its settings and their check.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use crate::backoff::Backoff;
use crate::dead_letters::DeadLetters;
use crate::gate::Gate;
use crate::handler::BoxFuture;
use crate::health::WorkerStatus;
use crate::observe::{Counters, Observer};
use crate::source::Source;

use super::breaker::Breaker;
use super::dead_letter_limit::DeadLetterLimit;
use super::error::ConsumerError;
use super::monitor::{Life, Monitor, WorkerReport};
#[cfg(feature = "otel")]
use super::settings::TraceParent;
use super::settings::{BadKeys, ConsumerSettings, Ordering, ReturnedLetters, TransactionalTerms};
use super::start::consume_until;
use super::work::{ConsumerHandler, Work};

mod opening;

/// Consumes a source through a gate.
///
/// A message is acknowledged only after exactly one of these: its handler has run and the result is
/// stored; its record was completed before; its dead letter is durably written. If the consumer
/// cannot tell, it does not acknowledge.
pub struct Consumer {
    source: Arc<dyn Source>,
    routes: Vec<(Option<String>, Gate, Work)>,
    dead_letters: Option<Arc<dyn DeadLetters>>,
    observer: Arc<dyn Observer>,
    settings: ConsumerSettings,
    dead_letter_limit: DeadLetterLimit,
    life: Arc<Life>,
    at_once: Option<BoxFuture<'static, ()>>,
}

impl Consumer {
    /// 64 handlers.
    pub const DEFAULT_CONCURRENCY: u32 = ConsumerSettings::CONCURRENCY;
    /// 10,000 messages.
    pub const DEFAULT_IN_FLIGHT_MESSAGES: usize = ConsumerSettings::IN_FLIGHT_MESSAGES;
    /// 64 MiB.
    pub const DEFAULT_IN_FLIGHT_BYTES: usize = ConsumerSettings::IN_FLIGHT_BYTES;
    /// 100 ms, doubling up to 30 s.
    pub const DEFAULT_BACKOFF: Backoff = ConsumerSettings::BACKOFF;
    /// 10.
    pub const DEFAULT_MAX_ATTEMPTS: u32 = ConsumerSettings::MAX_ATTEMPTS;
    /// 20 seconds.
    pub const DEFAULT_STOP_DEADLINE: Duration = ConsumerSettings::STOP_DEADLINE;
    /// 5 minutes.
    pub const DEFAULT_START_PATIENCE: Duration = ConsumerSettings::START_PATIENCE;

    /// Handles every message of `source` whose route has no handler of its own.
    ///
    /// A source is given as it is or shared, in an [`Arc`].
    pub fn new(source: impl Source + 'static, gate: Gate, handler: impl ConsumerHandler) -> Self {
        Self {
            source: Arc::new(source),
            routes: vec![(None, gate, handler.into_work())],
            dead_letters: None,
            observer: Arc::new(Counters::default()),
            settings: ConsumerSettings::default(),
            dead_letter_limit: DeadLetterLimit::default(),
            life: Arc::default(),
            at_once: None,
        }
    }

    /// Handles the messages of one route (by default the topic) with its own gate and handler. A
    /// refund with the order's id is then no duplicate of the order.
    pub fn route(
        mut self,
        route: impl Into<String>,
        gate: Gate,
        handler: impl ConsumerHandler,
    ) -> Self {
        self.routes
            .push((Some(route.into()), gate, handler.into_work()));
        self
    }

    /// Sets the number of handlers that run at a time: 64 by default. Waiting, parked and delayed
    /// messages do not count. From a queue, at most this many messages are received at a time.
    ///
    /// With a [batch handler](super::Batched) these are calls, and a queue gives as many messages
    /// as they can take.
    pub fn concurrency(mut self, handlers: u32) -> Self {
        self.settings.concurrency = handlers;
        self
    }

    /// Sets the number of handlers that run at a time for one tenant, so that one tenant cannot
    /// starve the others: by default as many as for all tenants together. The tenant is that of the
    /// gate's key, [`Key::tenant`](oncegate_core::key::Key::tenant).
    ///
    /// In a batch, each message counts as one. A message over the limit waits until one of the
    /// tenant's handlers finishes. It still counts as [in flight](Self::in_flight), and it keeps
    /// its place in its order.
    pub fn tenant_limit(mut self, handlers: u32) -> Self {
        self.settings.tenant_limit = Some(handlers);
        self
    }

    /// Sets the order in which messages run: by broker key by default.
    pub fn ordering(mut self, ordering: Ordering) -> Self {
        self.settings.ordering = ordering;
        self
    }

    /// Sets the number of attempts that a message gets, including those of crashed processes: 10 by
    /// default, 1 to 254.
    pub fn max_attempts(mut self, attempts: u32) -> Self {
        self.settings.max_attempts = attempts;
        self
    }

    /// The delays between attempts: 100 ms, doubling up to 30 s, by default. The longest may be 365
    /// days.
    pub fn backoff(mut self, backoff: Backoff) -> Self {
        self.settings.backoff = backoff;
        self
    }

    /// Limits what is in flight, between the source and the ack: 10,000 messages and 64 MiB by
    /// default. It bounds memory. A single message larger than `bytes` still passes, alone.
    pub fn in_flight(mut self, messages: usize, bytes: usize) -> Self {
        self.settings.most_messages = messages;
        self.settings.most_bytes = bytes;
        self
    }

    /// Sets the destination of dead letters. Without one, the consumer stops at the first message
    /// that must be given up, and does not acknowledge it.
    pub fn dead_letters(mut self, dead_letters: impl DeadLetters + 'static) -> Self {
        self.dead_letters = Some(Arc::new(dead_letters));
        self
    }

    /// Sets what happens to a message of which no key can be made: it is sent to the dead-letter
    /// topic or queue by default.
    pub fn bad_keys(mut self, bad_keys: BadKeys) -> Self {
        self.settings.bad_keys = bad_keys;
        self
    }

    /// Sets what happens to a dead letter of this consumer that is delivered to it again: by
    /// default its record is reopened, and the message runs again.
    #[must_use]
    pub fn returned_letters(mut self, returned_letters: ReturnedLetters) -> Self {
        self.settings.returned_letters = returned_letters;
        self
    }

    /// Sets the number of dead letters that mean that the consumer itself is wrong: 100 in a row or
    /// half of the last 1,000 messages by default. The consumer stops at the limit.
    ///
    /// The stop is kept in the store of the gate, so a restart does not forget it: the next process
    /// stops again at the first message that it would have to give up. It is over when a message
    /// succeeds (for a share: when the share is lower), under a higher limit, or when an operator
    /// accepts it: `oncegate accept dead-letters`, or
    /// `oncegate::admin::accept_dead_letters`.
    pub fn dead_letter_limit(mut self, limit: DeadLetterLimit) -> Self {
        self.dead_letter_limit = limit;
        self
    }

    /// Sets when the circuit breaker of a handler opens, because something the handler needs is
    /// down: when half of the last 20 keys failed, by default. While it is open the handler is
    /// paused, one message at a time probes, and failures cost no attempt until a probe succeeds.
    /// Each route has its own breaker.
    ///
    /// While it is open, the scope's descriptor in the store says so: a process that starts then
    /// begins with an open breaker, so restarts in an outage cost no attempts.
    pub fn breaker(mut self, limits: Breaker) -> Self {
        self.settings.breaker = Some(limits);
        self
    }

    /// Switches the circuit breaker off: no handler is ever paused, however often it fails.
    pub fn without_breaker(mut self) -> Self {
        self.settings.breaker = None;
        self
    }

    /// Sets how long running handlers may go on after the stop signal: 20 s by default, 365 days at
    /// most. Then they are cancelled. The source gets the rest of this time, and at least five
    /// seconds, to commit and leave.
    pub fn stop_deadline(mut self, deadline: Duration) -> Self {
        self.settings.stop_deadline = deadline;
        self
    }

    /// Sets how long the start waits when the server of the source or of the dead letters, or that
    /// of a store that has connected before, is away: 5 minutes by default. After that the consumer
    /// ends with the server's error. It does not wait for a server that answers and refuses.
    ///
    /// While it waits the consumer is live but not ready, and its status has the error. This
    /// includes SQS. A store connects before the consumer has it: its builder has a
    /// `start_patience` of its own.
    #[must_use]
    pub fn start_patience(mut self, patience: Duration) -> Self {
        self.settings.start_patience = patience;
        self
    }

    /// Ends the stop at once when `again` resolves, for example on a second signal. `again` is
    /// polled only from a second after the stop has begun: supervisors send two signals for one
    /// stop. Running handlers are then dropped, their leases lapse, and their messages run again
    /// elsewhere, flagged as recovered. What is finished is still committed, within a second. By
    /// default a stop runs to its deadline.
    ///
    /// ```no_run
    /// # async fn example(consumer: oncegate::Consumer) -> Result<(), oncegate::ConsumerError> {
    /// use oncegate::shutdown_signal;
    /// consumer.stop_at_once_on(shutdown_signal()).run_until(shutdown_signal()).await
    /// # }
    /// ```
    pub fn stop_at_once_on(mut self, again: impl Future<Output = ()> + Send + 'static) -> Self {
        self.at_once = Some(Box::pin(again));
        self
    }

    /// Accepts that later messages of the same key or partition overtake a message that waits in a
    /// retry topic.
    ///
    /// A source with retry topics needs this, or [`Ordering::Unordered`]: a message can wait in a
    /// retry topic or keep its place, but not both.
    pub fn overtaking_retries(mut self) -> Self {
        self.settings.overtaking_retries = true;
        self
    }

    /// Fails open: when the store has been away for `patience`, messages run without it until it
    /// answers again. By default they wait (the consumer fails closed), however long that takes.
    ///
    /// This gives up the promise for as long as the store is away. A message may run that was
    /// completed before, that another process runs at the same time, or that is delivered again,
    /// then or later: these runs leave no record. Each is counted as `extra_runs{fail_open}`, and
    /// the handler can see it by [`Attempt::is_fail_open`] and [`Attempt::recovered`]. What stays:
    /// a message is acknowledged only after its handler has succeeded, failures are retried and
    /// counted in this process, messages keep their order, and a message that cannot succeed goes
    /// to the dead letters. The consumer does not wait longer than `patience` for a completion that
    /// was in progress when the store went away; the gate continues it in the background.
    ///
    /// A store that answers with an error is not away: the consumer waits for a record that cannot
    /// be read and for a store that refuses. A consumer does not start without its store. Choose a
    /// patience longer than a failover. Gates that are [`transactional`](Gate::transactional) or
    /// [`fenced`](Gate::fenced) refuse this setting: without the store there is no transaction and
    /// no fencing token.
    ///
    /// [`Attempt::is_fail_open`]: crate::Attempt::is_fail_open
    /// [`Attempt::recovered`]: crate::Attempt::recovered
    pub fn fail_open_after(mut self, patience: Duration) -> Self {
        self.settings.fail_open_after = Some(patience);
        self
    }

    /// The observer of the events of the consumer, its gates and its source, such as [`Counters`].
    pub fn observer(mut self, observer: Arc<dyn Observer>) -> Self {
        self.observer = observer;
        self
    }

    /// Sets how the span of a run relates to the producer's trace: a child of it by default.
    #[cfg(feature = "otel")]
    pub fn trace_parent(mut self, trace_parent: TraceParent) -> Self {
        self.settings.trace_parent = trace_parent;
        self
    }

    /// Reports the processes of a handler that has its own with the consumer's status: on the
    /// status page, in metrics, and in the probes. `report` is called at each look, from any
    /// thread, so it must not block. The first one counts.
    #[must_use]
    pub fn worker_status(self, report: impl Fn() -> WorkerStatus + Send + Sync + 'static) -> Self {
        _ = self.life.worker.set(WorkerReport(Box::new(report)));
        self
    }

    /// Returns a handle that reports the consumer's status and health while it runs.
    pub fn monitor(&self) -> Monitor {
        let (_, gate, _) = self
            .routes
            .first()
            .expect("a consumer is made with a route");
        Monitor::new(gate.scope(), Arc::clone(&self.life))
    }

    /// Consumes until `shutdown` resolves or the source ends; then lets running handlers end,
    /// commits, and leaves.
    ///
    /// # Errors
    /// Returns an error when it cannot start, or cannot go on without losing a message; the error
    /// names what to change. Messages that were not acknowledged will be delivered again.
    pub async fn run_until(
        mut self,
        shutdown: impl Future<Output = ()> + Send,
    ) -> Result<(), ConsumerError> {
        let life = Arc::clone(&self.life);
        let at_once = self
            .at_once
            .take()
            .unwrap_or_else(|| Box::pin(std::future::pending()));
        let consuming = async {
            let mut shutdown = std::pin::pin!(shutdown);
            let Some(shared) = self.open(shutdown.as_mut()).await? else {
                return Ok(());
            };
            consume_until(
                shared,
                Arc::clone(&self.source),
                &self.life,
                shutdown,
                at_once,
            )
            .await
        };
        // Boxed: it happens once, and otherwise every future that contains this one would be
        // larger.
        let ended = Box::pin(consuming).await;
        life.end(ended.as_ref().err().map(ToString::to_string));
        ended
    }

    /// Checks the settings, as [`run_until`](Self::run_until) does first. It connects to nothing.
    ///
    /// # Errors
    /// Returns the first setting that makes no sense, of the consumer or of one of its gates.
    pub fn check(&self) -> Result<(), ConsumerError> {
        self.check_settings()?;
        self.routes
            .iter()
            .try_for_each(|(_, gate, _)| gate.check())
            .map_err(ConsumerError::Gate)
    }

    fn check_settings(&self) -> Result<(), ConsumerError> {
        let routes: Vec<_> = self
            .routes
            .iter()
            .map(|(name, gate, _)| (name.as_deref(), gate))
            .collect();
        self.settings
            .check(&routes, self.source.retry_queue().is_some())?;
        let transactional = self.routes.iter().filter_map(|(_, gate, work)| {
            Some(TransactionalTerms {
                gate,
                limit: work.limit()?,
                is_batched: work.limits.is_some(),
            })
        });
        self.settings.check_transactional(transactional)?;
        let limits = self.routes.iter().filter_map(|(_, _, work)| work.limits);
        let mut defects = limits.filter_map(|limits| limits.defect(self.settings.most_messages));
        defects
            .next()
            .map_or(Ok(()), |defect| Err(ConsumerError::Settings(defect)))
    }
}

impl std::fmt::Debug for Consumer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let gates: Vec<&Gate> = self.routes.iter().map(|(_, gate, _)| gate).collect();
        f.debug_struct("Consumer")
            .field("source", &self.source)
            .field("gates", &gates)
            .finish_non_exhaustive()
    }
}
