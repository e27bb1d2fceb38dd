//! The catalogue of planted bugs: with the fault that shows a bug, and a few rounds, each is found.

use super::{RIGHT_KEY, Stage, worker};

/// A worker, what it does wrong, the faults that show it, and the defects that may be named.
type Planted = (&'static str, &'static str, &'static str, &'static [&'static str]);

const PYTHON: &str = "worker.py";
const NODE: &str = "worker.js";

async fn finds((script, bug, faults, expected): Planted) {
    finds_with_key(RIGHT_KEY, (script, bug, faults, expected)).await;
}

async fn finds_with_key(key: &str, (script, bug, faults, expected): Planted) {
    let stage = Stage::new();
    let program = worker(script, bug);
    let proved = stage.prove(key, &["--handler-exec", &program, "--faults", faults, "--rounds", "4"]).await;
    let defects = proved.ended(1).defects();
    assert!(
        expected.iter().any(|defect| defects.contains(defect)),
        "seed {}: {script} {bug} must show one of {expected:?}\n{}\n{}",
        stage.seed,
        proved.out,
        proved.err
    );
    assert!(
        proved.err.contains(&format!("--seed {} --round", stage.seed)),
        "how to repeat it: {}",
        proved.err
    );
}

/// They take turns: each has processes of its own, and a machine has few cores.
async fn finds_each(planted: &[Planted]) {
    for one in planted {
        finds(*one).await;
    }
}

// invariant: planted-bugs-found
#[tokio::test]
async fn downstream_keys_that_are_missing_or_change_are_found_in_python() {
    finds_each(&[
        (PYTHON, "no_downstream_key", "kill-after-effect,answer-lost", &["no-downstream-key"]),
        (PYTHON, "key_with_attempt", "kill-after-effect", &["changing-downstream-key"]),
        (PYTHON, "no_downstream_key", "store-loss", &["no-downstream-key"]),
        (PYTHON, "key_with_time", "answer-lost", &["changing-downstream-key"]),
        (PYTHON, "random_key", "kill-before-completed", &["changing-downstream-key"]),
        (PYTHON, "one_key_for_all", "redelivery", &["shared-downstream-key"]),
        (PYTHON, "retries_in_place", "answer-lost", &["no-downstream-key"]),
    ])
    .await;
}

// invariant: planted-bugs-found
#[tokio::test]
async fn effects_that_are_lost_are_found_in_python() {
    finds_each(&[
        (PYTHON, "swallows_errors", "refused", &["swallowed-error"]),
        (PYTHON, "no_answer_is_success", "no-answer", &["swallowed-error"]),
        (PYTHON, "gives_up", "refused", &["gave-up"]),
        (PYTHON, "marks_before_effect", "refused", &["marked-before-effect"]),
        (PYTHON, "answers_before_effect", "kill-after-completed", &["answered-too-early"]),
        (PYTHON, "message_before", "redelivery", &["lost-effect", "changing-downstream-key"]),
        (PYTHON, "skips_older", "reordering", &["lost-effect"]),
    ])
    .await;
}

// invariant: planted-bugs-found
#[tokio::test]
async fn results_that_differ_and_workers_that_do_not_stop_are_found_in_python() {
    finds_each(&[
        (PYTHON, "random_result", "kill-before-completed", &["different-results"]),
        (PYTHON, "ignores_end_of_input", "redelivery", &["does-not-stop"]),
    ])
    .await;
}

// invariant: planted-bugs-found
#[tokio::test]
async fn planted_bugs_are_found_in_node() {
    finds_each(&[
        (NODE, "noDownstreamKey", "kill-after-effect", &["no-downstream-key"]),
        (NODE, "keyWithTime", "answer-lost", &["changing-downstream-key"]),
        (NODE, "randomKey", "kill-before-completed", &["changing-downstream-key"]),
        (NODE, "oneKeyForTwoSteps", "redelivery", &["shared-downstream-key"]),
        (NODE, "forgetsToAwait", "kill-after-completed", &["answered-too-early"]),
        (NODE, "ignoresTheStatus", "refused", &["swallowed-error"]),
        (NODE, "chargesAfterCancel", "freeze", &["no-downstream-key", "effect-after-cancel"]),
        (NODE, "returnsTheTime", "kill-before-completed", &["different-results"]),
    ])
    .await;
}

// invariant: planted-bugs-found
#[tokio::test]
async fn keys_that_are_too_narrow_or_too_wide_are_found() {
    let faults = "producer-duplicates";
    finds_with_key("order_id", (PYTHON, "right", faults, &["key-too-narrow"])).await;
    finds_with_key("order_id,currency,sent_at", (PYTHON, "right", faults, &["key-too-wide"])).await;
    finds_with_key("order_number", (NODE, "right", faults, &["no-key"])).await;
}
