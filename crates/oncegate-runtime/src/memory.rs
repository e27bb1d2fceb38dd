//! A store in this process's memory, on the runtime's clock.

use async_trait::async_trait;
use oncegate_core::key::{Scope, StoreKey};
use oncegate_core::record::{Record, StoreTime};
use oncegate_core::rules::Reply;
use oncegate_core::store::{self, Checkup, Command, RecordSnapshot, Store, StoreError};
use tokio::time::Instant;

/// A store in this process's memory, for tests and for trying things out.
///
/// The store forgets everything when the process ends, so it protects against duplicates only
/// within one run. Its clock is the runtime's: on paused time, leases pause too.
#[derive(Debug)]
pub struct MemoryStore {
    inner: store::MemoryStore,
}

impl MemoryStore {
    /// An empty store.
    pub fn new() -> Self {
        let started = Instant::now();
        Self {
            inner: store::MemoryStore::with_clock(move || {
                let micros = u64::try_from(started.elapsed().as_micros());
                StoreTime::from_micros(micros.unwrap_or(u64::MAX))
            }),
        }
    }

    /// Returns the records, in no order; expired ones may be among them.
    pub fn records(&self) -> Vec<(StoreKey, Record)> {
        self.inner.records()
    }

    /// Deletes every record, to simulate a store that lost its data.
    pub fn lose_everything(&self) {
        self.inner.lose_everything();
    }
}

impl Default for MemoryStore {
    fn default() -> Self {
        Self::new()
    }
}

#[async_trait]
impl Store for MemoryStore {
    async fn execute(&self, commands: Vec<Command>) -> Vec<Result<Reply, StoreError>> {
        self.inner.execute(commands).await
    }

    async fn read(&self, keys: Vec<StoreKey>) -> Vec<Result<Option<RecordSnapshot>, StoreError>> {
        self.inner.read(keys).await
    }

    async fn describe(
        &self,
        scope: &Scope,
        expected: Option<&str>,
        proposed: &str,
    ) -> Result<String, StoreError> {
        self.inner.describe(scope, expected, proposed).await
    }

    async fn descriptor(&self, scope: &Scope) -> Result<Option<String>, StoreError> {
        self.inner.descriptor(scope).await
    }

    async fn check(&self) -> Result<Checkup, StoreError> {
        self.inner.check().await
    }
}
