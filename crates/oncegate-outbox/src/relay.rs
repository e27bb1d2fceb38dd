//! The relay of an outbox, which a user configures and starts.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use oncegate_core::store::StoreError;

use super::{OutboxStore, Publisher, ReadLimits, RelayMonitor};
use oncegate_runtime::failure::BoxError;
use oncegate_runtime::observe::Observer;

/// Publishes an outbox: reads committed messages, sends them, and marks those that the broker has
/// confirmed.
///
/// Any number of relays may run for one outbox. One of them leads, by a lease in the database; when
/// it ends, another takes over, at the latest when the lease is over.
///
/// ```no_run
/// # #[cfg(all(feature = "kafka", feature = "postgres"))]
/// # async fn example() -> Result<(), oncegate::BoxError> {
/// use oncegate::kafka::KafkaPublisher;
/// use oncegate::outbox::Relay;
/// use oncegate::postgres::PostgresStore;
/// use oncegate::shutdown_signal;
///
/// let outbox = PostgresStore::connect("postgres://localhost/shop").await?.outbox("shop")?;
/// Relay::new(outbox, KafkaPublisher::new("localhost:9092")).run_until(shutdown_signal()).await?;
/// # Ok(())
/// # }
/// ```
#[must_use = "nothing happens before run_until()"]
pub struct Relay {
    pub(super) outbox: Arc<dyn OutboxStore>,
    pub(super) publisher: Arc<dyn Publisher>,
    pub(super) observer: Option<Arc<dyn Observer>>,
    pub(super) limits: ReadLimits,
    pub(super) poll_interval: Duration,
    pub(super) lease: Duration,
    pub(super) retention: Duration,
    pub(super) monitor: RelayMonitor,
    pub(super) stop_deadline: Duration,
}

/// The reason that a relay has ended by itself.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RelayError {
    /// The publisher's settings are wrong; the error names what to change.
    #[error("the publisher of outbox {outbox} cannot be opened: {error}")]
    Publisher {
        /// The outbox.
        outbox: String,
        /// The change that is needed.
        error: BoxError,
    },
    /// The database refuses until something is changed there.
    #[error("outbox {outbox}: {error}")]
    Store {
        /// The outbox.
        outbox: String,
        /// The change that is needed.
        #[source]
        error: StoreError,
    },
}

impl Relay {
    /// The default of [`batch`](Self::batch): 500 messages.
    pub const DEFAULT_BATCH: u32 = 500;
    /// The default of [`batch_bytes`](Self::batch_bytes): 16 MiB.
    pub const DEFAULT_BATCH_BYTES: u64 = 16 * 1024 * 1024;
    /// The default of [`poll_interval`](Self::poll_interval): 100 ms.
    pub const DEFAULT_POLL_INTERVAL: Duration = Duration::from_millis(100);
    /// The default of [`lease`](Self::lease): 10 s.
    pub const DEFAULT_LEASE: Duration = Duration::from_secs(10);
    /// The default of [`retention`](Self::retention): one day.
    pub const DEFAULT_RETENTION: Duration = Duration::from_secs(86_400);
    /// The default of [`stop_deadline`](Self::stop_deadline): 10 s.
    pub const DEFAULT_STOP_DEADLINE: Duration = Duration::from_secs(10);

    /// Creates a relay from an outbox to a broker.
    pub fn new(outbox: impl OutboxStore + 'static, publisher: impl Publisher + 'static) -> Self {
        Self {
            monitor: RelayMonitor::of(outbox.name()),
            outbox: Arc::new(outbox),
            publisher: Arc::new(publisher),
            observer: None,
            limits: ReadLimits {
                messages: Self::DEFAULT_BATCH,
                bytes: Self::DEFAULT_BATCH_BYTES,
            },
            poll_interval: Self::DEFAULT_POLL_INTERVAL,
            lease: Self::DEFAULT_LEASE,
            retention: Self::DEFAULT_RETENTION,
            stop_deadline: Self::DEFAULT_STOP_DEADLINE,
        }
    }

    /// The most messages that are read and in flight at a time: 500 by default.
    pub fn batch(mut self, messages: u32) -> Self {
        self.limits.messages = messages.max(1);
        self
    }

    /// The most bytes of payloads that are read and in flight at a time: 16 MiB by default. A
    /// larger message is sent alone.
    pub fn batch_bytes(mut self, bytes: u64) -> Self {
        self.limits.bytes = bytes;
        self
    }

    /// The wait before the relay reads an empty outbox again: 100 ms by default.
    pub fn poll_interval(self, poll_interval: Duration) -> Self {
        Self {
            poll_interval,
            ..self
        }
    }

    /// The lease of the leader: 10 s by default. Another relay waits for its end after the leader
    /// was killed. The leader renews the lease three times in that time.
    pub fn lease(self, lease: Duration) -> Self {
        Self { lease, ..self }
    }

    /// The time that sent messages are kept in the table, to look at: one day by default. They are
    /// removed in small steps.
    pub fn retention(self, retention: Duration) -> Self {
        Self { retention, ..self }
    }

    /// Time limit for the wait for messages in flight after a stop: 10 s by default. Those that are
    /// not confirmed by then are published again by the next relay.
    pub fn stop_deadline(self, stop_deadline: Duration) -> Self {
        Self {
            stop_deadline,
            ..self
        }
    }

    /// The observer that gets the events. Default: none.
    pub fn observer(self, observer: Arc<dyn Observer>) -> Self {
        Self {
            observer: Some(observer),
            ..self
        }
    }

    /// Returns a monitor, which shows the backlog of the outbox while the relay runs.
    pub fn monitor(&self) -> RelayMonitor {
        self.monitor.clone()
    }
}

impl fmt::Debug for Relay {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Relay")
            .field("outbox", &self.outbox)
            .field("publisher", &self.publisher)
            .field("limits", &self.limits)
            .field("lease", &self.lease)
            .field("retention", &self.retention)
            .finish_non_exhaustive()
    }
}
