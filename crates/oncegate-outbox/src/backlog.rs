//! The backlog of an outbox, as a relay has measured it.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::debug;

use super::OutboxStore;

/// The time between two measurements.
const MEASURE_EVERY: Duration = Duration::from_secs(10);

/// The most messages that a measurement counts. Counting them reads an index, for some
/// milliseconds.
const COUNTED_MOST: u32 = 10_000;

/// Messages of an outbox that are not sent yet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OutboxBacklog {
    /// The number of messages. When this is the most that was to be counted, there may be more.
    pub messages: u64,
    /// The time since the first of them was written; `None` if there is none.
    pub oldest: Option<Duration>,
}

/// Reads the backlog of a relay's outbox; made by [`Relay::monitor`](super::Relay::monitor).
///
/// Every relay that runs measures the backlog each 10 seconds, whether it leads or not: so it is
/// also known while no relay leads.
#[derive(Clone, Debug)]
pub struct RelayMonitor {
    outbox: Arc<str>,
    measured: Arc<Mutex<Option<(OutboxBacklog, Instant)>>>,
}

impl RelayMonitor {
    pub(super) fn of(outbox: &str) -> Self {
        Self {
            outbox: outbox.into(),
            measured: Arc::default(),
        }
    }

    /// The name of the outbox.
    pub fn outbox(&self) -> &str {
        &self.outbox
    }

    /// Returns the backlog at the last measurement, which counts up to 10,000 messages; `None`
    /// before the first one, and after the relay has ended.
    ///
    /// The age of the oldest message grows until the next measurement, so it is too high rather
    /// than too low. It also grows while the database does not answer.
    pub fn backlog(&self) -> Option<OutboxBacklog> {
        let (backlog, at) = (*self.measured())?;
        Some(OutboxBacklog {
            oldest: backlog.oldest.map(|oldest| oldest + at.elapsed()),
            ..backlog
        })
    }

    fn measured(&self) -> MutexGuard<'_, Option<(OutboxBacklog, Instant)>> {
        self.measured.lock()
    }

    /// Measures until `ended`.
    pub(super) async fn measure(&self, store: &dyn OutboxStore, ended: &CancellationToken) {
        let _shown = ShownBacklog(self);
        let measuring = async {
            loop {
                match store.backlog(COUNTED_MOST).await {
                    Ok(backlog) => *self.measured() = Some((backlog, Instant::now())),
                    // The relay itself reports an outbox that cannot be reached.
                    Err(error) => {
                        debug!(outbox = &*self.outbox, %error, "the backlog was not measured");
                    }
                }
                tokio::time::sleep(MEASURE_EVERY).await;
            }
        };
        ended.run_until_cancelled(measuring).await;
    }
}

/// A backlog that is shown until this is dropped. Otherwise the backlog of a relay that has ended
/// would stay for ever.
struct ShownBacklog<'a>(&'a RelayMonitor);

impl Drop for ShownBacklog<'_> {
    fn drop(&mut self) {
        *self.0.measured() = None;
    }
}
