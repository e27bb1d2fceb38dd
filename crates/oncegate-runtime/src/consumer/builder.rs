//! The consumer as users make it: its settings and their check.

use std::collections::BTreeSet;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use oncegate_core::settings::Finding;

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
use super::route_handler::{ConsumerHandler, RouteHandler};
#[cfg(feature = "otel")]
use super::settings::TraceParent;
use super::settings::{
    BadKeys, ConsumerSettings, Ordering, ReturnedLetters, RouteTerms, TransactionalTerms,
};
use super::start::consume_until;

mod opening;

/// Consumes a source through a gate.
///
/// A message is acknowledged only after exactly one of these: its handler has run and the result is
/// stored; its record was completed before; its dead letter is durably written. If the consumer
/// cannot tell, it does not acknowledge.
pub struct Consumer {
    source: Arc<dyn Source>,
    routes: Vec<(Option<String>, Gate, RouteHandler)>,
    dead_letters: Option<Arc<dyn DeadLetters>>,
    observer: Arc<dyn Observer>,
    settings: ConsumerSettings,
    ahead: u32,
    life: Arc<Life>,
    at_once: Option<BoxFuture<'static, ()>>,
}

impl Consumer {
    /// Handles every message of `source` whose route has no handler of its own.
    ///
    /// A source is given as it is or shared, in an [`Arc`].
    pub fn new(source: impl Source + 'static, gate: Gate, handler: impl ConsumerHandler) -> Self {
        Self {
            source: Arc::new(gate.checked_source(source)),
            routes: vec![(None, gate, handler.erased())],
            dead_letters: None,
            observer: Arc::new(Counters::default()),
            settings: ConsumerSettings::DEFAULT,
            ahead: 0,
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
            .push((Some(route.into()), gate, handler.erased()));
        self
    }

    /// Sets all settings at once, such as those of a file.
    #[must_use]
    pub fn settings(mut self, settings: ConsumerSettings) -> Self {
        self.settings = settings;
        self
    }

    /// Sets the [number of handlers](ConsumerSettings::concurrency) that run at a time, of batches
    /// with a [batch handler](super::Batched): 64 by default.
    pub fn concurrency(mut self, handlers: u32) -> Self {
        self.settings.concurrency = handlers;
        self
    }

    /// Sets how many more messages than [`concurrency`](Self::concurrency) may be given to handlers
    /// that have ended within a few milliseconds lately: 0 by default. It is for a handler that
    /// hands messages on to something with a queue of its own, which would otherwise have nothing
    /// to do between an answer and the next message.
    pub fn ahead(mut self, messages: u32) -> Self {
        self.ahead = messages;
        self
    }

    /// Sets the [number of handlers](ConsumerSettings::tenant_limit) that run at a time for one
    /// tenant: by default as many as for all tenants together. The tenant is that of the gate's
    /// key, [`Key::tenant`](oncegate_core::key::Key::tenant).
    pub fn tenant_limit(mut self, handlers: u32) -> Self {
        self.settings.tenant_limit = Some(handlers);
        self
    }

    /// Sets the [order](ConsumerSettings::ordering) in which messages run: by broker key by
    /// default.
    pub fn ordering(mut self, ordering: Ordering) -> Self {
        self.settings.ordering = ordering;
        self
    }

    /// Sets the [number of attempts](ConsumerSettings::max_attempts) that a message gets: 10 by
    /// default.
    pub fn max_attempts(mut self, attempts: u32) -> Self {
        self.settings.max_attempts = attempts;
        self
    }

    /// Sets the [delays between attempts](ConsumerSettings::backoff): 100 ms, doubling up to 30 s,
    /// by default.
    pub fn backoff(mut self, backoff: Backoff) -> Self {
        self.settings.backoff = backoff;
        self
    }

    /// Limits what is in flight, between the source and the ack:
    /// [messages](ConsumerSettings::in_flight_messages) and
    /// [bytes](ConsumerSettings::in_flight_bytes), 10,000 and 64 MiB by default.
    pub fn in_flight(mut self, messages: usize, bytes: usize) -> Self {
        self.settings.in_flight_messages = messages;
        self.settings.in_flight_bytes = bytes;
        self
    }

    /// Sets the destination of dead letters. Without one, the consumer stops at the first message
    /// that must be given up, and does not acknowledge it.
    pub fn dead_letters(mut self, dead_letters: impl DeadLetters + 'static) -> Self {
        self.dead_letters = Some(Arc::new(dead_letters));
        self
    }

    /// Sets what happens to a message [of which no key can be made](ConsumerSettings::bad_keys): it
    /// is sent to the dead-letter topic or queue by default.
    pub fn bad_keys(mut self, bad_keys: BadKeys) -> Self {
        self.settings.bad_keys = bad_keys;
        self
    }

    /// Sets what happens to a dead letter of this consumer that is
    /// [delivered to it again](ConsumerSettings::returned_letters): by default its record is
    /// reopened, and the message runs again.
    #[must_use]
    pub fn returned_letters(mut self, returned_letters: ReturnedLetters) -> Self {
        self.settings.returned_letters = returned_letters;
        self
    }

    /// Sets the [number of dead letters](ConsumerSettings::dead_letter_limit) that mean that the
    /// consumer itself is wrong: 100 in a row or half of the last 1,000 messages by default. The
    /// consumer stops at the limit.
    pub fn dead_letter_limit(mut self, limit: DeadLetterLimit) -> Self {
        self.settings.dead_letter_limit = limit;
        self
    }

    /// Sets when the [circuit breaker](ConsumerSettings::breaker) of a handler opens: when half of
    /// the last 20 keys failed, by default.
    pub fn breaker(mut self, limits: Breaker) -> Self {
        self.settings.breaker = limits;
        self
    }

    /// Switches the circuit breaker off: no handler is ever paused, however often it fails.
    pub fn without_breaker(mut self) -> Self {
        self.settings.breaker.on = false;
        self
    }

    /// Sets how long running handlers may go on [after the stop
    /// signal](ConsumerSettings::stop_deadline): 20 s by default, 365 days at most.
    pub fn stop_deadline(mut self, deadline: Duration) -> Self {
        self.settings.stop_deadline = deadline;
        self
    }

    /// Sets how long [the start waits](ConsumerSettings::start_patience) when the server of the
    /// source or of the dead letters, or that of a store that has connected before, is away: 5
    /// minutes by default. A store connects before the consumer has it: its builder has a
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

    /// Accepts that later messages [overtake](ConsumerSettings::overtaking_retries) a message that
    /// waits in a retry topic. A source with retry topics needs this, or [`Ordering::Unordered`].
    pub fn overtaking_retries(mut self) -> Self {
        self.settings.overtaking_retries = true;
        self
    }

    /// [Fails open](ConsumerSettings::fail_open_after): when the store has been away for
    /// `patience`, messages run without it until it answers again. By default they wait (the
    /// consumer fails closed), however long that takes.
    ///
    /// This gives up the promise for as long as the store is away.
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
    /// status page, in metrics, and in the probes. `report` is called with each snapshot, from any
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
        let mut findings = self.settings.check();
        let has_retry_topics = self.source.retry_queue().is_some();
        for (_, gate, handler) in &self.routes {
            findings.extend(self.settings.check_route(&RouteTerms {
                scope: gate.scope(),
                key: gate.key(),
                gate: &gate.settings,
                batch: handler.limits.as_ref(),
                has_retry_topics,
            }));
        }
        if let Some(Finding { what, .. }) = findings.into_iter().next() {
            return Err(ConsumerError::Settings(what));
        }
        self.check_routes()?;
        let transactional = self.routes.iter().filter_map(|(_, gate, handler)| {
            Some(TransactionalTerms {
                gate,
                limit: handler.limit()?,
                is_batched: handler.limits.is_some(),
            })
        });
        self.settings.check_transactional(transactional)
    }

    /// Checks that no route is given twice.
    fn check_routes(&self) -> Result<(), ConsumerError> {
        let names = self.routes.iter().filter_map(|(name, ..)| name.as_deref());
        let mut known = BTreeSet::new();
        for name in names {
            if !known.insert(name) {
                let twice = format!("the route `{name}` is given twice");
                return Err(ConsumerError::Settings(twice));
            }
        }
        Ok(())
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
