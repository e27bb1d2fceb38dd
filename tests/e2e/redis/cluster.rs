//! A cluster: the spread of its keys, and slots that move.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use oncegate::redis::RedisStore;
use oncegate_core::key::{Digest, Scope, StoreKey};
use oncegate_core::record::Token;
use oncegate_core::rules::{Operation, Reply, Verdict};
use oncegate_core::store::{Command, Store, StoreError};
use oncegate_core::testing::conformance::{Bench, conformance};
use oncegate_testkit::{RedisCluster, until};

use crate::faults::until_answered;
use crate::hand::{self, Hand, apply, claim, complete, key, scope, token};

pub(crate) const HELD: Reply = Reply::Applied { recreated: false };
pub(crate) const LIMIT: Duration = Duration::from_secs(240);

pub(crate) fn extend(token: Token) -> Operation {
    Operation::Extend {
        token,
        lease: Duration::from_secs(60),
    }
}

pub(crate) fn is_granted(reply: &Result<Reply, StoreError>) -> bool {
    matches!(
        reply,
        Ok(Reply::Verdict {
            verdict: Verdict::Granted(_),
            ..
        })
    )
}

pub(crate) fn completed(result: &'static [u8]) -> Reply {
    Reply::Verdict {
        verdict: Verdict::Completed {
            result: result.into(),
        },
        uncompared: false,
    }
}

/// A hand on each node.
pub(crate) async fn hands(cluster: &mut RedisCluster) -> Vec<Hand> {
    let mut hands = Vec::new();
    for number in 0..6 {
        hands.push(Hand::on(cluster.node(number)).await);
    }
    hands
}

pub(crate) async fn slot_of(hand: &Hand, key: &StoreKey) -> u16 {
    hand.ask(&["CLUSTER", "KEYSLOT", key.as_str()]).await
}

/// The primary that has a slot before any moves: 16,384 is no multiple of three.
pub(crate) fn shard_of(slot: u16) -> usize {
    (0..3)
        .rev()
        .find(|shard| usize::from(slot) >= shard * 16_384 / 3)
        .unwrap()
}

/// Keys by their slots: the slot with the most of them, and those.
async fn keys_of_one_slot(hand: &Hand, scope: &Scope) -> (u16, Vec<StoreKey>) {
    let mut by_slot: BTreeMap<u16, Vec<StoreKey>> = BTreeMap::new();
    for number in 0..4_000 {
        let key = key(scope, number);
        by_slot
            .entry(slot_of(hand, &key).await)
            .or_default()
            .push(key);
    }
    by_slot
        .into_iter()
        .max_by_key(|(_, keys)| keys.len())
        .unwrap()
}

struct OnCluster {
    store: Arc<RedisStore>,
    primaries: Vec<Hand>,
    scope: Scope,
}

#[async_trait]
impl Bench for OnCluster {
    fn store(&self) -> Arc<dyn Store> {
        Arc::clone(&self.store) as Arc<dyn Store>
    }

    async fn pass(&self, key: &StoreKey, time: Duration) {
        self.primaries[self.owner(key).await]
            .pass(&[(key.clone(), time)])
            .await;
    }

    async fn spoil(&self, key: &StoreKey) -> bool {
        self.primaries[self.owner(key).await]
            .spoil(key, b"no record")
            .await;
        true
    }

    fn key(&self, name: &str) -> StoreKey {
        let digest: Digest = oncegate_core::testing::key(name).digest();
        StoreKey::new(&self.scope, digest)
    }

    fn scope(&self, name: &str) -> Scope {
        Scope::new(format!("{}-{name}", self.scope.as_str())).unwrap()
    }
}

impl OnCluster {
    async fn owner(&self, key: &StoreKey) -> usize {
        shard_of(slot_of(&self.primaries[0], key).await)
    }
}

#[tokio::test]
async fn the_store_conforms_on_a_cluster() {
    let mut cluster = RedisCluster::start().await;
    let store = Arc::new(hand::timeless(&cluster.url()).connect().await.unwrap());
    let primaries = hands(&mut cluster).await.into_iter().take(3).collect();
    conformance(&OnCluster {
        store,
        primaries,
        scope: hand::scope(),
    })
    .await;
}

