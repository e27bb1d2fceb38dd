//! The thread that drives a store's connections: a handler that blocks a runtime's thread must not starve a
//! heartbeat.

use std::thread::JoinHandle;

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use oncegate_core::store::StoreError;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

/// A thread with a runtime of its own. Dropping it stops everything that runs there, and waits for it.
#[derive(Debug)]
pub(super) struct Driver {
    jobs: Jobs,
    stop: CancellationToken,
    thread: Option<JoinHandle<()>>,
}

impl Driver {
    /// Starts the thread.
    ///
    /// # Errors
    /// When the machine has no thread or no runtime to give.
    pub(super) fn start() -> Result<Self, StoreError> {
        let refuse = |error: std::io::Error| StoreError::unavailable(format!("no thread: {error}"));
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(refuse)?;
        let (sender, inbox) = mpsc::unbounded_channel();
        let stop = CancellationToken::new();
        let stopped = stop.clone();
        let drive = move || {
            runtime.block_on(run(inbox, stopped));
            // A name that is still being resolved keeps nobody waiting.
            runtime.shutdown_background();
        };
        let thread = std::thread::Builder::new().name("oncegate-redis".to_owned()).spawn(drive);
        Ok(Self { jobs: Jobs { inbox: sender }, stop, thread: Some(thread.map_err(refuse)?) })
    }

    /// What others hand their jobs to.
    pub(super) fn jobs(&self) -> Jobs {
        self.jobs.clone()
    }
}

/// Hands jobs to a driver. It does not keep the driver alive.
#[derive(Clone, Debug)]
pub(super) struct Jobs {
    /// One job for each lane and slot map, so there are never many.
    inbox: mpsc::UnboundedSender<BoxFuture<'static, ()>>,
}

impl Jobs {
    /// Runs `job` on the driver's thread until it ends by itself or the driver is dropped.
    pub(super) fn run(&self, job: impl Future<Output = ()> + Send + 'static) {
        // The inbox is gone only when the thread is, and then nobody's calls are answered anyway.
        let _ = self.inbox.send(job.boxed());
    }
}

async fn run(mut inbox: mpsc::UnboundedReceiver<BoxFuture<'static, ()>>, stopped: CancellationToken) {
    let mut running = JoinSet::new();
    loop {
        tokio::select! {
            biased;
            () = stopped.cancelled() => return,
            Some(job) = inbox.recv() => drop(running.spawn(job)),
            Some(ended) = running.join_next() => {
                if let Err(panic) = ended {
                    tracing::error!(%panic, "a connection to the store has panicked");
                }
            }
        }
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        self.stop.cancel();
        if let Some(thread) = self.thread.take() {
            // Nobody is left who waits for an answer, so the thread ends at its next wake-up. Whether it
            // had panicked does not matter any more.
            let _ = thread.join();
        }
    }
}
