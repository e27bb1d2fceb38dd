//! The embedded store, against the same writes in batches by hand.

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use oncegate::sqlite::SqliteStore;
use oncegate::{Gate, Message};
use rusqlite::{Connection, params};

use crate::Benchmark;
use crate::figure::{Figure, Unit};
use crate::gate::rate;
use crate::messages::{fresh_scope, key, messages};
use crate::rounds::Plan;

pub(crate) const BENCHMARK: Benchmark = Benchmark {
    name: "sqlite",
    question: "claim and complete on the embedded store, 64 in flight, against batches of 64 rows by hand",
    run: |plan| Box::pin(run(plan)),
};

const IN_FLIGHT: usize = 64;

/// The least that must be written: a claim, and then its completion.
const TABLE: &str = "\
PRAGMA journal_mode = WAL;
PRAGMA synchronous = FULL;
CREATE TABLE records (
    key           TEXT    NOT NULL PRIMARY KEY,
    state         TEXT    NOT NULL,
    expires_at_ms INTEGER NOT NULL,
    owner         BLOB    NOT NULL
) STRICT, WITHOUT ROWID;";
const INSERT: &str = "INSERT INTO records VALUES (?1, 'pending', ?2, ?3)";
const UPDATE: &str =
    "UPDATE records SET state = 'completed', expires_at_ms = ?2 WHERE key = ?1 AND owner = ?3";

async fn run(plan: &Plan) -> Vec<Figure> {
    let messages: Arc<[Message]> = messages(plan.size(40_000, 1_000)).into();
    let mut rounds = plan.rounds("sqlite", &["public API", "batches by hand"]);
    while rounds.next() {
        let dir = tempfile::tempdir().expect("a folder");
        let store = SqliteStore::open(dir.path().join("gate.db")).await.expect("a new file");
        let gate = Gate::new(fresh_scope(), key(), store);
        rounds.measure("public API", rate(gate, &messages, IN_FLIGHT)).await;

        let (file, count) = (dir.path().join("by-hand.db"), messages.len());
        let by_hand = tokio::task::spawn_blocking(move || by_hand(&file, count));
        rounds.measure("batches by hand", async { by_hand.await.expect("it does not panic") }).await;
    }
    vec![rounds.against("public API", Unit::MessagesPerSecond, "batches by hand")]
}

/// Rows per second, each inserted and updated, with a transaction for each 64 of either.
fn by_hand(file: &Path, count: usize) -> f64 {
    let mut connection = Connection::open(file).expect("a new file");
    connection.execute_batch(TABLE).expect("a new table");
    let scope = fresh_scope();
    let started = Instant::now();
    for first in (0..count).step_by(IN_FLIGHT) {
        for (sql, expires_at_ms) in [(INSERT, 1_i64), (UPDATE, 2)] {
            let batch = connection.transaction().expect("nobody else writes");
            let mut statement = batch.prepare_cached(sql).expect("valid SQL");
            for n in first..count.min(first + IN_FLIGHT) {
                let (key, owner) = (format!("{scope}:{n:022}"), [7_u8; 16]);
                statement.execute(params![key, expires_at_ms, owner]).expect("one row");
            }
            drop(statement);
            batch.commit().expect("the disk takes it");
        }
    }
    count as f64 / started.elapsed().as_secs_f64()
}
