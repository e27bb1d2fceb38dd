//! The runtime: takes messages from a source, asks the gate, runs handlers, and acknowledges.
//!
//! A message's way through the files of this module: `intake` (room, key, look-ahead) → `lanes` (order) →
//! `engine` (permits, waits, outages, `breaker`, stop) → `attempt` (claim, run, complete) → `settle` (ack, retry, dead letter).

use std::future::Future;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use oncegate_core::key::KeyError;
use tokio::sync::Semaphore;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::backoff::Backoff;
use crate::dead_letters::DeadLetters;
use crate::gate::{Claim, Gate, Identity, OpenGate};
use crate::handler::{BoxFuture, ErasedHandler, Handler};
use crate::health::{FailureLog, WaitCause};
use crate::observe::{Counters, Observer};
use crate::source::{Delivery, RetryQueue, Source, Terms};

mod attempt;
mod breaker;
mod dead_letter_limit;
mod engine;
mod error;
mod intake;
mod lanes;
mod monitor;
mod positions;
mod run;
mod settings;
mod settle;
mod start;
mod tenants;
mod trace;
mod watch;

pub use breaker::Breaker;
pub use dead_letter_limit::DeadLetterLimit;
pub use error::ConsumerError;
pub use monitor::Monitor;
pub use settings::{BadKeys, Ordering};
#[cfg(feature = "otel")]
pub use trace::TraceParent;

use breaker::Switch;
use dead_letter_limit::DeadLetterGuard;
use intake::InFlight;
use monitor::Life;
use settings::Settings;
use watch::{Attempt, Watch};

/// Consumes a source through a gate.
///
/// Every message ends in exactly one of these ways, and is acknowledged only then: its handler has run and the
/// result is stored; it was done before; it is durably with the dead letters. When none can be told, it is not
/// acknowledged.
pub struct Consumer {
    source: Arc<dyn Source>,
    routes: Vec<(Option<String>, Gate, Arc<dyn ErasedHandler>)>,
    dead_letters: Option<Arc<dyn DeadLetters>>,
    observer: Arc<dyn Observer>,
    settings: Settings,
    dead_letter_limit: DeadLetterLimit,
    breaker: Option<Breaker>,
    most_messages: usize,
    most_bytes: usize,
    life: Arc<Life>,
    at_once: Option<BoxFuture<'static, ()>>,
}

impl Consumer {
    /// 64 handlers.
    pub const DEFAULT_CONCURRENCY: u32 = 64;
    /// 10,000 messages.
    pub const DEFAULT_IN_FLIGHT_MESSAGES: usize = 10_000;
    /// 64 MiB.
    pub const DEFAULT_IN_FLIGHT_BYTES: usize = 64 * 1024 * 1024;
    /// 100 ms, doubling up to 30 s.
    pub const DEFAULT_BACKOFF: Backoff = Backoff::new(Duration::from_millis(100), Duration::from_secs(30));
    /// 10.
    pub const DEFAULT_MAX_ATTEMPTS: u32 = 10;
    /// 20 seconds.
    pub const DEFAULT_STOP_DEADLINE: Duration = Duration::from_secs(20);
    /// 5 minutes.
    pub const DEFAULT_START_PATIENCE: Duration = Duration::from_secs(300);

    /// Handles every message of `source` whose route has no handler of its own.
    ///
    /// A source is given as it is or shared, in an [`Arc`].
    pub fn new(source: impl Source + 'static, gate: Gate, handler: impl Handler) -> Self {
        Self {
            source: Arc::new(source),
            routes: vec![(None, gate, Arc::new(handler))],
            dead_letters: None,
            observer: Arc::new(Counters::default()),
            settings: Settings {
                concurrency: Self::DEFAULT_CONCURRENCY,
                ordering: Ordering::default(),
                max_attempts: Self::DEFAULT_MAX_ATTEMPTS,
                backoff: Self::DEFAULT_BACKOFF,
                bad_keys: BadKeys::default(),
                tenant_limit: None,
                stop_deadline: Self::DEFAULT_STOP_DEADLINE,
                start_patience: Self::DEFAULT_START_PATIENCE,
                overtaking_retries: false,
                fail_open_after: None,
                #[cfg(feature = "otel")]
                trace_parent: TraceParent::default(),
            },
            dead_letter_limit: DeadLetterLimit::default(),
            breaker: Some(Breaker::default()),
            most_messages: Self::DEFAULT_IN_FLIGHT_MESSAGES,
            most_bytes: Self::DEFAULT_IN_FLIGHT_BYTES,
            life: Arc::default(),
            at_once: None,
        }
    }

