//! The worker, key, route and limits of a configuration.

use serde_json::json;

use super::{Proved, RIGHT_KEY, Stage, worker};

impl Stage {
    /// Runs `oncegate prove` with a configuration of this text.
    pub(super) async fn prove_configured(&self, configuration: &str, flags: &[&str]) -> Proved {
        std::fs::write(self.dir.path().join("oncegate.toml"), configuration).unwrap();
        self.ended(self.command(&[&["--config", "oncegate.toml"], flags].concat()))
            .await
    }
}

/// A consumer as it would run in production, with another lease, and servers that are not there.
fn billing(program: &str, more: &str) -> String {
    format!(
        r#"
        [store]
        url = "redis://127.0.0.1:1"

        [consumer.billing]
        source = {{ kafka = {{ brokers = ["127.0.0.1:1"], topics = ["orders"] }} }}
        key = {{ json = ["order_id", "currency"] }}
        handler = {{ exec = {program:?}, timeout = "20s" }}
        dead_letters = {{ kafka = "orders.dead" }}
        lease = "30s"
        max_attempts = 2
        concurrency = 2
        {more}
        "#
    )
}

#[tokio::test]
async fn a_configured_consumer_is_tried_with_its_worker_key_and_route() {
    let stage = Stage::new();
    // More refusals than `max_attempts`: those of the trial pass, so the limit is not the
    // consumer's.
    let faults = [
        "--faults",
        "refused,answer-lost,kill-after-effect",
        "--rounds",
        "6",
        "--json",
    ];
    let right = billing(&worker("worker.py", "of_topic_orders"), "");
    let clean = stage.prove_configured(&right, &faults).await;
    assert_eq!(
        clean.ended(0).json()["passed"],
        json!(true),
        "seed {}",
        stage.seed
    );

    let planted = billing(&worker("worker.py", "no_downstream_key"), "");
    let found = stage
        .prove_configured(&planted, &["--faults", "answer-lost", "--rounds", "2"])
        .await;
    assert_eq!(
        found.ended(1).defects(),
        ["no-downstream-key"],
        "seed {}: {}",
        stage.seed,
        found.out
    );
    assert!(
        found
            .err
            .contains("oncegate prove --config oncegate.toml --samples"),
        "{}",
        found.err
    );
    assert!(
        !found.err.contains("--key"),
        "it is in the configuration: {}",
        found.err
    );
}

#[tokio::test]
async fn a_consumer_with_batches_is_tried_in_batches() {
    let stage = Stage::new();
    let batches = "batch = { messages = 3, wait = \"20ms\" }";
    let faults = [
        "--faults",
        "refused,answer-lost,kill-after-effect,freeze",
        "--rounds",
        "8",
        "--json",
    ];
    let right = billing(&worker("batches.py", "right"), batches);
    let clean = stage.prove_configured(&right, &faults).await;
    assert_eq!(
        clean.ended(0).json()["passed"],
        json!(true),
        "seed {}",
        stage.seed
    );

    let planted = billing(&worker("batches.py", "one_key_for_the_batch"), batches);
    let found = stage
        .prove_configured(&planted, &["--faults", "refused", "--rounds", "8"])
        .await;
    assert!(
        found.ended(1).defects().contains(&"shared-downstream-key"),
        "{}",
        found.out
    );
    // A batch of one message has the right key, so that nothing is found.
    let alone = [
        "--faults",
        "refused",
        "--rounds",
        "2",
        "--batch-messages",
        "1",
    ];
    stage.prove_configured(&planted, &alone).await.ended(0);
}

#[tokio::test]
async fn flags_win_over_the_configuration() {
    let stage = Stage::new();
    let program = worker("worker.py", "of_topic_orders");
    let right = billing(&program, "");
    let few = ["--faults", "producer-duplicates", "--rounds", "1"];
    let key = ["--key", "order_id"];
    let narrow = stage
        .prove_configured(&right, &[&key[..], &few].concat())
        .await;
    assert!(
        narrow.ended(1).defects().contains(&"key-too-narrow"),
        "{}",
        narrow.out
    );
    let route = stage
        .prove_configured(&right, &[&["--route", "refunds"], &few[..]].concat())
        .await;
    assert!(
        route.ended(1).defects().contains(&"gave-up"),
        "the worker takes orders alone: {}",
        route.out
    );
    let other = worker("worker.py", "swallows_errors");
    let flags = [
        "--handler-exec",
        &other,
        "--faults",
        "refused",
        "--rounds",
        "1",
    ];
    let swallowed = stage.prove_configured(&right, &flags).await;
    assert_eq!(
        swallowed.ended(1).defects(),
        ["swallowed-error"],
        "{}",
        swallowed.out
    );
}

#[tokio::test]
async fn a_configuration_that_cannot_be_tried_is_named() {
    let stage = Stage::new();
    let right = billing(&worker("worker.py", "right"), "");
    let key = "key = { json = [\"order_id\", \"currency\"] }";
    let refund = right.split_once("[consumer.billing]").unwrap().1;
    let two = format!(
        "{right}\n[consumer.refunds]\n{}",
        refund.replace("orders", "refunds")
    );
    let topics = right.replace(
        "topics = [\"orders\"]",
        "topics = [\"orders\", \"refunds\"]",
    );
    let short_runs = billing("./worker", "max_run = \"500ms\"")
        .replace("\"30s\"", "\"200ms\"")
        .replace("\"20s\"", "\"200ms\"");
    let cases: [(String, &[&str], i32, &[&str]); 8] = [
        (
            right.replace(key, ""),
            &[],
            78,
            &["consumer.billing.key", "it is missing"],
        ),
        (
            right.replace(key, "key = { header = \"id\" }"),
            &[],
            78,
            &["the header \"id\"", "--key"],
        ),
        (
            right.replace(key, "key = \"message-key\""),
            &[],
            78,
            &["the broker's key", "--key"],
        ),
        (
            right.replace("lease = ", "leese = "),
            &[],
            78,
            &["leese", "did you mean `lease`"],
        ),
        (short_runs, &[], 78, &["max_run", "--lease"]),
        (two.clone(), &[], 78, &["--scope", "billing, refunds"]),
        (
            two,
            &["--scope", "shop"],
            78,
            &["--scope", "billing, refunds"],
        ),
        (topics, &[], 78, &["billing", "--route", "orders, refunds"]),
    ];
    for (configuration, flags, code, says) in cases {
        let proved = stage.prove_configured(&configuration, flags).await;
        for word in says {
            assert!(
                proved.ended(code).err.contains(word),
                "{word} in {}\n{configuration}",
                proved.err
            );
        }
    }
    // Without a configuration, the flags must say all of it.
    let bare = Stage::new();
    for (flags, missing) in [
        (["--key", RIGHT_KEY], "--handler-exec"),
        (["--handler-exec", "./worker"], "--key"),
    ] {
        let alone = bare.ended(bare.command(&flags)).await;
        assert!(alone.ended(2).err.contains(missing));
    }
}
