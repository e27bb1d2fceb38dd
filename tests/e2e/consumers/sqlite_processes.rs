//! Several processes on one SQLite file, undisturbed and killed again and again.
//!
//! The workers are this very program: a parent starts it with the name of the one test that does
//! the work of a child, and with [`FOLDER`] set. Without it, that test has nothing to do.

use std::collections::{BTreeMap, BTreeSet};
use std::env;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::Stdio;
use std::sync::mpsc;
use std::time::Duration;

use bytes::Bytes;
use oncegate::sqlite::SqliteStore;
use oncegate_core::record::{State, Token};
use oncegate_core::rules::{Grant, Operation, Reply, Verdict};
use oncegate_core::store::{Command, Store, StoreError};
use oncegate_core::testing::key;
use oncegate_testkit::process::bound_to_parent;
use oncegate_testkit::{Ledger, Process};
use tempfile::TempDir;

/// Names the folder that the processes share; set for children alone.
const FOLDER: &str = "ONCEGATE_TEST_SQLITE_FOLDER";

/// The lease of a child's claims, in milliseconds.
const LEASE_MS: &str = "ONCEGATE_TEST_SQLITE_LEASE_MS";

const KEYS: u32 = 400;
const PROCESSES: usize = 4;
const KILLS: usize = 20;

/// How many messages a child works on at once.
const CONCURRENCY: u32 = 16;

/// How long a child waits at most before it asks for a busy key again.
const BUSY_PAUSE: Duration = Duration::from_millis(20);

const RETENTION: Duration = Duration::from_secs(86_400);
const LIMIT: Duration = Duration::from_secs(240);

/// What a child writes down: effects, and completions that the store has answered.
struct Witnesses {
    effects: Ledger,
    answered: Ledger,
}

impl Witnesses {
    fn open(folder: &Path) -> Self {
        Self {
            effects: Ledger::open(folder.join("effects")),
            answered: Ledger::open(folder.join("answered")),
        }
    }
}

async fn open(folder: &Path) -> SqliteStore {
    SqliteStore::open(folder.join("records.db"))
        .await
        .expect("the file can be opened")
}

async fn apply(store: &SqliteStore, name: &str, operation: Operation) -> Result<Reply, StoreError> {
    let commands = vec![Command {
        key: key(name),
        operation,
    }];
    store.execute(commands).await.pop().expect("one answer")
}

fn started(name: &str, folder: &Path, lease: Duration) -> Process {
    let program = env::current_exe().expect("a program has a path");
    let mut command = bound_to_parent(program, "KILL");
    command.args([
        "--exact",
        "sqlite_processes::a_child_works_on_all_keys",
        "--nocapture",
    ]);
    command
        .env(FOLDER, folder)
        .env(LEASE_MS, lease.as_millis().to_string())
        .stdout(Stdio::piped());
    Process::spawn(name, command)
}

/// The work of a child: every key until it is completed.
#[tokio::test(flavor = "multi_thread")]
async fn a_child_works_on_all_keys() {
    let Some(folder) = env::var_os(FOLDER) else {
        return;
    };
    let lease_ms = env::var(LEASE_MS)
        .expect("the parent sets the lease")
        .parse()
        .expect("a number");
    let store = open(Path::new(&folder)).await;
    let mut keys: Vec<u32> = (0..KEYS).collect();
    fastrand::shuffle(&mut keys);
    let tasks = keys.chunks((KEYS / CONCURRENCY) as usize).map(|keys| {
        let store = store.clone();
        let keys = keys.to_vec();
        let witnesses = Witnesses::open(Path::new(&folder));
        tokio::spawn(async move {
            for number in keys {
                work(
                    &store,
                    &witnesses,
                    &format!("{number}"),
                    Duration::from_millis(lease_ms),
                )
                .await;
            }
        })
    });
    for task in tasks.collect::<Vec<_>>() {
        task.await.expect("a task does not panic");
    }
}

/// Asks for one key until it is completed, and does the effect whenever it is granted.
async fn work(store: &SqliteStore, witnesses: &Witnesses, name: &str, lease: Duration) {
    loop {
        let token = Token::from_bits(fastrand::u128(..));
        let claim = Operation::Claim {
            token,
            lease,
            fingerprint: None,
            fenced: true,
            longest_lease: Duration::MAX,
        };
        let verdict = match apply(store, name, claim)
            .await
            .expect("a local file answers")
        {
            Reply::Verdict { verdict, .. } => verdict,
            other => panic!("a claim was answered with {other:?}"),
        };
        match verdict {
            Verdict::Granted(Grant { attempt, .. }) => {
                witnesses.effects.append(&format!("{name} {attempt}"));
                // The parent counts these lines.
                println!("\neffect");
                let result = format!("{attempt} {}", std::process::id());
                let complete = Operation::Complete {
                    token,
                    fingerprint: None,
                    result: Bytes::from(result.clone()),
                    retention: RETENTION,
                };
                match apply(store, name, complete)
                    .await
                    .expect("a local file answers")
                {
                    Reply::Applied { recreated: false } => {
                        return witnesses.answered.append(&format!("{name} {result}"));
                    }
                    Reply::NotOwner => {}
                    other => panic!("a completion was answered with {other:?}"),
                }
            }
            // The owner may be done long before its lease is over.
            Verdict::Busy { retry_in } => tokio::time::sleep(retry_in.min(BUSY_PAUSE)).await,
            Verdict::Completed { .. } => return,
            other => panic!("a claim was answered with {other:?}"),
        }
    }
}

