//! A consumer process of a round, as far as faults concern it.

use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;

/// A consumer process: it runs, stands still for a while, or was killed.
#[derive(Debug)]
pub(crate) struct Process {
    pub(crate) number: u32,
    killed: CancellationToken,
    frozen_until: Mutex<Option<Instant>>,
}

impl Process {
    pub(crate) fn new(number: u32) -> Self {
        Self {
            number,
            killed: CancellationToken::new(),
            frozen_until: Mutex::new(None),
        }
    }

    /// Kills the process. `false`: it was killed before.
    pub(crate) fn kill(&self) -> bool {
        let is_first = !self.killed.is_cancelled();
        self.killed.cancel();
        is_first
    }

    pub(crate) fn is_killed(&self) -> bool {
        self.killed.is_cancelled()
    }

    /// Resolves when the process is killed.
    pub(crate) async fn killed(&self) {
        self.killed.cancelled().await;
    }

    /// Lets the process stand still: its calls of the store wait.
    pub(crate) fn freeze(&self, time: Duration) {
        *self.frozen_until.lock() = Some(Instant::now() + time);
    }

    /// Resolves when the process does not stand still.
    pub(crate) async fn thawed(&self) {
        let until = *self.frozen_until.lock();
        if let Some(until) = until {
            sleep_until(until).await;
        }
    }
}
