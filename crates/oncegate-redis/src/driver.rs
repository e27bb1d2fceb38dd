//! Drives the connections of a store.
//!
//! Heartbeats, slot maps and checks run on one thread for all stores of this process, because a
//! handler that blocks threads of the runtime must not delay a heartbeat. Everything else runs
//! beside its callers, on their runtime: on the thread, each call and each answer would wake
//! another thread, and at everyday rates those wake-ups are most of what a message costs. When that
//! runtime ends before the store, or has only one thread, the thread takes over.

use std::sync::{Arc, Weak};
use std::thread::JoinHandle;

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use oncegate_core::store::StoreError;
use parking_lot::Mutex;
use tokio::runtime::{Handle, RuntimeFlavor};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

/// A store's share of the thread. Dropping it stops the store's jobs on the thread.
#[derive(Debug)]
pub(super) struct Driver {
    jobs: Jobs,
    _thread: Arc<Thread>,
}

impl Driver {
    /// Starts the thread, unless another store has. The runtime of the caller, if it has several
    /// threads, becomes the place for jobs [beside the callers](Jobs::run_beside_callers).
    ///
    /// # Errors
    /// When the thread or its runtime cannot be started.
    pub(super) fn start() -> Result<Self, StoreError> {
        let thread = Thread::shared()
            .map_err(|error| StoreError::unavailable(format!("no thread: {error}")))?;
        let callers = Handle::try_current()
            .ok()
            .filter(|handle| handle.runtime_flavor() == RuntimeFlavor::MultiThread);
        let jobs = Jobs {
            inbox: thread.inbox.clone(),
            callers,
            stop: CancellationToken::new(),
        };
        Ok(Self {
            jobs,
            _thread: thread,
        })
    }

    /// The handle that submits jobs to this driver.
    pub(super) fn jobs(&self) -> Jobs {
        self.jobs.clone()
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        self.jobs.stop.cancel();
    }
}

/// Submits jobs to a driver. It does not keep the driver alive.
#[derive(Clone, Debug)]
pub(super) struct Jobs {
    /// Receives one job for each pipe and slot map, so there are never many.
    inbox: mpsc::UnboundedSender<BoxFuture<'static, ()>>,
    callers: Option<Handle>,
    stop: CancellationToken,
}

impl Jobs {
    /// Runs `job` on the driver's thread until it ends by itself or the driver is dropped.
    pub(super) fn run(&self, job: impl Future<Output = ()> + Send + 'static) {
        let stop = self.stop.clone();
        let job = async move { _ = stop.run_until_cancelled_owned(job).await };
        // Sending fails only after the thread has ended, and then no call is answered anyway.
        let _ = self.inbox.send(job.boxed());
    }

    /// Runs `job` on the runtime on which the store was connected, if it has several threads, and
    /// otherwise like [`run`](Self::run). A job that is dropped although the driver [has not
    /// stopped](Self::is_stopped) was on a runtime that has ended.
    pub(super) fn run_beside_callers(&self, job: impl Future<Output = ()> + Send + 'static) {
        let Some(callers) = &self.callers else {
            return self.run(job);
        };
        let stop = self.stop.clone();
        callers.spawn(stop.run_until_cancelled_owned(job));
    }

    /// The runtime of [`run_beside_callers`](Self::run_beside_callers), if it is not the driver's
    /// thread.
    pub(super) fn callers(&self) -> Option<&Handle> {
        self.callers.as_ref()
    }

    /// Returns whether the driver has been dropped.
    pub(super) fn is_stopped(&self) -> bool {
        self.stop.is_cancelled()
    }
}

/// A thread with its own runtime. Dropping it stops all jobs on the thread and waits for the
/// thread.
#[derive(Debug)]
struct Thread {
    inbox: mpsc::UnboundedSender<BoxFuture<'static, ()>>,
    stop: CancellationToken,
    handle: Option<JoinHandle<()>>,
}

impl Thread {
    /// Returns the running thread, or starts one.
    fn shared() -> std::io::Result<Arc<Self>> {
        static SHARED: Mutex<Weak<Thread>> = Mutex::new(Weak::new());
        let mut shared = SHARED.lock();
        if let Some(thread) = shared.upgrade() {
            return Ok(thread);
        }
        let thread = Arc::new(Self::start()?);
        *shared = Arc::downgrade(&thread);
        Ok(thread)
    }

    fn start() -> std::io::Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?;
        let (sender, inbox) = mpsc::unbounded_channel();
        let stop = CancellationToken::new();
        let stopped = stop.clone();
        let handle = std::thread::Builder::new()
            .name("oncegate-redis".to_owned())
            .spawn(move || {
                runtime.block_on(run(inbox, stopped));
                // Does not wait for a name that is still being resolved.
                runtime.shutdown_background();
            })?;
        Ok(Self {
            inbox: sender,
            stop,
            handle: Some(handle),
        })
    }
}

impl Drop for Thread {
    fn drop(&mut self) {
        self.stop.cancel();
        // A task dropped on this thread may have held the last store; a thread cannot join itself.
        let this = std::thread::current().id();
        if let Some(handle) = self
            .handle
            .take()
            .filter(|handle| handle.thread().id() != this)
        {
            // No caller waits for an answer any more, so the thread ends at its next wake-up.
            // Whether it panicked does not matter.
            let _ = handle.join();
        }
    }
}

async fn run(
    mut inbox: mpsc::UnboundedReceiver<BoxFuture<'static, ()>>,
    stopped: CancellationToken,
) {
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

    /// Runs a job that never ends, and returns a receiver that is notified when the job is dropped.
    async fn begin(driver: &Driver) -> oneshot::Receiver<()> {
        let (dropped, is_dropped) = oneshot::channel::<()>();
        let (begun, has_begun) = oneshot::channel();
        driver.jobs().run(async move {
            let _dropped = dropped;
            begun
                .send(std::thread::current().id())
                .expect("the test waits");
            std::future::pending::<()>().await;
        });
        assert_ne!(
            has_begun.await.expect("it begins"),
            std::thread::current().id()
        );
        is_dropped
    }

    #[tokio::test]
    async fn stores_share_a_thread_and_end_by_themselves() {
        let one = Driver::start().unwrap();
        let other = Driver::start().unwrap();
        assert!(Arc::ptr_eq(&one._thread, &other._thread));
        let of_one = begin(&one).await;
        let mut of_other = begin(&other).await;
        drop(one);
        of_one.await.unwrap_err();
        assert_eq!(
            of_other.try_recv(),
            Err(oneshot::error::TryRecvError::Empty)
        );
        // The thread ends with the last store, and a later store starts another.
        drop(other);
        of_other.await.unwrap_err();
        let later = Driver::start().unwrap();
        let of_later = begin(&later).await;
        drop(later);
        of_later.await.unwrap_err();
    }
}