/// The results that the file holds, by key.
async fn results(folder: &Path) -> BTreeMap<u32, String> {
    let keys = (0..KEYS).map(|number| key(&format!("{number}"))).collect();
    let snapshot = open(folder).await.read(keys).await;
    let results = snapshot.into_iter().map(|snapshot| {
        let record = snapshot
            .expect("a local file answers")
            .expect("no key is forgotten")
            .record;
        let State::Completed { result, .. } = record.state else {
            panic!("{:?}", record.state)
        };
        String::from_utf8(result.to_vec()).expect("a child writes text")
    });
    (0..).zip(results).collect()
}

/// What stands in a ledger: the key, and the rest of the line.
fn lines(ledger: &Ledger) -> Vec<(u32, String)> {
    let parse = |line: String| {
        let (name, rest) = line.split_once(' ')?;
        Some((name.parse().ok()?, rest.to_owned()))
    };
    ledger
        .read()
        .into_iter()
        .map(|entry| parse(entry.effect).expect("a child wrote it"))
        .collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn processes_on_one_file_share_the_work_and_repeat_none() {
    let folder = TempDir::new().expect("a folder");
    let lease = Duration::from_secs(600);
    let start = |number| started(&format!("worker {number}"), folder.path(), lease);
    let mut workers: Vec<Process> = (0..PROCESSES).map(start).collect();
    for worker in &mut workers {
        assert!(worker.end_within(LIMIT).await.success());
    }
    let witnesses = Witnesses::open(folder.path());
    let effects = lines(&witnesses.effects);
    assert_eq!(effects.len(), KEYS as usize, "one effect for each key");
    let keys: BTreeSet<u32> = effects.iter().map(|(key, _)| *key).collect();
    assert_eq!(keys.len(), KEYS as usize);
    let answered: BTreeMap<u32, String> = lines(&witnesses.answered).into_iter().collect();
    assert_eq!(answered, results(folder.path()).await);
    let pids: BTreeSet<u32> = witnesses
        .effects
        .read()
        .iter()
        .map(|effect| effect.pid)
        .collect();
    assert!(
        pids.len() > 1,
        "all the work was done by one process: nothing was tested"
    );
}

// invariant: killed-process
#[tokio::test(flavor = "multi_thread")]
async fn nothing_that_was_answered_is_lost_by_kill_9() {
    let folder = TempDir::new().expect("a folder");
    let witnesses = Witnesses::open(folder.path());
    // Each worker that is killed leaves claims behind, and the next one has to take them over.
    let lease = Duration::from_millis(300);
    for number in 0..KILLS {
        let mut workers: Vec<Process> = (0..2)
            .map(|turn| started(&format!("worker {number}-{turn}"), folder.path(), lease))
            .collect();
        let victim = workers.first_mut().expect("two were started");
        await_effects(victim, 1 + fastrand::usize(..12)).await;
        victim.kill();
        // The other one is killed too, wherever it stands: recovery starts while no process has the
        // file open.
        drop(workers);
    }
    let mut last = started("the last worker", folder.path(), Duration::from_secs(600));
    assert!(last.end_within(LIMIT).await.success());

    let results = results(folder.path()).await;
    for (key, result) in lines(&witnesses.answered) {
        assert_eq!(
            results.get(&key),
            Some(&result),
            "the completion of {key} was answered"
        );
    }
    // A grant that was answered is in the file: no attempt of a key is ever granted twice.
    let effects = lines(&witnesses.effects);
    let attempts: BTreeSet<&(u32, String)> = effects.iter().collect();
    assert_eq!(
        attempts.len(),
        effects.len(),
        "two grants had the same number"
    );
    assert!(
        effects.iter().any(|(_, attempt)| attempt != "1"),
        "no kill left a claim behind"
    );
    let repeated = effects.len() - KEYS as usize;
    assert!(
        repeated <= 2 * KILLS * CONCURRENCY as usize,
        "{repeated} effects were repeated"
    );
}

/// Waits until a worker has reported so many effects, or has ended.
async fn await_effects(worker: &mut Process, count: usize) {
    let output = worker.child().stdout.take().expect("its output is a pipe");
    let (told, is_told) = mpsc::channel::<()>();
    std::thread::spawn(move || {
        for line in BufReader::new(output).lines().map_while(Result::ok) {
            if line == "effect" && told.send(()).is_err() {
                // The receiver is gone, but the worker must be able to go on writing.
                continue;
            }
        }
    });
    let wait = move || (0..count).try_for_each(|_| is_told.recv_timeout(LIMIT));
    // A worker that found nothing left to do reports no effect.
    let _ = tokio::task::spawn_blocking(wait)
        .await
        .expect("waiting does not panic");
}
