//! Compares the embedded store with hand-written batches of the same rows.

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use oncegate::sqlite::SqliteStore;
use oncegate::{Gate, Message};
use rusqlite::{Connection, params};

use crate::Benchmark;
use crate::cores::Cores;
use crate::figure::{Bound, Figure, Unit};
use crate::gate::rate;
use crate::messages::{fresh_scope, key, message, messages};
use crate::rounds::{Plan, Rounds};

pub(crate) const BENCHMARK: Benchmark = Benchmark {
    name: "sqlite",
    question: "claim and complete on the embedded store, against batches by hand of as many as are in flight",
    cores: Cores::Shared,
    run: |plan| Box::pin(run(plan)),
};

/// The number of messages in flight, and the contestants' names: on a new file, and on a file that
/// already holds records.
const CONTESTS: [(usize, OnFile, OnFile); 3] = [
    (
        64,
        OnFile {
            store: "64 in flight",
            by_hand: "same rows, 64 a batch",
        },
        OnFile {
            store: "64 in flight, 500,000 held",
            by_hand: "same rows, 500,000 held, 64 a batch",
        },
    ),
    (
        256,
        OnFile {
            store: "256 in flight",
            by_hand: "same rows, 256 a batch",
        },
        OnFile {
            store: "256 in flight, 500,000 held",
            by_hand: "same rows, 500,000 held, 256 a batch",
        },
    ),
    (
        1_024,
        OnFile {
            store: "1,024 in flight",
            by_hand: "same rows, 1,024 a batch",
        },
        OnFile {
            store: "1,024 in flight, 500,000 held",
            by_hand: "same rows, 500,000 held, 1,024 a batch",
        },
    ),
];
const LEAST: &str = "least rows, 64 a batch";

/// The number of records that the used file holds at first. It grows with the measurements of both
/// contestants.
const HELD: usize = 500_000;

/// The names of the contestants on one kind of file.
#[derive(Clone, Copy)]
struct OnFile {
    store: &'static str,
    by_hand: &'static str,
}

/// Settings with the durability and the tuning of the store.
const SETTINGS: &str = "\
PRAGMA journal_mode = WAL;
PRAGMA synchronous = FULL;
PRAGMA wal_autocheckpoint = 4096;
PRAGMA cache_size = -16384;";

/// Inserts completed records.
const FILL: &str = "\
WITH RECURSIVE numbers(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM numbers WHERE n < ?2)
INSERT INTO records (key, state, expires_at_ms, owner, attempt, recovery, handed_over, reason, result)
SELECT ?1 || ':' || hex(randomblob(11)), 'completed', 4102444800000, x'01020304', 0, 'none', 0, '', x'' FROM numbers";

/// The hand-written statements: a claim, and its completion by the owner.
#[derive(Clone, Copy)]
struct ByHand {
    in_flight: usize,
    table: &'static str,
    insert: &'static str,
    update: &'static str,
    /// `true` if the keys are in random order, as digests are; otherwise they ascend.
    digests: bool,
}

/// The same rows as the store's, in the store's table.
const SAME_ROWS: ByHand = ByHand {
    in_flight: 64,
    table: "",
    insert: "INSERT INTO records (key, state, expires_at_ms, owner, attempt, recovery, handed_over, reason) \
             VALUES (?1, 'pending', ?2, ?3, 1, 'none', 0, '')",
    update: "UPDATE records SET state = 'completed', expires_at_ms = ?2, attempt = 0, result = x'' \
             WHERE key = ?1 AND owner = ?3",
    digests: true,
};

/// The minimal rows: four columns, and keys in ascending order.
const LEAST_ROWS: ByHand = ByHand {
    in_flight: 64,
    table: "CREATE TABLE records (
                key           TEXT    NOT NULL PRIMARY KEY,
                state         TEXT    NOT NULL,
                expires_at_ms INTEGER NOT NULL,
                owner         BLOB    NOT NULL
            ) STRICT, WITHOUT ROWID;",
    insert: "INSERT INTO records VALUES (?1, 'pending', ?2, ?3)",
    update: "UPDATE records SET state = 'completed', expires_at_ms = ?2 WHERE key = ?1 AND owner = ?3",
    digests: false,
};

