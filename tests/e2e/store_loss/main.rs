//! A store that has lost its records, and processes that did not write them: each one notices, and
//! the whole scope halts until the loss is accepted.

// invariant (all tests): run-after-loss

#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "a test that cannot go on has failed"
)]

mod payments;
mod postgres;
mod unseen;

use std::path::Path;
use std::time::Duration;

use oncegate::admin;
use oncegate::core::key::Scope;
use oncegate::core::store::Store;
use oncegate::redis::RedisStore;
use oncegate::sqlite::SqliteStore;
use oncegate::{Entry, Gate, GateError, Message, OnStoreLoss, Origin};
use oncegate_testkit::{Redis, RedisCluster, RedisServer, unique, until};

use self::payments::Payments;

const LIMIT: Duration = Duration::from_secs(240);
const MESSAGES: u64 = 60;

fn payment(id: u64) -> Message {
    Message::new(
        "loss",
        Origin::Other("test".into()),
        Some(format!(r#"{{"id":{id}}}"#).into()),
    )
}

/// Asks until the claim is refused. What is granted before the loss is noticed is given back.
async fn until_refused(gate: &Gate, id: u64) -> String {
    until("the claim to be refused", LIMIT, async || {
        match gate.enter(&payment(id)).await {
            Err(GateError::Store(error)) if error.class() == "refused" => Ok(error.to_string()),
            Ok(Entry::Granted(lease)) => {
                lease
                    .release(Duration::ZERO, false, "the loss is not noticed yet")
                    .await;
                Err("granted".to_owned())
            }
            other => Err(format!("{other:?}")),
        }
    })
    .await
}

async fn flush(redis: &Redis) {
    let () = redis::cmd("FLUSHALL")
        .query_async(&mut redis.connection().await)
        .await
        .unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn an_emptied_redis_is_noticed_by_idle_and_replaying_members() {
    let server = RedisServer::start().await;
    let payments = Payments::new().await;
    let connect = async || RedisStore::connect(server.url()).await.unwrap();
    let group = unique("loss");
    payments.run_all(&group, connect().await).await;

    // One replays, and completes nothing itself. One has only joined.
    let replaying = payments.start(&unique("loss"), connect().await, OnStoreLoss::Halt);
    replaying.watched.until("acks", MESSAGES).await;
    let idle = payments.gate(connect().await, OnStoreLoss::Halt);
    idle.open().await.unwrap();
    assert_eq!(payments.runs(), MESSAGES);

    flush(&server).await;
    replaying.watched.until("store_losses", 1).await;
    replaying.is_not_ready().await;
    let refused = until_refused(&idle, 1_000_000).await;
    assert!(
        refused.contains("oncegate accept loss") && refused.contains(payments.scope.as_str()),
        "{refused}"
    );

    // The same payments again, to the consumers that ran before, and to one that starts now.
    payments.produce().await;
    replaying.is_refused().await;
    let late = payments.gate(connect().await, OnStoreLoss::Halt);
    late.open().await.unwrap();
    assert!(
        matches!(late.enter(&payment(1)).await, Err(GateError::Store(_))),
        "a halt is for the whole fleet"
    );
    replaying.stop().await;
    assert_eq!(payments.runs(), MESSAGES, "a payment ran again");

    // Accepted, all of them go on, and a process that starts later counts what runs again.
    payments.accept(&connect().await).await;
    for gate in [&idle, &late] {
        until("the gate to go on", LIMIT, async || {
            match gate.enter(&payment(2_000_000)).await {
                Ok(Entry::Granted(_) | Entry::Busy { .. }) => Ok(()),
                other => Err(format!("{other:?}")),
            }
        })
        .await;
    }
    let restarted = payments.start(&unique("loss"), connect().await, OnStoreLoss::Halt);
    restarted.watched.until("acks", 2 * MESSAGES).await;
    assert_eq!(
        restarted.watched.get("extra_runs", "store_loss"),
        MESSAGES,
        "what runs again is counted"
    );
    restarted.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_redis_that_came_back_empty_is_noticed_at_the_next_start() {
    let mut server = RedisServer::start().await;
    let payments = Payments::new().await;
    let group = unique("loss");
    payments
        .run_all(&group, RedisStore::connect(server.url()).await.unwrap())
        .await;
    server.kill();
    server.wipe();
    server.start_again().await;
    payments
        .notices_at_the_start(&group, RedisStore::connect(server.url()).await.unwrap())
        .await;

    // The same store and a restart of it with its data raise nothing.
    let store = RedisStore::connect(server.url()).await.unwrap();
    let process = payments.start(&group, store, OnStoreLoss::Halt);
    payments.produce().await;
    process.watched.until("acks", MESSAGES).await;
    assert_eq!(process.watched.total("store_losses"), 0);
    process.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_new_group_raises_no_alarm_and_a_change_of_store_does() {
    let first = RedisServer::start().await;
    let second = RedisServer::start().await;
    let mut payments = Payments::new().await;
    let group = unique("loss");
    // The group has committed without oncegate.
    payments.kafka.commit(&group, &payments.topic, 0, 1).await;
    let runs = MESSAGES - 1;
    let process = payments.start(
        &group,
        RedisStore::connect(first.url()).await.unwrap(),
        OnStoreLoss::Halt,
    );
    process.watched.until("acks", runs).await;
    payments.is_kept_at_a_sequence(&group).await;
    assert_eq!(process.watched.total("store_losses"), 0, "first adoption");
    process.stop().await;

    // Another scope on the same group is deliberate.
    let old = std::mem::replace(&mut payments.scope, Scope::new(unique("loss")).unwrap());
    payments.produce().await;
    let process = payments.start(
        &group,
        RedisStore::connect(first.url()).await.unwrap(),
        OnStoreLoss::Halt,
    );
    process.watched.until("acks", MESSAGES).await;
    assert_eq!(process.watched.total("store_losses"), 0, "a new scope");
    payments.is_kept_at_a_sequence(&group).await;
    process.stop().await;
    drop(old);

    // So is a move to another store, which must be declared.
    payments
        .notices_at_the_start(&group, RedisStore::connect(second.url()).await.unwrap())
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_fleet_that_may_go_on_counts_one_loss_for_each_process() {
    let server = RedisServer::start().await;
    let payments = Payments::new().await;
    let connect = async || RedisStore::connect(server.url()).await.unwrap();
    let groups = [unique("loss"), unique("loss")];
    let mut processes = Vec::new();
    for group in &groups {
        let process = payments.start(group, connect().await, OnStoreLoss::Continue);
        process.watched.until("acks", MESSAGES).await;
        processes.push(process);
    }
    flush(&server).await;
    for process in &processes {
        process.watched.until("store_losses", 1).await;
    }
    payments.produce().await;
    for process in processes {
        process.watched.until("acks", 2 * MESSAGES).await;
        process.stop().await;
    }
    assert!(payments.runs() > MESSAGES, "what was lost runs again");
    assert_eq!(
        admin::halt_of(&connect().await, &payments.scope)
            .await
            .unwrap(),
        None
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn an_emptied_shard_of_a_cluster_is_noticed_at_the_next_start() {
    let mut cluster = RedisCluster::start().await;
    let payments = Payments::new().await;
    let gate = payments.gate(
        RedisStore::connect(&cluster.url()).await.unwrap(),
        OnStoreLoss::Halt,
    );
    gate.open().await.unwrap();
    let store = RedisStore::connect(&cluster.url()).await.unwrap();
    let text = store.descriptor(&payments.scope).await.unwrap().unwrap();
    let held = oncegate::core::store::ScopeDescriptor::parse(&payments.scope, &text).unwrap();
    assert_eq!(held.markers.len(), 3, "one in each shard");
    drop(gate);

    // Not the shard of the descriptor.
    let descriptor_slot = cluster
        .slot_of(&format!("{}:descriptor", payments.scope))
        .await;
    let with_descriptor = cluster.primary_of(descriptor_slot).await;
    let mut other = None;
    for slot in [0, 8_192, 16_383] {
        let primary = cluster.primary_of(slot).await;
        if primary != with_descriptor {
            other = Some(primary);
        }
    }
    flush(cluster.node(other.expect("there are three shards"))).await;
    let late = payments.gate(
        RedisStore::connect(&cluster.url()).await.unwrap(),
        OnStoreLoss::Halt,
    );
    late.open().await.unwrap();
    let refused = late.enter(&payment(1)).await.unwrap_err().to_string();
    assert!(refused.contains("shard"), "{refused}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restored_sqlite_file_is_noticed_while_running_and_later() {
    let folder = tempfile::tempdir().unwrap();
    let payments = Payments::new().await;
    let file = folder.path().join("records.db");
    let backup = folder.path().join("backup.db");
    let group = unique("loss");
    payments
        .gate(SqliteStore::open(&file).await.unwrap(), OnStoreLoss::Halt)
        .open()
        .await
        .unwrap();
    std::fs::copy(&file, &backup).unwrap();
    payments
        .run_all(&group, SqliteStore::open(&file).await.unwrap())
        .await;

    let running = payments.gate(SqliteStore::open(&file).await.unwrap(), OnStoreLoss::Halt);
    running.open().await.unwrap();
    put_back(&backup, &file);
    let refused = until_refused(&running, 1_000_000).await;
    assert!(
        refused.contains("replaced") && refused.contains("restart"),
        "{refused}"
    );
    drop(running);
    payments
        .notices_at_the_start(&group, SqliteStore::open(&file).await.unwrap())
        .await;
}

/// As a restore does it: another file under the same name.
fn put_back(backup: &Path, file: &Path) {
    for suffix in ["-wal", "-shm"] {
        let mut beside = file.as_os_str().to_owned();
        beside.push(suffix);
        _ = std::fs::remove_file(beside);
    }
    let restored = file.with_extension("restored");
    std::fs::copy(backup, &restored).unwrap();
    std::fs::rename(&restored, file).unwrap();
}
