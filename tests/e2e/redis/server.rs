//! What a server may hold, be set to, or answer.

use std::time::{Duration, Instant};

use oncegate::redis::{Durability, RedisBuilder, RedisStore};
use oncegate_core::rules::{Operation, ReleaseCause, Reply, Verdict};
use oncegate_core::store::{Command, Store, StoreError};
use oncegate_testkit::{Redis, RedisServer};

use crate::hand::{Hand, apply, claim, complete, key, scope, token};

pub(crate) const HELD: Reply = Reply::Applied { recreated: false };

pub(crate) fn release(token: oncegate_core::record::Token) -> Operation {
    Operation::Release {
        token,
        delay: Duration::from_secs(1),
        end: ReleaseCause::Failed,
        reason: "later".to_owned(),
    }
}

fn fail(token: oncegate_core::record::Token) -> Operation {
    let retention = Duration::from_secs(3_600);
    Operation::Fail {
        token,
        reason: "broken".to_owned(),
        retention,
    }
}

pub(crate) fn extend(token: oncegate_core::record::Token) -> Operation {
    Operation::Extend {
        token,
        lease: Duration::from_secs(60),
    }
}

pub(crate) fn is_granted(reply: &Result<Reply, StoreError>) -> bool {
    matches!(reply, Ok(Reply::Verdict { verdict: Verdict::Granted(grant), .. }) if grant.attempt == 1)
}

#[tokio::test]
async fn scripts_that_vanish_from_under_a_pipeline_are_repaired() {
    let server = RedisServer::start().await;
    let store = RedisStore::builder(server.url())
        .scripts_alone()
        .connect()
        .await
        .unwrap();
    let hand = Hand::on(&server).await;
    let scope = scope();
    let token = token();
    for round in 0..100 {
        let numbers = (0..300).map(|number| round * 1_000 + number);
        let claims = numbers.map(|number| Command {
            key: key(&scope, number),
            operation: claim(token),
        });
        // Before the batch in even rounds, somewhere within it in odd ones.
        if round % 2 == 0 {
            let () = hand.ask(&["SCRIPT", "FLUSH"]).await;
        }
        let (replies, ()) = tokio::join!(
            store.execute(claims.collect()),
            hand.ask(&["SCRIPT", "FLUSH"])
        );
        // None is lost, and none is an error.
        assert!(
            replies.iter().all(is_granted),
            "{:?}",
            replies.iter().find(|reply| !is_granted(reply))
        );
    }
}

#[tokio::test]
async fn a_record_without_an_expiry_is_the_same_to_every_reader() {
    let server = RedisServer::start().await;
    let hand = Hand::on(&server).await;
    let builder = RedisStore::builder(server.url());
    let durability = Durability::Replicas {
        count: 0,
        timeout: Duration::from_secs(60),
    };
    let durable = builder.clone().durability(durability);
    for builder in [builder.clone(), builder.clone().scripts_alone(), durable] {
        let store = builder.connect().await.unwrap();
        let scope = scope();
        for (number, name) in (0..).zip(["completed", "failed"]) {
            let key = key(&scope, number);
            let owner = token();
            let end = || {
                if name == "completed" {
                    complete(owner, b"result")
                } else {
                    fail(owner)
                }
            };
            assert!(is_granted(&apply(&store, &key, claim(owner)).await));
            assert_eq!(apply(&store, &key, end()).await.unwrap(), HELD);
            let _: i64 = hand.ask(&["PERSIST", key.as_str()]).await;
            let claimed = apply(&store, &key, claim(token())).await;
            let is_settled = matches!(
                claimed,
                Ok(Reply::Verdict {
                    verdict: Verdict::Completed { .. } | Verdict::Failed { .. },
                    ..
                })
            );
            assert!(is_settled, "{name}: {claimed:?}");
            let snapshot = store.read(vec![key.clone()]).await.remove(0);
            let snapshot = snapshot
                .unwrap_or_else(|error| panic!("{name}: {error}"))
                .unwrap();
            assert!(snapshot.record.kept(snapshot.now), "{name}");
            assert_eq!(apply(&store, &key, end()).await.unwrap(), HELD);
        }
        let key = key(&scope, 9);
        let owner = token();
        assert!(is_granted(&apply(&store, &key, claim(owner)).await));
        let _: i64 = hand.ask(&["PERSIST", key.as_str()]).await;
        let claimed = apply(&store, &key, claim(token())).await;
        assert!(
            matches!(claimed, Err(StoreError::Unreadable { .. })),
            "{claimed:?}"
        );
        let snapshot = store.read(vec![key.clone()]).await.remove(0);
        assert!(
            matches!(snapshot, Err(StoreError::Unreadable { .. })),
            "{snapshot:?}"
        );
        assert_eq!(
            apply(&store, &key, complete(owner, b"result"))
                .await
                .unwrap(),
            HELD
        );
        assert!(hand.ask::<i64>(&["PTTL", key.as_str()]).await > 0);
    }
}