#[tokio::test]
async fn keys_spread_over_nodes_and_a_batch_is_a_pipeline_per_node() {
    let mut cluster = RedisCluster::start().await;
    // One of the nodes is enough to find the others.
    let url = cluster.url().split(',').next().unwrap().to_owned();
    let store = RedisStore::connect(&url).await.unwrap();
    let hands = hands(&mut cluster).await;
    let scope = scope();
    let owner = token();
    let calls = async || {
        let mut calls = Vec::new();
        for hand in &hands[..3] {
            calls.push(hand.info("stats", "total_reads_processed").await);
        }
        calls
    };
    let before = calls().await;
    let claims = (0..240).map(|number| Command {
        key: key(&scope, number),
        operation: claim(owner),
    });
    assert!(store.execute(claims.collect()).await.iter().all(is_granted));
    let reads: Vec<u64> = calls()
        .await
        .iter()
        .zip(&before)
        .map(|(after, before)| after - before)
        .collect();
    let mut parts = BTreeMap::new();
    for (number, hand) in hands[..3].iter().enumerate() {
        let keys: usize = hand.ask(&["DBSIZE"]).await;
        assert!(
            (40..120).contains(&keys),
            "node {number} has {keys} of 240 keys"
        );
        // Some 80 commands in a pipeline, which the server reads in a few pieces of 16 KiB; and
        // INFO.
        assert!(
            reads[number] < 20,
            "node {number} read {} times",
            reads[number]
        );
    }
    for number in 0..240 {
        let key = key(&scope, number);
        let node = shard_of(slot_of(&hands[0], &key).await);
        assert_eq!(
            *parts.entry(node).or_insert(store.shard(&key)),
            store.shard(&key)
        );
    }
    assert_eq!(
        parts
            .values()
            .collect::<std::collections::BTreeSet<_>>()
            .len(),
        3,
        "three parts fail apart"
    );
    let checkup = store.check().await.unwrap();
    assert!(checkup.store.contains("3 primaries"), "{checkup:?}");
}

// invariant: loss-checks-that-spread
#[tokio::test]
async fn a_watch_for_losses_asks_each_node_about_its_own_keys() {
    let mut cluster = RedisCluster::start().await;
    let builder = RedisStore::builder(&cluster.url()).watch_interval(Duration::from_millis(20));
    let store = builder.connect().await.unwrap();
    let hands = hands(&mut cluster).await;
    let scope = scope();
    let mut completed = std::collections::BTreeSet::new();
    let mut number = 0;
    while completed.len() < 3 {
        number += 1;
        let key = key(&scope, number);
        until_answered(&store, &key, &complete(token(), b"")).await;
        completed.insert(store.shard(&key));
    }
    for (number, hand) in hands[..3].iter().enumerate() {
        let before = cluster.node(number).times_looked_at().await;
        until("some checks", LIMIT, async || {
            let checks = cluster.node(number).times_looked_at().await - before;
            if checks > 60 {
                Ok(())
            } else {
                Err(format!("{checks} checks"))
            }
        })
        .await;
        assert_eq!(
            hand.errors("MOVED").await,
            0,
            "node {number} was asked for the keys of others"
        );
    }
    let () = hands[1].ask(&["FLUSHALL"]).await;
    until("the loss to be noticed", LIMIT, async || {
        store.loss().map(drop).ok_or("it is not".to_owned())
    })
    .await;
}

// invariant: failover-under-load
#[tokio::test]
async fn a_slot_that_moves_in_the_middle_of_a_lease_loses_nothing() {
    let mut cluster = RedisCluster::start().await;
    let store = RedisStore::builder(&cluster.url())
        .scripts_alone()
        .connect()
        .await
        .unwrap();
    let hands = hands(&mut cluster).await;
    let scope = scope();
    let owner = token();
    let (slot, keys) = keys_of_one_slot(&hands[0], &scope).await;
    let (running, fresh) = keys.split_first().unwrap();
    assert!(!fresh.is_empty());
    let others: Vec<StoreKey> = (10_000..10_300).map(|number| key(&scope, number)).collect();
    let from = cluster.primary_of(slot).await;
    let to = (from + 1) % 3;
    assert!(is_granted(&apply(&store, running, claim(owner)).await));

    cluster.begin_move(slot, from, to).await;
    // The target has no script, and gets the keys by ASK alone.
    let () = hands[to].ask(&["SCRIPT", "FLUSH"]).await;
    let batch = fresh.iter().chain(&others).map(|key| Command {
        key: key.clone(),
        operation: claim(owner),
    });
    let replies = store.execute(batch.collect()).await;
    assert!(
        replies.iter().all(is_granted),
        "{:?}",
        replies.iter().find(|reply| !is_granted(reply))
    );
    let kept: Vec<String> = hands[to].ask(&["KEYS", "*"]).await;
    assert!(
        fresh.iter().all(|key| kept.contains(&key.to_string())),
        "the new keys are where they will stay"
    );
    assert_eq!(
        apply(&store, running, extend(owner)).await.unwrap(),
        HELD,
        "the old one still is where it was"
    );

    assert_eq!(cluster.move_keys(slot, from, to).await, 1);
    assert_eq!(apply(&store, running, extend(owner)).await.unwrap(), HELD);
    assert_eq!(
        apply(&store, running, complete(owner, b"moved"))
            .await
            .unwrap(),
        HELD
    );

    cluster.end_move(slot, from, to).await;
    for key in fresh {
        assert_eq!(
            apply(&store, key, complete(owner, b"asked")).await.unwrap(),
            HELD
        );
    }
    assert_eq!(
        apply(&store, running, claim(token())).await.unwrap(),
        completed(b"moved")
    );
    // From now on no call is redirected.
    let redirected = async || {
        let moved: String = hands[from].ask(&["INFO", "errorstats"]).await;
        moved
            .lines()
            .find(|line| line.starts_with("errorstat_MOVED"))
            .map(str::to_owned)
    };
    let before = redirected().await;
    assert_eq!(
        apply(&store, &fresh[0], claim(token())).await.unwrap(),
        completed(b"asked")
    );
    assert_eq!(redirected().await, before);
}

