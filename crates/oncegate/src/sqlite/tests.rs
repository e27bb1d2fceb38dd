use oncegate_core::testing::conformance::{Bench, conformance};
use tempfile::TempDir;

use super::*;

/// A file that only its user's test knows.
struct SqliteBench {
    store: Arc<SqliteStore>,
    directory: TempDir,
}

impl SqliteBench {
    async fn new() -> Self {
        let directory = TempDir::new().unwrap();
        let store = SqliteStore::open(directory.path().join("records.db")).await.unwrap();
        Self { store: Arc::new(store), directory }
    }
}

#[async_trait]
impl Bench for SqliteBench {
    fn store(&self) -> Arc<dyn Store> {
        Arc::clone(&self.store) as Arc<dyn Store>
    }

    async fn pass(&self, key: &StoreKey, time: Duration) {
        self.store.pass(key, time).await.unwrap();
    }

    async fn spoil(&self, key: &StoreKey) -> bool {
        let other = rusqlite::Connection::open(self.directory.path().join("records.db")).unwrap();
        other.busy_timeout(Duration::from_secs(5)).unwrap();
        other.pragma_update(None, "ignore_check_constraints", true).unwrap();
        let spoilt = "INSERT INTO records (key, state, expires_at_ms, owner, attempt, recovery, handed_over, \
                      reason) VALUES (?1, 'from the future', 9e18, x'00', 1, 'none', 0, '')";
        other.execute(spoilt, [key.as_str()]).unwrap() == 1
    }
}

#[tokio::test]
async fn the_sqlite_store_conforms() {
    conformance(&SqliteBench::new().await).await;
}
