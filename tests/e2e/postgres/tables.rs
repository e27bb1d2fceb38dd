//! The tables: who may make them, what the check refuses, and which rights are enough.

use std::time::Duration;

use futures_util::future::join_all;
use oncegate::postgres::PostgresStore;
use oncegate_core::rules::Operation;
use oncegate_core::store::Store;
use oncegate_testkit::{Postgres, PostgresServer, unique, until};

use crate::hand::{self, HELD, PATIENCE, apply, claim, complete, granted_as, key, scope, token};

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
    let scope = scope();
    let owner = token();
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
async fn creating_the_tables_waits_for_others_beyond_the_timeout() {
    const ANSWER: Duration = Duration::from_secs(1);
    let server = PostgresServer::start().await;
    // Another session is creating the tables.
    let mut other = server.connection().await;
    let transaction = other.transaction().await.unwrap();
    transaction
        .execute("SELECT pg_advisory_xact_lock(8029745910187783269)", &[])
        .await
        .unwrap();

    // A slow machine may need longer for a connection than the timeout allows.
    let builder = PostgresStore::builder(server.url()).start_patience(PATIENCE);
    let store = builder.response_timeout(ANSWER).connect().await.unwrap();
    let made = tokio::spawn(async move { store.create_schema().await });
    let watcher = server.connection().await;
    let waiting = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'oncegate' \
                   AND wait_event_type = 'Lock' AND query_start < now() - interval '2 seconds'";
    until(
        "a session to wait for the lock for two seconds",
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
