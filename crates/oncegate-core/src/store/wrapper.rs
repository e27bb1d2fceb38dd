//! Stores that change what another store does in a few places.

use std::fmt;

use async_trait::async_trait;

use super::{Checkup, Command, Completed, RecordSnapshot, Store, StoreError, StoreLoss, Upkeep};
use crate::key::{Scope, StoreKey};
use crate::rules::Reply;

/// A store that passes every call on to another one, except those that it changes.
///
/// Each type that implements it is a [`Store`].
#[async_trait]
pub trait StoreWrapper: Send + Sync + fmt::Debug {
    /// The other store.
    fn inner(&self) -> &dyn Store;

    /// See [`Store::execute`].
    async fn execute(&self, commands: Vec<Command>) -> Vec<Result<Reply, StoreError>> {
        self.inner().execute(commands).await
    }

    /// See [`Store::read`].
    async fn read(&self, keys: Vec<StoreKey>) -> Vec<Result<Option<RecordSnapshot>, StoreError>> {
        self.inner().read(keys).await
    }

    /// See [`Store::describe`].
    async fn describe(
        &self,
        scope: &Scope,
        expected: Option<&str>,
        proposed: &str,
    ) -> Result<String, StoreError> {
        self.inner().describe(scope, expected, proposed).await
    }

    /// See [`Store::descriptor`].
    async fn descriptor(&self, scope: &Scope) -> Result<Option<String>, StoreError> {
        self.inner().descriptor(scope).await
    }

    /// See [`Store::loss`].
    fn loss(&self) -> Option<StoreLoss> {
        self.inner().loss()
    }

    /// See [`Store::check_spacing`].
    fn check_spacing(&self) -> u32 {
        self.inner().check_spacing()
    }

    /// See [`Store::prefetch`].
    async fn prefetch(&self, keys: Vec<StoreKey>) -> Vec<Result<Option<Completed>, StoreError>> {
        self.inner().prefetch(keys).await
    }
}

#[async_trait]
impl<W: StoreWrapper> Store for W {
    async fn execute(&self, commands: Vec<Command>) -> Vec<Result<Reply, StoreError>> {
        StoreWrapper::execute(self, commands).await
    }

    async fn read(&self, keys: Vec<StoreKey>) -> Vec<Result<Option<RecordSnapshot>, StoreError>> {
        StoreWrapper::read(self, keys).await
    }

    async fn prefetch(&self, keys: Vec<StoreKey>) -> Vec<Result<Option<Completed>, StoreError>> {
        StoreWrapper::prefetch(self, keys).await
    }

    async fn describe(
        &self,
        scope: &Scope,
        expected: Option<&str>,
        proposed: &str,
    ) -> Result<String, StoreError> {
        StoreWrapper::describe(self, scope, expected, proposed).await
    }

    async fn descriptor(&self, scope: &Scope) -> Result<Option<String>, StoreError> {
        StoreWrapper::descriptor(self, scope).await
    }

    fn shard(&self, key: &StoreKey) -> u64 {
        self.inner().shard(key)
    }

    fn loss(&self) -> Option<StoreLoss> {
        StoreWrapper::loss(self)
    }

    fn accept_loss(&self) {
        self.inner().accept_loss();
    }

    fn check_spacing(&self) -> u32 {
        StoreWrapper::check_spacing(self)
    }

    fn upkeep(&self) -> Upkeep {
        self.inner().upkeep()
    }

    async fn check(&self) -> Result<Checkup, StoreError> {
        self.inner().check().await
    }
}
