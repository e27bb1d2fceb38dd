//! The parts of a consumer under test.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::Duration;

use bytes::Bytes;
use oncegate::core::record::Token;
use oncegate::core::rules::{Operation, Reply, Verdict};
use oncegate::core::store::{Command, Store};
use oncegate::{Consumer, ConsumerError, Counters, Gate, Handler, Key, MemoryStore};
use tokio::time::sleep;

use super::list::{Letters, List, Listed};

pub(super) const LEASE: Duration = Duration::from_secs(1);

/// The parts of a consumer, and what its test inspects.
pub(super) struct Bench {
    pub(super) list: Arc<List>,
    pub(super) store: Arc<MemoryStore>,
    pub(super) letters: Arc<Letters>,
    pub(super) counters: Arc<Counters>,
}

impl Bench {
    pub(super) fn of(messages: impl IntoIterator<Item = (&'static str, String)>) -> Self {
        Self {
            list: List::of("orders", messages),
            store: Arc::new(MemoryStore::new()),
            letters: Arc::default(),
            counters: Arc::default(),
        }
    }

    pub(super) fn gate(&self, scope: &str) -> Gate {
        Gate::new(scope, Key::json(["id"]), Arc::clone(&self.store))
            .lease(LEASE)
            .simulated(7)
    }

    pub(super) fn consumer(&self, handler: impl Handler) -> Consumer {
        self.consumer_behind(self.gate("runtime"), handler)
    }

    pub(super) fn consumer_behind(&self, gate: Gate, handler: impl Handler) -> Consumer {
        Consumer::new(Listed(Arc::clone(&self.list)), gate, handler)
            .dead_letters(Arc::clone(&self.letters))
            .observer(Arc::clone(&self.counters) as _)
    }

    /// Another process claims the only record when its lease is over, and completes it.
    pub(super) async fn complete_elsewhere(&self) {
        sleep(LEASE).await;
        let [(key, _)] = &self.store.records()[..] else {
            panic!("one record")
        };
        let token = Token::from_bits(7);
        let claim = Operation::Claim {
            token,
            lease: LEASE,
            fingerprint: None,
            fenced: false,
            longest_lease: LEASE,
        };
        let result = Bytes::new();
        let retention = Duration::from_secs(3_600);
        let complete = Operation::Complete {
            token,
            fingerprint: None,
            result,
            retention,
        };
        for operation in [claim, complete] {
            let reply = self
                .store
                .execute_one(Command {
                    key: key.clone(),
                    operation,
                })
                .await
                .unwrap();
            let taken_over = match &reply {
                Reply::Verdict { verdict, .. } => matches!(verdict, Verdict::Granted(_)),
                reply => matches!(reply, Reply::Applied { .. }),
            };
            assert!(taken_over, "{reply:?}");
        }
    }

    /// Runs the consumer until this many messages are acknowledged, and stops it.
    pub(super) async fn run(&self, consumer: Consumer, acks: usize) -> Result<(), ConsumerError> {
        let list = Arc::clone(&self.list);
        consumer
            .run_until(async move { list.until_acked(acks).await })
            .await
    }
}

pub(super) fn numbered(count: usize) -> Vec<(&'static str, String)> {
    (0..count)
        .map(|id| ("", format!(r#"{{"id":{id}}}"#)))
        .collect()
}

/// Counts how many run at a time.
#[derive(Debug, Default)]
pub(super) struct Gauge {
    pub(super) now: AtomicUsize,
    pub(super) most: AtomicUsize,
}

impl Gauge {
    pub(super) async fn through<T>(&self, work: impl Future<Output = T>) -> T {
        let now = self.now.fetch_add(1, SeqCst) + 1;
        self.most.fetch_max(now, SeqCst);
        let output = work.await;
        self.now.fetch_sub(1, SeqCst);
        output
    }
}
