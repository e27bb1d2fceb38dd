//! A server that is killed while it works: what was confirmed is there.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use oncegate_core::key::StoreKey;
use oncegate_core::record::Token;
use oncegate_core::rules::{Operation, Reply, Verdict};
use oncegate_core::store::Store;
use oncegate_dynamodb::DynamoDbStore;
use oncegate_servers::DynamoDbServer;
use parking_lot::Mutex;
use tokio::task::JoinSet;

use super::{
    LIMIT, apply, builder, claim, complete, granted, new_key, new_table, new_token, until, verdict,
};

const WORKERS: usize = 8;
const KILLS: usize = 3;
/// The number of keys that are completed between two kills.
const EACH: usize = 40;

type Confirmed = Arc<Mutex<BTreeMap<StoreKey, Token>>>;

/// Completes one key after another. A call whose outcome is not known is repeated with its token.
async fn work(store: DynamoDbStore, confirmed: Confirmed) {
    loop {
        let key = new_key();
        let token = new_token();
        until_answered(&store, &key, claim(token)).await;
        let completed = until_answered(&store, &key, complete(token, "done")).await;
        // A server that has lost the claim would say that it was recreated.
        assert_eq!(completed, Reply::Applied { recreated: false });
        confirmed.lock().insert(key, token);
    }
}

async fn until_answered(store: &DynamoDbStore, key: &StoreKey, operation: Operation) -> Reply {
    let deadline = Instant::now() + LIMIT;
    loop {
        match apply(store, key, operation.clone()).await {
            Ok(reply) => return reply,
            Err(error) if error.is_away() && Instant::now() < deadline => {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            Err(error) => panic!("{error}"),
        }
    }
}

/// A store with this time limit of its calls, in milliseconds.
async fn within(server: &DynamoDbServer, table: &str, limit_ms: u64) -> DynamoDbStore {
    let store = builder(&server.endpoint(), table);
    let store = store.response_timeout(Duration::from_millis(limit_ms));
    store.connect().await.unwrap()
}

// invariant: durability-before-ack
#[tokio::test(flavor = "multi_thread")]
async fn what_was_confirmed_outlives_a_killed_server() {
    let mut server = DynamoDbServer::start().await;
    let made = new_table(&server.endpoint()).await;
    let store = within(&server, made.table(), 2_000).await;
    let patient = within(&server, made.table(), 60_000).await;
    let confirmed = Confirmed::default();
    let mut workers = JoinSet::new();
    for _ in 0..WORKERS {
        workers.spawn(work(store.clone(), Arc::clone(&confirmed)));
    }
    for kill in 1..=KILLS {
        until("keys to be completed", async || {
            let count = confirmed.lock().len();
            if count >= kill * EACH {
                Ok(())
            } else {
                Err(count.to_string())
            }
        })
        .await;
        server.kill();
        server.start_again().await;
    }
    workers.abort_all();
    while let Some(ended) = workers.join_next().await {
        let error = ended.unwrap_err();
        assert!(error.is_cancelled(), "{error}");
    }
    let confirmed = std::mem::take(&mut *confirmed.lock());
    let keys: Vec<StoreKey> = confirmed.keys().cloned().collect();
    for (key, known) in keys.iter().zip(patient.prefetch(keys.clone()).await) {
        assert!(matches!(known, Ok(Some(_))), "{key}: {known:?}");
    }
    let (key, _) = confirmed.first_key_value().unwrap();
    let again = verdict(apply(&patient, key, claim(new_token())).await);
    assert!(matches!(again, Verdict::Completed { .. }));
    granted(apply(&patient, &new_key(), claim(new_token())).await);
}
