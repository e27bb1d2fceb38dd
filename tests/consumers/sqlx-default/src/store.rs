//! The conformance suite on the SQLite store, through the public API alone.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use oncegate::sqlite::SqliteStore;
use oncegate_core::key::StoreKey;
use oncegate_core::store::Store;
use oncegate_core::testing::conformance::{Bench, conformance};

struct SqliteBench {
    store: Arc<SqliteStore>,
}

#[async_trait]
impl Bench for SqliteBench {
    fn store(&self) -> Arc<dyn Store> {
        Arc::clone(&self.store) as Arc<dyn Store>
    }

    async fn pass(&self, key: &StoreKey, time: Duration) {
        self.store.pass(key, time).await.expect("the file can be written");
    }

    /// That would need SQL of this test; the store's own tests do it.
    async fn spoil(&self, _: &StoreKey) -> bool {
        false
    }
}

/// Panics unless the store in a new file conforms.
pub async fn conforms(folder: &Path) {
    let path: PathBuf = folder.join("records.db");
    let store = SqliteStore::open(path).await.expect("a new file");
    conformance(&SqliteBench { store: Arc::new(store) }).await;
}
