//! Workers on standard streams: programs that read messages as JSON lines, and answer in any order.
//!
//! Each worker has a task, which owns its process and its streams. Messages wait in one queue. A
//! worker takes a message when it has fewer than its limit in flight; a message is in flight until
//! it is answered, also after it was cancelled. A worker that ends, damages an answer, or stays
//! silent about a cancelled message is restarted. The outcome of its messages in flight is unknown,
//! because they may have been handled in part. Messages it was not given have not begun, and
//! neither have those that it was sent ahead, before it had answered others (`ahead`): they go to
//! another worker. A wrong answer that names its message costs only that message, and what is no
//! answer at all costs none. The second wrong or damaged answer in a row is a mistake of the
//! program, not of a message: the consumer stops.
//!
//! | layer | files |
//! |---|---|
//! | messages are handed out | `hand_out` |
//! | one worker, whose process may be replaced | `slot` |
//! | one process | `session` |
//! | its messages; its mistakes | `job`, `violations` |
//! | its lines | `ahead` |

mod ahead;
mod hand_out;
mod job;
mod session;
pub(crate) mod slot;
mod violations;

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tokio::sync::{Mutex, mpsc, watch};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use self::job::{Job, Returned};
use self::slot::{END_GRACE, Slot};
use self::violations::Violations;
use crate::error::WorkerError;
use crate::process::Runnable;
use crate::report::{Capacity, WorkerReport};

/// Workers that share one queue.
pub(crate) struct Workers {
    jobs: mpsc::Sender<Job>,
    workers: u32,
    /// The capacity of one worker, once the first worker has reported it.
    wanted: watch::Receiver<Option<Capacity>>,
    report: WorkerReport,
    violations: Arc<Violations>,
    /// Cancelled when no more messages are to begin.
    rest: CancellationToken,
}

/// Keeps the workers running until it is stopped.
#[derive(Debug)]
pub struct Supervisor {
    tasks: JoinSet<()>,
    stop: CancellationToken,
    /// `true` once a worker had to be signalled at the stop.
    forced: Arc<AtomicBool>,
    /// The time limit for a worker to end after its input was closed, if not `END_GRACE`.
    end_grace: Arc<OnceLock<Duration>>,
}

impl Workers {
    /// Starts this number of workers.
    ///
    /// With `in_batches`, a worker that does not report that it takes batches is not ready.
    pub(crate) fn start(
        program: &Runnable,
        workers: u32,
        in_batches: bool,
        lease: Duration,
        report: &WorkerReport,
    ) -> (Self, Supervisor) {
        let (jobs, queue) = mpsc::channel(1);
        let queue = Arc::new(Mutex::new(queue));
        let (wants, wanted) = watch::channel(None);
        let stop = CancellationToken::new();
        let mut tasks = JoinSet::new();
        let forced = Arc::<AtomicBool>::default();
        let end_grace = Arc::<OnceLock<Duration>>::default();
        let violations = Arc::<Violations>::default();
        let returned = Arc::<Returned>::default();
        let rest = CancellationToken::new();
        for number in 1..=workers {
            let slot = Slot {
                number,
                program: program.clone(),
                lease,
                in_batches,
                queue: Arc::clone(&queue),
                returned: Arc::clone(&returned),
                rest: rest.clone(),
                wants: wants.clone(),
                report: report.clone(),
                stop: stop.clone(),
                forced: Arc::clone(&forced),
                end_grace: Arc::clone(&end_grace),
                violations: Arc::clone(&violations),
            };
            tasks.spawn(slot.keep());
        }
        (
            Self {
                jobs,
                workers,
                wanted,
                report: report.clone(),
                violations,
                rest,
            },
            Supervisor {
                tasks,
                stop,
                forced,
                end_grace,
            },
        )
    }

    /// Lets no more messages begin: what no worker has begun is not run.
    pub(crate) fn rest(&self) {
        self.rest.cancel();
    }

    /// Resolves when a worker has broken the protocol so that the consumer must stop.
    pub(crate) async fn unfit(&self) {
        self.violations.too_many().await;
    }

    /// Returns why the consumer must stop, if it must.
    pub(crate) fn why_unfit(&self) -> Option<String> {
        self.violations.reason()
    }

    /// Waits for the first worker that is ready. Returns how many messages all workers take.
    ///
    /// # Errors
    /// When the program cannot be started, or, after `patience`, when its processes end before they
    /// are ready.
    pub(crate) async fn ready(&self, patience: Duration) -> Result<Capacity, WorkerError> {
        let mut wanted = self.wanted.clone();
        let wanted = tokio::select! {
            biased;
            wanted = wanted.wait_for(Option::is_some) => wanted.map(|wanted| *wanted),
            never = self.report.never_ready(patience) => return Err(never),
        };
        match wanted {
            Ok(Some(Capacity { at_a_time, ahead })) => Ok(Capacity {
                at_a_time: self.workers.saturating_mul(at_a_time),
                ahead: self.workers.saturating_mul(ahead),
            }),
            // The workers' tasks were stopped before a worker was ready.
            Ok(None) | Err(_) => std::future::pending().await,
        }
    }
}

impl fmt::Debug for Workers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Workers")
            .field("workers", &self.workers)
            .finish_non_exhaustive()
    }
}

impl Supervisor {
    /// Closes the workers' input, and waits for their end; workers that do not end are terminated.
    /// Returns whether all ended by themselves.
    pub async fn stop(mut self) -> bool {
        self.stop.cancel();
        while self.tasks.join_next().await.is_some() {}
        !self.forced.load(Ordering::Relaxed)
    }

    /// Does the same, and gives the workers more time to end, if `grace` is more.
    pub async fn stop_within(self, grace: Duration) -> bool {
        _ = self.end_grace.set(grace.max(END_GRACE));
        self.stop().await
    }
}
