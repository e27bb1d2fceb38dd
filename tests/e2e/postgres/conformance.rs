//! The suite that every store passes.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use oncegate::postgres::PostgresStore;
use oncegate_core::key::{Scope, StoreKey};
use oncegate_core::store::Store;
use oncegate_core::testing::conformance::{Bench, conformance};
use oncegate_core::testing::key;
use oncegate_testkit::Postgres;
use tokio_postgres::Client;

use crate::hand;
use crate::proxy::Proxy;

struct OnPostgres {
    store: Arc<PostgresStore>,
    client: Client,
    scope: Scope,
}

#[async_trait]
impl Bench for OnPostgres {
    fn store(&self) -> Arc<dyn Store> {
        Arc::clone(&self.store) as Arc<dyn Store>
    }

    async fn pass(&self, key: &StoreKey, time: Duration) {
        self.store.pass(&[(key.clone(), time)]).await.unwrap();
    }

    async fn spoil(&self, key: &StoreKey) -> bool {
        let insert = "INSERT INTO oncegate_records (key, state, expires_at_ms, owner, attempt, recovery, \
                      handed_over, reason) VALUES ($1, 'pending', 9e15, '\\x01', 1, 'none', false, '')";
        self.client.execute(insert, &[&key.as_str()]).await.unwrap();
        true
    }

    fn key(&self, name: &str) -> StoreKey {
        StoreKey::new(&self.scope, key(name).digest())
    }

    fn scope(&self, name: &str) -> Scope {
        Scope::new(format!("{}-{name}", self.scope.as_str())).unwrap()
    }
}

// invariant: store-equals-rules
#[tokio::test]
async fn the_store_conforms() {
    let postgres = Postgres::shared().await;
    let store = hand::store(&postgres).await;
    let client = postgres.connection().await;
    conformance(&OnPostgres {
        store,
        client,
        scope: hand::scope(),
    })
    .await;
}

// invariant: store-equals-rules
#[tokio::test]
async fn the_store_conforms_with_limits_in_each_transaction() {
    let postgres = Postgres::shared().await;
    hand::store(&postgres).await;
    let client = postgres.connection().await;
    let proxy = Proxy::before(&postgres).await;
    proxy.be_a_pooler();
    let store = PostgresStore::builder(proxy.url())
        .without_purge()
        .response_timeout(hand::PATIENCE)
        .connect()
        .await;
    let store = Arc::new(store.unwrap());
    conformance(&OnPostgres {
        store,
        client,
        scope: hand::scope(),
    })
    .await;
}
