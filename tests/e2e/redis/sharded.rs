//! A sharded server behind a proxy that lets it look like a single one.

use oncegate::redis::RedisStore;
use oncegate_core::key::Scope;
use oncegate_core::record::Token;
use oncegate_core::rules::{Operation, Reply, Verdict};
use oncegate_core::store::{Command, Store};
use oncegate_testkit::{Proxy, RedisCluster};

use crate::hand::{Hand, claim, complete, key, scope, token};

async fn replies(
    store: &RedisStore,
    scope: &Scope,
    first: u128,
    operation: &Operation,
) -> Vec<Reply> {
    let command = |number| Command {
        key: key(scope, number),
        operation: operation.clone(),
    };
    let answers = store
        .execute((first..first + 50).map(command).collect())
        .await;
    answers.into_iter().map(Result::unwrap).collect()
}

async fn claim_and_complete(store: &RedisStore, scope: &Scope, first: u128) {
    let owner: Token = token();
    for reply in replies(store, scope, first, &claim(owner)).await {
        assert!(
            matches!(
                reply,
                Reply::Verdict {
                    verdict: Verdict::Granted(_),
                    ..
                }
            ),
            "{reply:?}"
        );
    }
    for reply in replies(store, scope, first, &complete(owner, b"done")).await {
        assert_eq!(reply, Reply::Applied { recreated: false });
    }
}

// invariant: hidden-shards
#[tokio::test]
async fn after_one_crossslot_refusal_each_key_is_asked_for_alone() {
    let mut cluster = RedisCluster::start_single().await;
    let proxy = Proxy::before(cluster.node(0)).await;
    proxy.rewrite("cluster_enabled:1", "cluster_enabled:0");
    let store = RedisStore::connect(&proxy.url()).await.unwrap();
    let hand = Hand::on(cluster.node(0)).await;
    let scope = scope();
    claim_and_complete(&store, &scope, 0).await;
    assert_eq!(
        hand.errors("CROSSSLOT").await,
        1,
        "the claims of the first batch were sent as one call"
    );
    claim_and_complete(&store, &scope, 100).await;
    assert_eq!(hand.errors("CROSSSLOT").await, 1);
}
