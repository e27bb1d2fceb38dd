//! Levels of durability: what counts, and what does not count yet.

use std::time::Duration;

use oncegate::redis::{Durability, RedisStore};
use oncegate_core::key::StoreKey;
use oncegate_core::rules::{Operation, Reply, Verdict};
use oncegate_core::store::{Command, Store, StoreError};
use oncegate_testkit::{ProxyMode as Mode, RedisPair, RedisServer, until};

use crate::faults::unwatched;
use crate::hand::{Hand, apply, claim, complete, key, scope, token};
use crate::lost_replies::WAYS;

const HELD: Reply = Reply::Applied { recreated: false };
const LIMIT: Duration = Duration::from_secs(240);
/// Long enough for a busy machine, and short enough to be waited for.
const PATIENCE: Duration = Duration::from_millis(300);

async fn pair() -> RedisPair {
    RedisPair::start(&[]).await
}

/// A store for which nothing counts that the replica does not have.
async fn waiting_store(pair: &RedisPair) -> RedisStore {
    let level = Durability::Replicas {
        count: 1,
        timeout: PATIENCE,
    };
    RedisStore::builder(pair.primary.url())
        .durability(level)
        .connect()
        .await
        .unwrap()
}

fn is_unknown<T: std::fmt::Debug>(answer: &Result<T, StoreError>) -> bool {
    matches!(answer, Err(StoreError::Unknown { .. }))
}

async fn until_held(store: &RedisStore, key: &StoreKey, operation: Operation) -> Reply {
    until("the replica to confirm", LIMIT, async || {
        apply(store, key, operation.clone())
            .await
            .map_err(|error| error.to_string())
    })
    .await
}

// invariant: durability-before-ack
#[tokio::test]
async fn what_a_replica_does_not_have_does_not_count_even_when_found() {
    does_not_count(pair().await).await;
}

/// There WAIT speaks for the writes of its own connection alone, and Redis 7.0 speaks for all of
/// them: only there is it seen that what was found settled is written once more.
// invariant: durability-before-ack
#[tokio::test]
async fn what_a_replica_of_valkey_does_not_have_does_not_count_either() {
    does_not_count(RedisPair::of(RedisServer::valkey, &[]).await).await;
}

async fn does_not_count(pair: RedisPair) {
    let store = waiting_store(&pair).await;
    let plain = RedisStore::connect(pair.primary.url()).await.unwrap();
    let scope = scope();
    let owner = token();
    let [confirmed, completing, found, failed] = [1, 2, 3, 4].map(|number| key(&scope, number));
    for key in [&confirmed, &completing, &found, &failed] {
        // A replica that has just begun to follow takes its time.
        let granted = until_held(&store, key, claim(owner)).await;
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
    }
    assert_eq!(
        until_held(&store, &confirmed, complete(owner, b"1")).await,
        HELD
    );
    let hand = Hand::on(&pair.replica).await;
    assert_eq!(first_byte(&hand, &confirmed).await, Some(b'C'));

    pair.cut();
    let fail = Operation::Fail {
        token: owner,
        reason: "rejected".to_owned(),
        retention: Duration::from_secs(3_600),
    };
    assert!(is_unknown(
        &apply(&store, &completing, complete(owner, b"2")).await
    ));
    assert!(is_unknown(&apply(&store, &failed, fail.clone()).await));
    // Another store completes without waiting. A claim that finds the record completed must not
    // acknowledge it yet.
    assert_eq!(
        apply(&plain, &found, complete(owner, b"3")).await.unwrap(),
        HELD
    );
    for key in [&completing, &found, &failed] {
        found_is_unknown(&pair, key).await;
    }
    for (key, operation) in [
        (&completing, complete(owner, b"2")),
        (&failed, fail.clone()),
        (&failed, Operation::HandOver { by: owner.tag() }),
    ] {
        repeat_is_unknown(&pair, key, operation).await;
    }
    // A heartbeat does not wait for replicas.
    let running = crate::hand::key(&scope, 5);
    assert!(is_unknown(&apply(&store, &running, claim(owner)).await));
    let extend = Operation::Extend {
        token: owner,
        lease: Duration::from_secs(60),
    };
    assert_eq!(apply(&store, &running, extend).await.unwrap(), HELD);

    pair.join();
    assert_eq!(
        until_held(&store, &completing, complete(owner, b"2")).await,
        HELD
    );
    for (key, result) in [(&completing, b"2".as_slice()), (&found, b"3")] {
        counts(&store, &hand, key, result).await;
    }
}

