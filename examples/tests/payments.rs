//! The payments example as its users run it, without a server and on real ones.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test that cannot go on has failed")]

use std::path::PathBuf;
use std::process::Command;

use oncegate_tests::{Kafka, Redis};

/// Cargo builds a package's examples before it runs its tests, in a folder next to theirs.
fn payments() -> Command {
    let tests: PathBuf = std::env::current_exe().unwrap().parent().unwrap().to_owned();
    Command::new(tests.parent().unwrap().join("examples").join("payments"))
}

/// Runs it with these arguments and reads its proof.
fn prove(arguments: &[&str]) -> serde_json::Value {
    let output =
        payments().args(["--json", "--messages", "4000"]).args(arguments).output().expect("it starts");
    let text = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}\n{text}\n{errors}", output.status);
    serde_json::from_str(&text).expect("the proof is JSON")
}

fn judge(proof: &serde_json::Value) {
    let number = |name: &str| proof[name].as_u64().unwrap_or_else(|| panic!("no {name} in {proof}"));
    assert_eq!(number("messages"), 4_000);
    assert_eq!(number("lost"), 0);
    assert_eq!(number("charged_twice"), number("charged_twice_explained_by_the_kill"));
    assert_eq!(number("charges"), number("distinct_payments") + number("charged_twice"));
    assert_eq!(number("replay_charges"), 0);
    assert!(number("recoveries") > 0, "the kill hit nobody in the middle of a handler: {proof}");
}

#[test]
fn it_proves_itself_without_a_server() {
    judge(&prove(&[]));
}

#[tokio::test]
async fn it_proves_itself_on_kafka_and_redis() {
    let (kafka, redis) = (Kafka::shared().await, Redis::shared().await);
    judge(&prove(&["--bootstrap", kafka.bootstrap(), "--redis", redis.url()]));
}
