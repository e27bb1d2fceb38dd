//! Faults that were not tried, and mistakes in the arguments.

use serde_json::json;

use super::super::{RIGHT_KEY, Stage, worker};
use super::{failures_of, fits_the_schema, skipped_of};

#[tokio::test]
async fn faults_that_were_not_tried_are_named_and_no_success() {
    let stage = Stage::new();
    let program = worker("worker.py", "right");
    let flags = ["--handler-exec", &program, "--rounds", "2"];
    let faults = ["--faults", "redelivery,refused,answer-lost,no-answer"];
    let proved = stage
        .prove(RIGHT_KEY, &[&flags[..], &faults].concat())
        .await;
    assert!(
        proved
            .ended(3)
            .out
            .contains("only 2 of 4 faults were tried"),
        "{}",
        proved.out
    );
    assert!(
        proved.err.contains("2 of 4 faults were not tried: "),
        "{}",
        proved.err
    );
    let more = ["--json", "--report", "out"];
    let proved = stage
        .prove(RIGHT_KEY, &[&flags[..], &faults, &more].concat())
        .await;
    let document = proved.ended(3).json();
    fits_the_schema(&document);
    let said = (
        &document["passed"],
        &document["complete"],
        document["untried"].as_array().unwrap().len(),
    );
    assert_eq!(said, (&json!(false), &json!(false), 2), "{document:#}");
    let junit = stage.dir.path().join("out/junit.xml");
    assert_eq!(failures_of(&junit).await, [""; 0]);
    assert_eq!(json!(skipped_of(&junit).await), document["untried"]);
}

#[tokio::test]
async fn a_defect_that_needs_no_fault_comes_first() {
    let stage = Stage::new();
    let program = worker("worker.py", "random_key");
    let flags = [
        "--handler-exec",
        &program,
        "--faults",
        "kill-after-effect,producer-duplicates",
    ];
    let proved = stage
        .prove(
            "order_id,currency,sent_at",
            &[&flags[..], &["--rounds", "3"]].concat(),
        )
        .await;
    assert_eq!(
        proved.ended(1).defects(),
        ["key-too-wide"],
        "{}\n{}",
        proved.out,
        proved.err
    );
    assert!(proved.err.contains("follow from these"), "{}", proved.err);
}

#[tokio::test]
async fn mistakes_are_named() {
    let stage = Stage::new();
    let right = worker("worker.py", "right");
    let mistaken = |flags: Vec<String>| {
        let stage = &stage;
        async move {
            let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
            stage.prove(RIGHT_KEY, &flags).await
        }
    };
    let words = |flags: &[&str]| {
        flags
            .iter()
            .map(|flag| (*flag).to_owned())
            .collect::<Vec<String>>()
    };
    let silent = worker("worker.py", "silent");
    let cases = [
        (
            words(&["--handler-exec", &silent, "--rounds", "1"]),
            65,
            "no call arrived at the downstream service",
        ),
        (
            words(&["--handler-exec", &right, "--volatile", "sent"]),
            65,
            "no sample has the volatile field \"sent\"",
        ),
        (
            words(&["--handler-exec", &right, "--faults", "kill"]),
            2,
            "kill-after-effect",
        ),
        (words(&["--handler-exec", &right, "--lease", "1ms"]), 2, ""),
        (
            words(&["--handler-exec", &right, "--report", "orders.jsonl"]),
            78,
            "--report",
        ),
        (
            words(&["--handler-exec", &right, "--round", "1", "--rounds", "2"]),
            2,
            "--rounds",
        ),
    ];
    for (flags, code, says) in cases {
        let proved = mistaken(flags.clone()).await;
        assert!(
            proved.ended(code).err.contains(says),
            "{flags:?}: {}",
            proved.err
        );
    }
}
