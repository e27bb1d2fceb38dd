//! Workers that are killed around the moment when a large result is stored.

use std::process::ExitStatus;
use std::time::Duration;

use oncegate::results::ObjectResults;
use oncegate::sqlite::SqliteStore;
use oncegate::{Entry, Gate, Key};
use oncegate_tests::process::bound_to_parent;
use oncegate_tests::{Ledger, Process, unique};
use tempfile::{TempDir, tempdir};

use super::folder::files;
use super::message;

const LIMIT: Duration = Duration::from_secs(60);

/// One order, its store, its results, and the workers that come for it.
struct Scene {
    place: TempDir,
    scope: String,
}

impl Scene {
    fn new() -> Self {
        Self { place: tempdir().unwrap(), scope: unique("kill") }
    }

    /// Lets a worker do order 1; it kills itself at `point`, if it gets there.
    async fn worker(&self, point: &str) -> ExitStatus {
        let mut command = bound_to_parent(env!("CARGO_BIN_EXE_result_worker"), "KILL");
        command.arg(self.place.path()).args([&self.scope, point]);
        Process::spawn("result_worker", command).end_within(LIMIT).await
    }

    fn effects(&self) -> usize {
        Ledger::open(self.place.path().join("ledger")).read().len()
    }

    /// What a later duplicate gets.
    async fn answer(&self) -> String {
        let store = SqliteStore::builder(self.place.path().join("records.db")).open().await.unwrap();
        let results = ObjectResults::folder(self.place.path().join("results")).unwrap();
        let gate = Gate::new(&self.scope, Key::json(["id"]), store).large_results(results);
        match gate.enter(&message(1)).await.unwrap() {
            Entry::Completed(stored) => stored.decode().unwrap(),
            other => panic!("it is completed, but the gate says {other:?}"),
        }
    }
}

#[tokio::test]
async fn a_kill_between_object_and_completed_leaves_an_orphan_and_a_rerun() {
    for (point, effects, objects) in [("before-put", 2, 1), ("after-put", 2, 2), ("after-complete", 1, 1)] {
        let scene = Scene::new();
        assert!(!scene.worker(point).await.success(), "it was to end at {point}");
        assert!(scene.worker("never").await.success(), "after {point}");
        assert_eq!(scene.effects(), effects, "after {point}");
        let found = files(&scene.place.path().join("results"), &scene.scope);
        assert_eq!(found.len(), objects, "after {point}: {found:?}");
        let answer = scene.answer().await;
        assert_eq!(answer.len(), 1_000_000);
        // The last worker's, whose process it names.
        let by: Vec<u32> =
            Ledger::open(scene.place.path().join("ledger")).read().iter().map(|e| e.pid).collect();
        assert!(answer.starts_with(&format!("{} ", by.last().unwrap())), "{}", &answer[..10]);
    }
}
