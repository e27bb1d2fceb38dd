//! A consumer with recorders around it, judged: a right store keeps the promise, and one that
//! forgets is seen.
//!
//! The shortest program of its kind: one process, and the fault is in the store. With real servers,
//! each worker is a process of its own, which is killed and stopped.

#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "a test that cannot go on has failed"
)]

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use oncegate::core::key::{CompiledKey, Scope};
use oncegate::core::record::State;
use oncegate::core::rules::{Operation, Reply};
use oncegate::core::store::StoreWrapper;
use oncegate::core::store::{Command, Store, StoreError};
use oncegate::dead_letters::{DeadLetter, DeadLetters};
use oncegate::source::{AckHandle, Delivery, Source, SourceError};
use oncegate::{
    Attempt, BoxError, Consumer, Failure, Gate, Handler, Key, MemoryStore, Message, Observer,
    Origin,
};
use oncegate_testing::promise::{
    EffectName, Evidence, History, Occurrence, ProducedMessage, PromiseReport, RecordedDeadLetters,
    RecordedObserver, RecordedSource, RecordedStore, SUCCEEDED, judge,
};

const TOPIC: &str = "orders";
const ORDERS: usize = 20;
const LEASE: Duration = Duration::from_millis(500);

/// Returns each order twice, and one message without a key.
fn payloads() -> Vec<String> {
    let orders = (0..ORDERS)
        .chain(0..ORDERS)
        .map(|order| format!(r#"{{"order":{order},"amount":1}}"#));
    orders.chain(["no order".to_owned()]).collect()
}

/// A source that ends when all of its messages are acknowledged.
#[derive(Debug)]
struct Orders {
    left: Mutex<VecDeque<Message>>,
    unacknowledged: Arc<tokio::sync::watch::Sender<usize>>,
}

#[derive(Debug)]
struct Ack(Arc<tokio::sync::watch::Sender<usize>>);

impl AckHandle for Ack {
    fn start(&self) -> bool {
        true
    }

    fn ack(&self) {
        self.0.send_modify(|left| *left -= 1);
    }

    fn stop(&self) {}
}

#[async_trait]
impl Source for Orders {
    async fn open(&self, _: Arc<dyn Observer>) -> Result<(), SourceError> {
        Ok(())
    }

    async fn receive(&self, most: usize) -> Result<Option<Vec<Delivery>>, SourceError> {
        let messages: Vec<Message> = {
            let mut left = self.left.lock().unwrap();
            let most = most.min(left.len());
            left.drain(..most).collect()
        };
        if messages.is_empty() {
            drop(
                self.unacknowledged
                    .subscribe()
                    .wait_for(|left| *left == 0)
                    .await,
            );
            return Ok(None);
        }
        Ok(Some(
            messages
                .into_iter()
                .map(|message| Delivery {
                    message,
                    ack_handle: Arc::new(Ack(Arc::clone(&self.unacknowledged))),
                })
                .collect(),
        ))
    }

    async fn close(&self, _: Duration) -> Result<(), SourceError> {
        Ok(())
    }
}

#[derive(Clone, Debug, Default)]
struct Letters(Arc<Mutex<BTreeSet<String>>>);

#[async_trait]
impl DeadLetters for Letters {
    async fn send(&self, letter: &DeadLetter) -> Result<(), BoxError> {
        self.0
            .lock()
            .unwrap()
            .insert(letter.message.origin().to_string());
        Ok(())
    }
}

/// Answers one completion in five, and forgets it.
#[derive(Debug)]
struct Forgetful {
    inner: MemoryStore,
    completions: AtomicU64,
}

#[async_trait]
impl StoreWrapper for Forgetful {
    fn inner(&self) -> &dyn Store {
        &self.inner
    }

    async fn execute(&self, commands: Vec<Command>) -> Vec<Result<Reply, StoreError>> {
        let mut replies = Vec::new();
        for command in commands {
            let completes = matches!(command.operation, Operation::Complete { .. });
            if completes && self.completions.fetch_add(1, Relaxed) % 5 == 4 {
                replies.push(Ok(Reply::Applied { recreated: false }));
            } else {
                replies.extend(Store::execute(&self.inner, vec![command]).await);
            }
        }
        replies
    }
}

/// Pays into a ledger, and notes what it does.
struct Pay {
    key: CompiledKey,
    ledger: Arc<Mutex<BTreeMap<EffectName, u64>>>,
    history: Arc<History>,
}

impl Pay {
    fn named(&self, message: &Message) -> (String, String, EffectName) {
        let order: serde_json::Value = message.json().unwrap();
        let key = self.key.derive(message.route(), message).unwrap();
        let effect = EffectName::new(order["order"].to_string(), order["amount"].to_string());
        (
            key.as_str().to_owned(),
            message.origin().to_string(),
            effect,
        )
    }
}

impl Handler for Pay {
    type Output = EffectName;

    async fn handle(&self, message: &Message, attempt: &Attempt) -> Result<EffectName, Failure> {
        let (key, origin, effect) = self.named(message);
        let fencing_token = attempt.fencing_token();
        let attempt = attempt.number();
        let content = effect.content.clone();
        let begun = Occurrence::Begun {
            key: key.clone(),
            origin: origin.clone(),
            attempt,
            fencing_token,
            content,
        };
        self.history.note(begun);
        *self
            .ledger
            .lock()
            .unwrap()
            .entry(effect.clone())
            .or_default() += 1;
        self.history.note(Occurrence::Ended {
            key,
            origin,
            attempt,
            outcome: SUCCEEDED.to_owned(),
        });
        Ok(effect)
    }

    async fn duplicate(&self, message: &Message, of: EffectName) -> Result<(), Failure> {
        let (key, origin, EffectName { content, .. }) = self.named(message);
        let result = serde_json::to_string(&of).unwrap();
        self.history.note(Occurrence::Duplicate {
            key,
            origin,
            content,
            result,
            of,
        });
        Ok(())
    }
}

/// Consumes everything with this store, and judges it. `states` reads the store's records when all
/// is quiet.
async fn judged(
    store: impl Store + Clone + 'static,
    states: impl FnOnce() -> BTreeMap<String, String>,
) -> PromiseReport {
    let folder = std::env::temp_dir().join(format!("oncegate-promise-{}", fastrand::u64(..)));
    let history = Arc::new(History::open(&folder).unwrap());
    let key = Key::json(["order"]);
    let compiled = key.compile(&Scope::new("billing").unwrap()).unwrap();
    let messages = messages();
    let produced = messages
        .iter()
        .map(|message| produced(message, &compiled))
        .collect();

    let unacknowledged = Arc::new(tokio::sync::watch::Sender::new(messages.len()));
    let source = Orders {
        left: Mutex::new(messages),
        unacknowledged,
    };
    let letters = Letters::default();
    let observer = Arc::new(RecordedObserver::new(Arc::clone(&history)));
    let ledger = Arc::default();
    let handler = Pay {
        key: compiled.clone(),
        ledger: Arc::clone(&ledger),
        history: Arc::clone(&history),
    };
    let gate = Gate::new(
        "billing",
        key,
        RecordedStore::new(store, Arc::clone(&history)),
    )
    .lease(LEASE)
    .fenced();
    Consumer::new(
        RecordedSource::new(source, compiled, Arc::clone(&history)),
        gate,
        handler,
    )
    .dead_letters(RecordedDeadLetters::new(
        letters.clone(),
        Arc::clone(&history),
    ))
    .observer(Arc::clone(&observer) as _)
    .run_until(std::future::pending())
    .await
    .unwrap();
    observer.note_counts();

    let evidence = Evidence {
        entries: history.read().unwrap(),
        produced,
        effects: ledger.lock().unwrap().clone(),
        dead_letters: letters.0.lock().unwrap().clone(),
        records: Some(states()),
        max_attempts: Some(5),
        ..Evidence::default()
    };
    std::fs::remove_file(&folder).unwrap();
    judge(&evidence)
}

fn messages() -> VecDeque<Message> {
    payloads()
        .into_iter()
        .enumerate()
        .map(|(offset, payload)| {
            let origin = Origin::Kafka {
                topic: TOPIC.into(),
                partition: 0,
                offset: i64::try_from(offset).unwrap(),
            };
            Message::new(TOPIC, origin, Some(payload.into()))
        })
        .collect()
}

fn produced(message: &Message, key: &CompiledKey) -> ProducedMessage {
    let order: serde_json::Value = message.json().unwrap_or_default();
    let effect = EffectName::new(order["order"].to_string(), order["amount"].to_string());
    let key = key
        .derive(message.route(), message)
        .ok()
        .map(|key| key.as_str().to_owned());
    ProducedMessage {
        origin: message.origin().to_string(),
        effect,
        key,
    }
}

fn states(memory: &MemoryStore) -> BTreeMap<String, String> {
    memory
        .records()
        .into_iter()
        .map(|(key, record)| {
            let state = match record.state {
                State::Pending { .. } => "pending",
                State::Released { .. } => "released",
                State::Completed { .. } => "completed",
                State::Failed { .. } => "failed",
            };
            (key.as_str().to_owned(), state.to_owned())
        })
        .collect()
}

// invariant: promise-from-history
#[tokio::test]
async fn a_right_store_keeps_the_promise() {
    let memory = Arc::new(MemoryStore::new());
    let report = judged(Arc::clone(&memory), || states(&memory)).await;
    assert!(report.broken.is_empty(), "{:#?}", report.broken);
    assert_eq!(
        (report.reached["granted"], report.second_effects),
        (ORDERS as u64, 0),
        "{report:#?}"
    );
    // All duplicates were answered, and the message without a key is a dead letter.
    assert_eq!(
        (
            report.reached["duplicate"],
            report.reached["dead letter bad_key"]
        ),
        (ORDERS as u64, 1)
    );
    assert_eq!(report.reached["key explained by the rules"], ORDERS as u64);
}

// invariant: promise-from-history
#[tokio::test]
async fn a_store_that_forgets_completions_is_seen() {
    let store = Arc::new(Forgetful {
        inner: MemoryStore::new(),
        completions: AtomicU64::new(0),
    });
    let report = judged(Arc::clone(&store), || states(&store.inner)).await;
    let broken: BTreeSet<&str> = report.broken.iter().map(|one| one.invariant).collect();
    // A claim was granted after the completion, which no order of the calls explains.
    assert!(
        broken.is_superset(&BTreeSet::from(["S5", "S16"])),
        "{:#?}",
        report.broken
    );
    assert!(report.second_effects > 0, "{report:#?}");
}
