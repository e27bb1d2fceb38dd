//! The thread that drives the connections of this process's stores: a handler that blocks a runtime's thread must
//! not starve a heartbeat.
//!
//! All stores share one: it has little to do for a message, and threads of their own would mostly wait to be woken up.

use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::thread::JoinHandle;

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use oncegate_core::store::StoreError;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::batch;

/// A store's share of the thread. Dropping it stops what runs there for this store.
#[derive(Debug)]
pub(super) struct Driver {
    jobs: Jobs,
    _thread: Arc<Thread>,
}

impl Driver {
    /// Starts the thread, unless another store has.
    ///
    /// # Errors
    /// When the machine has no thread or no runtime to give.
    pub(super) fn start() -> Result<Self, StoreError> {
        let thread =
            Thread::shared().map_err(|error| StoreError::unavailable(format!("no thread: {error}")))?;
        let jobs = Jobs { inbox: thread.inbox.clone(), stop: CancellationToken::new() };
        Ok(Self { jobs, _thread: thread })
    }

    /// What others hand their jobs to.
    pub(super) fn jobs(&self) -> Jobs {
        self.jobs.clone()
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        self.jobs.stop.cancel();
    }
}

/// Hands jobs to a driver. It does not keep the driver alive.
#[derive(Clone, Debug)]
pub(super) struct Jobs {
    /// One job for each lane and slot map, so there are never many.
    inbox: mpsc::UnboundedSender<BoxFuture<'static, ()>>,
    stop: CancellationToken,
}

impl Jobs {
    /// Runs `job` on the driver's thread until it ends by itself or the driver is dropped.
    pub(super) fn run(&self, job: impl Future<Output = ()> + Send + 'static) {
        let stop = self.stop.clone();
        let job = async move { _ = stop.run_until_cancelled(job).await };
        // The inbox is gone only when the thread is, and then nobody's calls are answered anyway.
        let _ = self.inbox.send(job.boxed());
    }
}

/// A thread with a runtime of its own. Dropping it stops everything that runs there, and waits for it.
#[derive(Debug)]
struct Thread {
    inbox: mpsc::UnboundedSender<BoxFuture<'static, ()>>,
    stop: CancellationToken,
    handle: Option<JoinHandle<()>>,
}

impl Thread {
    /// The one that runs, or a new one.
    fn shared() -> std::io::Result<Arc<Self>> {
        static SHARED: Mutex<Weak<Thread>> = Mutex::new(Weak::new());
        let mut shared = SHARED.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(thread) = shared.upgrade() {
            return Ok(thread);
        }
        let thread = Arc::new(Self::start()?);
        *shared = Arc::downgrade(&thread);
        Ok(thread)
    }

    fn start() -> std::io::Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let (sender, inbox) = mpsc::unbounded_channel();
        let stop = CancellationToken::new();
        let stopped = stop.clone();
        let drive = move || {
            batch::let_calls_gather();
            runtime.block_on(run(inbox, stopped));
            // A name that is still being resolved keeps nobody waiting.
            runtime.shutdown_background();
        };
        let handle = std::thread::Builder::new().name("oncegate-redis".to_owned()).spawn(drive)?;
        Ok(Self { inbox: sender, stop, handle: Some(handle) })
    }
}

impl Drop for Thread {
    fn drop(&mut self) {
        self.stop.cancel();
        // A task that is dropped there may have held the last store; nobody waits for himself.
        let is_other = |handle: &JoinHandle<()>| handle.thread().id() != std::thread::current().id();
        if let Some(handle) = self.handle.take().filter(is_other) {
            // Nobody is left who waits for an answer, so the thread ends at its next wake-up. Whether it
            // had panicked does not matter any more.
            let _ = handle.join();
        }
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

#[cfg(test)]
mod tests {
    use tokio::sync::oneshot;

    use super::*;

    /// Runs a job without an end, and returns what hears of it when it is dropped.
    async fn begin(driver: &Driver) -> oneshot::Receiver<()> {
        let (dropped, is_dropped) = oneshot::channel::<()>();
        let (begun, has_begun) = oneshot::channel();
        driver.jobs().run(async move {
            let _dropped = dropped;
            begun.send(std::thread::current().id()).expect("the test waits");
            std::future::pending::<()>().await;
        });
        assert_ne!(has_begun.await.expect("it begins"), std::thread::current().id());
        is_dropped
    }

    #[tokio::test]
    async fn stores_share_a_thread_and_end_by_themselves() {
        let (one, other) = (Driver::start().unwrap(), Driver::start().unwrap());
        assert!(Arc::ptr_eq(&one._thread, &other._thread));
        let (of_one, mut of_other) = (begin(&one).await, begin(&other).await);
        drop(one);
        of_one.await.unwrap_err();
        assert_eq!(of_other.try_recv(), Err(oneshot::error::TryRecvError::Empty));
        // The thread goes with the last one, and there is another for who comes later.
        drop(other);
        of_other.await.unwrap_err();
        let later = Driver::start().unwrap();
        let of_later = begin(&later).await;
        drop(later);
        of_later.await.unwrap_err();
    }
}