#[tokio::test]
async fn a_full_server_answers_what_is_settled_and_refuses_new_work() {
    for server in [RedisServer::start().await, RedisServer::valkey(&[]).await] {
        let builder = RedisStore::builder(server.url());
        answers_what_is_settled_when_full(&server, builder.clone()).await;
        answers_what_is_settled_when_full(&server, builder.clone().scripts_alone()).await;
        answers_what_is_settled_when_full(&server, builder.compact(1_000)).await;
    }
}

async fn answers_what_is_settled_when_full(server: &Redis, builder: RedisBuilder) {
    let store = builder.connect().await.unwrap();
    let hand = Hand::on(server).await;
    let scope = scope();
    let owner = token();
    let [done, completing, releasing, failing, extending, new] =
        [1, 2, 3, 4, 5, 6].map(|n| key(&scope, n));
    for running in [&done, &completing, &releasing, &failing, &extending] {
        assert!(is_granted(&apply(&store, running, claim(owner)).await));
    }
    assert_eq!(
        apply(&store, &done, complete(owner, b"done"))
            .await
            .unwrap(),
        HELD
    );

    let () = hand.ask(&["CONFIG", "SET", "maxmemory", "1mb"]).await;
    let refused = apply(&store, &new, claim(token())).await;
    assert!(
        matches!(&refused, Err(StoreError::Unavailable { reason }) if reason.contains("maxmemory")),
        "{refused:?}"
    );
    let result = b"done".as_slice().into();
    let settled = Reply::Verdict {
        verdict: Verdict::Completed { result },
        uncompared: false,
    };
    assert_eq!(apply(&store, &done, claim(token())).await.unwrap(), settled);
    let busy = apply(&store, &extending, claim(token())).await.unwrap();
    assert!(
        matches!(
            busy,
            Reply::Verdict {
                verdict: Verdict::Busy { .. },
                ..
            }
        ),
        "{busy:?}"
    );
    assert!(
        store.read(vec![done.clone()]).await[0]
            .as_ref()
            .unwrap()
            .is_some()
    );
    assert!(
        store.prefetch(vec![done.clone()]).await[0]
            .as_ref()
            .unwrap()
            .is_some()
    );
    // What runs can end.
    for (key, operation) in [
        (&extending, extend(owner)),
        (&completing, complete(owner, &[b'x'; 10_000])),
        (&releasing, release(owner)),
        (&failing, fail(owner)),
        (&failing, Operation::HandOver { by: owner.tag() }),
    ] {
        assert_eq!(apply(&store, key, operation).await.unwrap(), HELD);
    }

    let () = hand.ask(&["CONFIG", "SET", "maxmemory", "0"]).await;
    assert!(is_granted(&apply(&store, &new, claim(token())).await));
}

#[tokio::test]
async fn an_evicting_server_is_refused_until_it_is_accepted() {
    let server = RedisServer::start_with(&["--maxmemory-policy", "allkeys-lru"]).await;
    let store = RedisStore::connect(server.url()).await.unwrap();
    let refused = store.check().await.unwrap_err();
    assert_eq!(refused.class(), "refused");
    for named in [
        "maxmemory-policy",
        "allkeys-lru",
        "noeviction",
        "allow_evicting_policy",
    ] {
        assert!(refused.to_string().contains(named), "{refused}");
    }
    let accepting = RedisStore::builder(server.url())
        .allow_evicting_policy()
        .connect()
        .await
        .unwrap();
    let checkup = accepting.check().await.unwrap();
    assert!(
        checkup
            .warnings
            .iter()
            .any(|warning| warning.contains("allkeys-lru")),
        "{checkup:?}"
    );
}

