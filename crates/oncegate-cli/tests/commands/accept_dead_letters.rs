//! `oncegate accept dead-letters`.

use oncegate::core::key::Scope;
use oncegate::core::store::{DeadLetterStop, ScopeDescriptor, Store as _};
use oncegate::sqlite::SqliteStore;
use oncegate::{Gate, Key};

use super::oncegate_with;

/// The descriptor with a stop at the limit.
fn stopped(scope: &Scope, held: &str) -> String {
    let stop = DeadLetterStop {
        at_ms: 1_767_225_600_000,
        what: "100 messages in a row were given up".to_owned(),
        in_a_row: 100,
        of_window: 0,
    };
    let descriptor = ScopeDescriptor {
        dead_letter_stop: Some(stop),
        ..ScopeDescriptor::parse(scope, held).expect("readable")
    };
    descriptor.to_text().expect("JSON")
}

const ACCEPT: [&str; 5] = ["accept", "dead-letters", "--scope", "billing", "--store"];

#[tokio::test]
async fn accepting_a_dead_letter_stop_needs_leave_and_a_reason() {
    let dir = tempfile::tempdir().expect("a folder");
    let file = dir.path().join("once.db");
    let journal = dir.path().join("journal.jsonl");
    let store = SqliteStore::open(&file).await.expect("opens");
    let gate = Gate::new("billing", Key::json(["order_id"]), store.clone());
    gate.open().await.expect("the store answers");
    let url = format!("sqlite:{}", file.display());
    let environment = [
        ("ONCEGATE_JOURNAL", journal.to_str().expect("text")),
        ("ONCEGATE_OPERATOR", "ada"),
    ];
    let accept = async |more: &[&str]| {
        oncegate_with(&[&ACCEPT[..], &[&url], more].concat(), &environment, b"").await
    };
    accept(&["--yes", "--why", "x"])
        .await
        .ended(1)
        .says("no consumer of scope billing has stopped");

    let scope = Scope::new("billing").expect("a scope");
    let held = store
        .descriptor(&scope)
        .await
        .expect("answers")
        .expect("it was opened");
    let stopped = stopped(&scope, &held);
    assert_eq!(
        store
            .describe(&scope, Some(&held), &stopped)
            .await
            .expect("answers"),
        stopped
    );

    let dry = accept(&["--dry-run", "--json"]).await;
    let dry = dry.ended(0).json();
    assert_eq!(
        (&dry["stopped"], &dry["done"]),
        (&true.into(), &false.into())
    );
    assert_eq!(dry["stopped_at_ms"], 1_767_225_600_000_u64);
    accept(&["--why", "the orders are bad"])
        .await
        .ended(2)
        .says("--yes");
    accept(&["--yes"]).await.ended(2).says("--why");
    assert_eq!(
        store.descriptor(&scope).await.expect("answers"),
        Some(stopped),
        "nothing was done"
    );

    let done = accept(&["--yes", "--why", "the orders are bad"]).await;
    assert!(
        done.ended(0)
            .line("reason")
            .contains("100 messages in a row"),
        "{done:?}"
    );
    assert_eq!(
        store.descriptor(&scope).await.expect("answers"),
        Some(held),
        "nothing else was changed"
    );
    accept(&["--yes", "--why", "x"]).await.ended(1);
    let written = std::fs::read_to_string(&journal).expect("a journal");
    assert!(
        written.contains("accept_dead_letters") && written.contains("the orders are bad"),
        "{written}"
    );
}