// invariant: outage-of-one-key
#[tokio::test]
async fn a_slot_left_half_moved_or_without_a_node_fails_its_keys_only() {
    let settings = ["--cluster-require-full-coverage", "no"];
    let mut cluster = RedisCluster::start_with(&settings).await;
    let store = RedisStore::connect(&cluster.url()).await.unwrap();
    let hands = hands(&mut cluster).await;
    let scope = scope();
    let owner = token();
    let (slot, keys) = keys_of_one_slot(&hands[0], &scope).await;
    let (known, fresh) = keys.split_first().unwrap();
    let others: Vec<StoreKey> = (10_000..10_300).map(|number| key(&scope, number)).collect();
    let shard = store.shard(known);
    assert!(others.iter().any(|other| store.shard(other) == shard));
    let batch = || {
        let all = fresh.iter().chain(&others).map(|key| Command {
            key: key.clone(),
            operation: claim(owner),
        });
        all.collect::<Vec<Command>>()
    };
    let fails_alone = async |what: &str| {
        let replies = store.execute(batch()).await;
        let (new, rest) = replies.split_at(fresh.len());
        for (reply, key) in new.iter().zip(fresh) {
            let Err(StoreError::KeyUnavailable { key: named, reason }) = reply else {
                panic!("{what}: {reply:?}")
            };
            assert!(named == key && reason.contains("slot"), "{what}: {reason}");
        }
        for reply in rest {
            assert!(is_granted(reply), "{what}: {reply:?}");
        }
        let read = store.read(vec![fresh[0].clone()]).await.remove(0);
        assert!(
            matches!(read, Err(StoreError::KeyUnavailable { .. })),
            "{what}: {read:?}"
        );
    };
    assert!(is_granted(&apply(&store, known, claim(owner)).await));
    let from = cluster.primary_of(slot).await;
    cluster.begin_half_move(slot, from, (from + 1) % 3).await;
    fails_alone("half moved").await;
    assert_eq!(
        apply(&store, known, extend(owner)).await.unwrap(),
        HELD,
        "what is there is served"
    );

    // A slot that no node has is no part of the shard of another one.
    cluster.remove_slot(slot, from).await;
    until("the slot to be known as lost", LIMIT, async || {
        let _ = store.read(vec![known.clone()]).await;
        if (0..3).any(|node| store.shard(known) == node) {
            Err("it has a shard".to_owned())
        } else {
            Ok(())
        }
    })
    .await;
    fails_alone("without a node").await;
    cluster.add_slot(slot, from).await;
    for key in fresh {
        assert!(is_granted(&Ok(
            until_answered(&store, key, &claim(owner)).await
        )));
    }
}

#[tokio::test]
async fn the_fewest_rights_are_enough_in_a_cluster_too() {
    let mut cluster = RedisCluster::start().await;
    let hands = hands(&mut cluster).await;
    let scope = scope();
    let owner = token();
    let rules = RedisStore::connect(&cluster.url())
        .await
        .unwrap()
        .acl_rules(&scope);
    for hand in &hands {
        let words = ["ACL", "SETUSER", "billing", "on", ">right"]
            .into_iter()
            .chain(rules.split(' '));
        let () = hand.ask(&words.collect::<Vec<&str>>()).await;
    }
    let url = cluster
        .url()
        .replace("redis+cluster://", "redis+cluster://billing:right@");
    let store = RedisStore::connect(&url).await.unwrap();
    store.check().await.unwrap();
    store.describe(&scope, None, "descriptor").await.unwrap();
    let (slot, keys) = keys_of_one_slot(&hands[0], &scope).await;
    let from = cluster.primary_of(slot).await;
    cluster.begin_move(slot, from, (from + 1) % 3).await;
    for key in &keys {
        assert!(
            is_granted(&apply(&store, key, claim(owner)).await),
            "by ASKING"
        );
    }
}

#[tokio::test]
async fn who_names_the_wrong_kind_of_server_is_told_so() {
    let mut cluster = RedisCluster::start().await;
    let single = RedisStore::connect(cluster.node(0).url()).await.unwrap();
    let scope = scope();
    let mut refusals = Vec::new();
    for number in 0..30 {
        refusals.extend(
            apply(&single, &key(&scope, number), claim(token()))
                .await
                .err(),
        );
    }
    assert!(!refusals.is_empty());
    for refusal in refusals {
        assert!(
            refusal.class() == "refused" && refusal.to_string().contains("redis+cluster://"),
            "{refusal}"
        );
    }
    let server = oncegate_testkit::Redis::shared().await;
    let refusal = RedisStore::connect(&server.url().replace("redis://", "redis+cluster://"))
        .await
        .unwrap_err();
    assert!(
        refusal.class() == "refused" && refusal.to_string().contains("redis://"),
        "{refusal}"
    );
}
