//! The example `payments_sqs` as its users run it, on a server of its own and on real ones.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test that cannot go on has failed")]

use std::path::PathBuf;
use std::process::Command;

use oncegate_tests::{Redis, Sqs};

/// Cargo builds a package's examples before it runs its tests, in a folder next to theirs.
fn example() -> Command {
    let tests: PathBuf = std::env::current_exe().unwrap().parent().unwrap().to_owned();
    Command::new(tests.parent().unwrap().join("examples").join("payments_sqs"))
}

/// Runs it with these arguments, and reads and judges its proof.
fn prove(arguments: &[&str]) {
    let output = example().args(["--json", "--messages", "1500"]).args(arguments).output();
    let output = output.expect("it starts");
    let text = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}\n{text}\n{errors}", output.status);
    let proof: serde_json::Value = serde_json::from_str(&text).expect("the proof is JSON");
    let number = |name: &str| proof[name].as_u64().unwrap_or_else(|| panic!("no {name} in {proof}"));
    assert_eq!(number("messages"), 1_500);
    assert_eq!(number("lost"), 0);
    assert_eq!(number("charged_twice"), number("charged_twice_explained_by_the_kill"));
    assert_eq!(number("charges"), number("distinct_payments") + number("charged_twice"));
    assert_eq!(number("replay_charges"), 0);
    assert!(number("recoveries") > 0, "the kill hit nobody in the middle of a handler: {proof}");
}

#[test]
fn it_proves_itself_on_a_server_of_its_own() {
    prove(&[]);
}

#[tokio::test]
async fn it_proves_itself_on_a_queue_and_redis() {
    let (sqs, redis) = (Sqs::shared().await, Redis::shared().await);
    prove(&["--endpoint", sqs.endpoint(), "--redis", redis.url()]);
}
