//! A store that holds claims or endings back.

use std::sync::Arc;

use async_trait::async_trait;
use oncegate::MemoryStore;
use oncegate::core::rules::{Operation, Reply};
use oncegate::core::store::StoreWrapper;
use oncegate::core::store::{Command, Store, StoreError};
use tokio::sync::watch;

use crate::world::LIMIT;

#[derive(Clone, Debug)]
pub(crate) struct HeldStore {
    inner: Arc<MemoryStore>,
    holds: fn(&Operation) -> bool,
    seen: Arc<watch::Sender<bool>>,
    open: Arc<watch::Sender<bool>>,
}

impl HeldStore {
    /// Holds what ends a claim.
    pub(crate) fn endings(inner: &Arc<MemoryStore>) -> Self {
        let holds = |operation: &Operation| {
            matches!(
                operation,
                Operation::Complete { .. } | Operation::Fail { .. }
            )
        };
        Self::holding(inner, holds)
    }

    /// Holds claims.
    pub(crate) fn claims(inner: &Arc<MemoryStore>) -> Self {
        Self::holding(inner, |operation| {
            matches!(operation, Operation::Claim { .. })
        })
    }

    fn holding(inner: &Arc<MemoryStore>, holds: fn(&Operation) -> bool) -> Self {
        let switch = || Arc::new(watch::Sender::new(false));
        Self {
            inner: Arc::clone(inner),
            holds,
            seen: switch(),
            open: switch(),
        }
    }

    /// Waits until there is something to hold.
    pub(crate) async fn seen(&self) {
        let mut seen = self.seen.subscribe();
        let seen = tokio::time::timeout(LIMIT, seen.wait_for(|seen| *seen)).await;
        seen.expect("in time").unwrap();
    }

    /// Lets everything through.
    pub(crate) fn open(&self) {
        self.open.send_replace(true);
    }
}

#[async_trait]
impl StoreWrapper for HeldStore {
    fn inner(&self) -> &dyn Store {
        &self.inner
    }

    async fn execute(&self, commands: Vec<Command>) -> Vec<Result<Reply, StoreError>> {
        if commands
            .iter()
            .any(|command| (self.holds)(&command.operation))
        {
            self.seen.send_replace(true);
            self.open.subscribe().wait_for(|open| *open).await.unwrap();
        }
        self.inner.execute(commands).await
    }
}
