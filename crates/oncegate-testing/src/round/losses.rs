//! A store that can lose all its records, whatever store it is.
//!
//! After a loss, each key stands for another one of the same scope, so no record is found any more.
//! Nothing is deleted: the store may be a real one, which others use as well.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use async_trait::async_trait;
use oncegate_core::key::{Digest, Scope, StoreKey};
use oncegate_core::rules::Reply;
use oncegate_core::store::{Command, Completed, RecordSnapshot, Store, StoreError, StoreWrapper};

/// A store that can lose its records. The descriptors of its scopes stay.
pub(super) struct LossyStore {
    inner: Arc<dyn Store>,
    losses: AtomicU64,
}

impl LossyStore {
    pub(super) fn new(inner: Arc<dyn Store>) -> Self {
        Self {
            inner,
            losses: AtomicU64::new(0),
        }
    }

    /// Loses every record.
    pub(super) fn lose_records(&self) {
        self.losses.fetch_add(1, Ordering::SeqCst);
    }

    /// The key under which the store has the record now.
    fn moved(&self, key: StoreKey) -> StoreKey {
        let losses = self.losses.load(Ordering::SeqCst);
        if losses == 0 {
            return key;
        }
        let Ok(scope) = Scope::new(key.scope()) else {
            return key;
        };
        let mut hasher = blake3::Hasher::new();
        hasher
            .update(key.digest().as_bytes())
            .update(&losses.to_be_bytes());
        let mut digest = [0; 16];
        hasher.finalize_xof().fill(&mut digest);
        StoreKey::new(&scope, Digest::from_bytes(digest))
    }

    fn all_moved(&self, keys: Vec<StoreKey>) -> Vec<StoreKey> {
        keys.into_iter().map(|key| self.moved(key)).collect()
    }
}

impl fmt::Debug for LossyStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LossyStore")
            .field("losses", &self.losses)
            .finish_non_exhaustive()
    }
}

#[async_trait]
impl StoreWrapper for LossyStore {
    fn inner(&self) -> &dyn Store {
        &self.inner
    }

    async fn execute(&self, commands: Vec<Command>) -> Vec<Result<Reply, StoreError>> {
        let moved = commands
            .into_iter()
            .map(|command| Command {
                key: self.moved(command.key),
                ..command
            })
            .collect();
        self.inner.execute(moved).await
    }

    async fn read(&self, keys: Vec<StoreKey>) -> Vec<Result<Option<RecordSnapshot>, StoreError>> {
        self.inner.read(self.all_moved(keys)).await
    }

    async fn prefetch(&self, keys: Vec<StoreKey>) -> Vec<Result<Option<Completed>, StoreError>> {
        self.inner.prefetch(self.all_moved(keys)).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use oncegate_core::record::Token;
    use oncegate_core::rules::{Operation, Verdict};
    use oncegate_runtime::MemoryStore;
    use std::time::Duration;

    async fn claim(store: &LossyStore, key: &StoreKey, token: u128) -> Verdict {
        let operation = Operation::Claim {
            token: Token::from_bits(token),
            lease: Duration::from_secs(60),
            fingerprint: None,
            fenced: false,
            longest_lease: Duration::MAX,
        };
        let command = Command {
            key: key.clone(),
            operation,
        };
        match store.execute_one(command).await {
            Ok(Reply::Verdict { verdict, .. }) => verdict,
            other => panic!("{other:?}"),
        }
    }

    #[tokio::test]
    async fn after_a_loss_no_record_is_found_and_new_ones_are_kept() {
        let store = LossyStore::new(Arc::new(MemoryStore::new()));
        let key = StoreKey::new(&Scope::new("trial").unwrap(), Digest::from_bytes([7; 16]));
        for token in [1, 3] {
            assert!(matches!(
                claim(&store, &key, token).await,
                Verdict::Granted(_)
            ));
            assert!(matches!(
                claim(&store, &key, token + 1).await,
                Verdict::Busy { .. }
            ));
            assert!(matches!(
                Store::read(&store, vec![key.clone()]).await.as_slice(),
                [Ok(Some(_))]
            ));
            store.lose_records();
            assert!(matches!(
                Store::read(&store, vec![key.clone()]).await.as_slice(),
                [Ok(None)]
            ));
        }
    }
}
