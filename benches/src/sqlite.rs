//! The embedded store, against the same rows written in batches by hand.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use oncegate::sqlite::SqliteStore;
use oncegate::{Gate, Message};
use rusqlite::{Connection, params};

use crate::Benchmark;
use crate::cores::Cores;
use crate::figure::{Bound, Figure, Unit};
use crate::gate::rate;
use crate::messages::{fresh_scope, key, messages};
use crate::rounds::{Plan, Rounds};

pub(crate) const BENCHMARK: Benchmark = Benchmark {
    name: "sqlite",
    question: "claim and complete on the embedded store, against batches by hand of as many as are in flight",
    cores: Cores::Shared,
    run: |plan| Box::pin(run(plan)),
};

/// How many messages are in flight, and what each contestant is then called.
const CONTESTS: [(usize, &str, &str); 3] = [
    (64, "64 in flight", "same rows, 64 a batch"),
    (256, "256 in flight", "same rows, 256 a batch"),
    (1_024, "1,024 in flight", "same rows, 1,024 a batch"),
];
const LEAST: &str = "least rows, 64 a batch";

/// As durable as the store, and as well tuned.
const SETTINGS: &str = "\
PRAGMA journal_mode = WAL;
PRAGMA synchronous = FULL;
PRAGMA wal_autocheckpoint = 4096;
PRAGMA cache_size = -16384;";

/// How rows are written by hand: a claim, and then its completion by the owner.
#[derive(Clone, Copy)]
struct ByHand {
    in_flight: usize,
    table: &'static str,
    insert: &'static str,
    update: &'static str,
    /// Keys as a digest gives them, in no order; otherwise one after the other.
    digests: bool,
}

/// The store's own rows, in the store's own table.
const SAME_ROWS: ByHand = ByHand {
    in_flight: 64,
    table: "",
    insert: "INSERT INTO records (key, state, expires_at_ms, owner, attempt, recovery, handed_over, reason) \
             VALUES (?1, 'pending', ?2, ?3, 1, 'none', 0, '')",
    update: "UPDATE records SET state = 'completed', expires_at_ms = ?2, attempt = 0, result = x'' \
             WHERE key = ?1 AND owner = ?3",
    digests: true,
};

/// The least that somebody could get by with: four columns, and keys that come in their order.
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
    let messages: Arc<[Message]> = messages(plan.size(40_000, 2_000)).into();
    let names = CONTESTS.iter().flat_map(|&(_, store, same)| [store, same]);
    let names: Vec<&'static str> = names.chain([LEAST]).collect();
    let mut rounds = plan.rounds("sqlite", &names);
    while rounds.next() {
        for (in_flight, store, same) in CONTESTS {
            let dir = tempfile::tempdir().expect("a folder");
            let gate = Gate::new(fresh_scope(), key(), opened(&dir.path().join("gate.db")).await);
            rounds.measure(store, rate(gate, &messages, in_flight)).await;

            let file = dir.path().join("same.db");
            drop(opened(&file).await);
            let by_hand = ByHand { in_flight, ..SAME_ROWS };
            measure_by_hand(&mut rounds, same, by_hand, file, messages.len()).await;
        }
        let dir = tempfile::tempdir().expect("a folder");
        let file = dir.path().join("least.db");
        measure_by_hand(&mut rounds, LEAST, LEAST_ROWS, file, messages.len()).await;
    }
    let mut figures: Vec<Figure> = Vec::new();
    for (_, store, same) in CONTESTS {
        let figure = rounds.against(store, Unit::MessagesPerSecond, same);
        figures.push(figure.target(Bound::RatioAtLeast, 0.7));
    }
    figures.push(rounds.against(CONTESTS[0].1, Unit::MessagesPerSecond, LEAST));
    figures.push(rounds.against(CONTESTS[0].2, Unit::MessagesPerSecond, LEAST));
    figures
}

async fn opened(file: &Path) -> SqliteStore {
    SqliteStore::open(file).await.expect("a new file")
}

async fn measure_by_hand(
    rounds: &mut Rounds,
    name: &'static str,
    by_hand: ByHand,
    file: PathBuf,
    count: usize,
) {
    let measured = tokio::task::spawn_blocking(move || by_hand.rate(&file, count));
    rounds.measure(name, async { measured.await.expect("it does not panic") }).await;
}

impl ByHand {
    /// Messages per second: rows, each inserted and updated, with a transaction for each batch of either.
    fn rate(&self, file: &Path, count: usize) -> f64 {
        let mut connection = Connection::open(file).expect("a file");
        connection.execute_batch(SETTINGS).expect("valid settings");
        connection.execute_batch(self.table).expect("a new table");
        let keys = self.keys(count);
        let started = Instant::now();
        for keys in keys.chunks(self.in_flight) {
            for (sql, expires_at_ms) in
                [(self.insert, 1_700_000_000_000_i64), (self.update, 1_800_000_000_000)]
            {
                let batch = connection.transaction().expect("nobody else writes");
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

    fn keys(&self, count: usize) -> Vec<String> {
        let scope = fresh_scope();
        let digest = |n| if self.digests { fastrand::u64(..) } else { n };
        (0..count as u64).map(|n| format!("{scope}:{:022}", digest(n))).collect()
    }
}
