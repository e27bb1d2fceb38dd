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

    /// Waits until `name` was counted `count` times with any label.
    ///
    /// # Panics
    /// When that takes longer than 240 seconds.
    pub async fn until(&self, name: &str, count: u64) {
        let mut changed = self.changed.subscribe();
        let reached = async {
            while self.total(name) < count {
                changed.changed().await.expect("the sender is ours");
            }
        };
        if tokio::time::timeout(LIMIT, reached).await.is_err() {
            panic!(
                "waited for {count} {name}; counted: {:?}",
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
