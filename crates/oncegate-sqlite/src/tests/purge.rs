//! The removal of expired records.

use std::sync::mpsc;

use parking_lot::Mutex;

use super::*;
use oncegate_runtime::failure::BoxError;
use oncegate_store_toolkit::archive::{ArchiveFile, Expired};

/// The longest time that a busy machine may take.
const PATIENCE: Duration = Duration::from_secs(60);

/// A store whose purge never rests.
fn eager(place: &TestFolder) -> SqliteBuilder {
    SqliteStore::builder(place.path()).purge_every(Duration::ZERO)
}

async fn expire(store: &SqliteStore, numbers: impl Iterator<Item = u32>) {
    for number in numbers {
        store
            .pass(&key(&format!("{number}")), 2 * DAY)
            .await
            .unwrap();
    }
}

async fn expire_all(store: &SqliteStore) {
    let expire = store
        .inner
        .writer
        .ask(|connection| connection.execute("UPDATE records SET expires_at_ms = 7", []));
    expire.await.unwrap();
}

/// Works on other keys until so many records were removed.
async fn until_purged(store: &SqliteStore, count: u64) {
    while store.stats().purged < count {
        one(store, claim("busy", 1)).await.unwrap();
    }
}

fn rows(place: &TestFolder) -> i64 {
    place
        .foreign()
        .query_row("SELECT count(*) FROM records", [], |row| row.get(0))
        .unwrap()
}

#[tokio::test]
async fn expired_records_are_removed_and_others_stay() {
    let place = TestFolder::new();
    let store = eager(&place).open().await.unwrap();
    completed(&store, 2_500, DAY).await;
    expire(&store, (0..2_500).step_by(2)).await;
    until_purged(&store, 1_250).await;
    assert_eq!(rows(&place), 1_250 + 1);
    assert_eq!(store.stats().purged, 1_250);
}

// invariant: purge-too-slow
#[tokio::test]
async fn walks_come_early_and_until_nothing_expired_is_left() {
    let place = TestFolder::new();
    let store = SqliteStore::builder(place.path())
        .purge_every(DAY)
        .open()
        .await
        .unwrap();
    // A backlog that came while nothing was removed, and what comes behind it.
    for round in 1..=2 {
        completed(&store, 5_000, DAY).await;
        expire_all(&store).await;
        let purged = tokio::time::timeout(PATIENCE, until_purged(&store, round * 5_000)).await;
        assert!(
            purged.is_ok(),
            "{} were removed after round {round}",
            store.stats().purged
        );
    }
}

/// Works on other keys until the age of the oldest expired record is so.
async fn until_oldest(store: &SqliteStore, is: fn(Option<Duration>) -> bool) {
    while !is(store.upkeep().oldest_expired) {
        one(store, claim("busy", 1)).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_age_of_the_oldest_expired_record_is_told_while_present() {
    let place = TestFolder::new();
    let refuses = Arc::new(std::sync::atomic::AtomicBool::new(true));
    let asked = Arc::clone(&refuses);
    let moody = move |_: &[Expired]| -> Result<(), BoxError> {
        let refuses = asked.load(std::sync::atomic::Ordering::SeqCst);
        if refuses {
            Err("the archive is full".into())
        } else {
            Ok(())
        }
    };
    let store = eager(&place).archive(moody).open().await.unwrap();
    until_oldest(&store, |age| age == Some(Duration::ZERO)).await;
    completed(&store, 5, DAY).await;
    expire(&store, 0..5).await;
    until_oldest(&store, |age| age > Some(DAY / 2)).await;
    refuses.store(false, std::sync::atomic::Ordering::SeqCst);
    until_purged(&store, 5).await;
    until_oldest(&store, |age| age == Some(Duration::ZERO)).await;
}

// invariant: archive-in-sqlite
#[tokio::test]
async fn expired_records_are_in_the_archive_before_they_are_gone() {
    let place = TestFolder::new();
    let archive = ArchiveFile::new(place.directory.path().join("expired.jsonl"));
    let store = eager(&place).archive(archive.clone()).open().await.unwrap();
    completed(&store, 600, DAY).await;
    expire(&store, 0..500).await;
    until_purged(&store, 500).await;
    let lines = std::fs::read_to_string(archive.path()).unwrap();
    let keys: std::collections::BTreeSet<String> = lines
        .lines()
        .map(|line| {
            let line: serde_json::Value = serde_json::from_str(line).unwrap();
            assert_eq!(
                (&line["state"], &line["result_bytes"]),
                (&"completed".into(), &300.into())
            );
            line["key"].as_str().unwrap().to_owned()
        })
        .collect();
    assert_eq!(
        keys,
        (0..500)
            .map(|number| key(&format!("{number}")).to_string())
            .collect()
    );
    assert_eq!(rows(&place), 100 + 1);
}

// invariant: archive-in-sqlite
#[tokio::test]
async fn an_archive_that_refuses_keeps_the_records_where_they_are() {
    let place = TestFolder::new();
    let (asked, is_asked) = mpsc::channel();
    let refuse = move |expired: &[Expired]| -> Result<(), BoxError> {
        // The test may have seen enough.
        let _ = asked.send(expired.len());
        Err("the archive is full".into())
    };
    let store = eager(&place).archive(refuse).open().await.unwrap();
    completed(&store, 5, DAY).await;
    expire(&store, 0..5).await;
    // At its third refusal with all five, the purge has gone past the first two.
    let all = is_asked.iter().filter(|count| *count == 5).take(3).count();
    assert_eq!((all, rows(&place), store.stats().purged), (3, 5, 0));
}

// invariant: archive-in-sqlite
#[tokio::test(flavor = "multi_thread")]
async fn a_slow_archive_blocks_nothing_and_keeps_what_is_claimed() {
    let place = TestFolder::new();
    let (entered, is_entered) = mpsc::channel();
    let (leave, may_leave) = mpsc::channel::<()>();
    let may_leave = Mutex::new(may_leave);
    let slow = move |expired: &[Expired]| -> Result<(), BoxError> {
        entered.send(expired.to_vec())?;
        may_leave.lock().recv()?;
        Ok(())
    };
    let store = eager(&place).archive(slow).open().await.unwrap();
    completed(&store, 2, DAY).await;
    expire_all(&store).await;
    let archived = tokio::task::spawn_blocking(move || is_entered.recv().unwrap())
        .await
        .unwrap();
    assert_eq!(archived.len(), 2);
    assert!(
        archived
            .iter()
            .all(|expired| matches!(expired.record.state, State::Completed { .. }))
    );
    // The archive delays the purge, and nothing else.
    let granted = one(&store, claim("0", 2)).await.unwrap();
    assert!(
        matches!(
            granted,
            Reply::Verdict {
                verdict: Verdict::Granted(_),
                ..
            }
        ),
        "its time was over"
    );
    leave.send(()).unwrap();
    until_purged(&store, 1).await;
    let found = store.read(vec![key("0"), key("1")]).await;
    let found: Vec<bool> = found
        .into_iter()
        .map(|record| record.unwrap().is_some())
        .collect();
    assert_eq!(found, [true, false], "the new claim stays");
    drop(leave);
}
