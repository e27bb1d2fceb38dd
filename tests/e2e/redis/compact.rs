//! Completions in buckets: what they take, what removes them, and what a cluster makes of two keys
//! in one slot.

use std::time::Duration;

use oncegate::redis::RedisStore;
use oncegate_core::key::{Digest, Scope, StoreKey};
use oncegate_core::rules::{Operation, Reply, Verdict};
use oncegate_core::store::{Command, Store, StoreError};
use oncegate_testkit::{Redis, RedisCluster, RedisServer};

use crate::faults::until_answered;
use crate::hand::{Hand, apply, claim, complete, key, scope, timeless, token};

const HELD: Reply = Reply::Applied { recreated: false };

fn completed() -> Reply {
    Reply::Verdict {
        verdict: Verdict::Completed {
            result: b"".as_slice().into(),
        },
        uncompared: false,
    }
}

/// A key as digests are: anywhere.
fn random_key(scope: &Scope) -> StoreKey {
    StoreKey::new(scope, Digest::from_bytes(fastrand::u128(..).to_be_bytes()))
}

async fn complete_some(store: &RedisStore, scope: &Scope, count: usize) -> Vec<StoreKey> {
    let keys: Vec<StoreKey> = (0..count).map(|_| random_key(scope)).collect();
    for some in keys.chunks(5_000) {
        let commands = some.iter().map(|key| Command {
            key: key.clone(),
            operation: complete(token(), b""),
        });
        let replies = store.execute(commands.collect()).await;
        assert!(
            replies
                .iter()
                .all(|reply| matches!(reply, Ok(Reply::Applied { .. })))
        );
    }
    keys
}

#[tokio::test]
async fn a_completed_key_takes_at_most_45_bytes() {
    const KEYS: usize = 200_000;
    for server in [RedisServer::start().await, RedisServer::valkey(&[]).await] {
        let store = RedisStore::builder(server.url())
            .compact(KEYS as u64)
            .connect()
            .await
            .unwrap();
        let hand = Hand::on(&server).await;
        let scope = Scope::new("billing").unwrap();
        let warm_up = complete_some(&store, &Scope::new("warm-up").unwrap(), 1_000).await;
        let before = hand.info("memory", "used_memory").await;
        complete_some(&store, &scope, KEYS).await;
        let bytes = (hand.info("memory", "used_memory").await - before) / KEYS as u64;
        println!("{bytes} bytes per completed key");
        assert!(bytes <= 45, "{bytes} bytes per completed key");
        assert_eq!(
            apply(&store, &warm_up[0], claim(token())).await.unwrap(),
            completed()
        );
    }
}

#[tokio::test]
async fn expired_keys_leave_a_bucket_and_an_unused_bucket_expires() {
    let redis = Redis::shared().await;
    let store = timeless(redis.url()).compact(100).connect().await.unwrap();
    let scope = scope();
    let hand = Hand::on(&redis).await.of(&store);
    let old = complete_some(&store, &scope, 60).await;
    let (_, bucket, _) = store.names(&old[0]).unwrap();
    hand.pass(
        &old.iter()
            .map(|key| (key.clone(), Duration::from_secs(7_200)))
            .collect::<Vec<_>>(),
    )
    .await;
    let new = complete_some(&store, &scope, 40).await;
    let kept: usize = hand.ask(&["HLEN", &bucket]).await;
    assert!(kept < 60, "{kept} of 60 old and 40 new");
    for key in &new {
        assert_eq!(
            apply(&store, key, claim(token())).await.unwrap(),
            completed()
        );
    }
    let again = apply(&store, &old[0], claim(token())).await.unwrap();
    assert!(
        matches!(
            again,
            Reply::Verdict {
                verdict: Verdict::Granted(_),
                ..
            }
        ),
        "{again:?}"
    );
    let left: u64 = hand.ask(&["TTL", &bucket]).await;
    // The retention is an hour; an eighth more, so that the expiry is not written each time.
    assert!((3_500..=4_050).contains(&left), "{left} s");
}

