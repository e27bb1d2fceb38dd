//! Compares batches in one transaction with batches by hand and with messages one by one, in
//! PostgreSQL and SQLite.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Instant;

use oncegate::postgres::{PostgresStore, PostgresTransaction, PostgresTransactions};
use oncegate::sqlite::{SqliteStore, SqliteTransaction, SqliteTransactions};
use oncegate::{
    Attempt, BatchLimits, BatchMessage, Consumer, Failure, Gate, Message, Observer, Ordering,
    Transactional, TransactionalBatchHandler, TransactionalHandler,
};
use oncegate_testkit::{Postgres, PostgresServer};
use rusqlite::{Connection, params};
use tokio::task::JoinSet;
use tokio_postgres::Client;

use crate::Benchmark;
use crate::cores::Cores;
use crate::figure::{Bound, Figure, Unit};
use crate::handler::Queue;
use crate::messages::{fresh_scope, key, messages};
use crate::rounds::{Plan, Rounds};
use crate::stopwatch::{Stopwatch, Timed};

pub(crate) const BENCHMARK: Benchmark = Benchmark {
    name: "one-commit",
    question: "one row for each message: batches of 100 in one transaction, by hand, and one by one",
    cores: Cores::Apart,
    run: |plan| Box::pin(run(plan)),
};

const BATCH: usize = 100;
/// Batches at a time, and connections of the loop by hand.
const CALLS: usize = 4;
/// Handlers at a time, one by one.
const HANDLERS: usize = 16;

/// The names of the contestants in one database.
struct Names {
    batches: &'static str,
    by_hand: &'static str,
    one_by_one: &'static str,
}

const IN_POSTGRES: Names = Names {
    batches: "PostgreSQL, batches",
    by_hand: "PostgreSQL, batches by hand",
    one_by_one: "PostgreSQL, one by one",
};

const IN_SQLITE: Names = Names {
    batches: "SQLite, batches",
    by_hand: "SQLite, batches by hand",
    one_by_one: "SQLite, one by one",
};

/// The effect, as its own table.
const EFFECTS: &str = "CREATE TABLE effects (id text NOT NULL, amount bigint NOT NULL)";

/// The rows of the store and the effects, each by one statement.
const KEYS_BY_HAND: &str = "\
INSERT INTO oncegate_records (key, state, expires_at_ms, owner, attempt, recovery, handed_over, reason, result) \
SELECT key, 'completed', 4100000000000, '\\x01020304', 0, 'none', false, '', ''::bytea \
FROM unnest($1::text[]) AS key ON CONFLICT (key) DO NOTHING";
const EFFECTS_AT_ONCE: &str = "INSERT INTO effects SELECT id, 1 FROM unnest($1::text[]) AS id";
const EFFECT: &str = "INSERT INTO effects VALUES ($1, 1)";

/// The rows of the store in SQLite.
const KEY_BY_HAND: &str = "\
INSERT INTO records (key, state, expires_at_ms, owner, attempt, recovery, handed_over, reason, result) \
VALUES (?1, 'completed', 4100000000000, x'01020304', 0, 'none', 0, '', x'') ON CONFLICT (key) DO NOTHING";
/// The durability and the tuning of the store.
const SETTINGS: &str = "\
PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL; PRAGMA wal_autocheckpoint = 4096; PRAGMA cache_size = -16384;";

async fn run(plan: &Plan) -> Vec<Figure> {
    let server = PostgresServer::start().await;
    let client = server.connection().await;
    client.batch_execute(EFFECTS).await.expect("a new table");
    let store = PostgresStore::connect(server.url())
        .await
        .expect("the server may be used");
    store.create_schema().await.expect("new tables");
    let transactions = store
        .transactions()
        .expect("a store with a URL")
        .connections(HANDLERS);
    let all = messages(plan.size(100_000, 2_000));
    let some: Vec<Message> = all.iter().take(plan.size(10_000, 500)).cloned().collect();
    // Every connection is opened before the clock starts.
    in_postgres(&store, &transactions, false, &some).await;
    let names = [IN_POSTGRES, IN_SQLITE];
    let contestants = names
        .iter()
        .flat_map(|names| [names.batches, names.by_hand, names.one_by_one]);
    let mut rounds = plan.rounds("one-commit", &contestants.collect::<Vec<_>>());
    while rounds.next() {
        empty(&client).await;
        rounds
            .measure(
                IN_POSTGRES.batches,
                in_postgres(&store, &transactions, true, &all),
            )
            .await;
        empty(&client).await;
        rounds
            .measure(IN_POSTGRES.by_hand, postgres_by_hand(&server, all.len()))
            .await;
        empty(&client).await;
        rounds
            .measure(
                IN_POSTGRES.one_by_one,
                in_postgres(&store, &transactions, false, &some),
            )
            .await;

        measure_sqlite(&mut rounds, &all, &some).await;
    }
    names
        .iter()
        .flat_map(|names| {
            [(names.by_hand, 0.7), (names.one_by_one, 4.0)].map(|(baseline, least)| {
                rounds
                    .against(names.batches, Unit::MessagesPerSecond, baseline)
                    .target(Bound::RatioAtLeast, least)
            })
        })
        .collect()
}

