//! `oncegate run` with workers in other languages, on a real broker and a real store.

#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "a test that cannot go on has failed"
)]

mod batches;
mod clusters;
mod dead_letter_limit;
mod examples;
mod gateways;
mod history;
mod hung;
mod journal;
mod kills;
mod later;
#[path = "../libraries/mod.rs"]
mod libraries;
mod library;
mod logs;
mod misbehaving;
mod mistakes;
mod operate;
mod orphans;
mod outage;
mod outbox;
mod processes;
mod protocol;
mod queue;
mod rabbitmq;
mod raw;
mod repair;
mod request;
mod retries;
mod signals;
mod start;
mod stdin;
mod stop;
mod tls;
mod unknown;

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use oncegate_testkit::{Kafka, Process, Record, Redis, process, unique, until};
use rdkafka::Message as _;
use rdkafka::message::Headers as _;
use tempfile::TempDir;

/// The longest wait for anything.
const LIMIT: Duration = Duration::from_secs(240);

/// A topic with its dead letters, a scope, and a folder.
struct Stage {
    kafka: Kafka,
    redis: Redis,
    topic: String,
    dead: String,
    scope: String,
    dir: TempDir,
}

/// A process of `oncegate run`.
struct Running {
    group: String,
    process: Process,
}

impl Stage {
    async fn with(payloads: impl IntoIterator<Item = String>) -> Self {
        let kafka = Kafka::shared().await;
        let redis = Redis::shared().await;
        let topic = kafka.new_topic("run", 2).await;
        let dead = kafka.new_topic("run-dead", 1).await;
        kafka
            .produce(
                &topic,
                payloads
                    .into_iter()
                    .map(Record::new)
                    .collect::<Vec<Record>>(),
            )
            .await;
        Self {
            kafka,
            redis,
            topic,
            dead,
            scope: unique("run"),
            dir: tempfile::tempdir().unwrap(),
        }
    }

    /// With so many orders.
    async fn with_orders(count: usize) -> Self {
        Self::with((0..count).map(|n| format!(r#"{{"order_id":"A-{n}","amount":10}}"#))).await
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// A new group with these flags.
    fn start(&self, flags: &[&str]) -> Running {
        self.start_in(&unique("run"), flags)
    }

    fn start_in(&self, group: &str, flags: &[&str]) -> Running {
        self.spawn(group, self.command(group, flags))
    }

    fn spawn(&self, group: &str, command: Command) -> Running {
        let process = Process::spawn_logged("oncegate run", command, &self.path("oncegate.log"));
        Running {
            group: group.to_owned(),
            process,
        }
    }

    fn command(&self, group: &str, flags: &[&str]) -> Command {
        let mut command = process::bound_to_parent(program(), "KILL");
        for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("ONCEGATE_")) {
            command.env_remove(name);
        }
        // Workers in Python buffer their output, as they do elsewhere.
        command.env_remove("PYTHONUNBUFFERED");
        let Self {
            kafka,
            redis,
            topic,
            dead,
            scope,
            ..
        } = self;
        command.args([
            "run",
            "--brokers",
            kafka.bootstrap(),
            "--topic",
            topic,
            "--group",
            group,
        ]);
        command.args(["--scope", scope, "--dead-letters", dead]);
        // Tests wait for commits.
        command.args([
            "--set",
            &format!("consumer.{scope}.source.kafka.commit_interval=100ms"),
        ]);
        if !flags.contains(&"--store") {
            command.args(["--store", redis.url()]);
        }
        if !flags.contains(&"--key") {
            command.args(["--key", "order_id"]);
        }
        if !flags.contains(&"--listen") {
            command.args(["--listen", "off"]);
        }
        command.args(flags);
        command
    }

    /// A worker in Python that gets the path of the ledger: a command for `--handler-exec`.
    fn python(&self, script: &str) -> String {
        let path = self.path("worker.py");
        std::fs::write(&path, script).unwrap();
        format!(
            "python3 '{}' '{}'",
            path.display(),
            self.path("ledger").display()
        )
    }

    /// What a worker has noted in the ledger, one JSON value a line.
    fn noted<T: serde::de::DeserializeOwned>(&self) -> Vec<T> {
        let ledger = std::fs::read_to_string(self.path("ledger")).unwrap_or_default();
        ledger
            .lines()
            .map(|line| serde_json::from_str(line).unwrap())
            .collect()
    }

    async fn until_logged(&self, words: &str) {
        until(words, LIMIT, async || {
            if self.log().contains(words) {
                Ok(())
            } else {
                Err(self.log())
            }
        })
        .await;
    }

    /// Waits until the group has committed the whole topic.
    async fn until_consumed(&self, group: &str) {
        let ends = self.kafka.end_offsets(&self.topic).await;
        let wanted: BTreeMap<i32, i64> = ends.into_iter().filter(|(_, end)| *end > 0).collect();
        until("the whole topic to be committed", LIMIT, async || {
            let committed = self.kafka.committed_offsets(group, &self.topic).await;
            if committed == wanted {
                Ok(())
            } else {
                Err(format!("{committed:?} of {wanted:?}\n{}", self.log()))
            }
        })
        .await;
    }

    /// Runs until the topic is consumed, and stops gracefully.
    async fn consume(&self, flags: &[&str]) {
        let running = self.start(flags);
        self.until_consumed(&running.group).await;
        running.stop().await;
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.path("oncegate.log")).unwrap_or_default()
    }

    /// What the worker has done, and how often.
    fn effects(&self) -> BTreeMap<String, usize> {
        let mut effects = BTreeMap::new();
        let ledger = std::fs::read_to_string(self.path("ledger")).unwrap_or_default();
        ledger
            .lines()
            .for_each(|line| *effects.entry(line.to_owned()).or_default() += 1);
        effects
    }

    /// The dead letters: payloads and reasons.
    async fn letters(&self) -> Vec<(String, String)> {
        self.letters_with("oncegate-reason").await
    }

    /// The dead letters: payloads, and the header of this name.
    async fn letters_with(&self, name: &str) -> Vec<(String, String)> {
        let letters = self.kafka.read_all(&self.dead).await;
        let of = |letter: &rdkafka::message::OwnedMessage| {
            let headers = letter.headers().expect("a letter has headers");
            let found = headers
                .iter()
                .find(|header| header.key == name)
                .expect("it has that header");
            let text = |bytes: Option<&[u8]>| {
                String::from_utf8_lossy(bytes.unwrap_or_default()).into_owned()
            };
            (text(letter.payload()), text(found.value))
        };
        letters.iter().map(of).collect()
    }
}

impl Running {
    /// SIGTERM, and the exit code is 0.
    async fn stop(mut self) {
        self.process.signal("TERM");
        assert_eq!(self.process.end_within(LIMIT).await.code(), Some(0));
    }
}

/// The program to test: the one of this build, or `ONCEGATE_PROGRAM`, for one that is installed
/// elsewhere.
fn program() -> OsString {
    std::env::var_os("ONCEGATE_PROGRAM").unwrap_or_else(|| env!("CARGO_BIN_EXE_oncegate").into())
}

/// A worker of the examples.
fn example(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../examples/workers")
        .join(name);
    path.canonicalize().unwrap().to_str().unwrap().to_owned()
}
