//! `oncegate reset`.

use oncegate::sqlite::SqliteStore;
use oncegate::{Completion, Entry, Gate, Key, Message, Origin};

use super::{oncegate, oncegate_with};

fn order() -> Message {
    Message::new("orders", Origin::Other("a test".into()), Some(r#"{"order_id":1}"#.into()))
}

#[tokio::test]
async fn a_completed_key_runs_once_more_and_only_with_leave_and_a_reason() {
    let dir = tempfile::tempdir().expect("a folder");
    let (file, journal) = (dir.path().join("once.db"), dir.path().join("journal.jsonl"));
    let store = SqliteStore::open(&file).await.expect("opens");
    let gate = Gate::new("billing", Key::json(["order_id"]), store);
    let Entry::Granted(lease) = gate.enter(&order()).await.expect("the store answers") else {
        panic!("not granted")
    };
    assert_eq!(lease.complete(&"receipt").await.expect("encodes"), Completion::Held);

    let url = format!("sqlite:{}", file.display());
    let fixed = ["reset", "--store", &url, "--scope", "billing", "--key", "order_id", "--route", "orders"];
    let environment = [("ONCEGATE_JOURNAL", journal.to_str().expect("text")), ("ONCEGATE_OPERATOR", "ada")];
    let reset = async |more: &[&str]| {
        oncegate_with(&[&fixed[..], more].concat(), &environment, br#"{"order_id":1}"#).await
    };
    let dry = reset(&["--dry-run"]).await;
    assert_eq!(dry.ended(0).line("state"), "state completed");
    assert!(dry.line("effect").contains("happens once more"), "{dry:?}");
    reset(&["--why", "asked by support"]).await.ended(2).says("--yes");
    reset(&["--yes"]).await.ended(2).says("--why");
    assert!(!journal.exists(), "nothing was done");
    assert!(matches!(gate.enter(&order()).await, Ok(Entry::Completed(_))));

    let done = reset(&["--yes", "--why", "asked by support", "--json"]).await.ended(0).json();
    assert_eq!((&done["done"], &done["state"]), (&true.into(), &"completed".into()));
    let Ok(Entry::Granted(lease)) = gate.enter(&order()).await else { panic!("not granted") };
    assert_eq!(lease.message().attempt(), 1);
    let written = std::fs::read_to_string(&journal).expect("a journal");
    let written: Vec<serde_json::Value> =
        written.lines().map(|line| serde_json::from_str(line).expect("JSON lines")).collect();
    let events: Vec<_> = written.iter().map(|entry| entry["event"].as_str().expect("text")).collect();
    assert_eq!(events, ["reset_begins", "reset"]);
    assert!(written.iter().all(|entry| entry["by"] == "ada" && entry["reason"] == "asked by support"));

    // A journal that cannot be written forbids the change.
    let blocked = ["--yes", "--why", "x", "--journal", "/proc/no/journal"];
    reset(&blocked).await.ended(78).says("nothing was changed");
}

#[tokio::test]
async fn what_is_not_there_is_not_reset() {
    let dir = tempfile::tempdir().expect("a folder");
    let file = dir.path().join("once.db");
    drop(SqliteStore::open(&file).await.expect("opens"));
    let url = format!("sqlite:{}", file.display());
    let key = ["--store-key", "billing:UPt7KTwTETF9dZLHdE-MbA", "--yes", "--why", "x"];
    let answer = oncegate(&[&["reset", "--store", &url][..], &key].concat(), b"").await;
    assert_eq!(answer.ended(1).line("state"), "state absent");
}
