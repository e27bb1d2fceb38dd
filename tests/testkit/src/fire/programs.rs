//! Members that are programs of `oncegate run`, and the faults that only they can have.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use oncegate_testing::promise::Occurrence;

use super::faults::Fault;
use super::settings::{StoreKind, WorkerSettings};
use super::stage::Stage;
use super::stdio::{HUNG, PROGRAM_LEASE, PlannedHang, Silence, TIME_LIMIT, crew_of, hangs_of};
use super::work::{MAX_ATTEMPTS, SESSION, TAKES_LONG};
use crate::process;

/// How many workers each member starts. Each handles one message at a time.
const WORKERS_OF_EACH: u32 = 2;
/// How long a member must get a message to be signalled with it. After that some member is
/// signalled.
const BUSY_LIMIT: Duration = Duration::from_secs(60);
const LOOK_INTERVAL: Duration = Duration::from_millis(50);

/// The command of a member that leads a process group of its own, with `worker` in its form on
/// standard streams.
pub(super) fn oncegate_run(oncegate: &Path, worker: &Path, settings: &WorkerSettings) -> Command {
    let mut command = process::bound_to_parent(oncegate, "KILL");
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("ONCEGATE_")) {
        command.env_remove(name);
    }
    let WorkerSettings {
        address,
        scope,
        brokers,
        group,
        topic,
        dead_topic,
        ..
    } = settings;
    let store = match settings.store {
        StoreKind::Redis | StoreKind::Postgres | StoreKind::DynamoDb => address.clone(),
        StoreKind::Sqlite => format!("sqlite:{address}"),
    };
    let worker = format!("'{}' stdio '{}'", worker.display(), settings.as_json());
    command.args([
        "run", "--listen", "off", "--scope", scope, "--store", &store,
    ]);
    command.args([
        "--brokers",
        brokers,
        "--group",
        group,
        "--topic",
        topic,
        "--dead-letters",
        dead_topic,
    ]);
    command.args([
        "--key",
        "order",
        "--fingerprint",
        "payload-except:n",
        "--handler-exec",
        &worker,
    ]);
    command.args(["--workers", &WORKERS_OF_EACH.to_string()]);
    command.args(["--set", &format!("max_attempts={MAX_ATTEMPTS}")]);
    for (flag, time) in [("--lease", PROGRAM_LEASE), ("--timeout", TIME_LIMIT)] {
        command.args([flag, &format!("{}ms", time.as_millis())]);
    }
    let session = format!("session.timeout.ms={}", SESSION.as_millis());
    command.args([
        "--property",
        &session,
        "--property",
        "heartbeat.interval.ms=300",
    ]);
    for setting in [
        "backoff.first=5ms",
        "backoff.most=100ms",
        "dead_letter_limit.in_a_row=1000000",
        "dead_letter_limit.share=1.1",
    ] {
        command.args(["--set", &format!("consumer.{scope}.{setting}")]);
    }
    command.process_group(0);
    command
}

impl Stage<'_> {
    /// Lets one worker hang in each way, with the next messages that are paid at once.
    pub(super) fn plan_hangs(&mut self) {
        let hangs = hangs_of(&self.settings);
        fs::create_dir_all(&hangs).expect("a folder can be made");
        for silence in [Silence::Waits, Silence::Stops, Silence::AnswersLate] {
            let planned = PlannedHang {
                silence,
                is_paid: self.rng.bool(),
            };
            let file =
                tempfile::NamedTempFile::new_in(self.folder.path()).expect("a file can be made");
            fs::write(
                &file,
                serde_json::to_vec(&planned).expect("it is plain data"),
            )
            .expect("it can be written");
            // Workers find the whole file or none.
            file.persist(hangs.join(format!("{silence:?}-{}", self.rng.u64(..))))
                .expect("it can be renamed");
        }
    }

    /// Signals the process group of a member while a worker of it has a message, and starts another
    /// member.
    pub(super) async fn signal_a_group(&mut self) {
        let Some(index) = self.some_busy_worker().await else {
            return;
        };
        let mut member = self.workers.swap_remove(index);
        let signal = if self.rng.bool() { "INT" } else { "TERM" };
        self.note(Fault::GroupSignal.name(), member.process.id());
        if member.process.try_wait().is_none() {
            member.process.signal_group(signal);
        }
        self.leaving(member);
        self.start_worker(None);
    }

    /// A member with a worker in the middle of a long message, or any member when none gets one.
    async fn some_busy_worker(&mut self) -> Option<usize> {
        let keys = self.produce_unique(TAKES_LONG).await;
        let deadline = Instant::now() + BUSY_LIMIT;
        while Instant::now() < deadline {
            let members = self.members();
            let entries = self.history.read().expect("the history can be read");
            let busy = entries.iter().rev().find_map(|entry| match &entry.what {
                Occurrence::Begun { key, .. } if keys.contains(key) => members.get(&entry.pid),
                _ => None,
            });
            let is_it = |id: u32| Some(&id) == busy;
            let index = self
                .workers
                .iter()
                .position(|one| is_it(one.process.id()) && !one.is_frozen);
            if index.is_some() {
                return index;
            }
            tokio::time::sleep(LOOK_INTERVAL).await;
        }
        self.some_worker()
    }

    /// Which member has started each worker on standard streams, by their process ids.
    pub(super) fn members(&self) -> BTreeMap<u32, u32> {
        let crew = fs::read_to_string(crew_of(&self.settings)).unwrap_or_default();
        let pair = |line: &str| {
            let (worker, member) = line.split_once(' ')?;
            Some((worker.parse().ok()?, member.parse().ok()?))
        };
        crew.lines().filter_map(pair).collect()
    }

    /// The workers that have hung and were not killed, though everything is committed.
    pub(super) fn still_hanging(&self) -> Vec<String> {
        let entries = self.history.read().expect("the history can be read");
        let hung = entries.iter().filter(|entry| {
            matches!(&entry.what, Occurrence::Ended { outcome, .. } if outcome == HUNG)
                && process::is_running(entry.pid)
        });
        hung.map(|entry| format!("worker {} hangs and was not replaced", entry.pid))
            .collect()
    }
}