/// A claim and a prefetch of a settled record are unknown, each on a connection that has written
/// nothing yet, where a bare WAIT would succeed at once.
async fn found_is_unknown(pair: &RedisPair, key: &StoreKey) {
    let fresh = waiting_store(pair).await;
    assert!(
        is_unknown(&apply(&fresh, key, claim(token())).await),
        "{key}"
    );
    let fresh = waiting_store(pair).await;
    assert!(
        is_unknown(&fresh.prefetch(vec![key.clone()]).await.remove(0)),
        "{key}"
    );
}

/// An operation that was executed before is unknown each time, on such a connection too.
async fn repeat_is_unknown(pair: &RedisPair, key: &StoreKey, operation: Operation) {
    for time in ["at first", "again"] {
        let fresh = waiting_store(pair).await;
        assert!(
            is_unknown(&apply(&fresh, key, operation.clone()).await),
            "{operation:?}, {time}"
        );
    }
}

/// The replica has the record, so a claim and a prefetch return it as completed.
async fn counts(store: &RedisStore, replica: &Hand, key: &StoreKey, result: &'static [u8]) {
    let settled = Reply::Verdict {
        verdict: Verdict::Completed {
            result: result.into(),
        },
        uncompared: false,
    };
    assert_eq!(until_held(store, key, claim(token())).await, settled);
    let ahead = until("the replica to confirm", LIMIT, async || {
        store
            .prefetch(vec![key.clone()])
            .await
            .remove(0)
            .map_err(|error| error.to_string())
    });
    let ahead = ahead.await.unwrap();
    assert_eq!(ahead.result, result);
    assert_eq!(
        first_byte(replica, key).await,
        Some(b'C'),
        "the replica has what counts"
    );
}

/// The first byte of a record, which is its state.
async fn first_byte(server: &Hand, key: &StoreKey) -> Option<u8> {
    let record: Option<Vec<u8>> = server.ask(&["GET", key.as_str()]).await;
    record.map(|record| record[0])
}

// invariant: lost-reply
#[tokio::test]
async fn a_completion_does_not_count_when_only_its_own_reply_came() {
    let pair = pair().await;
    let level = Durability::Replicas {
        count: 1,
        timeout: PATIENCE,
    };
    let builder = unwatched(&pair.front)
        .durability(level)
        .response_timeout(2 * PATIENCE);
    let store = builder.connect().await.unwrap();
    let scope = scope();
    let owner = token();
    for (number, way) in (0..).zip(WAYS) {
        let key = key(&scope, number);
        until_held(&store, &key, claim(owner)).await;
        pair.front.set_after(1, way);
        let answer = apply(&store, &key, complete(owner, b"done")).await;
        assert!(is_unknown(&answer), "{way:?}: {answer:?}");
        pair.front.set(Mode::Pass);
        assert_eq!(
            until_held(&store, &key, complete(owner, b"done")).await,
            HELD,
            "{way:?}"
        );
    }
}

