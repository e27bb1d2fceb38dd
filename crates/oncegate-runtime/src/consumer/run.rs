//! From the first receive to the last ack: starts the parts of a consumer, begins the stop, and
//! waits for its end.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::breaker_mark;
use super::engine::Engine;
use super::error::ConsumerError;
use super::intake::intake;
use super::monitor::Life;
use super::shared::Shared;
use crate::handler::BoxFuture;
use crate::health::Phase;
use crate::source::{Source, SourceError};

/// The least time that a source has to commit and leave, however long the handlers took to end.
const CLOSE_AT_LEAST: Duration = Duration::from_secs(5);
/// The same for a stop that ends at once.
const CLOSE_AT_ONCE: Duration = Duration::from_secs(1);
/// Requests to stop that come closer together are one: `timeout`, a shell with its job, and systemd
/// with `SendSIGHUP` send two signals for one stop.
const ONE_REQUEST: Duration = Duration::from_secs(1);
/// The most batches that wait between intake and engine.
const INTAKE_DEPTH: usize = 4;

/// Consumes from an open source until `shutdown` resolves, the source ends or a part fails.
/// `at_once` is polled only from a second after that on, and ends the stop.
pub(super) async fn run(
    shared: Arc<Shared>,
    source: Arc<dyn Source>,
    life: &Life,
    shutdown: impl Future<Output = ()> + Send,
    at_once: BoxFuture<'static, ()>,
) -> Result<(), ConsumerError> {
    // Polled first when the stop has begun, so the time counts from there.
    let mut at_once: BoxFuture<'static, ()> = Box::pin(async move {
        tokio::time::sleep(ONE_REQUEST).await;
        at_once.await;
    });
    let stop_deadline = shared.settings.stop_deadline;
    let marks = BreakerMarks::begin(&shared);
    let (batches, receiver) = mpsc::channel(INTAKE_DEPTH);
    let mut parts: JoinSet<Result<(), ConsumerError>> = JoinSet::new();
    let feed = Arc::clone(&shared);
    let from = Arc::clone(&source);
    parts.spawn(async move { Ok(intake(feed, from, batches).await?) });
    parts.spawn(Engine::new(Arc::clone(&shared)).run(receiver));
    let mut shutdown = std::pin::pin!(shutdown);
    let mut result = Ok(());
    let mut stop_by = None;
    loop {
        let is_stopping = shared.stopping.is_cancelled();
        let ended = tokio::select! {
            biased;
            ended = parts.join_next() => ended,
            () = &mut shutdown, if !is_stopping => {
                info!("stopping: what has started may end");
                life.enter(Phase::Stopping);
                stop_by = Some(Instant::now() + stop_deadline);
                shared.stop();
                continue;
            }
            () = &mut at_once, if is_stopping && !shared.at_once.is_cancelled() => {
                warn!("stopping at once: running handlers are dropped");
                shared.at_once.cancel();
                continue;
            }
        };
        match ended {
            None => break,
            Some(Ok(Ok(()))) => {}
            Some(failed) => {
                let error = failed
                    .map_or_else(|bug| Some(ConsumerError::Bug(bug.to_string())), Result::err);
                result = result.and(error.map_or(Ok(()), Err));
                life.enter(Phase::Stopping);
                shared.stop();
            }
        }
    }
    let left = stop_by.map_or(stop_deadline, |stop_by| {
        stop_by.saturating_duration_since(Instant::now())
    });
    let closed = close(&shared, &*source, marks, left, at_once).await;
    if let Err(error) = &closed {
        warn!(%error, "the source did not close cleanly");
    }
    result.and(closed.map_err(ConsumerError::from))
}

/// The tasks that keep the marks of the breakers.
struct BreakerMarks {
    tasks: JoinSet<()>,
    ended: CancellationToken,
}

impl BreakerMarks {
    fn begin(shared: &Shared) -> Self {
        let mut tasks = JoinSet::new();
        let ended = CancellationToken::new();
        for route in shared.routes() {
            tasks.spawn(breaker_mark::keep(
                Arc::clone(route),
                route.breaker.changes(),
                ended.clone(),
            ));
        }
        Self { tasks, ended }
    }

    /// Waits until the last changes are written. No handler runs any more.
    async fn end(mut self) {
        self.ended.cancel();
        while self.tasks.join_next().await.is_some() {}
    }
}

/// Commits what is finished, and leaves. Meanwhile the gates release the claims that were
/// abandoned: otherwise their messages would lose an attempt each. Those whose handlers were
/// dropped are released too: they are no crash.
async fn close(
    shared: &Shared,
    source: &dyn Source,
    marks: BreakerMarks,
    left: Duration,
    at_once: BoxFuture<'static, ()>,
) -> Result<(), SourceError> {
    if shared.at_once.is_cancelled() {
        let releasing = timeout(CLOSE_AT_ONCE, shared.operations_finished());
        return tokio::join!(source.close(CLOSE_AT_ONCE), releasing).0;
    }
    // Also after a stop that has dropped handlers when its deadline was over: their claims are
    // released now.
    let left = left.max(CLOSE_AT_LEAST);
    let mut closed = None;
    {
        let closing = async { closed = Some(source.close(left).await) };
        let releasing = timeout(left, async {
            shared.operations_finished().await;
            shared.end_sessions().await;
            marks.end().await;
        });
        let mut ending = std::pin::pin!(async { tokio::join!(closing, releasing) });
        tokio::select! {
            biased;
            _ = &mut ending => {}
            () = at_once => {
                _ = timeout(CLOSE_AT_ONCE, ending).await;
            }
        }
    }
    closed.unwrap_or_else(|| {
        let what =
            "the stop was cut short before the last acknowledgements; their messages will be delivered again";
        Err(SourceError::new(what))
    })
}
