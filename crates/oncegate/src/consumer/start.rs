//! How a consumer starts: its gates, its dead letters, its source. It waits for a server that is away.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep};
use tracing::warn;

use super::monitor::Life;
use super::{Consumer, ConsumerError, positions, run};
use crate::backoff::Backoff;
use crate::failure::BoxError;
use crate::handler::BoxFuture;
use crate::observe::{Event, Observer};
use crate::source::{SourceError, Supply};

/// The delays between tries to open a source or dead letters whose server is away.
const OPEN_BACKOFF: Backoff = Backoff::new(Duration::from_millis(200), Duration::from_secs(5));

/// The name of the operation that opens source and dead letters, in metrics and in the status.
const OPEN: &str = "open";

/// Opens a source or dead letters.
type Open<'a> = dyn Fn() -> BoxFuture<'a, Result<(), BoxError>> + Send + Sync + 'a;

/// The result of opening something.
enum Opened {
    Yes,
    /// The consumer was asked to stop in the meantime.
    No,
}

impl Consumer {
    /// How long the start waits when the server of the source, or of the dead letters, is away: 5 minutes by default.
    /// After that the consumer ends with the server's error. It does not wait for a server that answers and refuses.
    ///
    /// While it waits the consumer is live but not ready, and its status has the error. This includes
    /// [SQS](crate::sqs).
    #[must_use]
    pub fn start_patience(mut self, patience: Duration) -> Self {
        self.settings.start_patience = patience;
        self
    }

    pub(super) async fn consume_until(
        mut self,
        shutdown: impl Future<Output = ()> + Send,
    ) -> Result<(), ConsumerError> {
        let mut shutdown = std::pin::pin!(shutdown);
        let source = Arc::clone(&self.source);
        let mut shared = self.open().await?;
        let waiting = Waiting {
            life: Arc::clone(&self.life),
            observer: Arc::clone(&self.observer),
            patience: self.settings.start_patience,
        };
        if let Some(dead_letters) = &shared.dead_letters {
            let opened = waiting.until_open("dead letters", &|| dead_letters.open(), shutdown.as_mut()).await;
            if matches!(opened.map_err(ConsumerError::DeadLetters)?, Opened::No) {
                return Ok(());
            }
        }
        if source.agree(&shared.terms()) == Supply::OnDemand {
            shared.in_flight.on_demand(self.settings.concurrency as usize);
        }
        // Before anything is received: a store that has lost records since the last commit must not be trusted.
        let compare = || -> BoxFuture<'_, Result<(), BoxError>> {
            let gates: Vec<_> = shared.routes().map(|route| Arc::clone(&route.gate)).collect();
            let source = Arc::clone(&source);
            Box::pin(async move { Ok(positions::compare_and_keep(gates, &*source).await?) })
        };
        if matches!(
            waiting.until_open("source", &compare, shutdown.as_mut()).await.map_err(of_source)?,
            Opened::No
        ) {
            return Ok(());
        }
        let open = || -> BoxFuture<'_, Result<(), BoxError>> {
            let opening = source.open(Arc::clone(&waiting.observer));
            Box::pin(async move { Ok(opening.await?) })
        };
        if matches!(
            waiting.until_open("source", &open, shutdown.as_mut()).await.map_err(of_source)?,
            Opened::No
        ) {
            return Ok(());
        }
        let shared = Arc::new(shared);
        self.life.begin(&shared, &source);
        let at_once = self.at_once.take().unwrap_or_else(|| Box::pin(std::future::pending()));
        run::run(shared, source, &self.life, shutdown, at_once).await
    }
}

/// Waits at the start for servers that are away.
struct Waiting {
    life: Arc<Life>,
    observer: Arc<dyn Observer>,
    patience: Duration,
}

impl Waiting {
    /// Opens it; while its server is away, tries again until the patience is over.
    async fn until_open(
        &self,
        what: &'static str,
        open: &Open<'_>,
        mut shutdown: Pin<&mut (impl Future<Output = ()> + Send)>,
    ) -> Result<Opened, BoxError> {
        let (began, mut failures) = (Instant::now(), 0_u32);
        while let Err(error) = open().await {
            let is_away = error.downcast_ref::<SourceError>().is_some_and(SourceError::is_away);
            let patience = self.patience;
            if !is_away || began.elapsed() >= patience {
                return Err(error);
            }
            failures = failures.saturating_add(1);
            self.life.opening.failed(Instant::now().into_std(), OPEN, &error);
            self.observer.observe(Event::SourceError { operation: OPEN });
            warn!(what, %error, failures, ?patience, "the server is away; trying again until `start_patience` is over");
            tokio::select! {
                biased;
                () = &mut shutdown => return Ok(Opened::No),
                () = sleep(OPEN_BACKOFF.wait(failures, rand::random())) => {}
            }
        }
        self.life.opening.succeeded(OPEN);
        Ok(Opened::Yes)
    }
}

fn of_source(error: BoxError) -> ConsumerError {
    match error.downcast::<SourceError>() {
        Ok(error) => ConsumerError::Source(*error),
        Err(other) => ConsumerError::Source(SourceError::new(other.to_string())),
    }
}
