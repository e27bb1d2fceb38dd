//! Workers that get many messages at a time.

use std::collections::{BTreeMap, BTreeSet};

use oncegate_testkit::{LoopbackPort, Process, Redis, Sqs, process, unique};
use serde_json::{Value, json};

use super::libraries::Libraries;
use super::raw::{Answer, RawWorker};
use super::{LIMIT, Stage, example};

const ORDERS: usize = 200;

/// Orders with a broken one in their middle.
async fn stage() -> Stage {
    let order = |n: usize| match n {
        100 => r#"{"order_id":["no id"]}"#.to_owned(),
        n => format!(r#"{{"order_id":"A-{n}","amount":10}}"#),
    };
    Stage::with((0..ORDERS).map(order)).await
}

/// Every order has one effect, also after a replay, and the broken one is a dead letter.
async fn consume_twice(stage: &Stage, flags: &[&str]) {
    let flags = [
        &["--batch-messages", "50", "--set", "batch.wait=20ms"],
        flags,
    ]
    .concat();
    stage.consume(&flags).await;
    let effects = stage.effects();
    assert_eq!(effects.len(), ORDERS - 1, "{}", stage.log());
    assert!(effects.values().all(|count| *count == 1), "{effects:?}");
    stage.consume(&flags).await;
    assert_eq!(stage.effects(), effects, "the replay has done something");
    assert_eq!(stage.letters().await.len(), 1);
}

#[tokio::test]
async fn a_worker_behind_http_gets_batches_and_a_replay_has_no_effect() {
    let stage = stage().await;
    let port = LoopbackPort::reserve();
    let number = port.number().to_string();
    let mut command = process::bound_to_parent("python3", "KILL");
    command
        .arg(example("python/batch_http.py"))
        .arg(&number)
        .arg(stage.path("ledger"));
    let _worker = Process::spawn_logged("worker", command, &stage.path("worker.log"));
    consume_twice(
        &stage,
        &["--handler", &format!("http://127.0.0.1:{number}/charge")],
    )
    .await;
}

#[tokio::test]
async fn a_stdio_worker_gets_batches_and_a_replay_has_no_effect() {
    let stage = stage().await;
    let ledger = stage.path("ledger");
    let command = format!(
        "python3 '{}' '{}'",
        example("python/batch_stdio.py"),
        ledger.display()
    );
    consume_twice(&stage, &["--handler-exec", &command, "--workers", "2"]).await;
}

#[tokio::test]
async fn a_python_library_worker_gets_batches_without_second_effects() {
    let stage = stage().await;
    let command = Libraries::new().python(example("python/batch.py").as_ref());
    let command = format!("{command} '{}'", stage.path("ledger").display());
    consume_twice(&stage, &["--handler-exec", &command, "--workers", "2"]).await;
}

#[tokio::test]
async fn a_node_library_worker_gets_batches_without_second_effects() {
    let stage = stage().await;
    let libraries = Libraries::new();
    let command = libraries.node(example("node/batch.js").as_ref());
    let command = format!("{command} '{}'", stage.path("ledger").display());
    consume_twice(&stage, &["--handler-exec", &command, "--workers", "2"]).await;
}

/// The messages of a request: the id of each order, and its attempt.
fn orders(body: &str) -> Vec<(String, Value)> {
    let messages: Vec<Value> = serde_json::from_str(body).unwrap();
    let order = |message: Value| {
        let payload: Value = serde_json::from_str(message["payload"].as_str().unwrap()).unwrap();
        (
            payload["order_id"].as_str().unwrap_or("none").to_owned(),
            message,
        )
    };
    messages.into_iter().map(order).collect()
}

#[tokio::test]
async fn each_message_of_a_request_has_its_outcome_or_an_unknown_one() {
    let stage = Stage::with_orders(30).await;
    let worker = RawWorker::start(|asked| {
        let outcome = |(order, message): &(String, Value)| {
            let id = &message["id"];
            match (order.as_str(), message["attempt"].as_u64().unwrap()) {
                ("A-3", 1) => Some(json!({ "id": id, "outcome": "retry", "reason": "not yet" })),
                ("A-5", _) => {
                    Some(json!({ "id": id, "outcome": "dead-letter", "reason": "no such account" }))
                }
                ("A-7", 1) => None,
                (order, _) => {
                    Some(json!({ "id": id, "outcome": "complete", "result": { "charged": order } }))
                }
            }
        };
        let answers: Vec<Value> = orders(&asked.body).iter().filter_map(outcome).collect();
        Answer::status(
            200,
            "content-type: application/json\r\n",
            &Value::from(answers).to_string(),
        )
    })
    .await;
    let url = worker.url();
    stage
        .consume(&["--handler", &url, "--batch-messages", "30", "--lease", "1s"])
        .await;
    let mut attempts: BTreeMap<String, Vec<(u64, bool)>> = BTreeMap::new();
    for asked in worker.asked() {
        let messages = orders(&asked.body);
        assert_eq!(asked.headers["oncegate-batch"], messages.len().to_string());
        let keys: BTreeSet<&str> = messages
            .iter()
            .map(|(_, message)| message["idempotency_key"].as_str().unwrap())
            .collect();
        assert_eq!(keys.len(), messages.len(), "each has a key of its own");
        for (order, message) in messages {
            let attempt = (
                message["attempt"].as_u64().unwrap(),
                message["recovered"].as_bool().unwrap(),
            );
            attempts.entry(order).or_default().push(attempt);
        }
    }
    assert_eq!(attempts.len(), 30);
    for (order, attempts) in &attempts {
        let expected = match order.as_str() {
            "A-3" => vec![(1, false), (2, false)],
            "A-7" => vec![(1, false), (2, true)],
            _ => vec![(1, false)],
        };
        assert_eq!(*attempts, expected, "{order}");
    }
    let letters = stage.letters().await;
    assert_eq!(letters.len(), 1, "{letters:?}");
    assert!(
        letters[0].0.contains("A-5") && letters[0].1.ends_with("no such account"),
        "{letters:?}"
    );
}

#[tokio::test]
async fn a_request_that_is_refused_is_split_until_the_cause_is_alone() {
    let stage = Stage::with_orders(40).await;
    let worker = RawWorker::start(|asked| {
        let orders = orders(&asked.body);
        if orders.iter().any(|(order, _)| order == "A-11") {
            Answer::status(422, "", "A-11 is no order")
        } else {
            Answer::status(204, "", "")
        }
    })
    .await;
    stage
        .consume(&[
            "--handler",
            &worker.url(),
            "--batch-messages",
            "40",
            "--set",
            "batch.wait=1s",
        ])
        .await;
    let letters = stage.letters().await;
    assert_eq!(letters.len(), 1, "{letters:?}");
    assert!(letters[0].0.contains("A-11"), "{letters:?}");
    let asked = worker.asked();
    let attempts = asked.iter().flat_map(|asked| orders(&asked.body));
    assert!(
        attempts
            .into_iter()
            .all(|(_, message)| message["attempt"] == 1),
        "the others pay nothing"
    );
    let refused = asked
        .iter()
        .filter(|asked| orders(&asked.body).iter().any(|(order, _)| order == "A-11"));
    assert!(refused.count() <= 7, "40, 20, 10, 5, 3, 2, 1");
}

// invariant: batch-crash
#[tokio::test]
async fn a_kill_in_a_batch_loses_nothing_and_each_message_is_told() {
    let stage = Stage::with_orders(40).await;
    // It dies once in the middle of a batch, after the effects of its first half.
    let worker = stage.python(
        r#"
import json, os, signal, sys
print(json.dumps({"type": "ready", "v": 1, "batches": True, "max_in_flight": 1}), flush=True)
for line in sys.stdin:
    batch = json.loads(line)
    if batch["type"] != "batch": continue
    for number, message in enumerate(batch["messages"]):
        with open(sys.argv[1], "a") as ledger:
            ledger.write(json.dumps([json.loads(message["payload"])["order_id"], message["attempt"], message["recovered"]]) + "\n")
        if number == len(batch["messages"]) // 2 and not os.path.exists(sys.argv[1] + ".died"):
            open(sys.argv[1] + ".died", "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        print(json.dumps({"id": message["id"], "outcome": "complete"}), flush=True)
"#,
    );
    stage
        .consume(&[
            "--handler-exec",
            &worker,
            "--batch-messages",
            "10",
            "--lease",
            "1s",
        ])
        .await;
    let noted: Vec<(String, u32, bool)> = stage.noted();
    let orders: BTreeSet<&String> = noted.iter().map(|(order, ..)| order).collect();
    assert_eq!(orders.len(), 40, "{noted:?}");
    for (order, attempt, recovered) in &noted {
        assert_eq!(*recovered, *attempt > 1, "{order}: {noted:?}");
    }
    // What was answered before the death is completed; the rest of that batch runs again.
    let second = noted.len() - 40;
    assert!((1..=10).contains(&second), "{noted:?}");
    assert!(stage.letters().await.is_empty());
}

#[tokio::test]
async fn a_worker_without_batches_is_not_ready_and_the_log_says_why() {
    let stage = Stage::with_orders(1).await;
    let command = format!(
        "python3 '{}' '{}'",
        example("python/worker_stdio.py"),
        stage.path("ledger").display()
    );
    let running = stage.start(&["--handler-exec", &command, "--batch-messages", "5"]);
    stage.until_logged("batches\\\":true").await;
    running.stop().await;
    assert!(stage.effects().is_empty());
}

#[tokio::test]
async fn a_queue_is_worked_off_in_batches() {
    let sqs = Sqs::shared().await;
    let redis = Redis::shared().await;
    let dir = tempfile::tempdir().unwrap();
    let queue = sqs.new_queue("run").await;
    let dead = sqs.new_queue("run-dead").await;
    let ledger = dir.path().join("ledger");
    let log = dir.path().join("log");
    let file = dir.path().join("oncegate.toml");
    let config = format!(
        r#"version = 1
[store]
url = {url:?}
[status]
listen = "off"
[consumer.{scope}]
source = {{ sqs = {{ queue = {queue:?}, wait = "1s" }} }}
key = {{ json = ["order_id"] }}
handler = {{ exec = ["python3", {worker:?}, {ledger:?}] }}
batch = {{ messages = 20, wait = "200ms", bytes = "1MiB" }}
concurrency = 2
dead_letters = {{ sqs = {dead:?} }}
"#,
        url = redis.url(),
        scope = unique("run"),
        queue = queue.url(),
        dead = dead.url(),
        worker = example("python/batch_stdio.py"),
    );
    std::fs::write(&file, config).unwrap();
    let orders = || (0..60).map(|n| format!(r#"{{"order_id":"A-{n}"}}"#));
    queue.send(orders()).await;
    let mut command = process::bound_to_parent(env!("CARGO_BIN_EXE_oncegate"), "KILL");
    command.args(["run", "--config"]).arg(&file);
    command.envs([
        ("AWS_ACCESS_KEY_ID", "none"),
        ("AWS_SECRET_ACCESS_KEY", "none"),
    ]);
    let mut running = Process::spawn_logged("oncegate run", command, &log);
    queue.until_empty().await;
    let effects = std::fs::read_to_string(&ledger).unwrap();
    assert_eq!(effects.lines().collect::<BTreeSet<_>>().len(), 60);
    assert_eq!(effects.lines().count(), 60);
    queue.send(orders()).await;
    queue.until_empty().await;
    assert_eq!(
        std::fs::read_to_string(&ledger).unwrap(),
        effects,
        "a second effect"
    );
    running.signal("TERM");
    assert_eq!(
        running.end_within(LIMIT).await.code(),
        Some(0),
        "{}",
        std::fs::read_to_string(&log).unwrap()
    );
}
