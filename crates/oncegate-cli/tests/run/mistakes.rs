//! Mistakes of beginners with workers on standard streams: the log reports what is wrong, and what
//! to write instead.

use super::Stage;

/// Returns what is logged about a worker that writes this when it is ready and has a message.
async fn is_told(wrong: &str, words: &[&str]) {
    let stage = Stage::with_orders(1).await;
    let script = format!(
        r#"
import json, os, sys
def say(line): print(line, flush=True)
say(json.dumps({{"type": "ready", "v": 1}}))
for line in sys.stdin:
    message = json.loads(line)
    id = message.get("id")
    if not os.path.exists(sys.argv[1]):
        open(sys.argv[1], "w").close()
        {wrong}
    say(json.dumps({{"id": id, "outcome": "complete"}}))
"#
    );
    let command = stage.python(&script);
    stage
        .consume(&["--handler-exec", &command, "--lease", "1s"])
        .await;
    for words in words {
        assert!(
            stage.log().contains(words),
            "{wrong}: {words} is not in\n{}",
            stage.log()
        );
    }
}

#[tokio::test]
async fn an_unknown_id_is_told() {
    let wrong = r#"say(json.dumps({"id": "no such", "outcome": "complete"}))"#;
    is_told(
        wrong,
        &[
            "line 2 of its standard output answers \\\"no such\\\", which it was not given",
            "`id` must be that of the message",
        ],
    )
    .await;
}

#[tokio::test]
async fn a_missing_id_is_told() {
    let wrong = r#"say(json.dumps({"outcome": "complete"}))"#;
    is_told(
        wrong,
        &[
            "line 2 of its standard output has no `id`",
            "it is that of the message",
        ],
    )
    .await;
}

#[tokio::test]
async fn a_missing_outcome_is_told() {
    let wrong = r#"say(json.dumps({"id": id}))"#;
    is_told(
        wrong,
        &[
            "line 2 of its standard output has no `outcome`",
            "dead-letter",
        ],
    )
    .await;
}

#[tokio::test]
async fn a_line_that_is_too_long_is_told() {
    let wrong = r#"say("x" * (17 * 1024 * 1024))"#;
    is_told(
        wrong,
        &["line 2 of its standard output is longer than 16777216 bytes"],
    )
    .await;
}

#[tokio::test]
async fn a_worker_that_never_says_ready_is_told_what_is_waited_for() {
    let stage = Stage::with_orders(1).await;
    // It writes the line, and does not flush.
    let script = r#"
import json, sys
print(json.dumps({"type": "ready", "v": 1}))
for line in sys.stdin: pass
"#;
    let command = stage.python(script);
    let running = stage.start(&["--handler-exec", &command]);
    stage
        .until_logged("has not reported that it is ready for 5s")
        .await;
    stage.until_logged("standard output must be flushed").await;
    running.stop().await;
}

#[tokio::test]
async fn a_worker_that_never_flushes_is_told_what_is_waited_for() {
    let stage = Stage::with_orders(1).await;
    let script = r#"
import json, sys
print(json.dumps({"type": "ready", "v": 1}), flush=True)
for line in sys.stdin:
    message = json.loads(line)
    print(json.dumps({"id": message["id"], "outcome": "complete"}))
"#;
    let command = stage.python(script);
    // The message is still with the worker at the stop.
    let deadline = format!("consumer.{}.stop_deadline=1s", stage.scope);
    let running = stage.start(&["--handler-exec", &command, "--set", &deadline]);
    stage
        .until_logged("has not answered its first message for 5s")
        .await;
    running.stop().await;
}
