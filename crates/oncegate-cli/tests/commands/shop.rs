//! A consumer that gives messages up until it is repaired, for the commands about dead letters and
//! records.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use oncegate::dead_letters::DeadLetters;
use oncegate::redis::RedisStore;
use oncegate::source::Source;
use oncegate::{Attempt, Backoff, Consumer, Failure, FingerprintSpec, Gate, Handler, Key, Message};
use oncegate_testkit::{Redis, Watched, unique};

use super::{Answer, oncegate_with};

/// Orders below this number are given up while the shop is broken.
pub(crate) const BAD: u32 = 10;

/// What happened to each order: the witness, which is not oncegate's.
#[derive(Clone, Debug, Default)]
pub(crate) struct Till {
    mended: Arc<AtomicBool>,
    sales: Arc<Mutex<BTreeMap<u32, u32>>>,
}

impl Handler for Till {
    type Output = ();

    async fn handle(&self, message: &Message, _: &Attempt) -> Result<(), Failure> {
        let order: serde_json::Value = message.json()?;
        let id =
            u32::try_from(order["order_id"].as_u64().unwrap_or_default()).expect("a small number");
        if id < BAD && !self.mended.load(SeqCst) {
            return match id {
                0 => Err(Failure::retry("the bank is closed")),
                _ => Err(Failure::permanent(format!("no account for order {id}"))),
            };
        }
        *self
            .sales
            .lock()
            .expect("no thread panics while it holds the lock")
            .entry(id)
            .or_default() += 1;
        Ok(())
    }
}

/// One shop: its gate's place, its handler, and the commands about it.
pub(crate) struct Shop {
    pub(crate) redis: Redis,
    pub(crate) scope: String,
    pub(crate) till: Till,
    dir: tempfile::TempDir,
}

impl Shop {
    pub(crate) async fn new() -> Self {
        let redis = Redis::shared().await;
        let scope = unique("shop");
        Self {
            redis,
            scope,
            till: Till::default(),
            dir: tempfile::tempdir().expect("a folder"),
        }
    }

    pub(crate) fn mend(&self) {
        self.till.mended.store(true, SeqCst);
    }

    /// How often each order was sold.
    pub(crate) fn sales(&self) -> BTreeMap<u32, u32> {
        self.till
            .sales
            .lock()
            .expect("no thread panics while it holds the lock")
            .clone()
    }

    /// Consumes until so many messages are acknowledged.
    pub(crate) async fn consume(
        &self,
        source: impl Source + 'static,
        dead: impl DeadLetters + 'static,
        acks: u64,
    ) -> Arc<Watched> {
        let store = RedisStore::connect(self.redis.url())
            .await
            .expect("connects");
        let gate = Gate::new(self.scope.as_str(), Key::json(["order_id"]), store);
        let gate = gate
            .fingerprint(FingerprintSpec::payload())
            .lease(Duration::from_secs(60));
        let watched = Watched::new();
        let consumer = Consumer::new(source, gate, self.till.clone())
            .max_attempts(3)
            .dead_letters(dead);
        let consumer = consumer.backoff(Backoff::new(
            Duration::from_millis(20),
            Duration::from_millis(40),
        ));
        let consumer = consumer.observer(Arc::clone(&watched) as _);
        consumer
            .run_until(watched.until("acks", acks))
            .await
            .expect("it ends well");
        watched
    }

    /// Runs a command with the shop's store, journal and operator, and credentials for a queue.
    pub(crate) async fn oncegate(&self, arguments: &[&str]) -> Answer {
        let journal = self.journal_path();
        let journal = journal.to_str().expect("a path of text");
        let environment = [
            ("ONCEGATE_STORE", self.redis.url()),
            ("ONCEGATE_JOURNAL", journal),
            ("ONCEGATE_OPERATOR", "ada"),
            ("AWS_ACCESS_KEY_ID", "none"),
            ("AWS_SECRET_ACCESS_KEY", "none"),
        ];
        oncegate_with(arguments, &environment, b"").await
    }

    pub(crate) fn journal_path(&self) -> std::path::PathBuf {
        self.dir.path().join("journal.jsonl")
    }

    /// The journal's entries of this event.
    pub(crate) fn journal(&self, event: &str) -> Vec<serde_json::Value> {
        let text = std::fs::read_to_string(self.journal_path()).unwrap_or_default();
        let entries = text
            .lines()
            .map(|line| serde_json::from_str(line).expect("JSON lines"));
        entries
            .filter(|entry: &serde_json::Value| entry["event"] == event)
            .collect()
    }
}

pub(crate) fn order(id: u32) -> String {
    format!(r#"{{"order_id":{id},"card":"4111-{id}"}}"#)
}
