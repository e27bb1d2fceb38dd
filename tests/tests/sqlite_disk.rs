//! The disk under the SQLite file is full in the middle, and has room again.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test that cannot go on has failed")]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use oncegate::kafka::KafkaSource;
use oncegate::sqlite::SqliteStore;
use oncegate::{Consumer, Gate, Key, Message};
use oncegate_core::record::Token;
use oncegate_core::rules::Operation;
use oncegate_core::store::{Command, Store, StoreError};
use oncegate_core::testing::key;
use oncegate_tests::{Kafka, Record, SmallDisk, Watched, unique};
use tokio::sync::oneshot;

const MESSAGES: u64 = 3_000;
const CONCURRENCY: u32 = 16;
/// Room for the file and its log: 3,000 results, each of which goes through the log first.
const DISK_BYTES: u64 = 64 << 20;
const RESULT_BYTES: usize = 2_000;
/// How often the store is asked while the disk is full, before there is room again.
const ASKED_IN_VAIN: u64 = 40;

#[tokio::test(flavor = "multi_thread")]
async fn consumption_pauses_while_the_disk_is_full_and_nothing_is_acknowledged() {
    let disk = SmallDisk::mount(DISK_BYTES);
    let kafka = Kafka::shared().await;
    let topic = kafka.new_topic("full-disk", 4).await;
    let records = (0..MESSAGES).map(|n| Record::new(format!(r#"{{"id":{n}}}"#)).key(n.to_string()));
    kafka.produce(&topic, records).await;

    let runs = Arc::new(AtomicU64::new(0));
    let counted = Arc::clone(&runs);
    let handler = move |_: Message| {
        let counted = Arc::clone(&counted);
        async move {
            tokio::time::sleep(Duration::from_millis(5)).await;
            counted.fetch_add(1, Relaxed);
            Ok("r".repeat(RESULT_BYTES))
        }
    };
    let file = disk.path().join("records.db");
    let store = SqliteStore::open(&file).await.unwrap();
    let (group, watched) = (unique("full-disk"), Watched::new());
    // The lease outlives the full disk, so that no run is cut short and none is taken over.
    let gate =
        Gate::new(unique("full-disk"), Key::json(["id"]), store.clone()).lease(Duration::from_secs(120));
    let source = KafkaSource::new(kafka.bootstrap(), group.as_str(), [topic.as_str()]);
    let consumer =
        Consumer::new(source, gate, handler).concurrency(CONCURRENCY).observer(Arc::clone(&watched) as _);
    let (stop, stopped) = oneshot::channel::<()>();
    let running = tokio::spawn(consumer.run_until(async { _ = stopped.await }));

    watched.until("acks", MESSAGES / 4).await;
    assert_eq!(watched.total("store_errors"), 0, "nothing is wrong while there is room");
    disk.fill();
    watched.until("store_errors", 1).await;
    let acked = watched.total("acks");
    watched.until("store_errors", ASKED_IN_VAIN).await;
    let late = watched.total("acks") - acked;
    // What the store had answered before may still be acknowledged after.
    assert!(late <= u64::from(CONCURRENCY), "{late} messages were acknowledged on a full disk");
    what_the_store_says(&store, &file.display().to_string()).await;

    disk.make_room();
    watched.until("acks", MESSAGES).await;
    stop.send(()).unwrap();
    running.await.unwrap().unwrap();

    assert_eq!(runs.load(Relaxed), MESSAGES, "every message ran once");
    assert_eq!(watched.total("extra_runs"), 0);
    let committed: i64 = kafka.committed_offsets(&group, &topic).await.values().sum();
    assert_eq!(committed, i64::try_from(MESSAGES).unwrap());
    // Another reader than ours: all of it is in the file.
    let completed = rusqlite::Connection::open(&file).unwrap();
    let completed: i64 = completed
        .query_row("SELECT count(*) FROM records WHERE state = 'completed'", [], |row| row.get(0))
        .unwrap();
    assert_eq!(completed, i64::try_from(MESSAGES).unwrap());
}

/// The error names the file and what to do; what is in the file can still be read.
async fn what_the_store_says(store: &SqliteStore, file: &str) {
    let claim = Operation::Claim {
        token: Token::from_bits(1),
        lease: Duration::from_secs(1),
        fingerprint: None,
        fenced: false,
    };
    let answers = store.execute(vec![Command { key: key("new"), operation: claim }]).await;
    match &answers[0] {
        Err(StoreError::Unavailable { reason }) => {
            assert!(reason.contains(file) && reason.contains("make room"), "{reason}");
        }
        other => panic!("a claim on a full disk was answered with {other:?}"),
    }
    assert_eq!(store.look(vec![key("new")]).await.pop().unwrap().unwrap(), None, "nothing was written");
}

#[tokio::test]
async fn a_full_disk_is_told_when_the_file_is_made() {
    let disk = SmallDisk::mount(1 << 20);
    disk.fill();
    let file = disk.path().join("records.db");
    match SqliteStore::open(&file).await {
        Err(StoreError::Unavailable { reason }) => {
            assert!(reason.contains(&file.display().to_string()) && reason.contains("full"), "{reason}");
        }
        other => panic!("a new file on a full disk was opened: {other:?}"),
    }
    disk.make_room();
    SqliteStore::open(&file).await.expect("there is room again");
}
