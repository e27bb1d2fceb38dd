//! Through PgBouncer in transaction mode, where a connection has another session for each
//! transaction.

use futures_util::future::join_all;
use oncegate::postgres::PostgresStore;
use oncegate_core::store::Store as _;
use oncegate_testkit::{PgBouncer, PostgresServer};

use crate::hand::{PATIENCE, apply, claim, complete, completed_with, key, scope, token};

async fn server() -> PostgresServer {
    let server = PostgresServer::start().await;
    let store = PostgresStore::connect(server.url()).await.unwrap();
    store.create_schema().await.unwrap();
    server
}

// invariant: behind-a-pooler
#[tokio::test(flavor = "multi_thread")]
async fn records_are_kept_through_a_pooler_in_transaction_mode() {
    let server = server().await;
    // The first one refuses the settings of our sessions, the second one drops them.
    for more in ["", "ignore_startup_parameters = options"] {
        let pooler = PgBouncer::before(&server, &["max_prepared_statements = 100", more]).await;
        let builder = || PostgresStore::builder(pooler.url()).response_timeout(PATIENCE);
        let stores = [
            builder().connect().await.unwrap(),
            builder().connect().await.unwrap(),
        ];
        stores[0].check().await.unwrap();
        let scope = scope();
        // More at once than the pooler has sessions, so that statements are executed where they
        // were not prepared.
        let work = (0..60).map(|number| {
            let store = stores[number as usize % 2].clone();
            let key = key(&scope, number);
            tokio::spawn(async move {
                let owner = token();
                apply(&store, &key, claim(owner)).await.unwrap();
                apply(&store, &key, complete(owner, "done")).await.unwrap();
                let reply = apply(&store, &key, claim(token())).await.unwrap();
                assert!(completed_with(b"done", &reply), "{reply:?}");
            })
        });
        for done in join_all(work).await {
            done.unwrap();
        }
        let admin = server.connection().await;
        let row = admin
            .query_one(
                "SELECT count(*) FROM pg_stat_activity WHERE usename = 'postgres'",
                &[],
            )
            .await;
        let sessions: i64 = row.unwrap().get(0);
        assert!(sessions < 16, "the pooler shares its sessions: {sessions}");
    }
}

// invariant: behind-a-pooler
#[tokio::test(flavor = "multi_thread")]
async fn a_pooler_without_prepared_statements_is_refused_with_a_fix() {
    let server = server().await;
    let pooler = PgBouncer::before(&server, &["max_prepared_statements = 0"]).await;
    let refused = PostgresStore::builder(pooler.url())
        .response_timeout(PATIENCE)
        .connect()
        .await
        .unwrap_err();
    assert_eq!(refused.class(), "refused", "{refused}");
    assert!(
        refused.to_string().contains("max_prepared_statements"),
        "{refused}"
    );
}
