//! The relay of an outbox, which a user configures and starts.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use oncegate_core::settings::Finding;
use oncegate_core::store::StoreError;

use super::{OutboxStore, Publisher, RelayMonitor, RelaySettings};
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
    pub(super) settings: RelaySettings,
    pub(super) monitor: RelayMonitor,
}

/// The reason that a relay has ended by itself.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RelayError {
    /// A setting of the relay is wrong.
    #[error("the relay of outbox {outbox} cannot start: {}", finding.what)]
    Settings {
        /// The outbox.
        outbox: String,
        /// The setting, and what to change.
        finding: Finding,
    },
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
    /// Creates a relay from an outbox to a broker.
    pub fn new(outbox: impl OutboxStore + 'static, publisher: impl Publisher + 'static) -> Self {
        Self::shared(Arc::new(outbox), publisher)
    }

    /// Creates a relay from an outbox of any kind.
    pub fn shared(outbox: Arc<dyn OutboxStore>, publisher: impl Publisher + 'static) -> Self {
        Self {
            monitor: RelayMonitor::of(outbox.name()),
            outbox,
            publisher: Arc::new(publisher),
            observer: None,
            settings: RelaySettings::DEFAULT,
        }
    }

    /// Sets all settings but the outbox and the publisher, such as those of a file.
    pub fn settings(self, settings: RelaySettings) -> Self {
        Self { settings, ..self }
    }

    /// Sets the [most messages](RelaySettings::batch) that are read and in flight at a time: 500 by
    /// default, at least 1.
    pub fn batch(mut self, messages: u32) -> Self {
        self.settings.batch = messages.max(1);
        self
    }

    /// Sets the [most bytes](RelaySettings::batch_bytes) of their payloads: 16 MiB by default.
    pub fn batch_bytes(mut self, bytes: usize) -> Self {
        self.settings.batch_bytes = bytes;
        self
    }

    /// Sets the [wait](RelaySettings::poll_interval) before the relay reads an empty outbox again:
    /// 100 ms by default.
    pub fn poll_interval(mut self, poll_interval: Duration) -> Self {
        self.settings.poll_interval = poll_interval;
        self
    }

    /// Sets the [lease of the leader](RelaySettings::lease): 10 s by default.
    pub fn lease(mut self, lease: Duration) -> Self {
        self.settings.lease = lease;
        self
    }

    /// Sets the time that [sent messages are kept](RelaySettings::retention): one day by default.
    pub fn retention(mut self, retention: Duration) -> Self {
        self.settings.retention = retention;
        self
    }

    /// Sets the [time limit for messages in flight](RelaySettings::stop_deadline) after a stop:
    /// 10 s by default.
    pub fn stop_deadline(mut self, stop_deadline: Duration) -> Self {
        self.settings.stop_deadline = stop_deadline;
        self
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
            .field("settings", &self.settings)
            .finish_non_exhaustive()
    }
}
