//! `oncegate prove`: workers in Python and Node with planted bugs, each of which it must find, and
//! right ones.
//!
//! `ONCEGATE_SEED=n` repeats a run, `ONCEGATE_PROVE_RUNS=1000` tries the right workers so often,
//! and `ONCEGATE_PROVE_DEFAULTS=FILE` tries the planted bugs at default settings.

#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "a test that cannot go on has failed"
)]

mod brokers;
mod catalogue;
mod configured;
mod others;
mod planted;
mod stores;
mod witness;

use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use serde_json::Value;
use tempfile::TempDir;
use tokio::process::Command;

/// The longest wait for a trial: each has a few rounds of seconds, on a machine that may be ten
/// times slower.
const LIMIT: Duration = Duration::from_secs(600);

/// Five orders, of which two differ in their currency alone.
const SAMPLES: &str = r#"{"order_id":"o-1001","amount":10.5,"currency":"EUR","sent_at":"2026-11-23T10:00:01Z"}
{"order_id":"o-1002","amount":20,"currency":"EUR","sent_at":"2026-11-23T10:00:02Z"}
{"order_id":"o-1003","amount":30.25,"currency":"EUR","sent_at":"2026-11-23T10:00:03Z"}

{"order_id":"o-1004","amount":40,"currency":"EUR","sent_at":"2026-11-23T10:00:04Z"}
{"order_id":"o-1004","amount":40,"currency":"USD","sent_at":"2026-11-23T10:00:05Z"}
"#;

const RIGHT_KEY: &str = "order_id,currency";

/// A folder with samples, and the seed of its trials.
struct Stage {
    dir: TempDir,
    seed: u64,
}

/// What a trial gave.
#[derive(Debug)]
struct Proved {
    code: Option<i32>,
    out: String,
    err: String,
}

impl Stage {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("orders.jsonl"), SAMPLES).unwrap();
        let seed = std::env::var("ONCEGATE_SEED")
            .map_or_else(|_| random_seed(), |seed| seed.parse().unwrap());
        println!("seed {seed}");
        Self { dir, seed }
    }

    /// Runs `oncegate prove` with the samples of the folder and this key.
    async fn prove(&self, key: &str, flags: &[&str]) -> Proved {
        self.ended(self.command(&[&["--key", key], flags].concat()))
            .await
    }

    /// `oncegate prove` with the samples of the folder.
    fn command(&self, flags: &[&str]) -> Command {
        self.command_without_lease(&[&["--lease", "1s"], flags].concat())
    }

    /// The same at default settings, with this key.
    fn default_command(&self, key: &str, flags: &[&str]) -> Command {
        self.command_without_lease(&[&["--key", key], flags].concat())
    }

    fn command_without_lease(&self, flags: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_oncegate"));
        for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("ONCEGATE_")) {
            command.env_remove(name);
        }
        command.args([
            "prove",
            "--samples",
            "orders.jsonl",
            "--volatile",
            "sent_at",
        ]);
        command.args(["--seed", &self.seed.to_string()]).args(flags);
        command.current_dir(self.dir.path()).kill_on_drop(true);
        command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command
    }

    async fn ended(&self, mut command: Command) -> Proved {
        let output = tokio::time::timeout(LIMIT, command.output()).await;
        let output = output
            .unwrap_or_else(|_| panic!("seed {}: it takes too long", self.seed))
            .unwrap();
        let text = |bytes| String::from_utf8(bytes).unwrap();
        Proved {
            code: output.status.code(),
            out: text(output.stdout),
            err: text(output.stderr),
        }
    }

    fn read(&self, path: &str) -> String {
        std::fs::read_to_string(self.dir.path().join(path)).unwrap()
    }
}

impl Proved {
    fn ended(&self, code: i32) -> &Self {
        assert_eq!(self.code, Some(code), "\n{}\n{}", self.out, self.err);
        self
    }

    /// The kinds of defects, from the lines of the answer.
    fn defects(&self) -> Vec<&str> {
        self.out
            .lines()
            .filter_map(|line| Some(line.split_once(':')?.0))
            .collect()
    }

    fn json(&self) -> Value {
        serde_json::from_str(&self.out).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }
}

/// A command that runs one of the workers of this folder.
fn worker(script: &str, bug: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/prove/workers")
        .join(script);
    let program = if script.ends_with(".py") {
        "python3"
    } else {
        "node"
    };
    format!("{program} '{}' {bug}", path.display())
}

/// The flags for workers that take batches.
fn batch_flags(script: &str) -> &'static [&'static str] {
    if script == "batches.py" {
        &["--batch-messages", "4"]
    } else {
        &[]
    }
}

/// A seed that differs between runs.
fn random_seed() -> u64 {
    let now = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .unwrap();
    u64::from(now.subsec_nanos())
}
