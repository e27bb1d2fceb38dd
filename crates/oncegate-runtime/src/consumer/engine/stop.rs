//! The end of the engine: what has started may finish, what ignores its cancellation is dropped,
//! and what blocks its thread is named.

use std::time::Duration;

use tokio::time::{Instant, interval, sleep_until};
use tracing::warn;

use super::super::error::ConsumerError;
use super::super::member::{Ended, Next};
use super::super::schedule::AttemptEnd;
use super::{Engine, SNAPSHOT_EVERY, now};

/// The time between the cancellation of handlers and their end when the stop deadline is over.
const STOP_GRACE: Duration = Duration::from_secs(1);
/// The time that dropped handlers have to end before they count as blocking their threads.
const ABORT_GRACE: Duration = Duration::from_secs(1);

impl Engine {
    /// Drops what has not started, and waits for what has, within the deadline.
    pub(super) async fn stop(mut self) -> Result<(), ConsumerError> {
        self.schedule.stop();
        self.publish();
        let deadline = Instant::now() + self.shared.settings.stop_deadline;
        if !self.drain_until(deadline).await {
            self.cut_short().await;
        }
        self.failed.take().map_or(Ok(()), Err)
    }

    /// Cancels what has not ended in time. A handler that blocks its thread cannot be ended, so it
    /// is named.
    async fn cut_short(&mut self) {
        let handlers = self.shared.watch.named();
        warn!(
            ?handlers,
            "the stop deadline is over; handlers that still run are cancelled"
        );
        self.shared.routes().for_each(|route| route.cancel_all());
        if self.drain_until(Instant::now() + STOP_GRACE).await {
            return;
        }
        let handlers = self.shared.watch.named();
        warn!(
            ?handlers,
            "handlers ignore their cancellation; their leases will lapse"
        );
        self.tasks.abort_all();
        if !self.drain(Instant::now() + ABORT_GRACE).await {
            let handlers = self.shared.watch.named();
            self.failed
                .get_or_insert(ConsumerError::StillRunning { handlers });
        }
    }

    /// Like `drain`, but returns early when the stop is to end at once.
    async fn drain_until(&mut self, deadline: Instant) -> bool {
        let at_once = self.shared.at_once.clone();
        tokio::select! {
            biased;
            () = at_once.cancelled() => self.tasks.len() == 0,
            drained = self.drain(deadline) => drained,
        }
    }

    /// Waits until everything has ended, and returns whether it has before `deadline`.
    async fn drain(&mut self, deadline: Instant) -> bool {
        // A long stop must not look like a loop that handlers have blocked.
        let mut snapshots = interval(SNAPSHOT_EVERY);
        loop {
            tokio::select! {
                biased;
                _ = snapshots.tick() => self.publish_snapshot(),
                Some(ended) = self.ended_early.recv() => self.note_last(ended),
                ended = self.tasks.join_next() => match ended {
                    None => return true,
                    Some(Ok(ended)) => self.note_last(ended),
                    Some(Err(_)) => {}
                },
                () = sleep_until(deadline) => return self.tasks.len() == 0,
            }
        }
    }

    /// Notes ends during the stop. Whatever becomes of a message, it does not start again.
    fn note_last(&mut self, ended: Vec<Ended>) {
        for Ended { place, next, .. } in ended {
            if let Next::Stop(error) = next {
                self.failed.get_or_insert(*error);
            }
            self.schedule.end(place, AttemptEnd::Finished, now());
        }
        self.publish();
    }
}