    /// Handles the messages of one route (by default the topic) with a gate and handler of their own: a refund
    /// with the order's id is not the order's duplicate.
    pub fn route(mut self, route: impl Into<String>, gate: Gate, handler: impl Handler) -> Self {
        self.routes.push((Some(route.into()), gate, Arc::new(handler)));
        self
    }

    /// How many handlers run at a time: 64 by default. Waiting, parked and delayed messages do not count. From a
    /// queue, no more messages are received than that.
    pub fn concurrency(mut self, handlers: u32) -> Self {
        self.settings.concurrency = handlers;
        self
    }

    /// How many handlers run at a time for one tenant, so that one cannot starve the others: as many as for all, by
    /// default. The tenant is that of the gate's key, [`Key::tenant`](crate::Key::tenant).
    ///
    /// What waits for its tenant still takes room [in flight](Self::in_flight). It keeps its place in its order.
    pub fn tenant_limit(mut self, handlers: u32) -> Self {
        self.settings.tenant_limit = Some(handlers);
        self
    }

    /// In which order messages run: by broker key, by default.
    pub fn ordering(mut self, ordering: Ordering) -> Self {
        self.settings.ordering = ordering;
        self
    }

    /// How many attempts a message gets, those of crashed processes included: 10 by default, 1 to 254.
    pub fn max_attempts(mut self, attempts: u32) -> Self {
        self.settings.max_attempts = attempts;
        self
    }

    /// The waits between attempts: 100 ms, doubling up to 30 s, by default.
    pub fn backoff(mut self, backoff: Backoff) -> Self {
        self.settings.backoff = backoff;
        self
    }

    /// How much waits between the source and the ack: 10,000 messages and 64 MiB by default. A bound on memory;
    /// one message that is larger than `bytes` still passes, alone.
    pub fn in_flight(mut self, messages: usize, bytes: usize) -> Self {
        self.most_messages = messages;
        self.most_bytes = bytes;
        self
    }

    /// Where messages go that are given up. Without one, the consumer stops at the first of them, and
    /// acknowledges it to nobody.
    pub fn dead_letters(mut self, dead_letters: impl DeadLetters + 'static) -> Self {
        self.dead_letters = Some(Arc::new(dead_letters));
        self
    }

    /// What becomes of a message of which no key can be made: it goes to the dead letters, by default.
    pub fn bad_keys(mut self, bad_keys: BadKeys) -> Self {
        self.settings.bad_keys = bad_keys;
        self
    }

    /// When giving up messages means that the consumer itself is wrong: 100 in a row or half of the last 1,000,
    /// by default. Then it stops.
    pub fn dead_letter_limit(mut self, limit: DeadLetterLimit) -> Self {
        self.dead_letter_limit = limit;
        self
    }

    /// When a handler fails for all messages alike, because something it needs is down: half of the last 20 keys, by
    /// default. Then it is paused, one message at a time probes, and failures cost no attempt until one goes through.
    /// Each route has a breaker of its own.
    pub fn breaker(mut self, limits: Breaker) -> Self {
        self.breaker = Some(limits);
        self
    }

    /// Never pauses a handler, however it fails.
    pub fn without_breaker(mut self) -> Self {
        self.breaker = None;
        self
    }

    /// How long running handlers may go on after the stop signal: 20 s by default. Then they are cancelled. The
    /// source gets what is left of this time to commit and leave, and five seconds at least.
    pub fn stop_deadline(mut self, deadline: Duration) -> Self {
        self.settings.stop_deadline = deadline;
        self
    }

    /// Ends the stop when `again` resolves, which is asked only after the stop has begun: such as a second signal. Nobody
    /// waits for handlers any more: they are dropped, their leases lapse, and their messages run again elsewhere, flagged as
    /// recovered. What is finished is still committed, within a second. By default a stop takes its time.
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

    /// Accepts that a message that waits in a retry topic is overtaken by later ones of its key or partition.
    ///
    /// A source with retry topics needs this, or [`Ordering::Unordered`]: a message can wait elsewhere, or keep its place,
    /// and not both.
    pub fn overtaking_retries(mut self) -> Self {
        self.settings.overtaking_retries = true;
        self
    }

