//! A new group before topics with a history: on a terminal the command asks before it begins.

use std::io::Write as _;
use std::process::{Command, Stdio};

use oncegate_testkit::unique;

use super::Stage;

/// Starts a consumer of a new group on a terminal, and answers its question. Returns the exit code
/// and what was on the terminal.
fn answered(stage: &Stage, answer: &str) -> (Option<i32>, String) {
    let run = stage.command(&unique("run"), &["--handler-exec", "true"]);
    let words = std::iter::once(run.get_program()).chain(run.get_args());
    let quoted: Vec<_> = words
        .map(|word| format!("'{}'", word.to_str().unwrap()))
        .collect();
    // It is the terminal of the command, and ends with its exit code.
    let mut terminal = Command::new("script");
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("ONCEGATE_")) {
        terminal.env_remove(name);
    }
    terminal
        .args([
            "--quiet",
            "--return",
            "--command",
            &quoted.join(" "),
            "/dev/null",
        ])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped());
    let mut terminal = terminal.spawn().expect("Debian's bsdutils has it");
    let mut keyboard = terminal.stdin.take().unwrap();
    keyboard.write_all(answer.as_bytes()).unwrap();
    let ended = terminal.wait_with_output().unwrap();
    drop(keyboard);
    let shown = String::from_utf8_lossy(&ended.stdout).into_owned();
    (ended.status.code(), shown)
}

// invariant: withheld-unseen
#[tokio::test(flavor = "multi_thread")]
async fn on_a_terminal_a_new_group_asks_before_the_history_runs() {
    let stage = Stage::with_orders(3).await;
    let (code, shown) = answered(&stage, "n\n");
    assert_eq!(code, Some(1), "{shown}");
    let question = format!(
        "has committed nothing in {}: it begins with the first of 3 messages",
        stage.topic
    );
    assert!(
        shown.contains(&question) && shown.contains("Begin? [y/N]"),
        "{shown}"
    );
    assert!(shown.contains("nothing was consumed"), "{shown}");
}
