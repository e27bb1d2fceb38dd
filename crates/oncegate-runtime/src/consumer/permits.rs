//! How many handlers run at a time.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering, fence};

use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};

/// One permit for each handler that may run, and as many for attempts whose handlers have returned: while their results
/// are stored, other handlers run.
#[derive(Debug)]
pub(super) struct HandlerPermits {
    handlers: Arc<Semaphore>,
    endings: Arc<Semaphore>,
    count: u32,
    /// Whether the engine has found none.
    is_wanted: AtomicBool,
    freed: Notify,
}

/// All permits. While they are held nothing runs, and nothing ends.
#[derive(Debug)]
#[expect(dead_code, reason = "held for their drop")]
pub(super) struct AllPermits(OwnedSemaphorePermit, OwnedSemaphorePermit);

impl HandlerPermits {
    pub(super) fn new(count: u32) -> Self {
        let semaphore = || Arc::new(Semaphore::new(count as usize));
        Self {
            handlers: semaphore(),
            endings: semaphore(),
            count,
            is_wanted: AtomicBool::new(false),
            freed: Notify::new(),
        }
    }

    /// Takes the permit of a handler. If none is free, [`freed`](Self::freed) resolves when one is, or the end of a task
    /// frees one.
    pub(super) fn take(&self) -> Option<OwnedSemaphorePermit> {
        let free = || Arc::clone(&self.handlers).try_acquire_owned().ok();
        free().or_else(|| {
            self.is_wanted.store(true, Ordering::Relaxed);
            // Either this sees a permit that is given back now, or the attempt that gives it back sees the wish.
            fence(Ordering::SeqCst);
            free()
        })
    }

    /// Resolves when a permit was given back while the engine wanted one.
    pub(super) async fn freed(&self) {
        self.freed.notified().await;
    }

    /// Gives the permit of a handler that has returned to another one, and returns the permit for the rest of the attempt:
    /// the same one when as many attempts are ending as handlers may run.
    pub(super) fn ending(&self, permit: OwnedSemaphorePermit) -> OwnedSemaphorePermit {
        let Ok(ending) = Arc::clone(&self.endings).try_acquire_owned() else { return permit };
        drop(permit);
        fence(Ordering::SeqCst);
        if self.is_wanted.swap(false, Ordering::Relaxed) {
            self.freed.notify_one();
        }
        ending
    }

    /// Waits until nothing runs or ends.
    pub(super) async fn all(&self) -> Option<AllPermits> {
        let handlers = Arc::clone(&self.handlers).acquire_many_owned(self.count).await.ok()?;
        let endings = Arc::clone(&self.endings).acquire_many_owned(self.count).await.ok()?;
        Some(AllPermits(handlers, endings))
    }

    /// How many more handlers could run now.
    pub(super) fn free(&self) -> usize {
        self.handlers.available_permits()
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;

    use super::*;

    #[test]
    fn a_handler_that_has_returned_gives_its_permit_to_another_one_and_the_engine_learns_it() {
        let permits = HandlerPermits::new(1);
        let first = permits.take().unwrap();
        assert!(permits.take().is_none() && permits.freed().now_or_never().is_none());
        let first_ends = permits.ending(first);
        assert_eq!(permits.freed().now_or_never(), Some(()));
        let second = permits.take().unwrap();
        // No more attempts end than handlers may run.
        let second = permits.ending(second);
        assert!(permits.take().is_none());
        drop(first_ends);
        drop(permits.ending(second));
        assert!(permits.take().is_some());
    }

    #[test]
    fn nobody_is_told_of_a_permit_that_nobody_wants() {
        let permits = HandlerPermits::new(2);
        drop(permits.ending(permits.take().unwrap()));
        assert!(permits.freed().now_or_never().is_none());
    }

    #[test]
    fn all_permits_are_there_when_the_attempts_that_end_have_ended() {
        let permits = HandlerPermits::new(2);
        let ending = permits.ending(permits.take().unwrap());
        assert_eq!(permits.free(), 2);
        let mut all = std::pin::pin!(permits.all());
        assert!(all.as_mut().now_or_never().is_none());
        drop(ending);
        assert!(all.now_or_never().is_some());
    }
}
