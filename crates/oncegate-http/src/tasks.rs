//! The running handlers, independent of whether their clients still wait.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tokio_util::task::task_tracker::TaskTrackerToken;
use tracing::Instrument;

/// The time that cancelled handlers may take to end.
const CUT_OFF_GRACE: Duration = Duration::from_secs(1);

/// A permit to run a handler; [`drain`](Tasks::drain) waits for it.
#[derive(Debug)]
pub(super) struct Permit {
    _permit: OwnedSemaphorePermit,
    _tracked: TaskTrackerToken,
}

/// Runs handlers in tasks, so that a client that disconnects does not stop its handler.
#[derive(Debug)]
pub(super) struct Tasks {
    permits: Arc<Semaphore>,
    running: TaskTracker,
    cut_off: CancellationToken,
}

impl Tasks {
    pub(super) fn new(max_in_flight: usize) -> Self {
        let permits = Arc::new(Semaphore::new(max_in_flight.min(Semaphore::MAX_PERMITS)));
        Self {
            permits,
            running: TaskTracker::new(),
            cut_off: CancellationToken::new(),
        }
    }

    /// Takes a permit; `None` when there is none left, or when the service stops.
    pub(super) fn permit(&self) -> Option<Permit> {
        let tracked = self.running.token();
        let permit = Arc::clone(&self.permits).try_acquire_owned().ok()?;
        Some(Permit {
            _permit: permit,
            _tracked: tracked,
        })
    }

    pub(super) fn spawn(&self, permit: Permit, work: impl Future<Output = ()> + Send + 'static) {
        let cut_off = self.cut_off.clone();
        let work = async move {
            tokio::select! {
                biased;
                () = cut_off.cancelled() => {}
                () = work => {}
            }
            drop(permit);
        };
        // A drain waits for this permit.
        drop(tokio::spawn(work.in_current_span()));
    }

    /// Stops new handlers, waits for the running ones, and cancels those that still run after
    /// `deadline`. Returns how many were cancelled.
    pub(super) async fn drain(&self, deadline: Duration) -> usize {
        self.permits.close();
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
