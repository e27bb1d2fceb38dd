//! The disk under the SQLite file is full in the middle, and has room again.

use std::time::Duration;

use oncegate::sqlite::SqliteStore;
use oncegate_core::record::Token;
use oncegate_core::rules::Operation;
use oncegate_core::store::{Command, Store, StoreError};
use oncegate_core::testing::key;
use oncegate_testkit::{Consuming, SmallDisk};

const MESSAGES: u64 = 3_000;
const LEASE: Duration = Duration::from_secs(120);
/// Room for the file and its log: 3,000 results, each of which goes through the log first.
const DISK_BYTES: u64 = 64 << 20;
const RESULT_BYTES: usize = 2_000;
/// How often the store is asked while the disk is full, before there is room again.
const ASKED_IN_VAIN: u64 = 40;

// invariant: run-without-store
#[tokio::test(flavor = "multi_thread")]
async fn consumption_pauses_without_acks_while_the_disk_is_full() {
    let disk = SmallDisk::mount(DISK_BYTES);
    let file = disk.path().join("records.db");
    let store = SqliteStore::open(&file).await.unwrap();
    let consuming =
        Consuming::start(store.clone(), MESSAGES, LEASE, "r".repeat(RESULT_BYTES)).await;
    let watched = &consuming.watched;

    watched.until("acks", MESSAGES / 4).await;
    assert_eq!(
        watched.total("store_errors"),
        0,
        "nothing is wrong while there is room"
    );
    disk.fill();
    watched.until("store_errors", 1).await;
    let acked = watched.total("acks");
    watched.until("store_errors", ASKED_IN_VAIN).await;
    let late = watched.total("acks") - acked;
    // What the store had answered before may still be acknowledged after.
    assert!(
        late <= u64::from(Consuming::CONCURRENCY),
        "{late} messages were acknowledged on a full disk"
    );
    what_the_store_says(&store, &file.display().to_string()).await;

    disk.make_room();
    consuming.ends_well().await;
    // An independent reader: all of it is in the file.
    let completed = rusqlite::Connection::open(&file).unwrap();
    let completed: i64 = completed
        .query_row(
            "SELECT count(*) FROM records WHERE state = 'completed'",
            [],
            |row| row.get(0),
        )
        .unwrap();
    assert_eq!(completed, i64::try_from(MESSAGES).unwrap());
}

/// The error names the file and what to do; what is in the file can still be read.
async fn what_the_store_says(store: &SqliteStore, file: &str) {
    // Larger than all of the log: a small claim may still fit into what the log had taken before.
    let complete = Operation::Complete {
        token: Token::from_bits(1),
        fingerprint: None,
        result: vec![b'r'; 16 << 20].into(),
        retention: Duration::from_secs(60),
    };
    let answers = store
        .execute(vec![Command {
            key: key("new"),
            operation: complete,
        }])
        .await;
    match &answers[0] {
        Err(StoreError::Unavailable { reason }) => {
            assert!(
                reason.contains(file) && reason.contains("make room"),
                "{reason}"
            );
        }
        other => panic!("a completion on a full disk was answered with {other:?}"),
    }
    assert_eq!(
        store.read(vec![key("new")]).await.pop().unwrap().unwrap(),
        None,
        "nothing was written"
    );
}

#[tokio::test]
async fn a_full_disk_is_told_when_the_file_is_made() {
    let disk = SmallDisk::mount(1 << 20);
    disk.fill();
    let file = disk.path().join("records.db");
    match SqliteStore::open(&file).await {
        Err(StoreError::Unavailable { reason }) => {
            assert!(
                reason.contains(&file.display().to_string()) && reason.contains("full"),
                "{reason}"
            );
        }
        other => panic!("a new file on a full disk was opened: {other:?}"),
    }
    disk.make_room();
    SqliteStore::open(&file).await.expect("there is room again");
}
