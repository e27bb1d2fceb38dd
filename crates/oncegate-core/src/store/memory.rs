//! The in-memory store: a map of records and the rules.

use std::collections::HashMap;
use std::fmt;

use async_trait::async_trait;
use parking_lot::{Mutex, MutexGuard};

use super::{Checkup, Command, RecordSnapshot, Store, StoreError, Survives};
use crate::key::{Scope, StoreKey};
use crate::record::{Record, StoreTime};
use crate::rules::{Reply, apply};

/// A store in this process's memory, for tests and experiments.
///
/// Its records are lost when the process ends, so it detects duplicates only within one run. It
/// reads no clock: the caller provides one.
pub struct MemoryStore {
    clock: Box<dyn Fn() -> StoreTime + Send + Sync>,
    held: Mutex<Held>,
}

#[derive(Default)]
struct Held {
    records: HashMap<StoreKey, Record>,
    descriptors: HashMap<Scope, String>,
}

impl MemoryStore {
    /// Creates an empty store that takes its time from `clock`.
    pub fn with_clock(clock: impl Fn() -> StoreTime + Send + Sync + 'static) -> Self {
        Self {
            clock: Box::new(clock),
            held: Mutex::default(),
        }
    }

    /// Returns all records in no particular order. Expired records may be among them.
    pub fn records(&self) -> Vec<(StoreKey, Record)> {
        self.held()
            .records
            .iter()
            .map(|(key, record)| (key.clone(), record.clone()))
            .collect()
    }

    /// Deletes every record, to simulate a store that has lost its data. The descriptors stay.
    pub fn lose_everything(&self) {
        self.held().records.clear();
    }

    /// Locks the maps. A panic elsewhere leaves them consistent, because each change is a single
    /// insert or remove.
    fn held(&self) -> MutexGuard<'_, Held> {
        self.held.lock()
    }
}

impl fmt::Debug for MemoryStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryStore")
            .field("records", &self.held().records.len())
            .finish_non_exhaustive()
    }
}

#[async_trait]
impl Store for MemoryStore {
    async fn execute(&self, commands: Vec<Command>) -> Vec<Result<Reply, StoreError>> {
        let now = (self.clock)();
        let mut held = self.held();
        commands
            .into_iter()
            .map(|Command { key, operation }| {
                let (record, reply) = apply(now, held.records.remove(&key), &operation);
                if let Some(record) = record {
                    held.records.insert(key, record);
                }
                Ok(reply)
            })
            .collect()
    }

    async fn read(&self, keys: Vec<StoreKey>) -> Vec<Result<Option<RecordSnapshot>, StoreError>> {
        let now = (self.clock)();
        let held = self.held();
        keys.into_iter()
            .map(|key| {
                let record = held.records.get(&key).filter(|record| record.kept(now));
                Ok(record.map(|record| RecordSnapshot {
                    now,
                    record: record.clone(),
                }))
            })
            .collect()
    }

    async fn describe(
        &self,
        scope: &Scope,
        expected: Option<&str>,
        proposed: &str,
    ) -> Result<String, StoreError> {
        let mut held = self.held();
        if held.descriptors.get(scope).map(String::as_str) == expected {
            held.descriptors.insert(scope.clone(), proposed.to_owned());
        }
        Ok(held
            .descriptors
            .get(scope)
            .cloned()
            .unwrap_or_else(|| expected.unwrap_or_default().to_owned()))
    }

    async fn descriptor(&self, scope: &Scope) -> Result<Option<String>, StoreError> {
        Ok(self.held().descriptors.get(scope).cloned())
    }

    async fn check(&self) -> Result<Checkup, StoreError> {
        let warnings =
            vec!["records are held in this process only and are lost when it ends".to_owned()];
        Ok(Checkup {
            store: "memory".to_owned(),
            survives: Survives::Process,
            warnings,
        })
    }
}
