//! Random sequences through the store and through the rules.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use oncegate::postgres::PostgresStore;
use oncegate_core::key::{Scope, StoreKey};
use oncegate_core::record::Record;
use oncegate_core::store::Store;
use oncegate_core::testing::equivalence::{Plan, Subject, compare};
use oncegate_testkit::{Postgres, sequences};

use crate::hand;

struct OnPostgres {
    store: Arc<PostgresStore>,
    scope: Scope,
}

#[async_trait]
impl Subject for OnPostgres {
    fn store(&self) -> Arc<dyn Store> {
        Arc::clone(&self.store) as Arc<dyn Store>
    }

    fn scope(&self) -> Scope {
        self.scope.clone()
    }

    async fn pass(&self, waits: &[(StoreKey, Duration)]) {
        self.store.pass(waits).await.unwrap();
    }

    async fn plant(&self, records: &[(StoreKey, Record)]) {
        self.store.plant(records).await.unwrap();
    }
}

// invariant: store-equals-rules
#[tokio::test]
async fn the_store_equals_the_rules() {
    let postgres = Postgres::shared().await;
    let subject = OnPostgres {
        store: hand::store(&postgres).await,
        scope: hand::scope(),
    };
    let plan = Plan {
        seed: fastrand::u64(..),
        sequences: sequences(),
        steps: 12,
    };
    let reached = compare(&subject, plan)
        .await
        .unwrap_or_else(|difference| panic!("{difference}"));
    assert_eq!(reached.missing(), Vec::<&str>::new(), "seed {}", plan.seed);
}
