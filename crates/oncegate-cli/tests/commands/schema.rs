//! `oncegate sql` and `oncegate migrate`, and the commands that look, on PostgreSQL.

use oncegate::postgres::PostgresStore;
use oncegate::{Completion, Entry, Gate, Key, Message, Origin};
use oncegate_testkit::PostgresServer;

use super::oncegate;

#[tokio::test]
async fn tables_are_made_when_told_to_and_then_looked_into() {
    let server = PostgresServer::start().await;
    let url = server.url_as("postgres:secret");
    let migrate =
        async |more: &[&str]| oncegate(&[&["migrate", "--store", &url], more].concat(), b"").await;

    let sql = oncegate(&["sql", "--store", "postgres", "--role", "billing"], b"").await;
    assert!(
        sql.ended(0)
            .out
            .contains("CREATE TABLE IF NOT EXISTS oncegate_records"),
        "{}",
        sql.out
    );
    assert!(sql.out.contains("TO \"billing\";"), "{}", sql.out);

    let planned = migrate(&["--dry-run"]).await;
    assert!(
        planned
            .ended(1)
            .says("no tables")
            .out
            .contains("CREATE TABLE"),
        "{}",
        planned.out
    );
    assert!(
        !planned.err.contains("secret") && planned.err.contains("***@127.0.0.1"),
        "{}",
        planned.err
    );
    // Without a terminal the command cannot ask for confirmation, so it does nothing.
    migrate(&[]).await.ended(2).says("--yes");
    assert_eq!(
        migrate(&["--dry-run", "--json"]).await.ended(1).json()["from"],
        serde_json::Value::Null
    );
    let done = migrate(&["--yes", "--json"]).await.ended(0).json();
    assert_eq!((&done["to"], &done["done"]), (&1.into(), &true.into()));
    migrate(&["--dry-run"]).await.ended(0).says("nothing to do");

    let client = server.connection().await;
    client
        .batch_execute("CREATE ROLE billing LOGIN")
        .await
        .unwrap();
    let grants = sql.out.split_once("GRANT").unwrap().1;
    client
        .batch_execute(&format!("GRANT{grants}"))
        .await
        .unwrap();
    let as_role = server.url_as("billing");
    let store = PostgresStore::connect(&as_role).await.unwrap();
    let gate = Gate::new("billing", Key::json(["order_id"]), store);
    let payload = r#"{"order_id":7}"#;
    let message = Message::new(
        "orders",
        Origin::Other("a test".into()),
        Some(payload.into()),
    );
    let Entry::Granted(lease) = gate.enter(&message).await.unwrap() else {
        panic!("it is not granted")
    };
    assert_eq!(lease.complete(&()).await.unwrap(), Completion::Applied);
    let look = [
        "inspect", "--store", &as_role, "--scope", "billing", "--key", "order_id", "--route",
        "orders",
    ];
    let looked = oncegate(&look, payload.as_bytes()).await;
    assert_eq!(looked.ended(0).line("state"), "state completed");

    // A journal, and what the tables' owner and a role without rights on it see of it.
    let url_with_journal = ["migrate", "--store", &url, "--journal"];
    let planned = oncegate(&[&url_with_journal[..], &["--dry-run"]].concat(), b"").await;
    assert!(
        planned
            .ended(1)
            .out
            .contains("CREATE TABLE IF NOT EXISTS oncegate_journal"),
        "{}",
        planned.out
    );
    oncegate(&[&url_with_journal[..], &["--yes"]].concat(), b"")
        .await
        .ended(0);
    oncegate(&url_with_journal, b"")
        .await
        .ended(0)
        .says("nothing to do");
    let printed = oncegate(&["sql", "--store", "postgres", "--journal"], b"").await;
    assert!(
        printed.ended(0).out.contains(planned.out.trim()),
        "{}",
        printed.out
    );
    let next = Message::new(
        "orders",
        Origin::Other("a test".into()),
        Some(r#"{"order_id":8}"#.into()),
    );
    let Entry::Granted(lease) = gate.enter(&next).await.unwrap() else {
        panic!("it is not granted")
    };
    let key = lease.store_key().to_string();
    assert_eq!(lease.complete(&()).await.unwrap(), Completion::Applied);
    let look = async |url: &str| {
        oncegate(
            &["inspect", "--store", url, "--store-key", &key, "--json"],
            b"",
        )
        .await
    };
    let told = look(&url).await.ended(0).json();
    let told: Vec<_> = told["journal"]
        .as_array()
        .unwrap()
        .iter()
        .map(|entry| entry["event"].clone())
        .collect();
    assert_eq!(told, ["claimed", "completed"]);
    let unread = look(&as_role).await;
    assert_eq!(
        unread.ended(0).says("GRANT SELECT").json().get("journal"),
        None
    );

    let migrate = ["migrate", "--store", &as_role];
    oncegate(&migrate, b"").await.ended(0).says("nothing to do");
    client
        .batch_execute("DROP TABLE oncegate_schema")
        .await
        .unwrap();
    oncegate(&[&migrate[..], &["--yes"]].concat(), b"")
        .await
        .ended(78)
        .says("42501");
}

#[tokio::test]
async fn only_postgresql_has_tables_to_make() {
    oncegate(&["sql", "--store", "redis"], b"")
        .await
        .ended(2)
        .says("postgres");
    oncegate(&["migrate", "--store", "sqlite:/tmp/no.db", "--yes"], b"")
        .await
        .ended(78)
        .says("postgres://");
    let gone = oncegate(
        &[
            "migrate",
            "--store",
            "postgres://u:secret@127.0.0.1:1/x",
            "--yes",
        ],
        b"",
    )
    .await;
    assert!(!gone.ended(69).err.contains("secret"), "{}", gone.err);
}
