//! The state that all parts of a running consumer share.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use parking_lot::{Mutex, MutexGuard};
use tokio_util::sync::CancellationToken;

use super::breaker::Switch;
use super::dead_letter_limit::DeadLetterGuard;
use super::erased::ErasedTransactional;
use super::in_flight::InFlight;
use super::pace::Pace;
use super::permits::PermitPool;
use super::quarantine::Quarantine;
use super::retry_writes::RetryWrites;
use super::session::Session;
use super::settings::ConsumerSettings;
use super::trace::Spans;
use super::watch::Watch;
use crate::batch::{BatchLimits, ErasedBatchHandler};
use crate::dead_letters::DeadLetters;
use crate::gate::{GateError, OpenGate};
use crate::handler::ErasedHandler;
use crate::health::FailureLog;
use crate::observe::Observer;
use crate::source::{RetryQueue, Terms};

/// A gate and the handler behind it.
pub(super) struct Route {
    /// The index of the route among the consumer's routes.
    pub(super) number: usize,
    pub(super) gate: Arc<OpenGate>,
    /// The gate that runs messages without the store while it is away, if the consumer fails open.
    pub(super) fail_open: Option<Arc<OpenGate>>,
    pub(super) handler: Arc<dyn ErasedHandler>,
    /// The limits of its batches, if it takes batches.
    pub(super) limits: Option<BatchLimits>,
    /// The same handler, if it takes batches whose messages are claimed one by one.
    pub(super) batches: Option<Arc<dyn ErasedBatchHandler>>,
    /// For runs without a claim, if the handler is transactional.
    pub(super) transactional: Option<TransactionalRoute>,
    pub(super) breaker: Switch,
    pub(super) pace: Pace,
}

/// The parts that a route needs to run first attempts without a claim.
pub(super) struct TransactionalRoute {
    pub(super) handler: Arc<dyn ErasedTransactional>,
    pub(super) session: Arc<Session>,
}

impl TransactionalRoute {
    pub(super) fn new(handler: Arc<dyn ErasedTransactional>, gate: &OpenGate) -> Self {
        let session = Session::new(
            gate.scope_name().clone(),
            gate.random_number(),
            handler.sessions(),
        );
        Self { handler, session }
    }

    /// Checks that its transactions are those of the gate's store, and begins the session.
    pub(super) async fn open(&self, gate: &OpenGate) -> Result<(), GateError> {
        let theirs = self.handler.descriptor(gate.scope_name().clone()).await?;
        if !gate.is_described_by(theirs.as_deref()).await? {
            return Err(GateError::Settings {
                scope: gate.scope().to_owned(),
                what: "the transactions of the handler are in another database than the store: use `transactions()` of that \
                       store"
                    .to_owned(),
            });
        }
        // A missing table or right is better found now than at the first message.
        Ok(self.session.beat().await?)
    }
}

impl Route {
    /// Returns how many messages that wait for its handler may ask again now: none while an
    /// operator has paused its scope.
    pub(super) fn admits(&self) -> usize {
        if self.gate.is_paused() {
            0
        } else {
            self.breaker.admits()
        }
    }

    /// Lets no handler begin any more.
    fn stop(&self) {
        self.gate.stop();
        self.fail_open.iter().for_each(|gate| gate.stop());
    }

    /// Tells every running handler to stop.
    pub(super) fn cancel_all(&self) {
        self.gate.cancel_all();
        self.fail_open.iter().for_each(|gate| gate.cancel_all());
    }
}

impl std::fmt::Debug for Route {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Route")
            .field("gate", &self.gate)
            .finish_non_exhaustive()
    }
}

/// The state that all parts of a running consumer share.
pub(super) struct Shared {
    /// The first one has no name; it takes the messages of every route that no other one takes.
    pub(super) routes: Vec<(Option<String>, Arc<Route>)>,
    pub(super) dead_letters: Option<Arc<dyn DeadLetters>>,
    pub(super) observer: Arc<dyn Observer>,
    /// The permits: one for each handler that may run.
    pub(super) permits: PermitPool,
    /// The growing patience of messages that run alone.
    pub(super) quarantine: Quarantine,
    pub(super) dead_letter_guard: Mutex<DeadLetterGuard>,
    pub(super) in_flight: InFlight,
    pub(super) watch: Arc<Watch>,
    /// Failures of writing dead letters.
    pub(super) failures: FailureLog,
    /// The share of duplicates among the last messages, as a moving average in 1/65,536.
    pub(super) duplicates: AtomicU32,
    pub(super) stopping: CancellationToken,
    /// The stop ends at once, without waiting for handlers.
    pub(super) at_once: CancellationToken,
    pub(super) spans: Spans,
    /// The topics or queues in which messages wait for a retry that is not due soon.
    pub(super) retry_queue: Option<Arc<dyn RetryQueue>>,
    /// Failures of writing to it.
    pub(super) retry_writes: Arc<RetryWrites>,
    pub(super) settings: ConsumerSettings,
}