    /// Fails open: when a store has been away for `patience`, its messages run without it, until it answers again. By
    /// default they wait (the consumer fails closed), however long that takes.
    ///
    /// This gives up the promise for as long as the store is away. A message may run that was completed before, that
    /// another process runs at the same time, or that comes again, then or later: nothing of these runs is remembered.
    /// Each is counted, as `extra_runs{fail_open}`; the handler is told by [`Attempt::is_fail_open`], and by
    /// [`Attempt::recovered`]. What stays: a message is acknowledged only after its handler has succeeded, failures are
    /// tried again in this process and counted there, messages keep their order, and what is hopeless goes to the dead
    /// letters. A completion that was under way when the store went is not waited for beyond `patience` either; the gate
    /// goes on with it in the background.
    ///
    /// A store that answers with an error is not away: a record that cannot be read, and a store that refuses, are waited
    /// for; nor does a consumer start without its store. Choose a patience that outlasts a failover. Gates that are [`transactional`](Gate::transactional) or
    /// [`fenced`](Gate::fenced) refuse it: there is no transaction and no fence without the store.
    ///
    /// [`Attempt::is_fail_open`]: crate::Attempt::is_fail_open
    /// [`Attempt::recovered`]: crate::Attempt::recovered
    pub fn fail_open_after(mut self, patience: Duration) -> Self {
        self.settings.fail_open_after = Some(patience);
        self
    }

    /// Who gets the events of the consumer, its gates and its source, such as [`Counters`].
    pub fn observer(mut self, observer: Arc<dyn Observer>) -> Self {
        self.observer = observer;
        self
    }

    /// How the span of a run stands to the trace of whoever produced its message: a part of it, by default.
    #[cfg(feature = "otel")]
    pub fn trace_parent(mut self, trace_parent: TraceParent) -> Self {
        self.settings.trace_parent = trace_parent;
        self
    }

    /// A handle to ask the consumer how it is while it runs: what it does, and whether that is well.
    pub fn monitor(&self) -> Monitor {
        let (_, gate, _) = self.routes.first().expect("a consumer is made with a route");
        Monitor::new(gate.scope(), Arc::clone(&self.life))
    }

    /// Consumes until `shutdown` resolves or the source ends; then lets running handlers end, commits, and leaves.
    ///
    /// # Errors
    /// When it cannot start, or cannot go on without losing a message; the error says what to change. What was
    /// not acknowledged will be delivered again.
    pub async fn run_until(self, shutdown: impl Future<Output = ()> + Send) -> Result<(), ConsumerError> {
        let life = Arc::clone(&self.life);
        // On the heap: it happens once, and whoever spawns a consumer would carry the room for it.
        let ended = Box::pin(self.consume_until(shutdown)).await;
        life.end(ended.as_ref().err().map(ToString::to_string));
        ended
    }

    /// Checks its settings, as [`run_until`](Self::run_until) does first. Nothing is connected.
    ///
    /// # Errors
    /// The first setting that makes no sense, of the consumer or of one of its gates.
    pub fn check(&self) -> Result<(), ConsumerError> {
        self.check_settings()?;
        self.routes.iter().try_for_each(|(_, gate, _)| gate.check()).map_err(ConsumerError::Gate)
    }

    /// Checks every setting, and opens every gate.
    async fn open(&mut self) -> Result<Shared, ConsumerError> {
        self.check_settings()?;
        let mut routes = Vec::new();
        for (name, mut gate, handler) in self.routes.drain(..) {
            gate.set_observer(Arc::clone(&self.observer));
            if let Some(patience) = self.settings.fail_open_after {
                gate.set_fail_open(patience);
                warn!(
                    scope = gate.scope(),
                    ?patience,
                    "it fails open: when its store is away for longer, messages run without it, and repetitions run again"
                );
            }
            let fail_open = gate.fail_open()?;
            let gate = Arc::clone(gate.opened().await?);
            let (checkup, promise) = (gate.checkup(), gate.promise());
            info!(scope = gate.scope(), store = checkup.store, %promise, adds_a_run = promise.adds_a_run, "the gate is open");
            for warning in &checkup.warnings {
                warn!(scope = gate.scope(), store = checkup.store, "{warning}");
            }
            let (number, breaker) = (routes.len(), Switch::new(self.breaker));
            routes.push((name, Arc::new(Route { number, gate, fail_open, handler, breaker })));
        }
        Ok(Shared {
            routes,
            dead_letters: self.dead_letters.take(),
            observer: Arc::clone(&self.observer),
            permits: Arc::new(Semaphore::new(self.settings.concurrency as usize)),
            flood: Mutex::new(DeadLetterGuard::new(self.dead_letter_limit)),
            in_flight: InFlight::new(self.most_messages, self.most_bytes),
            duplicates: AtomicU32::new(0),
            watch: Arc::new(Watch::new()),
            failures: FailureLog::default(),
            stopping: CancellationToken::new(),
            at_once: CancellationToken::new(),
            group: self.source.status().group,
            retry_queue: self.source.retry_queue(),
            settings: self.settings,
        })
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

/// A gate and the handler behind it.
struct Route {
    /// Its place among the consumer's routes.
    number: usize,
    gate: Arc<OpenGate>,
    /// What lets messages in while the store is away, if the consumer fails open.
    fail_open: Option<Arc<OpenGate>>,
    handler: Arc<dyn ErasedHandler>,
    breaker: Switch,
}

impl Route {
    /// Tells every running handler to stop.
    fn cancel_all(&self) {
        self.gate.cancel_all();
        self.fail_open.iter().for_each(|gate| gate.cancel_all());
    }
}

impl std::fmt::Debug for Route {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Route").field("gate", &self.gate).finish_non_exhaustive()
    }
}

/// A message on its way, with what is known of it.
struct Item {
    delivery: Delivery,
    route: Arc<Route>,
    identity: Result<Identity, KeyError>,
    /// Equal for messages of one tenant, if tenants are a part of the key.
    tenant: Option<u64>,
    /// A claim whose answer was lost: the next attempt must repeat it.
    claim: Option<Claim>,
    /// What it counts against the limit on bytes.
    bytes: usize,
    /// Its store has been away for too long: it runs without it.
    without_store: bool,
    /// The stored result, when a look ahead has found one.
    found: Option<Bytes>,
    received_at: Instant,
    /// What its earlier attempts in this process have left.
    past: attempt::Past,
    /// Why it has to wait, while it does.
    wait: Option<Wait>,
    /// The monitor's note of its attempt, while one is under way.
    attempt: Option<Attempt>,
}

/// Why a message waits for its time.
#[derive(Clone, Copy, Debug)]
struct Wait {
    cause: WaitCause,
    /// Since it first waits for this.
    since: Instant,
    until: Instant,
}

impl std::fmt::Debug for Item {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.delivery.message.fmt(f)
    }
}

