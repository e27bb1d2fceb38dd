//! The stores of a trial: what faults of them show, and that nothing is left of it.

use std::path::Path;

use oncegate_testkit::{PostgresServer, RedisServer, until};
use rustix::process::{Pid, Signal, kill_process};
use tokio::process::Child;

use super::{LIMIT, RIGHT_KEY, Stage, worker};

/// The faults of a store, and a kill, which needs what the store has.
const FAULTS: [&str; 4] = [
    "--faults",
    "store-outage,lost-replies,store-loss,kill-after-completed",
    "--rounds",
    "8",
];

fn files(folder: &Path) -> Vec<String> {
    let names = std::fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name());
    names.map(|name| name.into_string().unwrap()).collect()
}

// invariant: right-handlers-clean, planted-bugs-found
#[tokio::test]
async fn redis_is_used_in_scopes_that_are_removed() {
    let stage = Stage::new();
    let server = RedisServer::start().await;
    server.command(&["SET", "orders:1", "of the user"]).await;
    for (bug, code) in [("right", 0), ("no_downstream_key", 1)] {
        let program = worker("worker.py", bug);
        let flags = ["--handler-exec", &program, "--store", server.url()];
        let proved = stage
            .prove(RIGHT_KEY, &[&flags[..], &FAULTS].concat())
            .await;
        let found = proved.ended(code).defects().contains(&"no-downstream-key");
        assert_eq!(found, code == 1, "seed {}: {}", stage.seed, proved.out);
        assert_eq!(server.keys().await, ["orders:1"], "what is left");
    }
}

// invariant: right-handlers-clean
#[tokio::test]
async fn postgresql_is_used_in_scopes_that_are_removed() {
    let stage = Stage::new();
    let server = PostgresServer::start().await;
    let url = server.url_as("postgres:secret");
    let program = worker("worker.py", "right");
    let flags = ["--handler-exec", &program, "--store", &url];
    let flags = [&flags[..], &FAULTS].concat();
    // It makes no tables in a database of the user.
    let missing = stage.prove(RIGHT_KEY, &flags).await;
    assert!(
        missing.code == Some(78) || missing.code == Some(69),
        "{missing:?}"
    );
    assert!(missing.err.contains("oncegate migrate"), "{}", missing.err);
    let store = oncegate::postgres::PostgresStore::connect(&url)
        .await
        .unwrap();
    store.create_schema().await.unwrap();
    stage.prove(RIGHT_KEY, &flags).await.ended(0);
    let client = server.connection().await;
    for table in ["oncegate_records", "oncegate_descriptors"] {
        let left = client
            .query_one(&format!("SELECT count(*) FROM {table}"), &[])
            .await
            .unwrap();
        assert_eq!(left.get::<_, i64>(0), 0, "{table}");
    }
}

/// Starts a trial of a right worker, with this folder for temporary files.
pub(super) fn started(stage: &Stage, flags: &[&str], folder: &Path) -> Child {
    let program = worker("worker.py", "right");
    let mut command =
        stage.command(&[&["--key", RIGHT_KEY, "--handler-exec", &program], flags].concat());
    command.env("TMPDIR", folder).spawn().unwrap()
}

/// Sends SIGINT to a trial, and waits for its end.
pub(super) async fn interrupt(mut trial: Child) {
    let pid = Pid::from_raw(trial.id().unwrap().try_into().unwrap()).unwrap();
    kill_process(pid, Signal::INT).unwrap();
    let ended = tokio::time::timeout(LIMIT, trial.wait())
        .await
        .expect("it ends")
        .unwrap();
    assert_eq!(ended.code(), Some(130));
}

#[tokio::test]
async fn an_interrupt_leaves_no_key_in_redis() {
    let stage = Stage::new();
    let server = RedisServer::start().await;
    let flags = ["--store", server.url(), "--seconds", "600"];
    let trial = started(&stage, &flags, stage.dir.path());
    until("keys of the trial", LIMIT, async || {
        match server.keys().await.len() {
            few @ ..20 => Err(format!("{few} keys")),
            _ => Ok(()),
        }
    })
    .await;
    interrupt(trial).await;
    assert!(server.keys().await.is_empty(), "{:?}", server.keys().await);
}

#[tokio::test]
async fn files_are_made_in_the_temporary_folder_and_removed() {
    let stage = Stage::new();
    let folder = tempfile::tempdir().unwrap();
    let databases = || {
        let folders = files(folder.path()).into_iter();
        let all = folders.flat_map(|name| files(&folder.path().join(name)));
        all.filter(|name| name.ends_with(".db")).count()
    };
    let trial = started(&stage, &["--seconds", "600"], folder.path());
    until("files of two rounds", LIMIT, async || match databases() {
        few @ ..2 => Err(format!("{few} files")),
        _ => Ok(()),
    })
    .await;
    interrupt(trial).await;
    assert!(
        files(folder.path()).is_empty(),
        "{:?}",
        files(folder.path())
    );
    let program = worker("worker.py", "right");
    let mut command = stage.command(&[
        "--key",
        RIGHT_KEY,
        "--handler-exec",
        &program,
        "--faults",
        "redelivery",
        "--rounds",
        "2",
    ]);
    command.env("TMPDIR", folder.path());
    stage.ended(command).await.ended(0);
    assert!(
        files(folder.path()).is_empty(),
        "{:?}",
        files(folder.path())
    );
}

#[tokio::test]
async fn mistakes_in_the_store_are_named() {
    let stage = Stage::new();
    let program = worker("worker.py", "right");
    for (url, code, says) in [
        ("sqlite:orders.db", 2, "SQLite files of its own"),
        ("mysql://db", 78, "redis://host:port"),
        ("redis://127.0.0.1:1", 69, ""),
    ] {
        let proved = stage
            .prove(RIGHT_KEY, &["--handler-exec", &program, "--store", url])
            .await;
        assert!(
            proved.ended(code).err.contains(says),
            "{url}: {}",
            proved.err
        );
    }
}
