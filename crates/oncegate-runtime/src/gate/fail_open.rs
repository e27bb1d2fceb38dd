//! A store in memory that takes the store's place while it is away and the consumer fails open.

use std::collections::HashMap;

use async_trait::async_trait;
use oncegate_core::key::{Scope, StoreKey};
use oncegate_core::record::{Record, State, StoreTime};
use oncegate_core::rules::{Reply, apply};
use oncegate_core::store::{Checkup, Command, RecordSnapshot, Store, StoreError, Survives};
use parking_lot::Mutex;
use tokio::time::Instant;

/// The most messages whose attempts are remembered while they wait for their retry.
const REMEMBERED_MOST: usize = 100_000;

/// The rules applied to what this process runs now. It forgets a message as soon as it has ended,
/// so it holds only what runs and what waits for a retry, and answers no repetition.
#[derive(Debug)]
pub(super) struct FailOpenStore {
    began: Instant,
    records: Mutex<HashMap<StoreKey, Record>>,
}

impl FailOpenStore {
    pub(super) fn new() -> Self {
        Self {
            began: Instant::now(),
            records: Mutex::default(),
        }
    }

    pub(super) fn checkup() -> Checkup {
        Checkup {
            store: "none".to_owned(),
            survives: Survives::Process,
            warnings: Vec::new(),
        }
    }

    fn now(&self) -> StoreTime {
        StoreTime::from_micros(u64::try_from(self.began.elapsed().as_micros()).unwrap_or(u64::MAX))
    }
}

#[async_trait]
impl Store for FailOpenStore {
    async fn execute(&self, commands: Vec<Command>) -> Vec<Result<Reply, StoreError>> {
        let now = self.now();
        // A panic elsewhere leaves the map consistent: each change is one insert or remove.
        let mut records = self.records.lock();
        let replies = commands.into_iter().map(|Command { key, operation }| {
            let (record, reply) = apply(now, records.remove(&key), &operation);
            if let Some(record) = record.filter(has_not_ended) {
                if records.len() >= REMEMBERED_MOST {
                    // Their next attempts are numbered from one again.
                    records.retain(|_, record| matches!(record.state, State::Pending { .. }));
                }
                records.insert(key, record);
            }
            Ok(reply)
        });
        replies.collect()
    }

    async fn read(&self, keys: Vec<StoreKey>) -> Vec<Result<Option<RecordSnapshot>, StoreError>> {
        let now = self.now();
        let records = self.records.lock();
        let found = keys.iter().map(|key| {
            Ok(records.get(key).map(|record| RecordSnapshot {
                now,
                record: record.clone(),
            }))
        });
        found.collect()
    }

    async fn describe(
        &self,
        _: &Scope,
        _: Option<&str>,
        proposed: &str,
    ) -> Result<String, StoreError> {
        Ok(proposed.to_owned())
    }

    async fn descriptor(&self, _: &Scope) -> Result<Option<String>, StoreError> {
        Ok(None)
    }

    async fn check(&self) -> Result<Checkup, StoreError> {
        Ok(Self::checkup())
    }
}

/// Returns whether the message runs, or waits for a retry.
fn has_not_ended(record: &Record) -> bool {
    matches!(record.state, State::Pending { .. } | State::Released { .. })
}