// invariant: compact-record-twice
#[tokio::test]
async fn what_is_over_leaves_its_bucket_when_its_key_is_claimed_again() {
    let redis = Redis::shared().await;
    let store = timeless(redis.url()).compact(100).connect().await.unwrap();
    let scope = scope();
    let hand = Hand::on(&redis).await.of(&store);
    let keys = complete_some(&store, &scope, 2).await;
    let is_in_bucket = async |key: &StoreKey| -> bool {
        let (_, bucket, field) = store.names(key).unwrap();
        let mut exists = redis::cmd("HEXISTS");
        exists
            .arg(bucket)
            .arg(&field)
            .query_async(&mut redis.connection().await)
            .await
            .unwrap()
    };
    hand.pass(
        &keys
            .iter()
            .map(|key| (key.clone(), Duration::from_secs(7_200)))
            .collect::<Vec<_>>(),
    )
    .await;
    assert!(is_in_bucket(&keys[0]).await && is_in_bucket(&keys[1]).await);
    // A claim gives the key a record of its own, and so does a completion with a result whose claim
    // was lost.
    let again = apply(&store, &keys[0], claim(token())).await.unwrap();
    assert!(
        matches!(
            again,
            Reply::Verdict {
                verdict: Verdict::Granted(_),
                ..
            }
        ),
        "{again:?}"
    );
    let recreated = apply(&store, &keys[1], complete(token(), b"result"))
        .await
        .unwrap();
    assert_eq!(recreated, Reply::Applied { recreated: true });
    for key in &keys {
        assert!(!is_in_bucket(key).await);
    }
}

// invariant: compact-record-twice
#[tokio::test]
async fn a_number_of_keys_that_buckets_cannot_hold_is_refused() {
    const MOST: u64 = 838_860_800;
    let redis = Redis::shared().await;
    let by_url = RedisStore::connect(&format!("{}?compact={}", redis.url(), MOST + 1)).await;
    let by_builder = RedisStore::builder(redis.url())
        .compact(MOST + 1)
        .connect()
        .await;
    for refused in [by_url, by_builder] {
        let refused = refused.unwrap_err();
        assert!(
            refused.class() == "refused" && refused.to_string().contains("838860800"),
            "{refused}"
        );
    }
    RedisStore::builder(redis.url())
        .compact(MOST)
        .connect()
        .await
        .unwrap();
}

// invariant: compact-layout-changed
#[tokio::test]
async fn a_scope_is_opened_as_it_was_kept_or_not_at_all() {
    let redis = Redis::shared().await;
    let plain = RedisStore::builder(redis.url());
    let compact = RedisStore::builder(redis.url()).compact(1_000);
    let plain = plain.connect().await.unwrap();
    let other = compact.clone().compact(100_000).connect().await.unwrap();
    let compact = compact.connect().await.unwrap();
    let kept_plain = scope();
    let kept_compact = scope();
    assert_eq!(plain.describe(&kept_plain, None, "{}").await.unwrap(), "{}");
    assert_eq!(
        compact.describe(&kept_compact, None, "{}").await.unwrap(),
        "{}"
    );
    assert_eq!(
        compact.descriptor(&kept_compact).await.unwrap().as_deref(),
        Some("{}")
    );
    assert_eq!(
        compact
            .describe(&kept_compact, Some("{}"), "{1}")
            .await
            .unwrap(),
        "{1}"
    );
    let by_url = RedisStore::connect(&format!("{}?compact=1000", redis.url()))
        .await
        .unwrap();
    assert_eq!(
        by_url.descriptor(&kept_compact).await.unwrap().as_deref(),
        Some("{1}")
    );
    for (store, scope) in [
        (&compact, &kept_plain),
        (&by_url, &kept_plain),
        (&plain, &kept_compact),
        (&other, &kept_compact),
    ] {
        for expected in [None, Some("{}"), Some("{1}")] {
            let refused = store.describe(scope, expected, "{}").await.unwrap_err();
            assert!(
                refused.class() == "refused" && refused.to_string().contains("compact("),
                "{refused}"
            );
        }
        assert_eq!(
            store.descriptor(scope).await.unwrap_err().class(),
            "refused"
        );
    }
}

