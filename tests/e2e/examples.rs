//! The examples as their users run them, without a server and on real ones.

#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "a test that cannot go on has failed"
)]

use std::path::PathBuf;
use std::process::Command;

use oncegate_testkit::{Kafka, Postgres, RabbitMq, Redis, SchemaRegistry, Sqs};

/// Runs an example with `--json`, and reads what it has proved.
///
/// `cargo test --workspace` builds the examples before it runs tests, in a folder next to theirs.
/// They are no tests of their own package, so that running an example does not build what the tests
/// need.
fn proof_of(name: &str, arguments: &[&str]) -> serde_json::Value {
    let tests: PathBuf = std::env::current_exe()
        .unwrap()
        .parent()
        .unwrap()
        .to_owned();
    let program = tests.parent().unwrap().join("examples").join(name);
    let hint = "`cargo build --workspace --all-features --examples` builds it";
    let output = Command::new(&program)
        .arg("--json")
        .args(arguments)
        .output();
    let output = output
        .unwrap_or_else(|error| panic!("{} does not start: {error}; {hint}", program.display()));
    let text = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success(),
        "{}\n{text}\n{errors}",
        output.status
    );
    serde_json::from_str(&text).expect("the proof is JSON")
}

/// What an example has proved, in numbers.
struct Proof(serde_json::Value);

impl Proof {
    /// Runs the example with these arguments.
    fn of(name: &str, arguments: &[&str]) -> Self {
        Self(proof_of(name, arguments))
    }

    fn number(&self, name: &str) -> u64 {
        self.0[name]
            .as_u64()
            .unwrap_or_else(|| panic!("no {name} in {}", self.0))
    }
}

fn payments(example: &str, messages: u64, arguments: &[&str]) {
    let proof = Proof::of(
        example,
        &[&["--messages", &messages.to_string()], arguments].concat(),
    );
    let number = |name| proof.number(name);
    assert_eq!(number("messages"), messages);
    assert_eq!(number("lost"), 0);
    assert_eq!(
        number("asked_for_twice"),
        number("asked_for_twice_explained_by_the_kill")
    );
    assert_eq!(
        number("charges_asked_for"),
        number("distinct_payments") + number("asked_for_twice")
    );
    // The bank honours the idempotency key.
    assert_eq!(
        (number("charged_twice"), number("charges")),
        (0, number("distinct_payments"))
    );
    assert_eq!(number("replay_charges_asked_for"), 0);
    assert!(
        number("recoveries") > 0,
        "the kill hit no worker in the middle of a handler: {}",
        proof.0
    );
}

/// With the Python worker, which charges by itself.
fn payments_avro(arguments: &[&str]) {
    let proof = Proof::of(
        "payments_avro",
        &[&["--messages", "800"], arguments].concat(),
    );
    let number = |name| proof.number(name);
    assert_eq!(
        (number("messages"), number("lost"), number("charged_twice")),
        (800, 0, 0)
    );
    assert_eq!(number("charges"), number("distinct_payments"));
    assert_eq!(
        number("asked_for_twice"),
        number("asked_for_twice_explained_by_the_kill")
    );
    assert_eq!(
        (number("replay_charges_asked_for"), number("wrong_answers")),
        (0, 0)
    );
    assert!(
        number("recoveries") > 0,
        "the kill hit no worker in the middle of a handler: {}",
        proof.0
    );
    assert_eq!(number("python_charges"), number("distinct_payments"));
    assert_eq!(
        (number("python_lost"), number("python_charged_twice")),
        (0, 0)
    );
    assert_eq!(number("python_replay_charges"), 0);
}

fn payments_postgres(arguments: &[&str]) {
    let proof = Proof::of(
        "payments_postgres",
        &[&["--messages", "1500"], arguments].concat(),
    );
    let number = |name| proof.number(name);
    assert_eq!(number("messages"), 1_500);
    assert_eq!((number("lost"), number("charged_twice")), (0, 0));
    assert_eq!(number("charges"), number("distinct_payments"));
    assert_eq!((number("replay_charges"), number("wrong_answers")), (0, 0));
    assert_eq!(
        number("taken_back"),
        1,
        "the kill took no charge back: {}",
        proof.0
    );
    assert!(
        number("connections_cut") > 0,
        "no connections were cut: {}",
        proof.0
    );
}

fn outbox(arguments: &[&str]) {
    let proof = Proof::of("outbox", &[&["--orders", "800"], arguments].concat());
    let number = |name| proof.number(name);
    assert_eq!(
        (number("orders"), number("shipments"), number("notices")),
        (800, 800, 800)
    );
    assert_eq!(
        (
            number("shipped_twice"),
            number("noticed_twice"),
            number("out_of_order")
        ),
        (0, 0, 0)
    );
    assert!(
        number("published_again") > 0,
        "the relay has published nothing again: {}",
        proof.0
    );
}