// invariant: replicas-that-lag
#[tokio::test]
async fn pipelines_behind_a_lagging_wait_keep_their_connection() {
    let pair = pair().await;
    // Each pipeline waits for the whole second, and the third for the two before it as well.
    let level = Durability::Replicas {
        count: 1,
        timeout: Duration::from_secs(1),
    };
    let builder = RedisStore::builder(pair.primary.url()).durability(level);
    let store = builder
        .response_timeout(Duration::from_millis(1_500))
        .start_patience(LIMIT)
        .connect()
        .await
        .unwrap();
    let hand = Hand::on(&pair.primary).await;
    let scope = scope();
    let owner = token();
    until_held(&store, &key(&scope, 0), claim(owner)).await;
    pair.cut();
    let connections = hand.info("stats", "total_connections_received").await;
    let claims = (1..=3 * 256).map(|number| Command {
        key: key(&scope, number),
        operation: claim(owner),
    });
    for answer in store.execute(claims.collect()).await {
        let is_lag = matches!(&answer, Err(StoreError::Unknown { reason }) if reason.contains("too few replicas"));
        assert!(is_lag, "{answer:?}");
    }
    assert_eq!(
        hand.info("stats", "total_connections_received").await,
        connections
    );
}

#[tokio::test]
async fn the_rights_for_waiting_are_asked_for_and_enough() {
    let pair = pair().await;
    let scope = scope();
    let rules = waiting_store(&pair).await;
    let rules = rules.acl_rules(&scope);
    let hand = Hand::on(&pair.primary).await;
    let url = pair
        .primary
        .url()
        .replace("redis://", "redis://billing:right@");
    let level = Durability::Replicas {
        count: 1,
        timeout: Duration::from_secs(5),
    };
    for (missing, enough) in [("+wait", false), ("+pexpireat", false), ("", true)] {
        let granted = rules.split(' ').filter(|rule| *rule != missing);
        let words = ["ACL", "SETUSER", "billing", "reset", "on", ">right"]
            .into_iter()
            .chain(granted);
        let () = hand.ask(&words.collect::<Vec<&str>>()).await;
        let store = RedisStore::builder(&url)
            .durability(level)
            .connect()
            .await
            .unwrap();
        let described = store.describe(&scope, None, "descriptor").await;
        assert_eq!(
            described.is_ok(),
            enough,
            "without {missing}: {described:?}"
        );
        assert!(
            described.is_ok() || described.is_err_and(|error| error.to_string().contains(&rules))
        );
    }
}

#[tokio::test]
async fn a_full_primary_still_completes_and_answers_as_durably() {
    let pair = pair().await;
    let store = waiting_store(&pair).await;
    let hand = Hand::on(&pair.primary).await;
    let scope = scope();
    let owner = token();
    let [done, running] = [1, 2].map(|number| key(&scope, number));
    for key in [&done, &running] {
        until_held(&store, key, claim(owner)).await;
    }
    assert_eq!(
        until_held(&store, &done, complete(owner, b"done")).await,
        HELD
    );
    let () = hand.ask(&["CONFIG", "SET", "maxmemory", "1mb"]).await;
    assert_eq!(
        until_held(&store, &running, complete(owner, b"done")).await,
        HELD
    );
    let settled = Reply::Verdict {
        verdict: Verdict::Completed {
            result: b"done".as_slice().into(),
        },
        uncompared: false,
    };
    for key in [&done, &running] {
        assert_eq!(until_held(&store, key, claim(token())).await, settled);
    }
    let refused = apply(&store, &crate::hand::key(&scope, 3), claim(token())).await;
    assert!(
        matches!(refused, Err(StoreError::Unavailable { .. })),
        "{refused:?}"
    );
}

// invariant: durability-before-ack
#[tokio::test]
async fn scripts_that_vanish_make_no_write_count_without_its_replica() {
    let pair = pair().await;
    let store = waiting_store(&pair).await;
    let hand = Hand::on(&pair.primary).await;
    let scope = scope();
    let owner = token();
    let commands = |keys: std::ops::Range<u128>| -> Vec<Command> {
        keys.map(|number| Command {
            key: key(&scope, number),
            operation: complete(owner, b""),
        })
        .collect()
    };
    let () = hand.ask(&["SCRIPT", "FLUSH"]).await;
    until("the replica to confirm", LIMIT, async || {
        let error = store
            .execute(commands(0..100))
            .await
            .into_iter()
            .find_map(Result::err);
        error.map_or(Ok(()), |error| Err(error.to_string()))
    })
    .await;
    pair.cut();
    let () = hand.ask(&["SCRIPT", "FLUSH"]).await;
    assert!(
        store
            .execute(commands(100..200))
            .await
            .iter()
            .all(is_unknown)
    );
}