#[tokio::test]
async fn what_is_no_completion_in_a_bucket_is_an_error_and_stays() {
    let redis = Redis::shared().await;
    let store = timeless(redis.url())
        .compact(1_000)
        .connect()
        .await
        .unwrap();
    let scope = scope();
    let hand = Hand::on(&redis).await;
    let owner = token();
    for (number, spoilt) in (0..).zip(["", "nine byte", "eleven byte", "eighteen bytes, eh"]) {
        let key = random_key(&scope);
        let (_, bucket, field) = store.names(&key).unwrap();
        let mut spoil = redis::cmd("HSET");
        spoil.arg(&bucket).arg(&field).arg(spoilt);
        let () = spoil
            .query_async(&mut redis.connection().await)
            .await
            .unwrap();
        let before: Vec<u8> = hand.ask(&["DUMP", &bucket]).await;
        for operation in [
            claim(owner),
            complete(owner, b""),
            Operation::Extend {
                token: owner,
                lease: Duration::from_secs(1),
            },
        ] {
            let answer = apply(&store, &key, operation).await;
            assert!(
                matches!(answer, Err(StoreError::Unreadable { .. })),
                "{number}: {answer:?}"
            );
        }
        let snapshot = store.read(vec![key]).await.remove(0);
        assert!(
            matches!(snapshot, Err(StoreError::Unreadable { .. })),
            "{number}: {snapshot:?}"
        );
        assert_eq!(hand.ask::<Vec<u8>>(&["DUMP", &bucket]).await, before);
    }
    let key = random_key(&scope);
    let (_, bucket, _) = store.names(&key).unwrap();
    let () = hand.ask(&["SET", &bucket, "foreign"]).await;
    let answer = apply(&store, &key, claim(owner)).await;
    assert!(
        matches!(answer, Err(StoreError::Unreadable { .. })),
        "{answer:?}"
    );
}

#[tokio::test]
async fn the_rights_for_buckets_suffice_and_each_is_missed_at_once() {
    let server = RedisServer::start().await;
    let hand = Hand::on(&server).await;
    let scope = scope();
    let rules = RedisStore::builder(server.url())
        .compact(1_000)
        .connect()
        .await
        .unwrap()
        .acl_rules(&scope);
    let url = server.url().replace("redis://", "redis://billing:right@");
    let rights = rules
        .split(' ')
        .filter(|rule| rule.starts_with("+h") || ["+del", "+pexpireat"].contains(rule));
    for missing in rights.chain(["none"]) {
        let granted = rules.split(' ').filter(|rule| *rule != missing);
        let words = ["ACL", "SETUSER", "billing", "reset", "on", ">right"]
            .into_iter()
            .chain(granted);
        let () = hand.ask(&words.collect::<Vec<&str>>()).await;
        let () = hand.ask(&["FLUSHALL"]).await;
        let store = RedisStore::builder(&url)
            .compact(1_000)
            .connect()
            .await
            .unwrap();
        match store.describe(&scope, None, "descriptor").await {
            Ok(_) => assert_eq!(missing, "none"),
            Err(refused) => {
                assert!(
                    missing != "none" && refused.to_string().contains(&rules),
                    "{missing}: {refused}"
                );
            }
        }
    }
}

#[tokio::test]
async fn only_a_forgotten_bucket_raises_an_alarm() {
    let server = RedisServer::start().await;
    let builder = RedisStore::builder(server.url()).compact(1_000);
    let store = builder
        .watch_interval(Duration::from_millis(20))
        .connect()
        .await
        .unwrap();
    let hand = Hand::on(&server).await;
    let scope = scope();
    let owner = token();
    let key = random_key(&scope);
    assert_eq!(
        until_answered(&store, &key, &complete(owner, b"")).await,
        Reply::Applied { recreated: true }
    );
    let asked = async || hand.info("stats", "total_commands_processed").await;
    let before = asked().await;
    oncegate_testkit::until("some looks", Duration::from_secs(60), async || {
        if asked().await > before + 100 {
            Ok(())
        } else {
            Err("none yet".to_owned())
        }
    })
    .await;
    assert_eq!(store.loss(), None);
    let () = hand.ask(&["FLUSHALL"]).await;
    oncegate_testkit::until(
        "the loss to be noticed",
        Duration::from_secs(60),
        async || store.loss().ok_or_else(|| "nothing yet".to_owned()),
    )
    .await;
}

