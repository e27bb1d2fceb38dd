//! The journals that a configuration asks for.

use std::collections::BTreeMap;

use oncegate::core::key::StoreKey;
use oncegate::journal::JournalEntry;
use oncegate::sqlite::SqliteStore;

use super::Stage;
use super::raw::{Answer, RawWorker};

fn events(entries: &[JournalEntry]) -> Vec<&str> {
    entries.iter().map(|entry| entry.event.as_str()).collect()
}

#[tokio::test]
async fn a_file_and_the_store_itself_tell_what_happened_to_each_key() {
    let stage = Stage::with_orders(2).await;
    let worker = RawWorker::start(|_| Answer::status(200, "", "")).await;
    let records = stage.path("once.db");
    let journal = stage.path("journal.jsonl");
    let store = format!("sqlite:{}", records.display());
    let journal_flag = journal.to_str().unwrap();
    let flags = [
        "--handler",
        &worker.url(),
        "--store",
        &store,
        "--journal",
        journal_flag,
        "--set",
        "store.journal=true",
    ];
    stage.consume(&flags).await;

    let mut by_key: BTreeMap<String, Vec<JournalEntry>> = BTreeMap::new();
    for line in std::fs::read_to_string(&journal).unwrap().lines() {
        let entry: JournalEntry = serde_json::from_str(line).unwrap();
        assert!(entry.best_effort, "{entry:?}");
        by_key
            .entry(entry.key.clone().unwrap())
            .or_default()
            .push(entry);
    }
    assert_eq!(by_key.len(), 2, "{by_key:?}");
    let store = SqliteStore::open(&records).await.unwrap();
    for (key, in_file) in by_key {
        let key: StoreKey = key.parse().unwrap();
        let in_store = store.journal(&key, 10).await.unwrap();
        for entries in [&in_file, &in_store] {
            assert_eq!(events(entries), ["claimed", "completed"], "{entries:?}");
        }
        assert!(
            in_store.iter().all(|entry| !entry.best_effort),
            "{in_store:?}"
        );
    }
}