#[tokio::test]
async fn disks_are_refused_where_the_server_cannot_wait_for_them() {
    let server = RedisServer::start().await;
    let level = Durability::Fsync {
        replicas: 0,
        timeout: PATIENCE,
    };
    let connected = RedisStore::builder(server.url())
        .durability(level)
        .connect()
        .await;
    if !server.info("server").await.contains("redis_version:7.0.") {
        // What is installed here is newer.
        connected.unwrap();
        return;
    }
    let refused = connected.unwrap_err();
    assert_eq!(refused.class(), "refused");
    for named in ["WAITAOF", "7.2", "Durability::Replicas"] {
        assert!(refused.to_string().contains(named), "{refused}");
    }
}

#[tokio::test]
async fn disks_are_waited_for_where_the_server_can() {
    let server = RedisServer::valkey(&[]).await;
    let one_disk = Durability::Fsync {
        replicas: 0,
        timeout: Duration::from_secs(60),
    };
    let store = RedisStore::builder(server.url())
        .durability(one_disk)
        .connect()
        .await
        .unwrap();
    assert_eq!(
        store.check().await.unwrap().survives,
        oncegate_core::store::Survives::Disk
    );
    let scope = scope();
    let owner = token();
    let key = key(&scope, 1);
    let granted = apply(&store, &key, claim(owner)).await.unwrap();
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
        apply(&store, &key, complete(owner, b"")).await.unwrap(),
        HELD
    );
    // One disk more than there are.
    let level = Durability::Fsync {
        replicas: 1,
        timeout: PATIENCE,
    };
    let wanting = RedisStore::builder(server.url())
        .durability(level)
        .connect()
        .await
        .unwrap();
    assert!(is_unknown(&apply(&wanting, &key, claim(token())).await));
    // The rights that it asks for are enough.
    let hand = Hand::on(&server).await;
    let rules = store.acl_rules(&scope);
    let words = ["ACL", "SETUSER", "billing", "on", ">right"]
        .into_iter()
        .chain(rules.split(' '));
    let () = hand.ask(&words.collect::<Vec<&str>>()).await;
    let url = server.url().replace("redis://", "redis://billing:right@");
    let billing = RedisStore::builder(&url)
        .durability(one_disk)
        .connect()
        .await
        .unwrap();
    billing.describe(&scope, None, "descriptor").await.unwrap();
    let () = hand.ask(&["CONFIG", "SET", "appendonly", "no"]).await;
    let refused = RedisStore::builder(server.url())
        .durability(level)
        .connect()
        .await
        .unwrap_err();
    assert!(
        refused.class() == "refused" && refused.to_string().contains("appendonly"),
        "{refused}"
    );
    let refused = apply(&store, &key, claim(token())).await.unwrap_err();
    assert!(
        refused.class() == "refused" && refused.to_string().contains("WAITAOF"),
        "{refused}"
    );
}

#[tokio::test]
async fn replicas_that_are_missing_are_said_at_start_up() {
    let server = RedisServer::start().await;
    let level = Durability::Replicas {
        count: 2,
        timeout: PATIENCE,
    };
    let store = RedisStore::builder(server.url())
        .durability(level)
        .connect()
        .await
        .unwrap();
    let warnings = store.check().await.unwrap().warnings;
    assert!(
        warnings
            .iter()
            .any(|warning| warning.contains("2 replicas, and 0")),
        "{warnings:?}"
    );
}
