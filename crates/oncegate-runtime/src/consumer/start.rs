//! The start of a consumer: its gates, its dead letters, its source. It waits for a server that is
//! away.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep};
use tracing::warn;

use super::error::ConsumerError;
use super::monitor::Life;
use super::shared::{Shared, TransactionalRoute};
use super::{positions, run};
use crate::backoff::Backoff;
use crate::entropy::Entropy;
use crate::failure::BoxError;
use crate::gate::{Gate, GateError, OpenGate};
use crate::handler::BoxFuture;
use crate::observe::{Event, Observer};
use crate::source::{Source, SourceError, Supply};

/// The delays between tries to open a gate, a source or dead letters whose server is away.
const OPEN_BACKOFF: Backoff = Backoff::new(Duration::from_millis(200), Duration::from_secs(5));

/// The name of the operation that opens source and dead letters, in metrics and in the status.
const OPEN: &str = "open";

/// Opens a gate, a source or dead letters.
type Open<'a> = dyn Fn() -> BoxFuture<'a, Result<(), BoxError>> + Send + Sync + 'a;

/// The result of opening something.
pub(super) enum Opened {
    Yes,
    /// The consumer was asked to stop in the meantime.
    No,
}

/// Opens the dead letters and the source, and consumes until `shutdown` resolves. `at_once` ends
/// the stop.
pub(super) async fn consume_until(
    mut shared: Shared,
    source: Arc<dyn Source>,
    life: &Arc<Life>,
    shutdown: impl Future<Output = ()> + Send,
    at_once: BoxFuture<'static, ()>,
) -> Result<(), ConsumerError> {
    let mut shutdown = std::pin::pin!(shutdown);
    let waiting = Waiting {
        life: Arc::clone(life),
        observer: Arc::clone(&shared.observer),
        patience: shared.settings.start_patience,
        entropy: shared
            .routes()
            .next()
            .map(|route| route.gate.entropy())
            .unwrap_or_default(),
    };
    if let Some(dead_letters) = &shared.dead_letters {
        let opened = waiting
            .until_open("dead letters", &|| dead_letters.open(), shutdown.as_mut())
            .await;
        if let Opened::No = opened.map_err(ConsumerError::DeadLetters)? {
            return Ok(());
        }
    }
    if source.agree(&shared.terms()) == Supply::OnDemand {
        let most = shared.most_at_once();
        shared.in_flight.on_demand(most);
    }
    // Before anything is received: a store that has lost records since the last commit must not be
    // trusted.
    let compared = waiting
        .until_open(
            "source",
            &|| compare_positions(&shared, &source),
            shutdown.as_mut(),
        )
        .await;
    if let Opened::No = compared.map_err(of_source)? {
        return Ok(());
    }
    let opened = waiting
        .until_open(
            "source",
            &|| {
                let opening = source.open(Arc::clone(&waiting.observer));
                Box::pin(async move { Ok(opening.await?) })
            },
            shutdown.as_mut(),
        )
        .await;
    if let Opened::No = opened.map_err(of_source)? {
        return Ok(());
    }
    let shared = Arc::new(shared);
    life.begin(&shared, &source);
    run::run(shared, source, life, shutdown, at_once).await
}

/// Compares each gate's store with what the source's broker holds.
fn compare_positions(
    shared: &Shared,
    source: &Arc<dyn Source>,
) -> BoxFuture<'static, Result<(), BoxError>> {
    let gates: Vec<_> = shared
        .routes()
        .map(|route| Arc::clone(&route.gate))
        .collect();
    let source = Arc::clone(source);
    Box::pin(async move { positions::compare_and_keep(gates, &*source).await })
}

/// Waits at the start for servers that are away.
pub(super) struct Waiting {
    pub(super) life: Arc<Life>,
    pub(super) observer: Arc<dyn Observer>,
    pub(super) patience: Duration,
    /// For the jitter.
    pub(super) entropy: Arc<Entropy>,
}

impl Waiting {
    /// Opens the gate; while its store is away, tries again until the patience is over.
    pub(super) async fn until_gate_is_open(
        &self,
        gate: &Gate,
        shutdown: Pin<&mut (impl Future<Output = ()> + Send)>,
    ) -> Result<Opened, ConsumerError> {
        self.until_store_answers(
            &|| Box::pin(async { Ok(gate.opened().await.map(drop)?) }),
            shutdown,
        )
        .await
    }

    /// Begins the session of transactional handlers; while their database is away, tries again
    /// until the patience is over.
    pub(super) async fn until_session_begins(
        &self,
        route: &TransactionalRoute,
        gate: &OpenGate,
        shutdown: Pin<&mut (impl Future<Output = ()> + Send)>,
    ) -> Result<Opened, ConsumerError> {
        self.until_store_answers(
            &|| Box::pin(async { Ok(route.open(gate).await?) }),
            shutdown,
        )
        .await
    }

    async fn until_store_answers(
        &self,
        open: &Open<'_>,
        shutdown: Pin<&mut (impl Future<Output = ()> + Send)>,
    ) -> Result<Opened, ConsumerError> {
        self.until_open("store", open, shutdown)
            .await
            .map_err(|error| match error.downcast::<GateError>() {
                Ok(error) => ConsumerError::Gate(*error),
                Err(other) => ConsumerError::Bug(other.to_string()),
            })
    }

    /// Opens it; while its server is away, tries again until the patience is over.
    async fn until_open(
        &self,
        what: &'static str,
        open: &Open<'_>,
        mut shutdown: Pin<&mut (impl Future<Output = ()> + Send)>,
    ) -> Result<Opened, BoxError> {
        let began = Instant::now();
        let mut failures = 0_u32;
        while let Err(error) = open().await {
            let patience = self.patience;
            if !is_away(&error) || began.elapsed() >= patience {
                return Err(error);
            }
            failures = failures.saturating_add(1);
            self.life
                .opening
                .failed(Instant::now().into_std(), OPEN, &error);
            self.observer
                .observe(Event::SourceError { operation: OPEN });
            warn!(what, %error, failures, ?patience, "the server is away; trying again until `start_patience` is over");
            tokio::select! {
                biased;
                () = &mut shutdown => return Ok(Opened::No),
                () = sleep(OPEN_BACKOFF.wait(failures, self.entropy.fraction())) => {}
            }
        }
        self.life.opening.succeeded(OPEN);
        Ok(Opened::Yes)
    }
}

/// Returns whether the server may come back.
fn is_away(error: &BoxError) -> bool {
    let is_store_away = matches!(error.downcast_ref::<GateError>(), Some(GateError::Store(error)) if error.is_away());
    is_store_away
        || error
            .downcast_ref::<SourceError>()
            .is_some_and(SourceError::is_away)
}

/// Returns the error of a source, or of a store whose position was compared with the source's.
fn of_source(error: BoxError) -> ConsumerError {
    let other = match error.downcast::<SourceError>() {
        Ok(error) => return ConsumerError::Source(*error),
        Err(other) => other,
    };
    match other.downcast::<GateError>() {
        Ok(error) => ConsumerError::Gate(*error),
        Err(other) => ConsumerError::Source(SourceError::new(other.to_string())),
    }
}
