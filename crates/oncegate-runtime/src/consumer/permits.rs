//! The permits of handlers: those of `concurrency`, and further ones for handlers that end at once.

use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::pace::Pace;

/// The permits of a consumer.
#[derive(Debug)]
pub(super) struct PermitPool {
    running: Arc<Semaphore>,
    concurrency: u32,
    ahead: Arc<Semaphore>,
    most_ahead: u32,
}

/// The right to run one handler, or all permits. Members whose handlers have ended hold it together
/// with the one whose handler runs, until their ends are recorded.
#[derive(Clone, Debug)]
pub(super) struct Permit {
    _held: Arc<[OwnedSemaphorePermit]>,
}

impl Permit {
    fn new(held: impl Into<Arc<[OwnedSemaphorePermit]>>) -> Self {
        Self { _held: held.into() }
    }
}

impl PermitPool {
    /// Makes so many for handlers of any kind, and so many besides for those that end at once.
    pub(super) fn new(concurrency: u32, most_ahead: u32) -> Self {
        Self {
            running: Arc::new(Semaphore::new(concurrency as usize)),
            concurrency,
            ahead: Arc::new(Semaphore::new(most_ahead as usize)),
            most_ahead,
        }
    }

    /// Returns how many of those are free that handlers of any kind may have.
    pub(super) fn free(&self) -> usize {
        self.running.available_permits()
    }

    /// Returns a permit if one is free.
    pub(super) fn try_one(&self) -> Option<Permit> {
        try_of(&self.running)
    }

    /// Returns a permit for a handler with this pace, if one is free.
    pub(super) fn try_for(&self, pace: &Pace) -> Option<Permit> {
        self.try_one().or_else(|| {
            let is_quick = self.most_ahead > 0 && pace.is_quick();
            is_quick.then(|| try_of(&self.ahead)).flatten()
        })
    }

    /// Waits for a permit.
    pub(super) async fn one(&self) -> Option<Permit> {
        let permit = Arc::clone(&self.running).acquire_owned().await;
        permit.ok().map(|permit| Permit::new([permit]))
    }

    /// Waits until no handler runs, and returns all permits.
    pub(super) async fn all(&self) -> Option<Permit> {
        let running = Arc::clone(&self.running).acquire_many_owned(self.concurrency);
        let running = running.await.ok()?;
        let ahead = Arc::clone(&self.ahead).acquire_many_owned(self.most_ahead);
        Some(Permit::new([running, ahead.await.ok()?]))
    }
}

fn try_of(permits: &Arc<Semaphore>) -> Option<Permit> {
    let permit = Arc::clone(permits).try_acquire_owned();
    permit.ok().map(|permit| Permit::new([permit]))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::pace::BOUND;
    use super::*;

    #[tokio::test]
    async fn what_ends_at_once_has_more_permits_and_one_alone_has_all() {
        let permits = PermitPool::new(2, 3);
        let slow = Pace::new(1);
        slow.note_run(BOUND * 2);
        let quick = Pace::new(1);
        quick.note_run(Duration::from_micros(10));
        let mut held: Vec<_> = (0..2).map(|_| permits.try_for(&slow).unwrap()).collect();
        assert!(permits.try_for(&slow).is_none() && permits.try_one().is_none());
        assert!(
            permits.try_for(&Pace::new(1)).is_none(),
            "its pace is unknown"
        );
        held.extend((0..3).map(|_| permits.try_for(&quick).unwrap()));
        assert!(permits.try_for(&quick).is_none());
        assert_eq!(permits.free(), 0);
        let all = permits.all();
        let mut all = std::pin::pin!(all);
        for permit in held {
            assert!(futures_util::poll!(&mut all).is_pending(), "one still runs");
            drop(permit);
        }
        let all = all.await.unwrap();
        assert!(permits.try_for(&quick).is_none());
        drop(all);
        assert!(permits.one().await.is_some());
    }
}
