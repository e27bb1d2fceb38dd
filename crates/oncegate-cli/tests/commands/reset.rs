//! `oncegate reset`.

use std::path::{Path, PathBuf};
use std::time::Duration;

use oncegate::journal::FileJournal;
use oncegate::sqlite::SqliteStore;
use oncegate::{Completion, Entry, Gate, Key, Message, Origin};
use oncegate_testkit::until;
use serde_json::Value;
use tempfile::TempDir;

use super::{Answer, LIMIT, oncegate, oncegate_with};

fn order() -> Message {
    Message::new(
        "orders",
        Origin::Other("a test".into()),
        Some(r#"{"order_id":1}"#.into()),
    )
}

/// A store with a completed order, and the journal of its gate and of the commands.
struct Completed {
    dir: TempDir,
}

impl Completed {
    async fn with_gate() -> (Self, Gate) {
        let dir = tempfile::tempdir().expect("a folder");
        let store = SqliteStore::open(dir.path().join("once.db")).await;
        let journal = FileJournal::open(dir.path().join("journal.jsonl")).expect("opens");
        let gate = Gate::new("billing", Key::json(["order_id"]), store.expect("opens"))
            .journal(journal.by("worker-3"));
        complete(&gate).await;
        (Self { dir }, gate)
    }

    fn journal(&self) -> PathBuf {
        self.dir.path().join("journal.jsonl")
    }

    async fn oncegate(&self, command: &str, more: &[&str]) -> Answer {
        let url = format!("sqlite:{}", self.dir.path().join("once.db").display());
        let journal = self.journal();
        let environment = [
            ("ONCEGATE_JOURNAL", journal.to_str().expect("text")),
            ("ONCEGATE_OPERATOR", "ada"),
        ];
        let record = [
            "--store", &url, "--scope", "billing", "--key", "order_id", "--route", "orders",
        ];
        let arguments = [&[command][..], &record, more].concat();
        oncegate_with(&arguments, &environment, br#"{"order_id":1}"#).await
    }

    async fn reset(&self, more: &[&str]) -> Answer {
        self.oncegate("reset", more).await
    }
}

async fn complete(gate: &Gate) {
    let Entry::Granted(lease) = gate.enter(&order()).await.expect("the store answers") else {
        panic!("not granted")
    };
    assert_eq!(
        lease.complete(&"receipt").await.expect("encodes"),
        Completion::Applied
    );
}

#[tokio::test]
async fn a_reset_key_runs_once_more_and_needs_leave_and_a_reason() {
    let (completed, gate) = Completed::with_gate().await;
    let journal = completed.journal();
    let dry = completed.reset(&["--dry-run"]).await;
    assert_eq!(dry.ended(0).line("state"), "state completed");
    assert!(dry.line("effect").contains("happens once more"), "{dry:?}");
    completed
        .reset(&["--why", "asked by support"])
        .await
        .ended(2)
        .says("--yes");
    completed.reset(&["--yes"]).await.ended(2).says("--why");
    // The gate logs on its own thread.
    until("the gate's entries", LIMIT, async || {
        match events(&journal).len() {
            2.. => Ok(()),
            some => Err(format!("{some} entries")),
        }
    })
    .await;
    assert!(
        !events(&journal)
            .iter()
            .any(|event| event.starts_with("reset")),
        "nothing was done"
    );
    assert!(matches!(
        gate.enter(&order()).await,
        Ok(Entry::Completed(_))
    ));

    let done = completed
        .reset(&["--yes", "--why", "asked by support", "--json"])
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
    assert_eq!(events(&journal), all);
    let told = completed.oncegate("inspect", &["--json"]).await;
    let told = told.ended(0).json();
    has_the_history(told["journal"].as_array().expect("a list"), &all);

    // A journal that cannot be written forbids the change.
    let blocked = ["--yes", "--why", "x", "--journal", "/proc/no/journal"];
    completed
        .reset(&blocked)
        .await
        .ended(78)
        .says("nothing was changed");
}

fn events(journal: &Path) -> Vec<String> {
    let written = std::fs::read_to_string(journal).expect("a journal");
    written
        .lines()
        .map(|line| serde_json::from_str(line).expect("JSON lines"))
        .map(|entry: Value| entry["event"].as_str().expect("text").to_owned())
        .collect()
}

/// Checks the entries that `inspect` shows: events, names, reasons, and marks of a best effort.
fn has_the_history(history: &[Value], events: &[&str]) {
    let told: Vec<_> = history
        .iter()
        .map(|entry| entry["event"].as_str().expect("text"))
        .collect();
    assert_eq!(told, events);
    assert_eq!(history[0]["by"], "worker-3");
    assert_eq!(history[0].get("reason").and_then(Value::as_str), None);
    assert_eq!(history[3]["by"], "ada");
    assert_eq!(history[3]["reason"], "asked by support");
    assert_eq!(history[4]["reason"], "reopened");
    assert_eq!(history[5]["reason"], "the bank is closed");
    assert!(history[0].get("best_effort").is_some());
    assert!(history[3].get("best_effort").is_none());
}

/// Services and containers often have no user name.
#[tokio::test]
async fn without_a_user_name_the_journal_has_the_number_of_the_user() {
    let dir = tempfile::tempdir().expect("a folder");
    let file = dir.path().join("once.db");
    let journal = dir.path().join("journal.jsonl");
    let gate = Gate::new(
        "billing",
        Key::json(["order_id"]),
        SqliteStore::open(&file).await.expect("opens"),
    );
    complete(&gate).await;
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
