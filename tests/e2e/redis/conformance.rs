//! The suite that every store passes.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use oncegate::redis::{RedisBuilder, RedisStore};
use oncegate_core::key::{Digest, Scope, StoreKey};
use oncegate_core::store::Store;
use oncegate_core::testing::conformance::{Bench, conformance};
use oncegate_core::testing::key;
use oncegate_testkit::{Redis, RedisServer};

use crate::hand::{self, Hand};

struct OnRedis {
    store: Arc<RedisStore>,
    hand: Hand,
    scope: Scope,
}

#[async_trait]
impl Bench for OnRedis {
    fn store(&self) -> Arc<dyn Store> {
        Arc::clone(&self.store) as Arc<dyn Store>
    }

    async fn pass(&self, key: &StoreKey, time: Duration) {
        self.hand.pass(&[(key.clone(), time)]).await;
    }

    async fn spoil(&self, key: &StoreKey) -> bool {
        self.hand.spoil(key, b"no record").await;
        true
    }

    fn key(&self, name: &str) -> StoreKey {
        let digest: Digest = key(name).digest();
        StoreKey::new(&self.scope, digest)
    }

    fn scope(&self, name: &str) -> Scope {
        Scope::new(format!("{}-{name}", self.scope.as_str())).unwrap()
    }
}

async fn conforms(redis: &Redis, builder: RedisBuilder) {
    let store = Arc::new(builder.connect().await.unwrap());
    let hand = Hand::on(redis).await.of(&store);
    conformance(&OnRedis {
        store,
        hand,
        scope: hand::scope(),
    })
    .await;
}

// invariant: store-equals-rules
#[tokio::test]
async fn the_store_conforms() {
    let redis = Redis::shared().await;
    conforms(&redis, hand::timeless(redis.url())).await;
    conforms(&redis, hand::timeless(redis.url()).scripts_alone()).await;
    conforms(&redis, hand::timeless(redis.url()).compact(1_000)).await;
}

// invariant: store-equals-rules
#[tokio::test]
async fn the_store_conforms_on_valkey() {
    let valkey = RedisServer::valkey(&[]).await;
    conforms(&valkey, hand::timeless(valkey.url())).await;
    conforms(&valkey, hand::timeless(valkey.url()).compact(1_000)).await;
}
