//! A cluster that lacks a node: its shard, a replica, or the whole.

use std::time::Duration;

use futures_util::future::join_all;
use oncegate::redis::{Durability, RedisStore};
use oncegate_core::key::StoreKey;
use oncegate_core::rules::{Operation, Reply};
use oncegate_core::store::{Command, Store, StoreError};
use oncegate_testkit::{RedisCluster, until};

use crate::cluster::{HELD, LIMIT, completed, extend, hands, is_granted, shard_of, slot_of};
use crate::faults::until_answered;
use crate::hand::{Hand, apply, claim, complete, key, scope, token};

/// Waits until a replica has everything that its primary has.
async fn has_everything(primary: &Hand, replica: &Hand) {
    until("the replica to have everything", LIMIT, async || {
        let offsets = [
            primary.info("replication", "master_repl_offset").await,
            replica.info("replication", "slave_repl_offset").await,
        ];
        if offsets[0] == offsets[1] {
            Ok(())
        } else {
            Err(format!("{offsets:?}"))
        }
    })
    .await;
}

// invariant: shard-down
#[tokio::test]
async fn a_shard_that_is_down_fails_its_own_keys_until_the_takeover() {
    let mut cluster = RedisCluster::start().await;
    let store = RedisStore::connect(&cluster.url()).await.unwrap();
    let hands = hands(&mut cluster).await;
    let scope = scope();
    let owner = token();
    let keys: Vec<StoreKey> = (0..300).map(|number| key(&scope, number)).collect();
    let claims = keys.iter().map(|key| Command {
        key: key.clone(),
        operation: claim(owner),
    });
    assert!(store.execute(claims.collect()).await.iter().all(is_granted));
    // So that the replica has them all, and nothing is lost by its taking over.
    has_everything(&hands[0], &hands[3]).await;
    let part = |key: &StoreKey| store.shard(key);
    let mut down = None;
    for key in &keys {
        if shard_of(slot_of(&hands[0], key).await) == 0 {
            down.get_or_insert(part(key));
        }
    }
    let down = down.unwrap();

    cluster.node(0).kill();
    let extends = || {
        keys.iter()
            .map(|key| Command {
                key: key.clone(),
                operation: extend(owner),
            })
            .collect()
    };
    let parts: Vec<u64> = keys.iter().map(part).collect();
    let replies = store.execute(extends()).await;
    for (part, reply) in parts.iter().zip(&replies) {
        match reply {
            Ok(reply) => assert_eq!(*reply, HELD),
            Err(error) => {
                assert_eq!(*part, down, "{error}");
                assert!(
                    matches!(error.class(), "unknown" | "unavailable"),
                    "{error}"
                );
            }
        }
    }
    assert!(
        replies.iter().any(Result::is_err),
        "its keys have nowhere to go"
    );

    // The replica takes over with the leases that it has.
    for key in &keys {
        assert_eq!(
            until_answered(&store, key, &complete(owner, b"done")).await,
            HELD,
            "{key}"
        );
    }
    assert_ne!(cluster.primary_of(0).await, 0);
    // The old primary comes back as a replica, and no call is misdirected.
    cluster.node(0).start_again().await;
    let again = join_all(
        keys.iter()
            .map(|key| until_answered_owned(&store, key, claim(token()))),
    )
    .await;
    assert!(again.iter().all(|reply| *reply == completed(b"done")));
}

async fn until_answered_owned(store: &RedisStore, key: &StoreKey, operation: Operation) -> Reply {
    until_answered(store, key, &operation).await
}

#[tokio::test]
async fn a_cluster_down_as_a_whole_answers_nothing_and_resumes() {
    // A node must come back with all that it has answered: see `RedisServer::synced`.
    let settings = [
        "--cluster-require-full-coverage",
        "yes",
        "--appendfsync",
        "always",
    ];
    let mut cluster = RedisCluster::start_with(&settings).await;
    let store = RedisStore::connect(&cluster.url()).await.unwrap();
    let hands = hands(&mut cluster).await;
    let scope = scope();
    let owner = token();
    // A key of a shard that keeps running.
    let mut running = key(&scope, 0);
    for number in 1.. {
        if shard_of(slot_of(&hands[1], &running).await) > 0 {
            break;
        }
        running = key(&scope, number);
    }
    assert!(is_granted(&apply(&store, &running, claim(owner)).await));
    // No replica is left that could take over.
    cluster.node(3).kill();
    cluster.node(0).kill();
    until("the cluster to go down", LIMIT, async || {
        match apply(&store, &running, claim(token())).await {
            Err(StoreError::Unavailable { reason }) if reason.contains("the cluster is down") => {
                Ok(())
            }
            other => Err(format!("{other:?}")),
        }
    })
    .await;
    let snapshot = store.read(vec![running.clone()]).await.remove(0);
    assert!(
        matches!(snapshot, Err(StoreError::Unavailable { .. })),
        "{snapshot:?}"
    );
    cluster.node(0).start_again().await;
    assert_eq!(
        until_answered(&store, &running, &complete(owner, b"done")).await,
        HELD
    );
}

#[tokio::test]
async fn on_a_cluster_a_record_counts_once_its_shards_replica_has_it() {
    let mut cluster = RedisCluster::start().await;
    let level = Durability::Replicas {
        count: 1,
        timeout: Duration::from_millis(300),
    };
    let store = RedisStore::builder(&cluster.url())
        .durability(level)
        .connect()
        .await
        .unwrap();
    let hands = hands(&mut cluster).await;
    let scope = scope();
    let owner = token();
    let keys: Vec<StoreKey> = (0..60).map(|number| key(&scope, number)).collect();
    for key in &keys {
        assert!(is_granted(&Ok(
            until_answered(&store, key, &claim(owner)).await
        )));
    }
    cluster.node(3).kill();
    let batch = keys.iter().map(|key| Command {
        key: key.clone(),
        operation: complete(owner, b"done"),
    });
    let replies = store.execute(batch.collect()).await;
    let mut without_replica = 0;
    for (key, reply) in keys.iter().zip(replies) {
        if shard_of(slot_of(&hands[1], key).await) == 0 {
            without_replica += 1;
            assert!(
                matches!(reply, Err(StoreError::Unknown { .. })),
                "{reply:?}"
            );
        } else {
            assert_eq!(
                until_answered(&store, key, &complete(owner, b"done")).await,
                HELD,
                "{reply:?}"
            );
        }
    }
    assert!((1..keys.len()).contains(&without_replica));
    cluster.node(3).start_again().await;
    for key in &keys {
        assert_eq!(
            until_answered(&store, key, &claim(token())).await,
            completed(b"done")
        );
    }
}
