//! What a server may hold, be set to, or refuse.

use std::time::{Duration, Instant};

use futures_util::future::join_all;
use oncegate::postgres::PostgresStore;
use oncegate_core::rules::{Operation, Reply, Verdict};
use oncegate_core::store::{Command, Store, StoreError};
use oncegate_testkit::{Postgres, PostgresServer};

use crate::hand::{
    self, HELD, PATIENCE, apply, claim, complete, completed_with, granted_as, key, scope, token,
};
use crate::proxy::Proxy;

#[tokio::test(flavor = "multi_thread")]
async fn one_of_many_is_granted() {
    let postgres = Postgres::shared().await;
    // Two stores, as two processes have.
    let stores = [hand::store(&postgres).await, hand::store(&postgres).await];
    let scope = scope();
    for round in 0..20 {
        let key = key(&scope, round);
        let claims = (0..40).map(|number| {
            let store = stores[number % 2].clone();
            let key = key.clone();
            tokio::spawn(async move { apply(&*store, &key, claim(token())).await.unwrap() })
        });
        let replies = join_all(claims).await;
        let granted = replies
            .iter()
            .filter(|reply| granted_as(1, reply.as_ref().unwrap()))
            .count();
        assert_eq!(granted, 1);
    }
}

#[tokio::test]
async fn one_of_two_takes_over_when_both_stand_at_the_same_row() {
    let server = PostgresServer::start().await;
    let stores = [hand::store(&server).await, hand::store(&server).await];
    let scope = scope();
    let mut client = server.connection().await;
    let watcher = server.connection().await;
    for round in 0..10 {
        let key = key(&scope, round);
        assert!(granted_as(
            1,
            &apply(&*stores[0], &key, claim(token())).await.unwrap()
        ));
        stores[0]
            .pass(&[(key.clone(), Duration::from_secs(601))])
            .await
            .unwrap();
        // Its lease is over, and the row is locked until both have come to it.
        let transaction = client.transaction().await.unwrap();
        let lock = "SELECT 1 FROM oncegate_records WHERE key = $1 FOR UPDATE";
        transaction.query_one(lock, &[&key.as_str()]).await.unwrap();
        let claims = async {
            let one = claim(token());
            let other = claim(token());
            tokio::join!(
                apply(&*stores[0], &key, one),
                apply(&*stores[1], &key, other)
            )
        };
        let release = async {
            let waiting = "SELECT count(*) FROM pg_stat_activity \
                           WHERE application_name = 'oncegate' AND wait_event_type = 'Lock'";
            while watcher
                .query_one(waiting, &[])
                .await
                .unwrap()
                .get::<_, i64>(0)
                < 2
            {
                tokio::task::yield_now().await;
            }
            transaction.rollback().await.unwrap();
        };
        let ((one, other), ()) = tokio::join!(claims, release);
        let granted = [one.unwrap(), other.unwrap()]
            .iter()
            .filter(|reply| granted_as(2, reply))
            .count();
        assert_eq!(granted, 1);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn batches_that_cross_each_other_do_not_deadlock() {
    let postgres = Postgres::shared().await;
    let stores = [
        hand::store(&postgres).await,
        hand::store(&postgres).await,
        hand::store(&postgres).await,
    ];
    let scope = scope();
    let client = postgres.connection().await;
    let deadlocks = "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()";
    let before: i64 = client.query_one(deadlocks, &[]).await.unwrap().get(0);
    let batches = (0..60).map(|number| {
        let store = stores[number % 3].clone();
        let scope = scope.clone();
        tokio::spawn(async move {
            let mut numbers: Vec<u128> = (0..100).collect();
            fastrand::shuffle(&mut numbers);
            let owner = token();
            let claims = numbers.into_iter().map(|number| Command {
                key: key(&scope, number),
                operation: if number % 2 == 0 {
                    claim(owner)
                } else {
                    complete(owner, b"")
                },
            });
            store.execute(claims.collect()).await
        })
    });
    for batch in join_all(batches).await {
        assert!(batch.unwrap().iter().all(Result::is_ok));
    }
    let after: i64 = client.query_one(deadlocks, &[]).await.unwrap().get(0);
    assert_eq!(after, before);
}

// invariant: cost-grows-with-table
#[tokio::test]
async fn no_statement_reads_the_whole_table() {
    const KEYS: u128 = 2_000;
    let server = PostgresServer::start().await;
    let store = hand::store(&server).await;
    let scope = scope();
    let owner = token();
    let keys: Vec<_> = (0..KEYS).map(|number| key(&scope, number)).collect();
    // In many batches, so that plans are made while the table is empty, and kept while it grows.
    for keys in keys.chunks(50) {
        let extend = || Operation::Extend {
            token: owner,
            lease: Duration::from_secs(900),
        };
        for operation in [
            claim(owner),
            extend(),
            claim(owner),
            complete(owner, b"done"),
        ] {
            let commands = keys.iter().map(|key| Command {
                key: key.clone(),
                operation: operation.clone(),
            });
            assert!(
                store
                    .execute(commands.collect())
                    .await
                    .iter()
                    .all(Result::is_ok)
            );
        }
        assert!(
            store
                .read(keys.to_vec())
                .await
                .iter()
                .all(|snapshot| matches!(snapshot, Ok(Some(_))))
        );
    }
    let client = server.connection().await;
    let scans =
        "SELECT n_tup_ins, seq_scan FROM pg_stat_user_tables WHERE relname = 'oncegate_records'";
    let start = Instant::now();
    let scans: i64 = loop {
        let row = client.query_one(scans, &[]).await.unwrap();
        // The server counts a little later than it works.
        if row.get::<_, i64>("n_tup_ins") >= KEYS as i64 {
            break row.get("seq_scan");
        }
        assert!(start.elapsed() < PATIENCE, "{row:?}");
        tokio::task::yield_now().await;
    };
    // Making the primary key counts as one.
    assert!(scans <= 1, "{scans} scans");
}

#[tokio::test]
async fn nothing_is_left_of_a_question_about_an_absent_key() {
    let postgres = Postgres::shared().await;
    let store = hand::store(&postgres).await;
    let client = postgres.connection().await;
    let scope = scope();
    let owner = token();
    let extend = Operation::Extend {
        token: owner,
        lease: Duration::from_secs(900),
    };
    let absent = Command {
        key: key(&scope, 1),
        operation: Operation::HandOver { by: owner.tag() },
    };
    let other = Command {
        key: key(&scope, 2),
        operation: claim(owner),
    };
    assert_eq!(
        store.execute(vec![absent.clone()]).await[0]
            .as_ref()
            .unwrap(),
        &Reply::NotOwner
    );
    assert_eq!(
        apply(&*store, &absent.key, extend).await.unwrap(),
        Reply::NotOwner
    );
    // In one transaction with a change, too.
    assert_eq!(
        store.execute(vec![absent.clone(), other]).await[0]
            .as_ref()
            .unwrap(),
        &Reply::NotOwner
    );
    let rows = "SELECT count(*) FROM oncegate_records WHERE key = $1";
    let rows: i64 = client
        .query_one(rows, &[&absent.key.as_str()])
        .await
        .unwrap()
        .get(0);
    assert_eq!(rows, 0);
}

#[tokio::test]
async fn what_text_cannot_hold_does_not_fail_its_batch() {
    let postgres = Postgres::shared().await;
    let store = hand::store(&postgres).await;
    let key = key(&scope(), 1);
    let owner = token();
    assert!(granted_as(
        1,
        &apply(&*store, &key, claim(owner)).await.unwrap()
    ));
    let retention = Duration::from_secs(3_600);
    let fail = Operation::Fail {
        token: owner,
        reason: "nul \0 inside".to_owned(),
        retention,
    };
    assert_eq!(apply(&*store, &key, fail).await.unwrap(), HELD);
    let reply = apply(&*store, &key, claim(token())).await.unwrap();
    assert!(
        format!("{reply:?}").contains("nul \u{fffd} inside"),
        "{reply:?}"
    );
}

#[tokio::test]
async fn who_cannot_connect_is_told_why_but_no_secret() {
    let postgres = Postgres::shared().await;
    let invalid = PostgresStore::connect("postgres://billing:canary@host:port/x")
        .await
        .unwrap_err();
    assert_eq!(invalid.class(), "refused", "{invalid}");
    let unreachable = PostgresStore::connect("postgres://billing:canary@127.0.0.1:1/x")
        .await
        .unwrap_err();
    assert_eq!(unreachable.class(), "unavailable", "{unreachable}");
    let stranger = PostgresStore::connect(&postgres.url_as("stranger:canary"))
        .await
        .unwrap_err();
    assert_eq!(stranger.class(), "refused", "{stranger}");
    for error in [invalid, unreachable, stranger] {
        assert!(!format!("{error} {error:?}").contains("canary"), "{error}");
    }
    let right = PostgresStore::connect(&postgres.url_as("postgres:canary"))
        .await
        .unwrap();
    assert!(!format!("{right:?} {:?}", PostgresStore::builder(postgres.url())).contains("canary"));
}

// invariant: key-blocked-in-sql, store-starts-late
#[tokio::test]
async fn a_late_server_is_waited_for_as_long_as_it_is_told() {
    let mut server = PostgresServer::start().await;
    PostgresStore::connect(server.url())
        .await
        .unwrap()
        .create_schema()
        .await
        .unwrap();
    server.kill();
    let url = server.url().to_owned();
    let impatient = PostgresStore::connect(&url).await.unwrap_err();
    assert_eq!(impatient.class(), "unavailable", "{impatient}");
    // After a kill it recovers first, and answers 57P03 meanwhile.
    let patient = PostgresStore::builder(&url)
        .start_patience(PATIENCE)
        .connect();
    let (store, ()) = tokio::join!(patient, server.start_again());
    store.unwrap().check().await.unwrap();
}

#[tokio::test]
async fn a_locked_row_blocks_no_other_for_ever() {
    let postgres = Postgres::shared().await;
    hand::store(&postgres).await;
    let limit = Duration::from_secs(2);
    let store = PostgresStore::builder(postgres.url())
        .response_timeout(limit)
        .start_patience(PATIENCE)
        .connect()
        .await
        .unwrap();
    let scope = scope();
    let owner = token();
    let key = key(&scope, 1);
    let patient = hand::store(&postgres).await;
    assert!(granted_as(
        1,
        &apply(&*patient, &key, claim(owner)).await.unwrap()
    ));
    let mut client = postgres.connection().await;
    let transaction = client.transaction().await.unwrap();
    let lock = "SELECT 1 FROM oncegate_records WHERE key = $1 FOR UPDATE";
    transaction.query_one(lock, &[&key.as_str()]).await.unwrap();
    let held = apply(&store, &key, complete(owner, b"done")).await;
    assert!(
        matches!(held, Err(StoreError::Unavailable { .. })),
        "{held:?}"
    );
    // Those that travel with it are not held up.
    let commands = (1..100).map(|number| Command {
        key: self::key(&scope, number),
        operation: claim(owner),
    });
    for (number, reply) in store
        .execute(commands.collect())
        .await
        .into_iter()
        .enumerate()
    {
        let as_it_should_be = match &reply {
            Ok(Reply::Verdict {
                verdict: Verdict::Busy { .. },
                ..
            }) => number == 0,
            Ok(reply) => number > 0 && granted_as(1, reply),
            Err(_) => false,
        };
        assert!(as_it_should_be, "{number}: {reply:?}");
    }
    transaction.rollback().await.unwrap();
    assert_eq!(
        apply(&*patient, &key, complete(owner, b"done"))
            .await
            .unwrap(),
        HELD
    );
    assert!(completed_with(
        b"done",
        &apply(&*patient, &key, claim(token())).await.unwrap()
    ));
}

// invariant: pooled-connection-limits
#[tokio::test]
async fn behind_a_pooler_each_transaction_has_its_limits() {
    let postgres = Postgres::shared().await;
    let patient = hand::store(&postgres).await;
    let proxy = Proxy::before(&postgres).await;
    proxy.be_a_pooler();
    let limit = Duration::from_secs(2);
    let store = PostgresStore::builder(proxy.url())
        .without_purge()
        .response_timeout(limit)
        .start_patience(PATIENCE)
        .connect()
        .await
        .unwrap();
    let scope = scope();
    let owner = token();
    let key = key(&scope, 1);
    assert!(granted_as(
        1,
        &apply(&store, &key, claim(owner)).await.unwrap()
    ));
    let mut client = postgres.connection().await;
    let transaction = client.transaction().await.unwrap();
    let lock = "SELECT 1 FROM oncegate_records WHERE key = $1 FOR UPDATE";
    transaction.query_one(lock, &[&key.as_str()]).await.unwrap();
    // Without limits it would wait for the row until the store gives up the connection.
    let held = apply(&store, &key, complete(owner, b"done")).await;
    assert!(
        held.as_ref()
            .is_err_and(|error| error.to_string().contains("lock_timeout")),
        "{held:?}"
    );
    transaction.rollback().await.unwrap();
    assert_eq!(
        apply(&*patient, &key, complete(owner, b"done"))
            .await
            .unwrap(),
        HELD
    );
    assert!(store.read(vec![key]).await.remove(0).unwrap().is_some());
}
