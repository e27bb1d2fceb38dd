//! The command as its users see it: arguments in; output, errors and exit codes out.

#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "a test that cannot go on has failed"
)]

mod accept_dead_letters;
mod accept_loss;
mod audit;
mod check;
mod complete;
mod configured;
mod dead_letters;
mod doctor;
mod dynamodb;
mod environment;
mod estimate;
mod formats;
mod generate;
mod init;
mod inspect;
mod key;
#[path = "../libraries/mod.rs"]
mod libraries;
mod migrate;
mod packages;
mod replay;
mod replay_queue;
mod reset;
mod shop;
mod status;
mod sweep;
mod topics;
mod worker_test;

use std::io::{BufRead, BufReader};
use std::process::Stdio;
use std::time::Duration;

use oncegate_testkit::{Process, process};
use tokio::io::AsyncWriteExt;
use tokio::process::Command;

/// No command here takes this long; one that does has failed.
const LIMIT: Duration = Duration::from_secs(240);

/// What a command gave.
#[derive(Debug)]
struct Answer {
    code: Option<i32>,
    out: String,
    err: String,
}

impl Answer {
    /// The document that `--json` printed.
    fn json(&self) -> serde_json::Value {
        serde_json::from_str(&self.out).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    fn ended(&self, code: i32) -> &Self {
        assert_eq!(self.code, Some(code), "\n{}\n{}", self.out, self.err);
        self
    }

    /// The line of the answer that begins so, with single blanks between its words.
    fn line(&self, name: &str) -> String {
        let line = self.out.lines().find(|line| line.starts_with(name));
        let line = line
            .unwrap_or_else(|| panic!("no line begins with {name:?}:\n{}\n{}", self.out, self.err));
        line.split_whitespace().collect::<Vec<_>>().join(" ")
    }

    fn says(&self, words: &str) -> &Self {
        assert!(
            self.err.contains(words),
            "{words:?} is missing in:\n{}",
            self.err
        );
        self
    }
}

/// A command of `oncegate` with nothing from the environment that the tests run in.
fn command(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_oncegate"));
    command.args(arguments).kill_on_drop(true);
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("ONCEGATE_")) {
        command.env_remove(name);
    }
    command
}

async fn oncegate(arguments: &[&str], input: &[u8]) -> Answer {
    oncegate_with(arguments, &[], input).await
}

/// The same with these environment variables.
async fn oncegate_with(arguments: &[&str], environment: &[(&str, &str)], input: &[u8]) -> Answer {
    let mut command = command(arguments);
    command.envs(environment.iter().copied());
    ended(command, input).await
}

/// Runs the command with this input.
async fn ended(mut command: Command, input: &[u8]) -> Answer {
    command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut child = command.spawn().expect("the command starts");
    let mut stdin = child.stdin.take().expect("standard input is a pipe");
    let feed = async move {
        // A command that needs no input may have ended already.
        drop(stdin.write_all(input).await);
        drop(stdin);
    };
    let ended = async { tokio::join!(feed, child.wait_with_output()).1 };
    let output = tokio::time::timeout(LIMIT, ended).await;
    let output = output
        .expect("no command takes this long")
        .expect("it ends");
    let text = |bytes| String::from_utf8(bytes).expect("the output is UTF-8");
    Answer {
        code: output.status.code(),
        out: text(output.stdout),
        err: text(output.stderr),
    }
}

#[tokio::test]
async fn an_interrupt_ends_a_command_that_waits() {
    for signal in ["INT", "TERM"] {
        is_ended_by(signal).await;
    }
}

async fn is_ended_by(signal: &str) {
    // It waits for a payload that never comes.
    let mut command = process::bound_to_parent(env!("CARGO_BIN_EXE_oncegate"), "KILL");
    command
        .args(["key", "--key", "id"])
        .env("ONCEGATE_LOG", "debug");
    command
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped());
    let mut process = Process::spawn("oncegate key", command);
    let err = process
        .child()
        .stderr
        .take()
        .expect("standard error is a pipe");
    let mut lines = BufReader::new(err).lines();
    assert!(
        lines.any(|line| line.expect("text").contains("started")),
        "it never started"
    );
    process.signal(signal);
    assert_eq!(
        process.end_within(LIMIT).await.code(),
        Some(130),
        "{signal}"
    );
    assert!(
        lines.any(|line| line.expect("text").contains("interrupted")),
        "it does not report why it ended"
    );
}

#[tokio::test]
async fn a_reader_that_has_gone_away_is_no_error() {
    let mut command = command(&["key", "--key", "id"]);
    command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null());
    let mut child = command.spawn().expect("the command starts");
    drop(child.stdout.take());
    let mut stdin = child.stdin.take().expect("standard input is a pipe");
    stdin.write_all(br#"{"id":1}"#).await.expect("it reads");
    drop(stdin);
    let ended = tokio::time::timeout(LIMIT, child.wait())
        .await
        .expect("it ends in time");
    assert_eq!(ended.expect("it ends").code(), Some(0));
}
