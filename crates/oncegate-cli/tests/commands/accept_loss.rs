//! `oncegate accept loss`.

use std::time::Duration;

use oncegate::sqlite::SqliteStore;
use oncegate::{Entry, Gate, Key, Message, Origin};
use oncegate_testkit::until;

use super::{LIMIT, oncegate, oncegate_with};

fn order() -> Message {
    Message::new(
        "orders",
        Origin::Other("a test".into()),
        Some(r#"{"order_id":1}"#.into()),
    )
}

/// Waits until the gate has noticed the loss. Returns the error of its claim.
async fn until_refused(gate: &Gate, order: &Message) -> String {
    until("the claim to be refused", LIMIT, async || {
        match gate.enter(order).await {
            Err(error) => Ok(error.to_string()),
            Ok(Entry::Granted(lease)) => {
                lease
                    .release(Duration::ZERO, false, "the loss is not noticed yet")
                    .await;
                Err("granted".to_owned())
            }
            Ok(other) => Err(format!("{other:?}")),
        }
    })
    .await
}

#[tokio::test]
async fn a_halted_scope_goes_on_only_with_leave_and_a_reason() {
    let dir = tempfile::tempdir().expect("a folder");
    let file = dir.path().join("once.db");
    let journal = dir.path().join("journal.jsonl");
    let store = SqliteStore::open(&file).await.expect("opens");
    let gate = Gate::new("billing", Key::json(["order_id"]), store.clone());
    gate.open().await.expect("the store answers");
    let url = format!("sqlite:{}", file.display());
    let fixed = ["accept", "loss", "--store", &url, "--scope", "billing"];
    let environment = [
        ("ONCEGATE_JOURNAL", journal.to_str().expect("text")),
        ("ONCEGATE_OPERATOR", "ada"),
    ];
    let accept =
        async |more: &[&str]| oncegate_with(&[&fixed[..], more].concat(), &environment, b"").await;
    accept(&["--yes", "--why", "x"])
        .await
        .ended(1)
        .says("not halted");

    store
        .open_connection()
        .expect("opens")
        .execute("DELETE FROM descriptors", ())
        .expect("deleted");
    let order = order();
    let refused = until_refused(&gate, &order).await;
    assert!(
        refused.contains("oncegate accept loss --scope billing"),
        "{refused}"
    );

    let dry = until("the halt to be written", LIMIT, async || {
        let dry = accept(&["--dry-run", "--json"]).await;
        if dry.code == Some(0) {
            Ok(dry.json())
        } else {
            Err(format!("{dry:?}"))
        }
    });
    let dry = dry.await;
    assert_eq!(
        (&dry["halted"], &dry["done"]),
        (&true.into(), &false.into())
    );
    assert!(
        dry["reason"].as_str().expect("text").contains("descriptor"),
        "{dry}"
    );
    accept(&["--why", "replayed"]).await.ended(2).says("--yes");
    accept(&["--yes"]).await.ended(2).says("--why");
    assert!(gate.enter(&order).await.is_err(), "nothing was done");

    let done = accept(&["--yes", "--why", "replayed"]).await;
    assert!(
        done.ended(0).line("reason").contains("descriptor"),
        "{done:?}"
    );
    until("the gate to go on", LIMIT, async || {
        gate.enter(&order)
            .await
            .map(drop)
            .map_err(|e| e.to_string())
    })
    .await;
    accept(&["--yes", "--why", "x"]).await.ended(1);
    let written = std::fs::read_to_string(&journal).expect("a journal");
    assert!(
        written.contains("accept_loss") && written.contains("replayed") && written.contains("ada"),
        "{written}"
    );
}

#[tokio::test]
async fn a_store_that_cannot_be_reached_is_said_so() {
    let answer = oncegate(
        &[
            "accept",
            "loss",
            "--store",
            "redis://127.0.0.1:1",
            "--scope",
            "billing",
            "--yes",
            "--why",
            "x",
        ],
        b"",
    );
    answer.await.ended(69);
}
