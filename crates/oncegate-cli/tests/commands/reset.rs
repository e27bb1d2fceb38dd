//! `oncegate reset`.

use std::time::Duration;

use oncegate::journal::FileJournal;
use oncegate::sqlite::SqliteStore;
use oncegate::{Completion, Entry, Gate, Key, Message, Origin};
use oncegate_testkit::until;

use super::{LIMIT, oncegate, oncegate_with};

fn order() -> Message {
    Message::new(
        "orders",
        Origin::Other("a test".into()),
        Some(r#"{"order_id":1}"#.into()),
    )
}

#[tokio::test]
async fn a_completed_key_runs_once_more_and_only_with_leave_and_a_reason() {
    let dir = tempfile::tempdir().expect("a folder");
    let (file, journal) = (dir.path().join("once.db"), dir.path().join("journal.jsonl"));
    let store = SqliteStore::open(&file).await.expect("opens");
    let gate = Gate::new("billing", Key::json(["order_id"]), store);
    let gate = gate.journal(FileJournal::open(&journal).expect("opens").by("worker-3"));
    let Entry::Granted(lease) = gate.enter(&order()).await.expect("the store answers") else {
        panic!("not granted")
    };
    assert_eq!(
        lease.complete(&"receipt").await.expect("encodes"),
        Completion::Applied
    );

    let url = format!("sqlite:{}", file.display());
    let fixed = [
        "reset", "--store", &url, "--scope", "billing", "--key", "order_id", "--route", "orders",
    ];
    let environment = [
        ("ONCEGATE_JOURNAL", journal.to_str().expect("text")),
        ("ONCEGATE_OPERATOR", "ada"),
    ];
    let reset = async |more: &[&str]| {
        oncegate_with(
            &[&fixed[..], more].concat(),
            &environment,
            br#"{"order_id":1}"#,
        )
        .await
    };
    let dry = reset(&["--dry-run"]).await;
    assert_eq!(dry.ended(0).line("state"), "state completed");
    assert!(dry.line("effect").contains("happens once more"), "{dry:?}");
    reset(&["--why", "asked by support"])
        .await
        .ended(2)
        .says("--yes");
    reset(&["--yes"]).await.ended(2).says("--why");
    let events = || {
        let written = std::fs::read_to_string(&journal).expect("a journal");
        let entries = written
            .lines()
            .map(|line| serde_json::from_str(line).expect("JSON lines"));
        entries
            .map(|entry: serde_json::Value| entry["event"].as_str().expect("text").to_owned())
            .collect::<Vec<_>>()
    };
    // The gate logs on its own thread.
    until("the gate's entries", LIMIT, async || match events().len() {
        2.. => Ok(()),
        some => Err(format!("{some} entries")),
    })
    .await;
    assert!(
        !events().iter().any(|event| event.starts_with("reset")),
        "nothing was done"
    );
    assert!(matches!(
        gate.enter(&order()).await,
        Ok(Entry::Completed(_))
    ));

    let done = reset(&["--yes", "--why", "asked by support", "--json"])
        .await
        .ended(0)
        .json();
    assert_eq!(
        (&done["done"], &done["state"]),
        (&true.into(), &"completed".into())
    );
    let Ok(Entry::Granted(lease)) = gate.enter(&order()).await else {
        panic!("not granted")
    };
    assert_eq!(lease.attempt().number(), 1);
    lease
        .release(Duration::ZERO, true, "the bank is closed")
        .await;
    // Its thread writes what is waiting when it ends.
    drop(gate);
    let all = [
        "claimed",
        "completed",
        "reset_begins",
        "reset",
        "claimed",
        "released",
    ];
    assert_eq!(events(), all);
    let inspect = [&["inspect"][..], &fixed[1..], &["--json"]].concat();
    let history = oncegate_with(&inspect, &environment, br#"{"order_id":1}"#)
        .await
        .ended(0)
        .json();
    let history = history["journal"].as_array().expect("a list");
    let told: Vec<_> = history
        .iter()
        .map(|entry| entry["event"].as_str().expect("text"))
        .collect();
    assert_eq!(told, all);
    let by = |place: usize| {
        (
            history[place]["by"].as_str(),
            history[place]["reason"].as_str(),
        )
    };
    assert_eq!(
        (by(0), by(3)),
        (
            (Some("worker-3"), None),
            (Some("ada"), Some("asked by support"))
        )
    );
    assert_eq!(
        (by(4).1, by(5).1),
        (Some("reopened"), Some("the bank is closed"))
    );
    let best_effort = |place: usize| history[place].get("best_effort").is_some();
    assert_eq!((best_effort(0), best_effort(3)), (true, false));

    // A journal that cannot be written forbids the change.
    let blocked = ["--yes", "--why", "x", "--journal", "/proc/no/journal"];
    reset(&blocked).await.ended(78).says("nothing was changed");
}

/// Services and containers often have no user name.
#[tokio::test]
async fn without_a_user_name_the_journal_has_the_number_of_the_user() {
    let dir = tempfile::tempdir().expect("a folder");
    let (file, journal) = (dir.path().join("once.db"), dir.path().join("journal.jsonl"));
    let gate = Gate::new(
        "billing",
        Key::json(["order_id"]),
        SqliteStore::open(&file).await.expect("opens"),
    );
    let Entry::Granted(lease) = gate.enter(&order()).await.expect("the store answers") else {
        panic!("not granted")
    };
    assert_eq!(
        lease.complete(&"receipt").await.expect("encodes"),
        Completion::Applied
    );
    let url = format!("sqlite:{}", file.display());
    let reset = [
        "reset", "--store", &url, "--scope", "billing", "--key", "order_id", "--route", "orders",
    ];
    let journal_path = journal.to_str().expect("text");
    let change = ["--yes", "--why", "x", "--journal", journal_path];
    let environment = [("SUDO_USER", ""), ("USER", ""), ("LOGNAME", "")];
    oncegate_with(
        &[&reset[..], &change].concat(),
        &environment,
        br#"{"order_id":1}"#,
    )
    .await
    .ended(0);
    let written = std::fs::read_to_string(&journal).expect("a journal");
    assert!(
        written.lines().all(|line| line.contains(r#""by":"uid "#)),
        "{written}"
    );
}

#[tokio::test]
async fn what_is_not_there_is_not_reset() {
    let dir = tempfile::tempdir().expect("a folder");
    let file = dir.path().join("once.db");
    drop(SqliteStore::open(&file).await.expect("opens"));
    let url = format!("sqlite:{}", file.display());
    let key = [
        "--store-key",
        "billing:UPt7KTwTETF9dZLHdE-MbA",
        "--yes",
        "--why",
        "x",
    ];
    let answer = oncegate(&[&["reset", "--store", &url][..], &key].concat(), b"").await;
    assert_eq!(answer.ended(1).line("state"), "state absent");
}
