//! The handlers that run, whoever still waits for them.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tokio_util::task::task_tracker::TaskTrackerToken;
use tracing::Instrument;

/// How long handlers have to end that were cut off.
const CUT_OFF_GRACE: Duration = Duration::from_secs(1);

/// The right to run a handler, and the promise that a [`drain`](Tasks::drain) waits for it.
#[derive(Debug)]
pub(super) struct Place {
    _permit: OwnedSemaphorePermit,
    _tracked: TaskTrackerToken,
}

/// Runs handlers apart from the futures of their responses: a client that goes away ends nothing.
#[derive(Debug)]
pub(super) struct Tasks {
    places: Arc<Semaphore>,
    running: TaskTracker,
    cut_off: CancellationToken,
}

impl Tasks {
    pub(super) fn new(max_in_flight: usize) -> Self {
        let places = Arc::new(Semaphore::new(max_in_flight.min(Semaphore::MAX_PERMITS)));
        Self { places, running: TaskTracker::new(), cut_off: CancellationToken::new() }
    }

    /// A place to run in; `None` when all are taken, or when the service stops.
    pub(super) fn place(&self) -> Option<Place> {
        let tracked = self.running.token();
        let permit = Arc::clone(&self.places).try_acquire_owned().ok()?;
        Some(Place { _permit: permit, _tracked: tracked })
    }

    pub(super) fn spawn(&self, place: Place, work: impl Future<Output = ()> + Send + 'static) {
        let cut_off = self.cut_off.clone();
        let work = async move {
            tokio::select! {
                biased;
                () = cut_off.cancelled() => {}
                () = work => {}
            }
            drop(place);
        };
        // Its place is what a drain waits for.
        drop(tokio::spawn(work.in_current_span()));
    }

    /// Takes nothing new, waits for what runs, and cuts off what still runs after `deadline`. Says how many.
    pub(super) async fn drain(&self, deadline: Duration) -> usize {
        self.places.close();
        self.running.close();
        if timeout(deadline, self.running.wait()).await.is_ok() {
            return 0;
        }
        let left = self.running.len();
        self.cut_off.cancel();
        // One that blocks its thread cannot be cut off; the process ends with it.
        _ = timeout(CUT_OFF_GRACE, self.running.wait()).await;
        left
    }
}
