//! How the server executes our statements.

use oncegate::outbox::OutboxStore as _;
use oncegate_core::store::Store as _;
use oncegate_testkit::PostgresServer;

use crate::hand::{apply, claim, complete, key, scope, store, token};

/// A server with its default settings compiles what it thinks expensive, which takes longer than
/// any of our statements.
#[tokio::test]
async fn no_statement_is_compiled() {
    let server = PostgresServer::start_with(&["shared_preload_libraries=pg_stat_statements"]).await;
    let client = server.connection().await;
    client
        .batch_execute("CREATE EXTENSION pg_stat_statements")
        .await
        .unwrap();
    let store = store(&server).await;
    store.check().await.unwrap();
    let (key, owner) = (key(&scope(), 1), token());
    for operation in [claim(owner), complete(owner, "done"), claim(token())] {
        apply(&store, &key, operation).await.unwrap();
    }
    let outbox = store.outbox("orders").unwrap();
    outbox.backlog(10).await.unwrap();
    outbox.status().await.unwrap();
    let compiled = client
        .query(
            "SELECT query FROM pg_stat_statements WHERE jit_functions > 0",
            &[],
        )
        .await
        .unwrap();
    let compiled: Vec<String> = compiled.iter().map(|row| row.get(0)).collect();
    assert_eq!(compiled, Vec::<String>::new());
    let counted = client
        .query_one(
            "SELECT count(*) FROM pg_stat_statements WHERE query LIKE '%oncegate_%'",
            &[],
        )
        .await
        .unwrap();
    assert!(counted.get::<_, i64>(0) > 5, "statements are recorded");
}
