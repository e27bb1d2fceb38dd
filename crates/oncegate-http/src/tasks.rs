//! The running handlers, independent of whether their clients still wait, and the memory for request bodies.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tokio_util::task::task_tracker::TaskTrackerToken;
use tracing::Instrument;

/// How long cancelled handlers may take to end.
const CUT_OFF_GRACE: Duration = Duration::from_secs(1);

/// A permit to run a handler; [`drain`](Tasks::drain) waits for it.
#[derive(Debug)]
pub(super) struct Place {
    _permit: OwnedSemaphorePermit,
    _tracked: TaskTrackerToken,
}

/// The memory for request bodies, shared by all requests of a layer: one permit for each byte.
#[derive(Debug)]
pub(super) struct BodyMemory {
    free: Arc<Semaphore>,
    bytes: usize,
}

/// The memory that one request's body occupies. It is free again when this is dropped.
#[derive(Debug, Default)]
pub(super) struct OccupiedMemory {
    permit: Option<OwnedSemaphorePermit>,
}

impl BodyMemory {
    pub(super) fn new(bytes: usize) -> Self {
        let bytes = bytes.min(Semaphore::MAX_PERMITS);
        Self { free: Arc::new(Semaphore::new(bytes)), bytes }
    }

    /// The size of the whole.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Occupies so many bytes more; `false` when there are not so many left.
    pub(super) fn occupy(&self, occupied: &mut OccupiedMemory, bytes: usize) -> bool {
        let bytes = u32::try_from(bytes).unwrap_or(u32::MAX);
        let Ok(more) = Arc::clone(&self.free).try_acquire_many_owned(bytes) else { return false };
        match &mut occupied.permit {
            Some(permit) => permit.merge(more),
            None => occupied.permit = Some(more),
        }
        true
    }
}

/// Runs handlers in tasks, so that a client that disconnects does not stop its handler.
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

    /// Takes a permit; `None` when there is none left, or when the service stops.
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
        // A drain waits for this permit.
        drop(tokio::spawn(work.in_current_span()));
    }

    /// Stops new handlers, waits for the running ones, and cancels those that still run after `deadline`. Returns how
    /// many were cancelled.
    pub(super) async fn drain(&self, deadline: Duration) -> usize {
        self.places.close();
        self.running.close();
        if timeout(deadline, self.running.wait()).await.is_ok() {
            return 0;
        }
        let left = self.running.len();
        self.cut_off.cancel();
        // A handler that blocks its thread cannot be cancelled; it ends with the process.
        _ = timeout(CUT_OFF_GRACE, self.running.wait()).await;
        left
    }
}
