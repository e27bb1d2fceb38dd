//! A store that holds completions back.

use std::sync::Arc;

use async_trait::async_trait;
use oncegate::MemoryStore;
use oncegate::core::key::{Scope, StoreKey};
use oncegate::core::rules::{Operation, Reply};
use oncegate::core::store::{Checkup, Command, Looked, Store, StoreError};
use tokio::sync::watch;

#[derive(Clone, Debug)]
pub(crate) struct HeldStore {
    inner: Arc<MemoryStore>,
    open: Arc<watch::Sender<bool>>,
}

impl HeldStore {
    pub(crate) fn before(inner: &Arc<MemoryStore>) -> Self {
        Self { inner: Arc::clone(inner), open: Arc::new(watch::Sender::new(false)) }
    }

    /// Lets completions through.
    pub(crate) fn open(&self) {
        self.open.send_replace(true);
    }
}

#[async_trait]
impl Store for HeldStore {
    async fn execute(&self, commands: Vec<Command>) -> Vec<Result<Reply, StoreError>> {
        let ends = |command: &Command| {
            matches!(command.operation, Operation::Complete { .. } | Operation::Fail { .. })
        };
        if commands.iter().any(ends) {
            self.open.subscribe().wait_for(|open| *open).await.unwrap();
        }
        self.inner.execute(commands).await
    }

    async fn look(&self, keys: Vec<StoreKey>) -> Vec<Result<Option<Looked>, StoreError>> {
        self.inner.look(keys).await
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
