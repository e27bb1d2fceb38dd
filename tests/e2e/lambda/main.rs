//! A function in environments that are killed, frozen and out of time, over the wire protocol of
//! Lambda's runtime API.

#![allow(clippy::unwrap_used, reason = "tests")]

mod runtime_api;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::Duration;

use oncegate_testkit::{Effect, Ledger};
use serde_json::{Value, json};
use tokio::time::{Instant, sleep};

use runtime_api::{Environment, Fault, Outcome};

const LEASE: Duration = Duration::from_millis(800);
const ORDERS: usize = 40;
/// The most messages of one event, as of a mapping.
const BATCH: usize = 5;

/// The time for which a message of an invocation is not given to another one.
const VISIBILITY: Duration = Duration::from_secs(1);

/// A queue behind an event source mapping: what is not deleted comes again.
struct Queue {
    /// The body of each message, and when it is visible.
    messages: BTreeMap<String, (Value, Instant)>,
}

impl Queue {
    /// Each order twice, under two ids.
    fn of_orders() -> Self {
        let mut messages = BTreeMap::new();
        for number in 0..ORDERS * 2 {
            let order = number % ORDERS;
            let does = match order % 10 {
                0 => "hangs",
                1 | 2 => "fails",
                3..=7 => "lingers",
                _ => "",
            };
            let body = json!({"id": format!("order-{order}"), "does": does});
            messages.insert(format!("m{number:03}"), (body, Instant::now()));
        }
        Self { messages }
    }

    /// Takes some visible messages for an invocation. `None` when all are deleted.
    fn event(&mut self, random: &mut fastrand::Rng) -> Option<(Vec<String>, Value)> {
        if self.messages.is_empty() {
            return None;
        }
        let now = Instant::now();
        let visible = self.messages.iter().filter(|(_, (_, from))| *from <= now);
        let mut ids: Vec<String> = visible.map(|(id, _)| id.clone()).collect();
        random.shuffle(&mut ids);
        ids.truncate(BATCH);
        let mut records = Vec::new();
        for id in &ids {
            let (body, from) = self.messages.get_mut(id).unwrap();
            *from = now + VISIBILITY;
            records.push(
                json!({"messageId": id, "body": body.to_string(), "attributes": {},
                "messageAttributes": {}, "eventSource": "aws:sqs",
                "eventSourceARN": "arn:aws:sqs:eu-central-1:1:orders"}),
            );
        }
        Some((ids, json!({ "Records": records })))
    }

    /// Deletes what an answer does not name, as the mapping does; the rest is visible at once.
    fn settle(&mut self, ids: &[String], outcome: &Outcome) {
        let failed: BTreeSet<&str> = match outcome {
            Outcome::Answered(answer) => answer
                .get("batchItemFailures")
                .and_then(Value::as_array)
                .unwrap()
                .iter()
                .map(|failure| {
                    failure
                        .get("itemIdentifier")
                        .and_then(Value::as_str)
                        .unwrap()
                })
                .collect(),
            Outcome::Failed(_) | Outcome::Ended => ids.iter().map(String::as_str).collect(),
        };
        for id in ids {
            if !failed.contains(id.as_str()) {
                self.messages.remove(id);
            } else if let Some((_, from)) = self.messages.get_mut(id) {
                *from = Instant::now();
            }
        }
    }
}

struct World {
    folder: tempfile::TempDir,
}

impl World {
    fn new() -> Self {
        Self {
            folder: tempfile::tempdir().unwrap(),
        }
    }

    fn ledger(&self) -> PathBuf {
        self.folder.path().join("ledger")
    }

    async fn environment(&self) -> Environment {
        let records = self.folder.path().join("records.db");
        let lease = LEASE.as_millis().to_string();
        let program = Path::new(env!("CARGO_BIN_EXE_lambda_function"));
        Environment::start(program, &[&records, &self.ledger(), Path::new(&lease)]).await
    }

    /// Of each order, whether the attempt of each effect knew that an earlier one had ended without
    /// an outcome.
    fn effects(&self) -> BTreeMap<String, Vec<bool>> {
        let mut effects: BTreeMap<String, Vec<bool>> = BTreeMap::new();
        for Effect { effect, .. } in Ledger::open(self.ledger()).read() {
            let (order, recovered) = effect.split_once(' ').unwrap();
            let of_order = effects.entry(order.to_owned()).or_default();
            of_order.push(recovered == "true");
        }
        effects
    }

    /// Invokes one environment after another until the queue is empty.
    async fn work_off(&self, queue: &Mutex<Queue>, mut random: fastrand::Rng) {
        let mut environment = self.environment().await;
        loop {
            let taken = queue.lock().unwrap().event(&mut random);
            let Some((ids, event)) = taken else { return };
            if ids.is_empty() {
                sleep(VISIBILITY / 10).await;
                continue;
            }
            let fault = match random.u8(..8) {
                0 => Fault::KillAfter(Duration::from_millis(random.u64(..150))),
                1 => Fault::FreezeAfter(Duration::from_millis(random.u64(..150)), LEASE * 2),
                _ => Fault::None,
            };
            let limit = Duration::from_millis(random.u64(900..4_000));
            let outcome = environment.invoke(&event, limit, fault).await;
            queue.lock().unwrap().settle(&ids, &outcome);
            if matches!(outcome, Outcome::Ended) {
                environment = self.environment().await;
            }
        }
    }
}

// invariant: lambda-answers
#[tokio::test]
async fn killed_and_frozen_environments_lose_and_double_nothing() {
    let seed = fastrand::u64(..);
    println!("seed {seed}");
    let random = || fastrand::Rng::with_seed(seed);
    let world = World::new();
    let queue = Mutex::new(Queue::of_orders());
    let second = fastrand::Rng::with_seed(seed ^ 1);
    tokio::join!(
        world.work_off(&queue, random()),
        world.work_off(&queue, second)
    );
    let effects = world.effects();
    assert_eq!(effects.len(), ORDERS, "an order is lost: {effects:?}");
    for (order, of_order) in &effects {
        let uninformed = of_order.iter().filter(|recovered| !**recovered).count();
        assert!(uninformed <= 1, "{order} ran again: {of_order:?}");
    }

    // The whole queue again: every message is done, and nothing runs.
    let mut replayed = Queue::of_orders();
    let mut environment = world.environment().await;
    while let Some((ids, event)) = replayed.event(&mut random()) {
        let outcome = environment
            .invoke(&event, Duration::from_secs(60), Fault::None)
            .await;
        assert!(matches!(outcome, Outcome::Answered(_)), "{outcome:?}");
        replayed.settle(&ids, &outcome);
    }
    assert_eq!(world.effects(), effects);
}

#[tokio::test]
async fn an_event_of_another_source_is_an_error_of_the_invocation() {
    let world = World::new();
    let mut environment = world.environment().await;
    let event = json!({"Records": [{"eventSource": "aws:s3"}]});
    let outcome = environment
        .invoke(&event, Duration::from_secs(60), Fault::None)
        .await;
    let Outcome::Failed(error) = outcome else {
        panic!("{outcome:?}")
    };
    let text = error.to_string();
    assert!(text.contains("event source mapping"), "{text}");
}
