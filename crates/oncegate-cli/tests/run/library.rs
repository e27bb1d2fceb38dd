//! What the libraries for workers do that a worker without one has to do by itself.

use std::collections::BTreeMap;
use std::path::Path;

use super::Stage;
use super::libraries::Libraries;
use super::stdin::{Feed, order};

/// The first message prints and waits for its cancellation; each notes what it was given.
const PYTHON: &str = r#"
import json, os, sys
from oncegate import Message, Retry, worker

@worker
def handle(message: Message) -> None:
    print("this is no protocol", flush=True)
    first = not os.path.exists(sys.argv[1])
    with open(sys.argv[1], "a") as ledger:
        given = [message.json()["order_id"], message.attempt, message.recovered, os.getpid()]
        ledger.write(json.dumps(given) + "\n")
    if first:
        message.cancelled.wait()
        raise Retry("cancelled")

handle.run()
"#;

const PYTHON_ASYNC: &str = r#"
import asyncio, json, os, sys
from oncegate import Message, worker

@worker
async def handle(message: Message) -> None:
    print("this is no protocol", flush=True)
    first = not os.path.exists(sys.argv[1])
    with open(sys.argv[1], "a") as ledger:
        given = [message.json()["order_id"], message.attempt, message.recovered, os.getpid()]
        ledger.write(json.dumps(given) + "\n")
    if first:
        await asyncio.Event().wait()

handle.run()
"#;

const NODE: &str = r#"
const { once } = require("node:events"), fs = require("node:fs");
require("oncegate").worker(async (message) => {
  console.log("this is no protocol");
  const [ledger, first] = [process.argv[2], !fs.existsSync(process.argv[2])];
  const given = [message.json().order_id, message.attempt, message.recovered, process.pid];
  fs.appendFileSync(ledger, JSON.stringify(given) + "\n");
  if (first) {
    await once(message.signal, "abort");
    message.signal.throwIfAborted();
  }
});
"#;

/// The first batch raises an error. Then A-1 is given up, and A-2 and A-3 ask for another attempt
/// or another time.
const PYTHON_BATCHES: &str = r#"
import json, os, sys
from oncegate import DeadLetter, Later, Message, Retry, batch_worker

asked = {}

def outcome(message: Message) -> object:
    order = message.json()["order_id"]
    asked[order] = asked.get(order, 0) + 1
    if order == "A-1":
        return DeadLetter("no such account")
    if order == "A-2" and asked[order] == 1:
        return Retry("busy", delay=0.01)
    if order == "A-3" and asked[order] == 1:
        return Later("not ready", delay=0.01)
    return {"charged": order}

@batch_worker
def handle(batch):
    print("this is no protocol", flush=True)
    first = not os.path.exists(sys.argv[1])
    with open(sys.argv[1], "a") as ledger:
        for message in batch:
            ledger.write(json.dumps([message.json()["order_id"], message.attempt, message.recovered, len(batch)]) + "\n")
    if first:
        raise OSError("the database is away")
    return [outcome(message) for message in batch]

handle.run()
"#;

const NODE_BATCHES: &str = r#"
const fs = require("node:fs");
const { batchWorker, DeadLetter, Later, Retry } = require("oncegate");
const asked = {};

async function outcome(message) {
  const order = message.json().order_id;
  asked[order] = (asked[order] ?? 0) + 1;
  if (order === "A-1") throw new DeadLetter("no such account");
  if (order === "A-2" && asked[order] === 1) throw new Retry("busy", { delayMs: 10 });
  if (order === "A-3" && asked[order] === 1) throw new Later("not ready", { delayMs: 10 });
  return { charged: order };
}

batchWorker(async (batch) => {
  console.log("this is no protocol");
  const [ledger, first] = [process.argv[2], !fs.existsSync(process.argv[2])];
  const lines = batch.map((message) => [message.json().order_id, message.attempt, message.recovered, batch.length]);
  fs.appendFileSync(ledger, lines.map((line) => JSON.stringify(line) + "\n").join(""));
  if (first) throw new Error("the database is away");
  return batch.map(outcome);
});
"#;

type Given = (String, u32, bool, u32);

/// A message is cancelled: only its handler ends, and the process goes on.
async fn survives_a_cancellation(
    name: &str,
    script: &str,
    command: impl Fn(&Libraries, &Path) -> String,
) {
    let stage = Stage::with_orders(4).await;
    let libraries = Libraries::new();
    let path = stage.path(name);
    std::fs::write(&path, script).unwrap();
    let command = format!(
        "{} '{}'",
        command(&libraries, &path),
        stage.path("ledger").display()
    );
    stage
        .consume(&[
            "--handler-exec",
            &command,
            "--lease",
            "5s",
            "--timeout",
            "3s",
        ])
        .await;
    assert!(stage.letters().await.is_empty(), "{}", stage.log());
    let given: Vec<Given> = stage.noted();
    assert_eq!(given.len(), 5, "{given:?}\n{}", stage.log());
    let (cancelled, _, _, process) = given[0].clone();
    assert!(
        given.iter().all(|given| given.3 == process),
        "one process: {given:?}\n{}",
        stage.log()
    );
    let again: Vec<(u32, bool)> = given
        .iter()
        .filter(|given| given.0 == cancelled)
        .map(|given| (given.1, given.2))
        .collect();
    assert_eq!(again, [(1, false), (2, true)], "{given:?}");
    assert!(
        stage.log().contains("this is no protocol"),
        "{}",
        stage.log()
    );
}

