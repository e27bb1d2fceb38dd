//! Waits for events that oncegate reports.

use std::sync::Arc;
use std::time::Duration;

use oncegate::{Counters, Event, Observer};
use tokio::sync::watch;

/// The longest wait for anything.
const LIMIT: Duration = Duration::from_secs(240);

/// Counts events, and wakes the tasks that wait for a count.
#[derive(Debug)]
pub struct Watched {
    counters: Counters,
    changed: watch::Sender<()>,
}

impl Watched {
    /// Nothing counted yet.
    #[must_use]
    pub fn new() -> Arc<Self> {
        Arc::new(Self {
            counters: Counters::default(),
            changed: watch::channel(()).0,
        })
    }

    /// How often `name` was counted with `label`.
    pub fn get(&self, name: &str, label: &str) -> u64 {
        self.counters.get(name, label)
    }

    /// How often `name` was counted with any label.
    pub fn total(&self, name: &str) -> u64 {
        self.counters.total(name)
    }

    /// How often the source has told of an event that its broker alone has.
    pub fn source(&self, event: &str) -> u64 {
        self.get("source_events", event)
    }

    /// Waits until `name` was counted `count` times with any label.
    ///
    /// # Panics
    /// When that takes longer than 240 seconds.
    pub async fn until(&self, name: &str, count: u64) {
        self.wait(name, count, || self.total(name)).await;
    }

    /// Waits until the source has told of `event` `count` times.
    ///
    /// # Panics
    /// When that takes longer than 240 seconds.
    pub async fn until_source(&self, event: &str, count: u64) {
        self.wait(event, count, || self.source(event)).await;
    }

    /// Waits until `name` was counted `count` times with this label.
    ///
    /// # Panics
    /// When that takes longer than 240 seconds.
    pub async fn until_label(&self, name: &str, label: &str, count: u64) {
        self.wait(label, count, || self.get(name, label)).await;
    }

    async fn wait(&self, what: &str, count: u64, counted: impl Fn() -> u64 + Send + Sync) {
        let mut changed = self.changed.subscribe();
        let reached = async {
            while counted() < count {
                changed.changed().await.expect("the sender is ours");
            }
        };
        if tokio::time::timeout(LIMIT, reached).await.is_err() {
            panic!(
                "waited for {count} {what}; counted: {:?}",
                self.counters.snapshot()
            );
        }
    }
}

impl Observer for Watched {
    fn observe(&self, event: Event<'_>) {
        self.counters.observe(event);
        self.changed.send_replace(());
    }
}