async fn run(plan: &Plan) -> Vec<Figure> {
    let count = plan.size(40_000, 2_000);
    let new_messages: Arc<[Message]> = messages(count).into();
    let names = CONTESTS
        .iter()
        .flat_map(|(_, new, held)| [new.store, new.by_hand, held.store, held.by_hand]);
    let names: Vec<&'static str> = names.chain([LEAST]).collect();
    let held_dir = tempfile::tempdir().expect("a folder");
    let held_file = held_dir.path().join("held.db");
    let held_scope = fresh_scope();
    fill(&held_file, &held_scope, plan.size(HELD, 2_000)).await;
    let mut so_far = 0;
    let mut rounds = plan.rounds("sqlite", &names);
    while rounds.next() {
        for (in_flight, new, held) in CONTESTS {
            let dir = tempfile::tempdir().expect("a folder");
            let by_hand = ByHand {
                in_flight,
                ..SAME_ROWS
            };
            let gate = gate_over(&fresh_scope(), &dir.path().join("gate.db")).await;
            rounds
                .measure(new.store, rate(gate, &new_messages, in_flight))
                .await;
            let file = dir.path().join("same.db");
            drop(opened(&file).await);
            measure_by_hand(
                &mut rounds,
                new.by_hand,
                by_hand,
                fresh_scope(),
                &file,
                count,
            )
            .await;

            let unseen: Arc<[Message]> = (so_far..so_far + count).map(message).collect();
            so_far += count;
            let gate = gate_over(&held_scope, &held_file).await;
            rounds
                .measure(held.store, rate(gate, &unseen, in_flight))
                .await;
            measure_by_hand(
                &mut rounds,
                held.by_hand,
                by_hand,
                held_scope.clone(),
                &held_file,
                count,
            )
            .await;
        }
        let dir = tempfile::tempdir().expect("a folder");
        let file = dir.path().join("least.db");
        measure_by_hand(&mut rounds, LEAST, LEAST_ROWS, fresh_scope(), &file, count).await;
    }
    let mut figures: Vec<Figure> = Vec::new();
    for OnFile { store, by_hand } in CONTESTS.iter().flat_map(|(_, new, held)| [*new, *held]) {
        let figure = rounds.against(store, Unit::MessagesPerSecond, by_hand);
        figures.push(figure.target(Bound::RatioAtLeast, 0.7));
    }
    let (_, least_like, _) = CONTESTS[0];
    figures.push(rounds.against(least_like.store, Unit::MessagesPerSecond, LEAST));
    figures.push(rounds.against(least_like.by_hand, Unit::MessagesPerSecond, LEAST));
    figures
}

/// Opens a store without the check of its file at start-up and without the background purge.
async fn opened(file: &Path) -> SqliteStore {
    let store = SqliteStore::builder(file)
        .check_files_up_to(0)
        .without_purge();
    store.open().await.expect("the file is sound")
}

/// Creates a file with `count` completed records under keys in random order, as digests are.
async fn fill(file: &Path, scope: &str, count: usize) {
    drop(opened(file).await);
    let connection = Connection::open(file).expect("a file");
    connection.execute_batch(SETTINGS).expect("valid settings");
    let filled = connection.execute(FILL, params![scope, count as i64]);
    assert_eq!(filled.expect("the disk takes it"), count);
}

async fn gate_over(scope: &str, file: &Path) -> Gate {
    Gate::new(scope, key(), opened(file).await)
}

async fn measure_by_hand(
    rounds: &mut Rounds,
    name: &'static str,
    by_hand: ByHand,
    scope: String,
    file: &Path,
    count: usize,
) {
    let file = file.to_owned();
    let measured = tokio::task::spawn_blocking(move || by_hand.rate(&file, &scope, count));
    rounds
        .measure(name, async { measured.await.expect("it does not panic") })
        .await;
}

impl ByHand {
    /// Messages per second. Each row is inserted and updated, with one transaction for each batch
    /// of inserts or updates.
    fn rate(&self, file: &Path, scope: &str, count: usize) -> f64 {
        let mut connection = Connection::open(file).expect("a file");
        connection.execute_batch(SETTINGS).expect("valid settings");
        connection.execute_batch(self.table).expect("a new table");
        let keys = self.keys(scope, count);
        let started = Instant::now();
        for keys in keys.chunks(self.in_flight) {
            for (sql, expires_at_ms) in [
                (self.insert, 4_000_000_000_000_i64),
                (self.update, 4_100_000_000_000),
            ] {
                let batch = connection.transaction().expect("there is no other writer");
                let mut statement = batch.prepare_cached(sql).expect("valid SQL");
                for key in keys {
                    let rows = statement.execute(params![key, expires_at_ms, [7_u8; 16]]);
                    assert_eq!(rows.expect("the disk takes it"), 1);
                }
                drop(statement);
                batch.commit().expect("the disk takes it");
            }
        }
        count as f64 / started.elapsed().as_secs_f64()
    }

    fn keys(&self, scope: &str, count: usize) -> Vec<String> {
        (0..count as u64)
            .map(|n| if self.digests { fastrand::u64(..) } else { n })
            .map(|digest| format!("{scope}:{digest:022}"))
            .collect()
    }
}