// invariant: compact-lease-in-a-move
#[tokio::test]
async fn heartbeats_go_on_while_their_slot_moves() {
    let mut cluster = RedisCluster::start().await;
    let store = RedisStore::builder(&cluster.url())
        .compact(100)
        .connect()
        .await
        .unwrap();
    let running = key(&scope(), 1);
    let owner = token();
    until_answered(&store, &running, &claim(owner)).await;
    // There is no bucket yet, so a call with both keys is refused during the whole move.
    let (_, bucket, _) = store.names(&running).unwrap();
    let slot = cluster.slot_of(&bucket).await;
    let from = cluster.primary_of(slot).await;
    let to = (from + 1) % 3;
    let extend = Operation::Extend {
        token: owner,
        lease: Duration::from_secs(60),
    };
    cluster.begin_move(slot, from, to).await;
    assert_eq!(apply(&store, &running, extend.clone()).await.unwrap(), HELD);
    assert_eq!(cluster.move_keys(slot, from, to).await, 1);
    assert_eq!(apply(&store, &running, extend.clone()).await.unwrap(), HELD);
    let stranger = Operation::Extend {
        token: token(),
        lease: Duration::from_secs(60),
    };
    let unclear = apply(&store, &running, stranger).await;
    assert!(
        matches!(unclear, Err(StoreError::KeyUnavailable { .. })),
        "{unclear:?}"
    );
    cluster.end_move(slot, from, to).await;
    assert_eq!(until_answered(&store, &running, &extend).await, HELD);
    assert_eq!(
        until_answered(&store, &running, &complete(owner, b"")).await,
        HELD
    );
    // In its bucket, the end of the own attempt is no lost lease.
    assert_eq!(until_answered(&store, &running, &extend).await, HELD);
}

#[tokio::test]
async fn keys_of_a_slot_that_moves_wait_until_it_has_moved() {
    let mut cluster = RedisCluster::start().await;
    let store = RedisStore::builder(&cluster.url())
        .compact(100)
        .connect()
        .await
        .unwrap();
    let scope = scope();
    let owner = token();
    // All of them share the one bucket, and so the slot.
    let [done, running, fresh] = [1, 2, 3].map(|number| key(&scope, number));
    for key in [&done, &running] {
        until_answered(&store, key, &claim(owner)).await;
    }
    assert_eq!(
        until_answered(&store, &done, &complete(owner, b"")).await,
        HELD
    );
    let hand = Hand::on(cluster.node(0)).await;
    let (_, bucket, _) = store.names(&done).unwrap();
    let slot: u16 = hand.ask(&["CLUSTER", "KEYSLOT", &bucket]).await;
    let from = cluster.primary_of(slot).await;
    let to = (from + 1) % 3;
    cluster.begin_move(slot, from, to).await;
    let waits = apply(&store, &fresh, claim(owner)).await;
    assert!(
        matches!(&waits, Err(StoreError::KeyUnavailable { reason, .. }) if reason.contains("being moved")),
        "{waits:?}"
    );
    cluster.move_keys(slot, from, to).await;
    cluster.end_move(slot, from, to).await;
    let granted = until_answered(&store, &fresh, &claim(owner)).await;
    assert!(
        matches!(
            granted,
            Reply::Verdict {
                verdict: Verdict::Granted(_),
                ..
            }
        ),
        "{granted:?}"
    );
    assert_eq!(
        until_answered(&store, &done, &claim(token())).await,
        completed()
    );
    assert_eq!(
        until_answered(&store, &running, &complete(owner, b"")).await,
        HELD
    );
}
