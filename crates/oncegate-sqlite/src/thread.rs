//! A thread with a queue: its start, failure and end.

use std::io;
use std::sync::Arc;
use std::thread::JoinHandle;

use oncegate_core::store::StoreError;
use tokio::sync::oneshot;

use super::queue::{Job, Queue};

/// Error text for a job whose thread ended before it answered.
pub(super) const ENDED: &str = "the thread of the SQLite store ended before it answered";

/// A thread that owns a connection and processes a queue. Dropping it waits for the queued jobs.
pub(super) struct Worker<J: Job> {
    queue: Arc<Queue<J>>,
    thread: Option<JoinHandle<()>>,
}

impl<J: Job + Send + 'static> Worker<J> {
    /// Starts the thread, and waits until it has opened its connection.
    pub(super) async fn start<S>(
        name: &str,
        open: impl FnOnce() -> Result<S, StoreError> + Send + 'static,
        run: impl FnOnce(S, &Queue<J>) + Send + 'static,
    ) -> Result<Self, StoreError> {
        let queue = Arc::new(Queue::new());
        let (opened, is_open) = oneshot::channel();
        let ending = Ending(Arc::clone(&queue));
        let thread = std::thread::Builder::new()
            .name(name.to_owned())
            .spawn(move || {
                // However this thread ends, no caller waits for it for ever.
                let ending = ending;
                match open() {
                    Ok(state) => {
                        // A caller that is gone has dropped the queue too, so the thread ends.
                        let _ = opened.send(Ok(()));
                        run(state, &ending.0);
                    }
                    Err(error) => {
                        let _ = opened.send(Err(error));
                    }
                }
            });
        let thread = thread.map_err(|error: io::Error| StoreError::unavailable(error))?;
        let worker = Self {
            queue,
            thread: Some(thread),
        };
        match is_open.await {
            Ok(Ok(())) => Ok(worker),
            Ok(Err(error)) => Err(error),
            Err(_) => Err(StoreError::unavailable(
                "the thread of the SQLite store ended at once",
            )),
        }
    }

    /// The queue of the thread, for other submitters besides the owner.
    pub(super) fn queue(&self) -> &Arc<Queue<J>> {
        &self.queue
    }

    /// Submits a job to the thread.
    ///
    /// # Errors
    /// See [`Queue::push`].
    pub(super) fn push(&self, job: J) -> Result<(), StoreError> {
        self.queue.push(job)
    }
}

impl<J: Job> Drop for Worker<J> {
    fn drop(&mut self) {
        self.queue.close();
        if let Some(thread) = self.thread.take() {
            // The panic hook has already reported a panic of the thread.
            let _ = thread.join();
        }
    }
}

/// Closes the queue when its thread ends.
struct Ending<J: Job>(Arc<Queue<J>>);

impl<J: Job> Drop for Ending<J> {
    fn drop(&mut self) {
        self.0.abandon();
    }
}
