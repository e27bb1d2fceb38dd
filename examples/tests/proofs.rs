//! The examples as their users run them, without a server and on real ones.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test that cannot go on has failed")]

use std::path::PathBuf;
use std::process::Command;

use oncegate_tests::{Kafka, Postgres, Redis};

/// Cargo builds a package's examples before it runs its tests, in a folder next to theirs.
fn example(name: &str) -> Command {
    let tests: PathBuf = std::env::current_exe().unwrap().parent().unwrap().to_owned();
    Command::new(tests.parent().unwrap().join("examples").join(name))
}

/// What an example has proved, in numbers.
struct Proof(serde_json::Value);

impl Proof {
    /// Runs the example with these arguments.
    fn of(name: &str, arguments: &[&str]) -> Self {
        let output = example(name).arg("--json").args(arguments).output().expect("it starts");
        let text = String::from_utf8_lossy(&output.stdout);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{}\n{text}\n{errors}", output.status);
        Self(serde_json::from_str(&text).expect("the proof is JSON"))
    }

    fn number(&self, name: &str) -> u64 {
        self.0[name].as_u64().unwrap_or_else(|| panic!("no {name} in {}", self.0))
    }
}

fn payments(arguments: &[&str]) {
    let proof = Proof::of("payments", &[&["--messages", "4000"], arguments].concat());
    let number = |name| proof.number(name);
    assert_eq!(number("messages"), 4_000);
    assert_eq!(number("lost"), 0);
    assert_eq!(number("charged_twice"), number("charged_twice_explained_by_the_kill"));
    assert_eq!(number("charges"), number("distinct_payments") + number("charged_twice"));
    assert_eq!(number("replay_charges"), 0);
    assert!(number("recoveries") > 0, "the kill hit nobody in the middle of a handler: {}", proof.0);
}

fn payments_postgres(arguments: &[&str]) {
    let proof = Proof::of("payments_postgres", &[&["--messages", "4000"], arguments].concat());
    let number = |name| proof.number(name);
    assert_eq!(number("messages"), 4_000);
    assert_eq!((number("lost"), number("charged_twice")), (0, 0));
    assert_eq!(number("charges"), number("distinct_payments"));
    assert_eq!((number("replay_charges"), number("wrong_answers")), (0, 0));
    assert!(number("recoveries") > 0, "the kill hit nobody in the middle of a handler: {}", proof.0);
    assert!(number("connections_cut") > 0, "nobody's connections were cut: {}", proof.0);
}

fn outbox(arguments: &[&str]) {
    let proof = Proof::of("outbox", &[&["--orders", "2000"], arguments].concat());
    let number = |name| proof.number(name);
    assert_eq!((number("orders"), number("shipments"), number("notices")), (2_000, 2_000, 2_000));
    assert_eq!((number("shipped_twice"), number("noticed_twice"), number("out_of_order")), (0, 0, 0));
    assert!(number("published_again") > 0, "the relay has published nothing again: {}", proof.0);
}

#[test]
fn payments_prove_themselves_without_a_server() {
    payments(&[]);
}

#[tokio::test]
async fn payments_prove_themselves_on_kafka_and_redis() {
    let (kafka, redis) = (Kafka::shared().await, Redis::shared().await);
    payments(&["--bootstrap", kafka.bootstrap(), "--redis", redis.url()]);
}

#[test]
fn payments_in_transactions_prove_themselves_on_a_server_of_their_own() {
    payments_postgres(&[]);
}

#[tokio::test]
async fn payments_in_transactions_prove_themselves_on_kafka() {
    let (kafka, postgres) = (Kafka::shared().await, Postgres::shared().await);
    payments_postgres(&["--bootstrap", kafka.bootstrap(), "--postgres", postgres.url()]);
}

#[test]
fn the_outbox_proves_itself_on_a_server_of_its_own() {
    outbox(&[]);
}

#[tokio::test]
async fn the_outbox_proves_itself_on_kafka() {
    let (kafka, postgres) = (Kafka::shared().await, Postgres::shared().await);
    outbox(&["--bootstrap", kafka.bootstrap(), "--postgres", postgres.url()]);
}
