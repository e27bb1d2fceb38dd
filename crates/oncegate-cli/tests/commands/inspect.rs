//! `oncegate inspect`.

use std::time::Duration;

use oncegate::core::key::StoreKey;
use oncegate::redis::RedisStore;
use oncegate::sqlite::SqliteStore;
use oncegate::{Completion, Entry, Gate, Key, Lease, Message, Origin};
use oncegate_testkit::{Redis, unique};

use super::oncegate;

fn order(id: u32) -> Message {
    let origin = Origin::Other(format!("order {id}").into());
    Message::new("orders", origin, Some(payload(id).into()))
}

fn payload(id: u32) -> String {
    format!(r#"{{"order_id":{id},"card":"visa-of-alice"}}"#)
}

async fn granted(gate: &Gate, id: u32) -> Lease {
    match gate.enter(&order(id)).await.expect("the store answers") {
        Entry::Granted(lease) => lease,
        other => panic!("not granted: {other:?}"),
    }
}

#[tokio::test]
async fn a_store_that_is_away_is_named_without_its_password() {
    for (url, server) in [
        ("redis://me:secret@127.0.0.1:1", "Redis at 127.0.0.1:1"),
        (
            "redis+cluster://me:secret@127.0.0.1:1",
            "Redis at 127.0.0.1:1",
        ),
        (
            "redis+sentinel://me:secret@127.0.0.1:1/primary",
            "Redis at 127.0.0.1:1",
        ),
        (
            "postgres://me:secret@127.0.0.1:1/once",
            "PostgreSQL at 127.0.0.1:1/once",
        ),
    ] {
        let answer = oncegate(
            &[
                "inspect",
                "--store",
                url,
                "--store-key",
                "billing:UPt7KTwTETF9dZLHdE-MbA",
            ],
            b"",
        )
        .await;
        answer.ended(69).says(server);
        assert!(!answer.err.contains("secret"), "{answer:?}");
    }
}

#[tokio::test]
async fn each_state_is_told_in_words() {
    let redis = Redis::shared().await;
    let scope = unique("inspect");
    let store = RedisStore::connect(redis.url()).await.expect("connects");
    let gate = Gate::new(&*scope, Key::json(["order_id"]), store)
        .lease(Duration::from_secs(60))
        .fenced();
    let done = granted(&gate, 1).await;
    assert_eq!(
        done.complete(&"receipt visa".to_owned())
            .await
            .expect("encodes"),
        Completion::Applied
    );
    let running = granted(&gate, 2).await;

    let by_payload = ["--key", "order_id", "--route", "orders"];
    let inspect = async |id: u32, more: &[&str]| {
        let fixed = ["inspect", "--store", redis.url(), "--scope", &scope];
        oncegate(
            &[&fixed[..], &by_payload, more].concat(),
            payload(id).as_bytes(),
        )
        .await
    };
    let completed = inspect(1, &[]).await;
    assert_eq!(completed.ended(0).line("state"), "state completed");
    for (name, value) in [
        ("result", "result 14 bytes of JSON"),
        ("forgotten", "forgotten in 6 d 23 h"),
        // As the server was started: an append-only file, and Redis's own `appendfsync`.
        ("promise", "promise moments: it survives its worker"),
    ] {
        assert!(completed.line(name).starts_with(value), "{completed:?}");
    }
    assert!(
        !completed.out.contains("receipt visa") && completed.err.is_empty(),
        "{completed:?}"
    );

    let pending = inspect(2, &["--json"]).await.ended(0).json();
    assert_eq!(
        (&pending["state"], &pending["attempt"]),
        (&"pending".into(), &1.into())
    );
    assert_eq!(pending["promise"]["row"], "moments");
    let left = pending["protected_for_ms"].as_u64().unwrap();
    assert!((1..=60_001).contains(&left), "{left}");
    assert_eq!(
        pending["fencing_token"].as_u64(),
        running.attempt().fencing_token()
    );

    let absent = inspect(3, &[]).await;
    assert_eq!(absent.ended(1).line("state"), "state absent");
    assert_eq!(
        inspect(3, &["--json"]).await.ended(1).json()["state"],
        "absent"
    );

    // The same record by the names that logs and dead letters have.
    let key: StoreKey = pending["key"].as_str().unwrap().parse().unwrap();
    let digest = key.digest().to_string();
    for names in [
        &["--store-key", key.as_str()][..],
        &["--scope", &scope, "--digest", &digest],
    ] {
        let fixed = ["inspect", "--store", redis.url(), "--json"];
        let named = oncegate(&[&fixed[..], names].concat(), b"").await;
        assert_eq!(named.ended(0).json()["state"], "pending");
    }
}

#[tokio::test]
async fn a_wrong_key_is_refused_and_an_unknown_scope_stays_unknown() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("once.db");
    let store = SqliteStore::open(&file).await.expect("opens");
    let gate = Gate::new("billing", Key::json(["order_id"]), store);
    assert_eq!(
        granted(&gate, 1)
            .await
            .complete(&())
            .await
            .expect("encodes"),
        Completion::Applied
    );
    let url = format!("sqlite:{}", file.display());

    let inspect = async |scope: &str, key: &str| {
        let arguments = [
            "inspect", "--store", &url, "--scope", scope, "--key", key, "--route", "orders",
        ];
        oncegate(&arguments, payload(1).as_bytes()).await
    };
    assert_eq!(
        inspect("billing", "order_id").await.ended(0).line("state"),
        "state completed"
    );
    inspect("billing", "card")
        .await
        .ended(78)
        .says("order_id")
        .says("card");
    for _ in 0..2 {
        inspect("refunds", "card")
            .await
            .ended(1)
            .says("no gate has ever opened this scope");
    }
}

#[tokio::test]
async fn stores_that_cannot_be_had() {
    let arguments = |store| {
        [
            "inspect",
            "--store",
            store,
            "--store-key",
            "billing:UPt7KTwTETF9dZLHdE-MbA",
            "--timeout",
            "30s",
        ]
    };
    oncegate(&arguments("mysql://user:secret@db"), b"")
        .await
        .ended(78)
        .says("known are redis://");
    oncegate(&arguments("sqlite:/no/such/file.db"), b"")
        .await
        .ended(69)
        .says("/no/such/file.db");
    for gone in [
        "redis://:secret@127.0.0.1:1",
        "postgres://u:secret@127.0.0.1:1/x",
    ] {
        let gone = oncegate(&arguments(gone), b"").await;
        assert!(!gone.ended(69).err.contains("secret"), "{}", gone.err);
    }
}
