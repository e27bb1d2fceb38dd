//! What the libraries for workers do that a worker without one has to do by itself.

use std::path::Path;

use super::Stage;
use super::libraries::Libraries;

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

type Given = (String, u32, bool, u32);

/// A message is cancelled: only its handler ends, and the process goes on.
async fn survives_a_cancellation(name: &str, script: &str, command: impl Fn(&Libraries, &Path) -> String) {
    let (stage, libraries) = (Stage::with_orders(4).await, Libraries::new());
    let path = stage.path(name);
    std::fs::write(&path, script).unwrap();
    let command = format!("{} '{}'", command(&libraries, &path), stage.path("ledger").display());
    stage.consume(&["--handler-exec", &command, "--lease", "5s", "--timeout", "1s"]).await;
    assert!(stage.letters().await.is_empty(), "{}", stage.log());
    let given: Vec<Given> = stage.noted();
    assert_eq!(given.len(), 5, "{given:?}\n{}", stage.log());
    let (cancelled, _, _, process) = given[0].clone();
    assert!(given.iter().all(|given| given.3 == process), "one process: {given:?}\n{}", stage.log());
    let again: Vec<(u32, bool)> =
        given.iter().filter(|given| given.0 == cancelled).map(|given| (given.1, given.2)).collect();
    assert_eq!(again, [(1, false), (2, true)], "{given:?}");
    assert!(stage.log().contains("this is no protocol"), "{}", stage.log());
}

// invariant: worker-library
#[tokio::test]
async fn a_function_in_python_survives_the_cancellation_of_a_message() {
    survives_a_cancellation("worker.py", PYTHON, Libraries::python).await;
}

// invariant: worker-library
#[tokio::test]
async fn a_coroutine_function_in_python_survives_the_cancellation_of_a_message() {
    survives_a_cancellation("worker.py", PYTHON_ASYNC, Libraries::python).await;
}

// invariant: worker-library
#[tokio::test]
async fn a_function_in_node_survives_the_cancellation_of_a_message() {
    survives_a_cancellation("worker.js", NODE, Libraries::node).await;
}