fn batch(arguments: &[&str]) {
    let proof = Proof::of("batch", &[&["--orders", "2000"], arguments].concat());
    let number = |name| proof.number(name);
    assert_eq!((number("orders"), number("unbookable")), (2_000, 5));
    assert_eq!(
        (
            number("booked"),
            number("booked_twice"),
            number("dead_letters")
        ),
        (1_995, 0, 5)
    );
    assert!(number("calls") < 400, "the batches are small: {}", proof.0);
    assert!(
        number("calls_for_parts_of_failed_batches") > 0,
        "no batch failed: {}",
        proof.0
    );
}

#[test]
fn batches_prove_themselves_without_a_server() {
    batch(&[]);
}

#[test]
fn batches_in_one_transaction_prove_themselves_without_a_server() {
    batch(&["--one-transaction"]);
}

#[tokio::test]
async fn batches_in_one_transaction_prove_themselves_on_kafka() {
    let kafka = Kafka::shared().await;
    batch(&["--bootstrap", kafka.bootstrap(), "--one-transaction"]);
}

#[tokio::test]
async fn batches_prove_themselves_on_kafka_and_redis() {
    let kafka = Kafka::shared().await;
    let redis = Redis::shared().await;
    batch(&["--bootstrap", kafka.bootstrap(), "--redis", redis.url()]);
}

#[test]
fn payments_prove_themselves_without_a_server() {
    payments("payments", 1_500, &[]);
}

#[tokio::test]
async fn payments_prove_themselves_on_kafka_and_redis() {
    let kafka = Kafka::shared().await;
    let redis = Redis::shared().await;
    payments(
        "payments",
        1_500,
        &["--bootstrap", kafka.bootstrap(), "--redis", redis.url()],
    );
}

#[test]
fn payments_in_transactions_prove_themselves_on_their_server() {
    payments_postgres(&[]);
}

#[tokio::test]
async fn payments_in_transactions_prove_themselves_on_kafka() {
    let kafka = Kafka::shared().await;
    let postgres = Postgres::shared().await;
    payments_postgres(&[
        "--bootstrap",
        kafka.bootstrap(),
        "--postgres",
        postgres.url(),
    ]);
}

#[test]
fn the_outbox_proves_itself_on_a_server_of_its_own() {
    outbox(&[]);
}

#[tokio::test]
async fn the_outbox_proves_itself_on_kafka() {
    let kafka = Kafka::shared().await;
    let postgres = Postgres::shared().await;
    outbox(&[
        "--bootstrap",
        kafka.bootstrap(),
        "--postgres",
        postgres.url(),
    ]);
}

#[test]
fn payments_in_avro_prove_themselves_with_their_own_registry() {
    payments_avro(&[]);
}

#[tokio::test]
async fn payments_in_avro_prove_themselves_on_kafka_and_redis() {
    let kafka = Kafka::shared().await;
    let redis = Redis::shared().await;
    let registry = SchemaRegistry::start().await;
    let arguments = [
        "--bootstrap",
        kafka.bootstrap(),
        "--redis",
        redis.url(),
        "--registry",
        &registry.url(),
    ];
    payments_avro(&arguments);
}

#[test]
fn payments_from_a_queue_prove_themselves_on_their_own_server() {
    payments("payments_sqs", 600, &[]);
}

#[tokio::test]
async fn payments_from_a_queue_prove_themselves_on_a_queue_and_redis() {
    let sqs = Sqs::shared().await;
    let redis = Redis::shared().await;
    payments(
        "payments_sqs",
        600,
        &["--endpoint", sqs.endpoint(), "--redis", redis.url()],
    );
}

#[test]
fn payments_from_rabbitmq_prove_themselves_on_their_own_server() {
    payments("payments_amqp", 600, &[]);
}

#[tokio::test]
async fn payments_from_rabbitmq_prove_themselves_with_redis() {
    let broker = RabbitMq::shared().await.addresses();
    let redis = Redis::shared().await;
    payments(
        "payments_amqp",
        600,
        &["--broker", &broker, "--redis", redis.url()],
    );
}

#[test]
fn payments_by_http_prove_themselves() {
    let scenes = proof_of("payments_http", &[]);
    let scenes = scenes.as_array().unwrap();
    assert_eq!(scenes.len(), 5);
    for scene in scenes {
        assert_eq!(
            (&scene["holds"], &scene["charges"]),
            (&true.into(), &1.into()),
            "{scene}"
        );
    }
}