/// Empties the tables and writes a checkpoint, so that every contestant starts with the same server
/// state.
async fn empty(client: &Client) {
    let empty = "TRUNCATE oncegate_records, effects; CHECKPOINT";
    client
        .batch_execute(empty)
        .await
        .expect("the tables can be emptied");
}

/// Writes one row for each message.
struct Write;

impl TransactionalHandler<PostgresTransaction> for Write {
    type Output = ();

    async fn handle(
        &self,
        message: &Message,
        _: &Attempt,
        transaction: &mut PostgresTransaction,
    ) -> Result<(), Failure> {
        let effect = transaction.prepare_cached(EFFECT).await?;
        transaction
            .execute(&effect, &[&message.origin().to_string()])
            .await?;
        Ok(())
    }
}

impl TransactionalBatchHandler<PostgresTransaction> for Write {
    type Output = ();

    async fn handle(
        &self,
        batch: &[BatchMessage],
        transaction: &mut PostgresTransaction,
    ) -> Result<Vec<Result<(), Failure>>, Failure> {
        let effects = transaction.prepare_cached(EFFECTS_AT_ONCE).await?;
        let ids: Vec<String> = batch
            .iter()
            .map(|one| one.message().origin().to_string())
            .collect();
        transaction.execute(&effects, &[&ids]).await?;
        Ok(batch.iter().map(|_| Ok(())).collect())
    }
}

impl TransactionalHandler<SqliteTransaction> for Write {
    type Output = ();

    async fn handle(
        &self,
        message: &Message,
        _: &Attempt,
        transaction: &mut SqliteTransaction,
    ) -> Result<(), Failure> {
        transaction
            .prepare_cached(EFFECT)?
            .execute([message.origin().to_string()])?;
        Ok(())
    }
}

impl TransactionalBatchHandler<SqliteTransaction> for Write {
    type Output = ();

    async fn handle(
        &self,
        batch: &[BatchMessage],
        transaction: &mut SqliteTransaction,
    ) -> Result<Vec<Result<(), Failure>>, Failure> {
        let mut effect = transaction.prepare_cached(EFFECT)?;
        for one in batch {
            effect.execute([one.message().origin().to_string()])?;
        }
        Ok(batch.iter().map(|_| Ok(())).collect())
    }
}

/// Measures the contestants on new files.
async fn measure_sqlite(rounds: &mut Rounds, all: &[Message], some: &[Message]) {
    let dir = tempfile::tempdir().expect("a folder");
    let [batches, hand, one] =
        ["batches.db", "hand.db", "one.db"].map(|name| dir.path().join(name));
    rounds
        .measure(IN_SQLITE.batches, in_sqlite(&batches, true, all))
        .await;
    drop(sqlite_store(&hand).await);
    let count = all.len();
    let by_hand = tokio::task::spawn_blocking(move || sqlite_by_hand(&hand, count));
    rounds
        .measure(IN_SQLITE.by_hand, async {
            by_hand.await.expect("it does not panic")
        })
        .await;
    rounds
        .measure(IN_SQLITE.one_by_one, in_sqlite(&one, false, some))
        .await;
}

/// Messages per second through a consumer on PostgreSQL.
async fn in_postgres(
    store: &PostgresStore,
    transactions: &PostgresTransactions,
    is_batched: bool,
    messages: &[Message],
) -> f64 {
    let transactions = transactions.clone();
    let work = if is_batched {
        Transactional::batched(transactions, BatchLimits::new(BATCH), Write)
    } else {
        Transactional::new(transactions, Write)
    };
    rate(
        Gate::new(fresh_scope(), key(), store.clone()),
        work,
        is_batched,
        messages,
    )
    .await
}

