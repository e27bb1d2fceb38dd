//! The opening of a consumer's gates.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::AtomicU32;

use oncegate_core::store::DeadLetterStop;
use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::Consumer;
use crate::consumer::breaker::Switch;
use crate::consumer::dead_letter_limit::DeadLetterGuard;
use crate::consumer::error::ConsumerError;
use crate::consumer::in_flight::InFlight;
use crate::consumer::pace::Pace;
use crate::consumer::permits::PermitPool;
use crate::consumer::quarantine::Quarantine;
use crate::consumer::route_handler::RouteHandler;
use crate::consumer::settings::ConsumerSettings;
use crate::consumer::shared::{Route, Shared, TransactionalRoute};
use crate::consumer::start::{Opened, Waiting};
use crate::consumer::trace::Spans;
use crate::consumer::watch::Watch;
use crate::gate::{Gate, OpenGate};
use crate::health::FailureLog;

impl Consumer {
    /// Checks every setting and opens every gate. `None`: the consumer was asked to stop in the
    /// meantime.
    pub(super) async fn open(
        &mut self,
        mut shutdown: Pin<&mut (impl Future<Output = ()> + Send)>,
    ) -> Result<Option<Shared>, ConsumerError> {
        self.check_settings()?;
        let entropy = self
            .routes
            .first()
            .map(|(_, gate, _)| gate.entropy())
            .unwrap_or_default();
        let waiting = Waiting {
            life: Arc::clone(&self.life),
            observer: Arc::clone(&self.observer),
            patience: self.settings.start_patience,
            entropy,
        };
        let settings = self.settings;
        let mut routes = Vec::new();
        for (number, (name, gate, handler)) in self.routes.drain(..).enumerate() {
            let gate = configured(gate, &handler, &settings, &waiting);
            let opened = open_route(
                number,
                gate,
                handler,
                &settings,
                &waiting,
                shutdown.as_mut(),
            );
            let Some(route) = opened.await? else {
                return Ok(None);
            };
            routes.push((name, Arc::new(route)));
        }
        Ok(Some(self.shared(routes)))
    }

    /// The state that the parts of the running consumer share.
    fn shared(&mut self, routes: Vec<(Option<String>, Arc<Route>)>) -> Shared {
        let earlier_stop = routes
            .iter()
            .find_map(|(_, route)| stop_before(&route.gate));
        Shared {
            routes,
            dead_letters: self.dead_letters.take(),
            observer: Arc::clone(&self.observer),
            permits: PermitPool::new(self.settings.concurrency, self.ahead),
            quarantine: Quarantine::default(),
            dead_letter_guard: Mutex::new(DeadLetterGuard::new(
                self.settings.dead_letter_limit,
                earlier_stop.as_ref(),
            )),
            in_flight: InFlight::new(
                self.settings.in_flight_messages,
                self.settings.in_flight_bytes,
            ),
            duplicates: AtomicU32::new(0),
            watch: Arc::new(Watch::new()),
            failures: FailureLog::default(),
            stopping: CancellationToken::new(),
            at_once: CancellationToken::new(),
            spans: Spans {
                group: self.source.status().group,
                #[cfg(feature = "otel")]
                trace_parent: self.settings.trace_parent,
            },
            retry_queue: self.source.retry_queue(),
            retry_writes: Arc::default(),
            settings: self.settings,
        }
    }
}

/// Passes the consumer's settings on to a gate.
fn configured(
    mut gate: Gate,
    handler: &RouteHandler,
    settings: &ConsumerSettings,
    waiting: &Waiting,
) -> Gate {
    if handler.limit().is_some() {
        gate = gate.transactional();
    }
    gate.set_observer(Arc::clone(&waiting.observer));
    if let Some(patience) = settings.fail_open_after {
        gate.set_fail_open(patience);
        warn!(
            scope = gate.scope(),
            ?patience,
            "the consumer fails open: when its store is away for longer, messages run without it, and duplicates run again"
        );
    }
    gate
}

/// Opens the gate of a route, and begins the session of its handler if that is transactional.
/// `None`: the consumer was asked to stop in the meantime.
async fn open_route(
    number: usize,
    gate: Gate,
    handler: RouteHandler,
    settings: &ConsumerSettings,
    waiting: &Waiting,
    mut shutdown: Pin<&mut (impl Future<Output = ()> + Send)>,
) -> Result<Option<Route>, ConsumerError> {
    let fail_open = gate.fail_open()?;
    if let Opened::No = waiting.until_gate_is_open(&gate, shutdown.as_mut()).await? {
        return Ok(None);
    }
    let gate = Arc::clone(gate.opened().await?);
    tell_of(&gate);
    let breaker = Switch::new(settings.breaker.on.then_some(settings.breaker), &gate);
    let RouteHandler {
        handler,
        limits,
        batches,
        transactional,
    } = handler;
    let transactional = transactional.map(|handler| TransactionalRoute::new(handler, &gate));
    if let Some(transactional) = &transactional
        && let Opened::No = waiting
            .until_session_begins(transactional, &gate, shutdown)
            .await?
    {
        return Ok(None);
    }
    Ok(Some(Route {
        number,
        gate,
        fail_open,
        handler,
        limits,
        batches,
        transactional,
        breaker,
        pace: Pace::new(Handle::current().metrics().num_workers()),
    }))
}

/// Logs what an open gate promises, and what its store warns of.
fn tell_of(gate: &OpenGate) {
    let checkup = gate.checkup();
    let promise = gate.promise();
    info!(
        scope = gate.scope(),
        store = checkup.store,
        promise = promise.to_string(),
        adds_a_run = promise.adds_a_run,
        "the gate is open"
    );
    for warning in &checkup.warnings {
        warn!(scope = gate.scope(), store = checkup.store, "{warning}");
    }
}

/// The stop of an earlier process at its dead-letter limit.
fn stop_before(gate: &OpenGate) -> Option<DeadLetterStop> {
    let stop = gate.dead_letter_stop()?;
    warn!(
        scope = gate.scope(),
        stop.what,
        "a consumer has stopped at its dead-letter limit: until a message succeeds, this one stops at the first message \
         that it would have to give up; `oncegate accept dead-letters` lets as many be given up again"
    );
    Some(stop)
}