/// What all parts of a running consumer share.
struct Shared {
    /// The first one has no name and takes what no other takes.
    routes: Vec<(Option<String>, Arc<Route>)>,
    dead_letters: Option<Arc<dyn DeadLetters>>,
    observer: Arc<dyn Observer>,
    /// One for each handler that may run.
    permits: Arc<Semaphore>,
    flood: Mutex<DeadLetterGuard>,
    in_flight: InFlight,
    watch: Arc<Watch>,
    /// What fails of the dead letters.
    failures: FailureLog,
    /// The share of duplicates among the last messages, as a moving average in 1/65,536.
    duplicates: AtomicU32,
    stopping: CancellationToken,
    /// Nobody waits for handlers any more.
    at_once: CancellationToken,
    /// The source's consumer group, for spans.
    group: Option<String>,
    /// Where messages wait whose retry is far off.
    retry_queue: Option<Arc<dyn RetryQueue>>,
    settings: Settings,
}

impl Shared {
    const ALL: u32 = 1 << 16;
    /// A message moves the average by this part.
    const SHARE_OF_ONE: u32 = 64;

    fn breaker(&self, route: usize) -> Option<&Switch> {
        self.routes.get(route).map(|(_, route)| &route.breaker)
    }

    fn routes(&self) -> impl Iterator<Item = &Arc<Route>> {
        self.routes.iter().map(|(_, route)| route)
    }

    fn terms(&self) -> Terms {
        let lease = self.routes().map(|route| route.gate.settings().lease).max().unwrap_or_default();
        let retention = self.routes().map(|route| route.gate.settings().retention).min().unwrap_or_default();
        let max_run = self.routes().map(|route| route.gate.settings().max_run).max().unwrap_or_default();
        let Settings { max_attempts, stop_deadline, .. } = self.settings;
        Terms { max_attempts, lease, retention, stop_deadline, max_run }
    }

    fn route(&self, name: &str) -> Arc<Route> {
        let named = self.routes.iter().find(|(route, _)| route.as_deref() == Some(name));
        let unnamed = || self.routes.iter().find(|(route, _)| route.is_none());
        let (_, route) = named.or_else(unnamed).expect("a consumer is made with a route that has no name");
        Arc::clone(route)
    }

    /// A message has passed: by its handler, or as a duplicate.
    fn noted(&self, duplicate: bool) {
        self.flood.lock().unwrap_or_else(std::sync::PoisonError::into_inner).passed();
        // Two threads may overwrite each other's step; the average is a hint, not a count.
        let average = self.duplicates.load(Relaxed);
        let up = if duplicate { Self::ALL / Self::SHARE_OF_ONE } else { 0 };
        self.duplicates.store(average - average / Self::SHARE_OF_ONE + up, Relaxed);
    }

    /// Whether looking ahead pays: it costs a read for each message that is not completed, and saves more for
    /// each that is.
    fn mostly_duplicates(&self) -> bool {
        self.duplicates.load(Relaxed) > Self::ALL / 2
    }

    /// A random number from 0 up to 1, for jitter.
    fn random(&self) -> f64 {
        self.routes().next().map_or(0.0, |route| route.gate.fraction())
    }
}