/// Messages per second through a consumer on a new file.
async fn in_sqlite(file: &Path, is_batched: bool, messages: &[Message]) -> f64 {
    let store = sqlite_store(file).await;
    let transactions: SqliteTransactions = store.transactions();
    let work = if is_batched {
        Transactional::batched(transactions, BatchLimits::new(BATCH), Write)
    } else {
        Transactional::new(transactions, Write)
    };
    rate(
        Gate::new(fresh_scope(), key(), store),
        work,
        is_batched,
        messages,
    )
    .await
}

/// A store without a purge, on a file with the table of effects.
async fn sqlite_store(file: &Path) -> SqliteStore {
    let store = SqliteStore::builder(file)
        .check_files_up_to(0)
        .without_purge();
    let store = store.open().await.expect("the file is sound");
    Connection::open(file)
        .expect("a file")
        .execute_batch(EFFECTS)
        .expect("a new table");
    store
}

async fn rate(gate: Gate, work: Transactional, is_batched: bool, messages: &[Message]) -> f64 {
    let stopwatch = Stopwatch::new(messages.len());
    let source = Timed {
        source: Queue::of(messages),
        stopwatch: Arc::clone(&stopwatch),
    };
    let at_once = if is_batched { CALLS } else { HANDLERS };
    let consumer = Consumer::new(source, gate, work)
        .concurrency(u32::try_from(at_once).expect("a small number"))
        .ordering(Ordering::Unordered)
        .observer(Arc::clone(&stopwatch) as Arc<dyn Observer>);
    consumer
        .run_until(std::future::pending())
        .await
        .expect("the consumer runs to the end");
    stopwatch.rate()
}

/// Keys in no order, as digests come.
fn keys(scope: &str, count: usize) -> Vec<String> {
    (0..count)
        .map(|_| format!("{scope}:{:022}", fastrand::u64(..)))
        .collect()
}

/// Messages per second, with two statements of many rows in each transaction.
async fn postgres_by_hand(postgres: &Postgres, count: usize) -> f64 {
    let keys: Arc<Vec<String>> = Arc::new(keys(&fresh_scope(), count));
    let mut clients = Vec::new();
    for _ in 0..CALLS {
        clients.push(postgres.connection().await);
    }
    let next = Arc::new(AtomicUsize::new(0));
    let started = Instant::now();
    let mut workers = JoinSet::new();
    for mut client in clients {
        let next = Arc::clone(&next);
        let keys = Arc::clone(&keys);
        workers.spawn(async move {
            let insert = client.prepare(KEYS_BY_HAND).await.expect("valid SQL");
            let effects = client.prepare(EFFECTS_AT_ONCE).await.expect("valid SQL");
            while let Some(batch) = keys.chunks(BATCH).nth(next.fetch_add(1, Relaxed)) {
                let mut batch = batch.to_vec();
                // Batches that lock their rows in the same order cannot deadlock.
                batch.sort_unstable();
                let transaction = client.transaction().await.expect("the server answers");
                let inserted = transaction
                    .execute(&insert, &[&batch])
                    .await
                    .expect("the server answers");
                assert_eq!(inserted, batch.len() as u64);
                transaction
                    .execute(&effects, &[&batch])
                    .await
                    .expect("the effects are made");
                transaction.commit().await.expect("the server commits");
            }
        });
    }
    while let Some(worker) = workers.join_next().await {
        worker.expect("no worker panics");
    }
    count as f64 / started.elapsed().as_secs_f64()
}

/// Messages per second, with a row for the key and a row for the effect in the transaction of each
/// batch.
fn sqlite_by_hand(file: &Path, count: usize) -> f64 {
    let keys = keys(&fresh_scope(), count);
    let mut connection = Connection::open(file).expect("a file");
    connection.execute_batch(SETTINGS).expect("valid settings");
    let started = Instant::now();
    for batch in keys.chunks(BATCH) {
        let transaction = connection.transaction().expect("there is no other writer");
        let mut insert = transaction.prepare_cached(KEY_BY_HAND).expect("valid SQL");
        let mut effect = transaction.prepare_cached(EFFECT).expect("valid SQL");
        for key in batch {
            assert_eq!(insert.execute(params![key]).expect("the disk takes it"), 1);
            effect.execute(params![key]).expect("the disk takes it");
        }
        drop((insert, effect));
        transaction.commit().expect("the disk takes it");
    }
    count as f64 / started.elapsed().as_secs_f64()
}