/// Values that are no records.
const SPOILT: [&[u8]; 9] = [
    b"",
    b"{\"state\":\"done\"}",
    b"pending in another format..",
    b"P0123456789abcdef\0\0\0\0\0\0\0",
    b"P0123456789abcdef\0\0\0\0\0\0\0\x01123",
    b"C0123\0\0\0\0\0\0",
    b"S0123\0\0\0\0\0\0\0\x03000000000000000",
    b"F0123\0\0\0\0\0\0\0",
    b"\xff\xff",
];

fn every_operation(token: oncegate_core::record::Token) -> [Operation; 8] {
    let expected = oncegate_core::record::Record {
        expires_at: oncegate_core::record::StoreTime::default(),
        fingerprint: None,
        state: oncegate_core::record::State::Completed {
            by: token.tag(),
            result: b"".as_slice().into(),
        },
    };
    [
        claim(token),
        extend(token),
        complete(token, b"mine"),
        release(token),
        fail(token),
        Operation::HandOver { by: token.tag() },
        Operation::Reopen {
            expected: expected.clone(),
        },
        Operation::Resolve {
            expected,
            token,
            resolution: oncegate_core::rules::Resolution::Completed {
                result: b"".as_slice().into(),
            },
            retention: Duration::from_secs(60),
        },
    ]
}

// invariant: garbage-as-answer
#[tokio::test]
async fn what_is_no_record_is_an_error_and_stays_untouched() {
    let redis = Redis::shared().await;
    let store = RedisStore::connect(redis.url()).await.unwrap();
    let hand = Hand::on(&redis).await;
    let scope = scope();
    let token = token();
    let mut keys = Vec::new();
    for (number, bytes) in (1..).zip(SPOILT) {
        let key = key(&scope, number);
        hand.spoil(&key, bytes).await;
        keys.push(key);
    }
    let list = key(&scope, 100);
    let () = hand.ask(&["RPUSH", list.as_str(), "foreign"]).await;
    let eternal = key(&scope, 101);
    let () = hand
        .ask(&[
            "SET",
            eternal.as_str(),
            "S0123.......\u{3}0000000000000000never",
        ])
        .await;
    keys.push(list);
    for key in &keys {
        let before: Vec<u8> = hand.ask(&["DUMP", key.as_str()]).await;
        for operation in every_operation(token) {
            let answer = apply(&store, key, operation.clone()).await;
            assert!(
                matches!(answer, Err(StoreError::Unreadable { .. })),
                "{key} {operation:?}: {answer:?}"
            );
        }
        for answer in [
            store.read(vec![key.clone()]).await.remove(0).map(|_| ()),
            store
                .prefetch(vec![eternal.clone(), key.clone()])
                .await
                .remove(1)
                .map(|_| ()),
        ] {
            assert!(
                matches!(answer, Err(StoreError::Unreadable { .. })),
                "{key}: {answer:?}"
            );
        }
        assert_eq!(hand.ask::<Vec<u8>>(&["DUMP", key.as_str()]).await, before);
    }
    // A record that waits for ever would never be taken over.
    let answer = apply(&store, &eternal, claim(token)).await;
    assert!(
        matches!(answer, Err(StoreError::Unreadable { .. })),
        "{answer:?}"
    );
}

