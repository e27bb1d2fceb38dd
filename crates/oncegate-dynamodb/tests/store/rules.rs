//! The suite that every store passes, and the rules on random operations.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use aws_sdk_dynamodb::Client;
use aws_sdk_dynamodb::types::AttributeValue;
use futures_util::future::join_all;
use oncegate_core::key::{Scope, StoreKey};
use oncegate_core::record::Record;
use oncegate_core::store::Store;
use oncegate_core::testing::conformance::{Bench, conformance};
use oncegate_core::testing::equivalence::{Plan, Subject, compare};
use oncegate_core::testing::{key, scope};
use oncegate_dynamodb::DynamoDbStore;
use oncegate_servers::DynamoDbServer;

use super::{builder, client, new_table};

/// The most bytes of a result in an item of 400 KB, rounded down.
const RESULT_MOST_BYTES: usize = 400_000;

pub(super) struct OnTable {
    store: DynamoDbStore,
    client: Client,
}

impl OnTable {
    /// A new table, at a server whose clock is this machine's.
    pub(super) async fn at(endpoint: &str) -> Self {
        let made = new_table(endpoint).await;
        let store = builder(endpoint, made.table()).machine_clock();
        Self {
            store: store.connect().await.unwrap(),
            client: client(endpoint),
        }
    }
}

#[async_trait]
impl Bench for OnTable {
    fn store(&self) -> Arc<dyn Store> {
        Arc::new(self.store.clone())
    }

    async fn pass(&self, key: &StoreKey, time: Duration) {
        self.store.pass(key, time).await.unwrap();
    }

    async fn spoil(&self, key: &StoreKey) -> bool {
        let put = self.client.put_item().table_name(self.store.table());
        let put = put
            .item("id", AttributeValue::S(key.as_str().to_owned()))
            .item("state", AttributeValue::S("paused".to_owned()));
        put.send().await.unwrap();
        true
    }

    fn most_result_bytes(&self) -> usize {
        RESULT_MOST_BYTES
    }

    fn key(&self, name: &str) -> StoreKey {
        key(name)
    }

    fn scope(&self, name: &str) -> Scope {
        scope(name)
    }
}

#[async_trait]
impl Subject for OnTable {
    fn store(&self) -> Arc<dyn Store> {
        Bench::store(self)
    }

    fn scope(&self) -> Scope {
        scope("equivalence")
    }

    async fn pass(&self, waits: &[(StoreKey, Duration)]) {
        let passing = waits.iter().map(|(key, time)| self.store.pass(key, *time));
        for passed in join_all(passing).await {
            passed.unwrap();
        }
    }

    async fn plant(&self, records: &[(StoreKey, Record)]) {
        let planting = records
            .iter()
            .map(|(key, record)| self.store.plant(key, record));
        for planted in join_all(planting).await {
            planted.unwrap();
        }
    }
}

// invariant: store-equals-rules
#[tokio::test(flavor = "multi_thread")]
async fn the_store_conforms() {
    let server = DynamoDbServer::start().await;
    conformance(&OnTable::at(&server.endpoint()).await).await;
}

// invariant: store-equals-rules
#[tokio::test(flavor = "multi_thread")]
async fn random_sequences_go_as_the_rules_say() {
    let server = DynamoDbServer::start().await;
    let plan = Plan {
        seed: fastrand::u64(..),
        sequences: sequences(),
        steps: 12,
    };
    let reached = compare(&OnTable::at(&server.endpoint()).await, plan).await;
    let reached = reached.unwrap_or_else(|difference| panic!("{difference}"));
    assert_eq!(reached.missing(), Vec::<&str>::new(), "seed {}", plan.seed);
}

/// Each step of a sequence is a few requests, so they are fewer than for other stores by default.
fn sequences() -> usize {
    let chosen = std::env::var("ONCEGATE_SEQUENCES").ok();
    chosen.map_or(800, |chosen| chosen.parse().unwrap())
}
