//! What a server may hold, be set to, or refuse.

use std::time::{Duration, Instant};

use futures_util::future::join_all;
use oncegate::postgres::PostgresStore;
use oncegate_core::rules::{Operation, Reply, Verdict};
use oncegate_core::store::{Command, Store, StoreError};
use oncegate_testkit::{Postgres, PostgresServer, unique, until};

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
            let (store, key) = (stores[number % 2].clone(), key.clone());
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
            let (one, other) = (claim(token()), claim(token()));
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
        let (store, scope) = (stores[number % 3].clone(), scope.clone());
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

#[tokio::test]
async fn the_check_refuses_what_breaks_the_promise() {
    let server = PostgresServer::start_with(&["synchronous_commit=off", "fsync=off"]).await;
    let store = PostgresStore::connect(server.url()).await.unwrap();
    let no_tables = store.check().await.unwrap_err();
    assert_eq!(no_tables.class(), "refused");
    // It checks the server before the tables.
    assert!(
        no_tables.to_string().contains("synchronous_commit"),
        "{no_tables}"
    );
    let lenient = || PostgresStore::builder(server.url()).allow_asynchronous_commit();
    let unsynced = lenient()
        .connect()
        .await
        .unwrap()
        .check()
        .await
        .unwrap_err();
    assert!(
        unsynced
            .to_string()
            .contains("the store's `allow_fsync_off`"),
        "{unsynced}"
    );
    let lenient = lenient().allow_fsync_off().connect().await.unwrap();
    let no_tables = lenient.check().await.unwrap_err();
    assert!(
        no_tables.to_string().contains("create_schema()"),
        "{no_tables}"
    );
    let no_tables = apply(&store, &key(&scope(), 1), claim(token()))
        .await
        .unwrap_err();
    assert!(no_tables.to_string().contains("42P01"), "{no_tables}");

    store.create_schema().await.unwrap();
    let checkup = lenient.check().await.unwrap();
    assert_eq!(checkup.warnings.len(), 2, "{checkup:?}");

    let client = server.connection().await;
    client
        .batch_execute("ALTER TABLE oncegate_records SET UNLOGGED")
        .await
        .unwrap();
    let unlogged = lenient.check().await.unwrap_err();
    assert!(unlogged.to_string().contains("SET LOGGED"), "{unlogged}");
    client
        .batch_execute("UPDATE oncegate_schema SET version = 2")
        .await
        .unwrap();
    for refused in [
        lenient.check().await.map(|_| ()),
        lenient.create_schema().await,
    ] {
        let refused = refused.unwrap_err();
        assert_eq!(refused.class(), "refused");
        assert!(refused.to_string().contains("format 2"), "{refused}");
    }
}

#[tokio::test]
async fn the_fewest_rights_are_enough() {
    let postgres = Postgres::shared().await;
    hand::store(&postgres).await;
    let role = unique("billing").replace('-', "_");
    let client = postgres.connection().await;
    client
        .batch_execute(&format!("CREATE ROLE {role} LOGIN"))
        .await
        .unwrap();
    let store = PostgresStore::connect(&postgres.url_as(&role))
        .await
        .unwrap();
    let (scope, owner) = (scope(), token());
    let own = key(&scope, 1);
    let refused = apply(&store, &own, claim(owner)).await.unwrap_err();
    assert_eq!(refused.class(), "refused");
    assert!(
        refused.to_string().contains("permission denied"),
        "{refused}"
    );
    let select = format!("GRANT SELECT ON oncegate_schema, oncegate_records TO {role}");
    client.batch_execute(&select).await.unwrap();
    let missing = store.check().await.unwrap_err();
    assert!(
        missing
            .to_string()
            .contains(&PostgresStore::grant_sql(&role)),
        "{missing}"
    );
    client
        .batch_execute(&PostgresStore::grant_sql(&role))
        .await
        .unwrap();

    store.check().await.unwrap();
    assert_eq!(
        store.describe(&scope, None, "descriptor").await.unwrap(),
        "descriptor"
    );
    assert!(granted_as(
        1,
        &apply(&store, &own, claim(owner)).await.unwrap()
    ));
    let extend = Operation::Extend {
        token: owner,
        lease: Duration::from_secs(900),
    };
    assert_eq!(apply(&store, &own, extend).await.unwrap(), HELD);
    assert_eq!(
        apply(&store, &own, complete(owner, b"done")).await.unwrap(),
        HELD
    );
    assert!(store.read(vec![own]).await[0].as_ref().unwrap().is_some());
    store.purge().await.unwrap();
    // The tables are there: it need not make any.
    store.create_schema().await.unwrap();
    client
        .batch_execute(&format!("DROP OWNED BY {role}; DROP ROLE {role}"))
        .await
        .unwrap();
}

