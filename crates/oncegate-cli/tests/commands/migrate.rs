//! `oncegate migrate`, and the commands that look, on PostgreSQL.

use oncegate::postgres::PostgresStore;
use oncegate::{Completion, Entry, Gate, Key, Message, Origin};
use oncegate_testkit::PostgresServer;

use super::{Answer, oncegate};

fn order(id: u32) -> Message {
    Message::new(
        "orders",
        Origin::Other("a test".into()),
        Some(format!("{{\"order_id\":{id}}}").into()),
    )
}

/// Completes the message, and returns its key.
async fn complete(gate: &Gate, message: &Message) -> String {
    let Entry::Granted(lease) = gate.enter(message).await.unwrap() else {
        panic!("it is not granted")
    };
    let key = lease.store_key().to_string();
    assert_eq!(lease.complete(&()).await.unwrap(), Completion::Applied);
    key
}

#[tokio::test]
async fn tables_are_made_when_told_to_and_then_looked_into() {
    let server = PostgresServer::start().await;
    let url = server.url_as("postgres:secret");

    let sql = oncegate(&["migrate", "--print", "--role", "billing"], b"").await;
    assert!(
        sql.ended(0)
            .out
            .contains("CREATE TABLE IF NOT EXISTS oncegate_records"),
        "{}",
        sql.out
    );
    assert!(sql.out.contains("TO \"billing\";"), "{}", sql.out);

    tables_are_made_once(&url).await;

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
    let message = order(7);
    complete(&gate, &message).await;
    let look = [
        "inspect", "--store", &as_role, "--scope", "billing", "--key", "order_id", "--route",
        "orders",
    ];
    let looked = oncegate(&look, message.payload()).await;
    assert_eq!(looked.ended(0).line("state"), "state completed");

    a_journal_is_made(&url).await;
    let key = complete(&gate, &order(8)).await;
    // The tables' owner sees the journal, a role without rights on it does not.
    let told = look_into(&url, &key).await.ended(0).json();
    let told: Vec<_> = told["journal"]
        .as_array()
        .unwrap()
        .iter()
        .map(|entry| entry["event"].clone())
        .collect();
    assert_eq!(told, ["claimed", "completed"]);
    let unread = look_into(&as_role, &key).await;
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

async fn look_into(url: &str, key: &str) -> Answer {
    oncegate(
        &["inspect", "--store", url, "--store-key", key, "--json"],
        b"",
    )
    .await
}

async fn tables_are_made_once(url: &str) {
    let migrate =
        async |more: &[&str]| oncegate(&[&["migrate", "--store", url], more].concat(), b"").await;
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
}

async fn a_journal_is_made(url: &str) {
    let url_with_journal = ["migrate", "--store", url, "--journal"];
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
    let printed = oncegate(&["migrate", "--print", "--journal"], b"").await;
    assert!(
        printed.ended(0).out.contains(planned.out.trim()),
        "{}",
        printed.out
    );
}

#[tokio::test]
async fn only_postgresql_has_tables_to_make() {
    oncegate(&["migrate", "--role", "billing", "--yes"], b"")
        .await
        .ended(2)
        .says("--print");
    oncegate(&["migrate", "--yes"], b"")
        .await
        .ended(2)
        .says("--store is missing");
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
