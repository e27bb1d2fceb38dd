//! The workers of `examples/workers`: they work, and a replay has no second effect.

use oncegate_testkit::{LoopbackPort, Process, process};

use super::libraries::Libraries;
use super::{Stage, example};

const ORDERS: usize = 60;

/// Consumes a topic, and then all of it again in another group.
async fn has_no_second_effect(stage: &Stage, flags: &[&str]) {
    stage.consume(flags).await;
    let effects = stage.effects();
    assert_eq!(effects.len(), ORDERS, "{}", stage.log());
    assert!(effects.values().all(|count| *count == 1), "{effects:?}");
    stage.consume(flags).await;
    assert_eq!(stage.effects(), effects, "the replay has done something");
    assert!(stage.letters().await.is_empty());
}

async fn over_http(program: &str, worker: &str) {
    let stage = Stage::with_orders(ORDERS).await;
    let port = LoopbackPort::reserve();
    let number = port.number().to_string();
    let mut command = process::bound_to_parent(program, "KILL");
    command
        .arg(example(worker))
        .arg(&number)
        .arg(stage.path("ledger"));
    let _worker = Process::spawn_logged(worker, command, &stage.path("worker.log"));
    let url = format!("http://127.0.0.1:{number}/charge");
    has_no_second_effect(&stage, &["--handler", &url]).await;
}

async fn over_stdio(worker: &str) {
    let stage = Stage::with_orders(ORDERS).await;
    let command = format!("{worker} '{}'", stage.path("ledger").display());
    has_no_second_effect(&stage, &["--handler-exec", &command, "--workers", "2"]).await;
}

// invariant: worker-replay
#[tokio::test]
async fn a_python_worker_behind_http() {
    over_http("python3", "python/worker_http.py").await;
}

#[tokio::test]
async fn a_node_worker_behind_http() {
    over_http("node", "node/worker_http.js").await;
}

#[tokio::test]
async fn a_python_worker_on_standard_streams() {
    over_stdio(&format!("python3 '{}'", example("python/worker_stdio.py"))).await;
}

#[tokio::test]
async fn a_node_worker_on_standard_streams() {
    over_stdio(&format!("node '{}'", example("node/worker_stdio.js"))).await;
}

#[tokio::test]
async fn a_python_worker_with_the_library() {
    over_stdio(&Libraries::new().python(example("python/worker.py").as_ref())).await;
}

#[tokio::test]
async fn a_node_worker_with_the_library() {
    let libraries = Libraries::new();
    over_stdio(&libraries.node(example("node/worker.js").as_ref())).await;
}

#[tokio::test]
async fn a_command_for_each_message() {
    let stage = Stage::with_orders(ORDERS).await;
    let script = stage.path("charge.sh");
    let ledger = stage.path("ledger");
    // The order's id stands between the third and the fourth quote of the payload.
    let text = format!(
        "id=$(cut -d'\"' -f4)\nprintf '%s\\n' \"$id\" >>'{}'\nprintf 'charged %s' \"$id\"\n",
        ledger.display()
    );
    std::fs::write(&script, text).unwrap();
    has_no_second_effect(
        &stage,
        &["--handler-command", &format!("sh '{}'", script.display())],
    )
    .await;
}