#[tokio::test]
async fn the_tables_are_made_once_by_who_may() {
    let server = PostgresServer::start().await;
    let client = server.connection().await;
    client
        .batch_execute("CREATE ROLE billing LOGIN")
        .await
        .unwrap();
    let store = PostgresStore::connect(&server.url_as("billing"))
        .await
        .unwrap();
    let change = store.schema_change().await.unwrap();
    assert_eq!(
        (change.from, change.to, &change.sql),
        (None, 1, &PostgresStore::schema_sql())
    );
    let refused = store.create_schema().await.unwrap_err();
    assert_eq!(refused.class(), "refused");
    assert!(refused.to_string().contains("42501"), "{refused}");
    // Nothing was made by halves, and many deployments at once do not hinder each other.
    let owner = PostgresStore::connect(server.url()).await.unwrap();
    assert_eq!(owner.schema_change().await.unwrap(), change);
    for made in join_all((0..8).map(|_| owner.create_schema())).await {
        made.unwrap();
    }
    let change = owner.schema_change().await.unwrap();
    assert_eq!((change.from, change.to, &*change.sql), (Some(1), 1, ""));
    // What is printed can be run, and run again.
    client
        .batch_execute(&PostgresStore::schema_sql())
        .await
        .unwrap();
}

#[tokio::test]
async fn who_makes_the_tables_waits_for_others_who_do_longer_than_for_an_answer() {
    const ANSWER: Duration = Duration::from_millis(200);
    let server = PostgresServer::start().await;
    // Another session is creating the tables.
    let mut other = server.connection().await;
    let transaction = other.transaction().await.unwrap();
    transaction
        .execute("SELECT pg_advisory_xact_lock(8029745910187783269)", &[])
        .await
        .unwrap();

    let store = PostgresStore::builder(server.url())
        .response_timeout(ANSWER)
        .connect()
        .await
        .unwrap();
    let made = tokio::spawn(async move { store.create_schema().await });
    let watcher = server.connection().await;
    let waiting = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'oncegate' \
                   AND wait_event_type = 'Lock' AND query_start < now() - interval '1 second'";
    until(
        "a session to wait for the lock for a second",
        PATIENCE,
        async || {
            assert!(
                !made.is_finished(),
                "the other session still holds the lock"
            );
            let count: i64 = watcher.query_one(waiting, &[]).await.unwrap().get(0);
            if count == 1 {
                Ok(())
            } else {
                Err(format!("{count} wait"))
            }
        },
    )
    .await;
    transaction.rollback().await.unwrap();
    made.await.unwrap().unwrap();
}

// invariant: cost-grows-with-table
#[tokio::test]
async fn no_statement_reads_the_whole_table() {
    const KEYS: u128 = 2_000;
    let server = PostgresServer::start().await;
    let store = hand::store(&server).await;
    let (scope, owner) = (scope(), token());
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
    let (store, client) = (hand::store(&postgres).await, postgres.connection().await);
    let (scope, owner) = (scope(), token());
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
    let (key, owner) = (key(&scope(), 1), token());
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
async fn a_server_that_starts_late_is_waited_for_as_long_as_it_is_told() {
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
async fn a_row_that_somebody_holds_blocks_nobody_for_ever() {
    let postgres = Postgres::shared().await;
    hand::store(&postgres).await;
    let limit = Duration::from_secs(2);
    let store = PostgresStore::builder(postgres.url())
        .response_timeout(limit)
        .connect()
        .await
        .unwrap();
    let (scope, owner) = (scope(), token());
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
    let (patient, proxy) = (hand::store(&postgres).await, Proxy::before(&postgres).await);
    proxy.be_a_pooler();
    let limit = Duration::from_secs(2);
    let store = PostgresStore::builder(proxy.url())
        .without_purge()
        .response_timeout(limit)
        .connect()
        .await
        .unwrap();
    let (scope, owner) = (scope(), token());
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
