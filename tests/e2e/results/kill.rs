//! Workers that are killed around the moment when a large result is stored.

use std::process::ExitStatus;
use std::time::Duration;

use oncegate::core::key::Scope;
use oncegate::results::ObjectResults;
use oncegate::sqlite::SqliteStore;
use oncegate::{Entry, Gate, Key};
use oncegate_testkit::process::bound_to_parent;
use oncegate_testkit::{Ledger, Process, unique};
use tempfile::{TempDir, tempdir};

use super::folder::files;
use super::message;

const LIMIT: Duration = Duration::from_secs(240);

/// Longer than the lease of a worker. The store's time is advanced by it; the test does not wait.
const PAST_THE_LEASE: Duration = Duration::from_secs(60);

/// One order, its store, its results, and the workers that come for it.
struct Scene {
    place: TempDir,
    scope: String,
}

impl Scene {
    fn new() -> Self {
        Self {
            place: tempdir().unwrap(),
            scope: unique("kill"),
        }
    }

    /// Lets a worker do order 1; it kills itself at `point`, if it gets there.
    async fn worker(&self, point: &str) -> ExitStatus {
        let mut command = bound_to_parent(env!("CARGO_BIN_EXE_result_worker"), "KILL");
        command.arg(self.place.path()).args([&self.scope, point]);
        Process::spawn("result_worker", command)
            .end_within(LIMIT)
            .await
    }

    async fn store(&self) -> SqliteStore {
        SqliteStore::open(self.place.path().join("records.db"))
            .await
            .unwrap()
    }

    /// Ends the lease of a worker that is no more, if it had one.
    async fn pass_the_lease(&self) {
        let key = Key::json(["id"])
            .compile(&Scope::new(&self.scope).unwrap())
            .unwrap();
        let message = message(1);
        let key = key.derive(message.route(), &message).unwrap();
        self.store().await.pass(&key, PAST_THE_LEASE).await.unwrap();
    }

    fn effects(&self) -> usize {
        Ledger::open(self.place.path().join("ledger")).read().len()
    }

    /// What a later duplicate gets.
    async fn answer(&self) -> String {
        let results = ObjectResults::folder(self.place.path().join("results")).unwrap();
        let gate =
            Gate::new(&self.scope, Key::json(["id"]), self.store().await).large_results(results);
        match gate.enter(&message(1)).await.unwrap() {
            Entry::Completed(stored) => stored.decode().unwrap(),
            other => panic!("it is completed, but the gate returns {other:?}"),
        }
    }
}

// invariant: result-not-stored
#[tokio::test]
async fn a_kill_between_object_and_completed_means_orphan_and_rerun() {
    for (point, effects, objects) in [
        ("before-put", 2, 1),
        ("after-put", 2, 2),
        ("after-complete", 1, 1),
    ] {
        let scene = Scene::new();
        assert!(
            !scene.worker(point).await.success(),
            "it was to end at {point}"
        );
        scene.pass_the_lease().await;
        assert!(scene.worker("never").await.success(), "after {point}");
        assert_eq!(scene.effects(), effects, "after {point}");
        let found = files(&scene.place.path().join("results"), &scene.scope);
        assert_eq!(found.len(), objects, "after {point}: {found:?}");
        let answer = scene.answer().await;
        assert_eq!(answer.len(), 1_000_000);
        // The last worker's, whose process it names.
        let by: Vec<u32> = Ledger::open(scene.place.path().join("ledger"))
            .read()
            .iter()
            .map(|e| e.pid)
            .collect();
        assert!(
            answer.starts_with(&format!("{} ", by.last().unwrap())),
            "{}",
            &answer[..10]
        );
    }
}