// invariant: worker-library
#[tokio::test]
async fn a_function_in_python_survives_the_cancellation_of_a_message() {
    survives_a_cancellation("worker.py", PYTHON, Libraries::python).await;
}

// invariant: worker-library
#[tokio::test]
async fn a_python_coroutine_survives_the_cancellation_of_a_message() {
    survives_a_cancellation("worker.py", PYTHON_ASYNC, Libraries::python).await;
}

// invariant: worker-library
#[tokio::test]
async fn a_function_in_node_survives_the_cancellation_of_a_message() {
    survives_a_cancellation("worker.js", NODE, Libraries::node).await;
}

/// Every outcome that a message of a batch can have, and an error that concerns the whole batch.
async fn has_an_outcome_for_each(
    name: &str,
    script: &str,
    command: impl Fn(&Libraries, &Path) -> String,
) {
    const ORDERS: usize = 12;
    let stage = Stage::with_orders(ORDERS).await;
    let libraries = Libraries::new();
    let path = stage.path(name);
    std::fs::write(&path, script).unwrap();
    let command = format!(
        "{} '{}'",
        command(&libraries, &path),
        stage.path("ledger").display()
    );
    let flags = [
        "--handler-exec",
        &command,
        "--batch-messages",
        "12",
        "--set",
        "batch.wait=1s",
    ];
    stage.consume(&flags).await;
    let given: Vec<Given> = stage.noted();
    let in_first = given.first().map_or(0, |given| given.3 as usize);
    assert!(given.iter().any(|given| given.3 > 1), "{given:?}");
    let mut attempts: BTreeMap<&str, Vec<u32>> = BTreeMap::new();
    for (order, attempt, recovered, _) in &given {
        assert!(!recovered, "each outcome is known: {given:?}");
        attempts.entry(order).or_default().push(*attempt);
    }
    assert_eq!(attempts.len(), ORDERS, "{given:?}");
    for (order, attempts) in attempts {
        // The error of the first batch has cost each of its messages an attempt.
        let failed = u32::from(given[..in_first].iter().any(|given| given.0 == order));
        let further = match order {
            "A-2" => vec![1 + failed, 2 + failed],
            "A-3" => vec![1 + failed, 1 + failed],
            _ => vec![1 + failed],
        };
        assert_eq!(
            attempts,
            (1..=failed).chain(further).collect::<Vec<_>>(),
            "{order}: {given:?}"
        );
    }
    let letters = stage.letters().await;
    assert_eq!(letters.len(), 1, "{letters:?}\n{}", stage.log());
    assert!(
        letters[0].0.contains("A-1") && letters[0].1.ends_with("no such account"),
        "{letters:?}"
    );
    assert!(
        stage.log().contains("the database is away"),
        "{}",
        stage.log()
    );
    stage.consume(&flags).await;
    assert_eq!(
        stage.noted::<Given>(),
        given,
        "the replay has done something"
    );
}

#[tokio::test]
async fn each_message_of_a_batch_in_python_has_its_own_outcome() {
    has_an_outcome_for_each("worker.py", PYTHON_BATCHES, Libraries::python).await;
}

#[tokio::test]
async fn each_message_of_a_batch_in_node_has_its_own_outcome() {
    has_an_outcome_for_each("worker.js", NODE_BATCHES, Libraries::node).await;
}

/// Notes each run, and kills its process at the first run of some orders.
const PYTHON_KILLED: &str = r#"
import json, os, signal
from oncegate import Message, worker

@worker(ahead=16)
def handle(message: Message) -> None:
    order = message.json()["order_id"]
    with open("ledger", "a") as ledger:
        ledger.write(json.dumps([order, message.attempt, message.recovered]) + "\n")
    if message.attempt == 1 and int(order[2:]) % 50 == 49:
        os.kill(os.getpid(), signal.SIGKILL)

handle.run()
"#;

/// A function takes messages ahead. A process that dies with some has begun one of them.
// invariant: ahead-not-begun
#[tokio::test]
async fn what_a_process_that_dies_was_sent_ahead_runs_once() {
    const ORDERS: usize = 400;
    let orders: Vec<String> = (0..ORDERS).map(|n| order(&format!("A-{n}"))).collect();
    let feed = Feed::of(&orders.iter().map(String::as_str).collect::<Vec<_>>());
    std::fs::write(feed.path("worker.py"), PYTHON_KILLED).unwrap();
    let command = Libraries::new().python(Path::new("worker.py"));
    let flags = [
        "--handler-exec",
        &command,
        "--workers",
        "2",
        "--lease",
        "1s",
    ];
    let ended = feed.run(&flags).await;
    assert_eq!(ended.code, Some(0), "{ended:?}");
    let mut runs: BTreeMap<usize, Vec<(u32, bool)>> = BTreeMap::new();
    for line in feed.ledger() {
        let noted: (String, u32, bool) = serde_json::from_str(&line).unwrap();
        let number = noted.0[2..].parse().unwrap();
        runs.entry(number).or_default().push((noted.1, noted.2));
    }
    assert_eq!(runs.len(), ORDERS);
    for (number, runs) in runs {
        let expected: &[(u32, bool)] = if number % 50 == 49 {
            &[(1, false), (2, true)]
        } else {
            &[(1, false)]
        };
        assert_eq!(runs, expected, "A-{number}: {}", ended.err);
    }
}
