//! Finds a consumer that the broker has forgotten. This module does no I/O.

use std::time::Duration;

use tokio::time::Instant;

/// The time without a delivery before the queue is asked whether it has messages.
const QUIET: Duration = Duration::from_secs(10);
/// The longest time between two questions.
const QUIET_MOST: Duration = Duration::from_secs(600);
/// The number of answers in a row that the queue has messages after which it is consumed anew.
const SILENT_LOOKS: u32 = 3;

/// Watches a queue that delivers nothing, through all sessions.
///
/// A standby of a single active consumer gets nothing either, so the queue is asked less and less
/// often.
#[derive(Debug)]
pub(crate) struct Watch {
    since: Instant,
    every: Duration,
    silent_looks: u32,
}

impl Watch {
    pub(crate) fn new() -> Self {
        Self {
            since: Instant::now(),
            every: QUIET,
            silent_looks: 0,
        }
    }

    /// Begins with a new session.
    pub(crate) fn begin(&mut self) {
        self.since = Instant::now();
    }

    /// Returns whether nothing is in hand, and nothing has been delivered for long.
    pub(crate) fn is_due(&mut self, in_hand: usize, delivered_at: Option<Instant>) -> bool {
        let now = Instant::now();
        if delivered_at.is_some_and(|at| at > self.since) {
            *self = Self::new();
        }
        if in_hand > 0 || now.duration_since(self.since) < self.every {
            return false;
        }
        self.since = now;
        true
    }

    /// Counts the answer. Returns whether the queue has had messages too often.
    pub(crate) fn is_silent(&mut self, messages: u32) -> bool {
        if messages == 0 {
            self.silent_looks = 0;
            return false;
        }
        self.silent_looks += 1;
        if self.silent_looks < SILENT_LOOKS {
            return false;
        }
        self.silent_looks = 0;
        self.every = (self.every * 2).min(QUIET_MOST);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::time::advance;

    #[tokio::test(start_paused = true)]
    async fn a_queue_that_delivers_nothing_is_asked_less_often() {
        let mut watch = Watch::new();
        let mut waited = Vec::new();
        for _ in 0..10 {
            let began = Instant::now();
            while !(watch.is_due(0, None) && watch.is_silent(5)) {
                advance(Duration::from_secs(1)).await;
            }
            waited.push(began.elapsed().as_secs());
            watch.begin();
        }
        assert_eq!(
            waited,
            [30, 60, 120, 240, 480, 960, 1_800, 1_800, 1_800, 1_800]
        );
        advance(Duration::from_secs(1)).await;
        assert!(!watch.is_due(0, Some(Instant::now())), "it delivers again");
        advance(QUIET).await;
        assert!(!watch.is_due(1, None), "a message is in hand");
        assert!(
            watch.is_due(0, None) && !watch.is_silent(0),
            "an empty queue is no fault"
        );
    }
}