// invariant: demoted-server
#[tokio::test]
async fn a_demoted_primary_answers_nothing() {
    let server = RedisServer::start().await;
    let store = RedisStore::connect(server.url()).await.unwrap();
    let hand = Hand::on(&server).await;
    let scope = scope();
    let owner = token();
    let keys: Vec<_> = (0..600).map(|number| key(&scope, number)).collect();
    let complete_all = keys.iter().map(|key| Command {
        key: key.clone(),
        operation: complete(owner, b""),
    });
    assert!(
        store
            .execute(complete_all.collect())
            .await
            .iter()
            .all(Result::is_ok)
    );
    assert!(
        store
            .prefetch(keys.clone())
            .await
            .iter()
            .all(|answer| matches!(answer, Ok(Some(_))))
    );

    let () = hand.ask(&["REPLICAOF", "127.0.0.1", "1"]).await;
    let unavailable =
        |error: &StoreError| error.class() != "unreadable" && error.class() != "refused";
    assert!(
        apply(&store, &keys[0], claim(token()))
            .await
            .is_err_and(|error| unavailable(&error))
    );
    for answer in store.read(keys.clone()).await {
        assert!(answer.is_err_and(|error| unavailable(&error)));
    }
    for answer in store.prefetch(keys.clone()).await {
        assert!(answer.is_err_and(|error| unavailable(&error)));
    }
    // It answers, so every try to connect succeeds; that must not become a flood of connections.
    let connections = async || hand.info("stats", "total_connections_received").await;
    let before = connections().await;
    let start = Instant::now();
    for _ in 0..10_000 {
        assert!(apply(&store, &keys[0], claim(token())).await.is_err());
    }
    let most = 10 + 10 * start.elapsed().as_secs();
    let tries = connections().await - before;
    assert!(
        tries <= most,
        "{tries} connections in {:?}",
        start.elapsed()
    );

    let () = hand.ask(&["REPLICAOF", "NO", "ONE"]).await;
    while apply(&store, &keys[0], claim(token())).await.is_err() {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn who_cannot_connect_is_told_why_but_no_secret() {
    let server = RedisServer::start_with(&["--requirepass", ""]).await;
    let hand = Hand::on(&server).await;
    let () = hand
        .ask(&["ACL", "SETUSER", "billing", "on", ">right", "~*", "+@all"])
        .await;
    let address = server.url().trim_start_matches("redis://").to_owned();
    let wrong = RedisStore::connect(&format!("redis://billing:canary@{address}"))
        .await
        .unwrap_err();
    assert_eq!(wrong.class(), "refused", "{wrong}");
    let invalid = RedisStore::connect("http://billing:canary@host")
        .await
        .unwrap_err();
    assert_eq!(invalid.class(), "refused", "{invalid}");
    let unreachable = RedisStore::connect("redis://billing:canary@127.0.0.1:1")
        .await
        .unwrap_err();
    assert_eq!(unreachable.class(), "unavailable", "{unreachable}");
    for error in [wrong, invalid, unreachable] {
        assert!(!format!("{error} {error:?}").contains("canary"), "{error}");
    }
    let right = RedisStore::connect(&format!("redis://billing:right@{address}"))
        .await
        .unwrap();
    assert!(!format!("{right:?}").contains("right"));
}

#[tokio::test]
async fn a_completed_key_takes_at_most_150_bytes() {
    /// Nearly fills a hash table's slots, as a million does.
    const KEYS: u128 = 125_000;
    let server = RedisServer::start().await;
    let store = RedisStore::connect(server.url()).await.unwrap();
    let hand = Hand::on(&server).await;
    let scope = oncegate_core::key::Scope::new("billing").unwrap();
    let used = async || hand.info("memory", "used_memory").await;
    let complete_some = async |from: u128, to: u128| {
        let numbers = from..to;
        let commands = numbers.map(|n| Command {
            key: key(&scope, n),
            operation: complete(token(), b""),
        });
        assert!(
            store
                .execute(commands.collect())
                .await
                .iter()
                .all(Result::is_ok)
        );
    };
    // Buffers have grown by then.
    complete_some(0, 1_000).await;
    let before = used().await;
    for from in (1_000..KEYS + 1_000).step_by(5_000) {
        complete_some(from, from + 5_000).await;
    }
    let bytes = (used().await - before) / u64::try_from(KEYS).unwrap();
    println!("{bytes} bytes per completed key");
    assert!(bytes <= 150, "{bytes} bytes per completed key");
}