impl Shared {
    pub(super) const ALL: u32 = 1 << 16;
    /// The divisor of the average: one message moves it by one part in this many.
    pub(super) const SHARE_OF_ONE: u32 = 64;

    /// Begins the stop: no handler begins any more.
    pub(super) fn stop(&self) {
        self.stopping.cancel();
        self.routes().for_each(|route| route.stop());
    }

    pub(super) fn route_number(&self, route: usize) -> Option<&Route> {
        self.routes.get(route).map(|(_, route)| &**route)
    }

    /// Returns whether an operator has paused the scope of this route.
    pub(super) fn is_paused(&self, route: usize) -> bool {
        self.route_number(route)
            .is_some_and(|route| route.gate.is_paused())
    }

    pub(super) fn routes(&self) -> impl Iterator<Item = &Arc<Route>> {
        self.routes.iter().map(|(_, route)| route)
    }

    /// The most messages that run at once.
    pub(super) fn most_at_once(&self) -> usize {
        let largest_call = self
            .routes()
            .map(|route| route.limits.map_or(1, |limits| limits.messages))
            .max()
            .unwrap_or(1);
        largest_call.saturating_mul(self.settings.concurrency as usize)
    }

    pub(super) fn terms(&self) -> Terms {
        let lease = self
            .routes()
            .map(|route| route.gate.settings().lease)
            .max()
            .unwrap_or_default();
        let retention = self
            .routes()
            .map(|route| route.gate.settings().retention)
            .min()
            .unwrap_or_default();
        let max_run = self
            .routes()
            .map(|route| route.gate.settings().max_run)
            .max()
            .unwrap_or_default();
        let ConsumerSettings {
            max_attempts,
            stop_deadline,
            ..
        } = self.settings;
        Terms {
            max_attempts,
            lease,
            retention,
            stop_deadline,
            max_run,
        }
    }

    pub(super) fn route(&self, name: &str) -> Arc<Route> {
        let named = self
            .routes
            .iter()
            .find(|(route, _)| route.as_deref() == Some(name));
        let (_, route) = named
            .or_else(|| self.routes.iter().find(|(route, _)| route.is_none()))
            .expect("a consumer is made with a route that has no name");
        Arc::clone(route)
    }

    /// Counts a message that its handler accepted, or that was a duplicate. Returns whether the
    /// stop at the dead-letter limit that the store keeps is to be removed.
    pub(super) fn noted(&self, duplicate: bool) -> bool {
        let is_stop_over = self.dead_letter_guard().passed(duplicate);
        // Two threads may overwrite each other's update; the average is a hint, not a count.
        let average = self.duplicates.load(Relaxed);
        let up = if duplicate {
            Self::ALL / Self::SHARE_OF_ONE
        } else {
            0
        };
        self.duplicates
            .store(average - average / Self::SHARE_OF_ONE + up, Relaxed);
        is_stop_over
    }

    pub(super) fn dead_letter_guard(&self) -> MutexGuard<'_, DeadLetterGuard> {
        self.dead_letter_guard.lock()
    }

    /// Returns whether the prefetch pays: it costs a read for each message that is not completed,
    /// and saves more than that for each one that is.
    pub(super) fn mostly_duplicates(&self) -> bool {
        self.duplicates.load(Relaxed) > Self::ALL / 2
    }

    /// Waits until no operation of a gate is left whose caller is gone, such as the release of an
    /// abandoned claim.
    pub(super) async fn operations_finished(&self) {
        for (_, route) in &self.routes {
            route.gate.operations_finished().await;
            if let Some(gate) = &route.fail_open {
                gate.operations_finished().await;
            }
        }
    }

    /// Removes the sessions of transactional handlers: every handler has ended.
    pub(super) async fn end_sessions(&self) {
        for route in self
            .routes()
            .filter_map(|route| route.transactional.as_ref())
        {
            route.session.end().await;
        }
    }

    /// A random number from 0 up to 1, for jitter.
    pub(super) fn random(&self) -> f64 {
        self.routes()
            .next()
            .map_or(0.0, |route| route.gate.fraction())
    }
}
