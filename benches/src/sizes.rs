//! Measures the size of results by codec, and of completed keys in each store.

use std::collections::BTreeMap;
use std::time::Duration;

use bytes::Bytes;
use oncegate::codec::{Codec, ToStored};
use oncegate::core::key::{Digest, Scope, StoreKey};
use oncegate::core::record::Token;
use oncegate::core::rules::{Operation, Reply, Verdict};
use oncegate::core::store::{Command, Store};
use oncegate::postgres::PostgresStore;
use oncegate::redis::RedisStore;
use oncegate::sqlite::SqliteStore;
use oncegate::{GateSettings, Raw};
use oncegate_testkit::{PostgresServer, RedisServer};
use rusqlite::Connection;
use serde::Serialize;

use crate::bare::Bare;
use crate::cores::Cores;
use crate::figure::{Figure, Unit};
use crate::messages::fresh_scope;
use crate::rounds::{Plan, Rounds};
use crate::{BENCH_REDIS, Benchmark};

pub(crate) const BENCHMARK: Benchmark = Benchmark {
    name: "sizes",
    question: "bytes of a stored result by codec, and bytes of a completed key with it in each store",
    cores: Cores::Shared,
    run: |plan| Box::pin(run(plan)),
};

/// The number of keys in a batch.
const BATCH: usize = 500;

/// A result that a payment handler might return.
#[derive(Serialize)]
struct Receipt {
    receipt_id: String,
    order_id: u64,
    amount: String,
    currency: &'static str,
    charged_at: &'static str,
}

/// A result that a pricing service might return: many similar records.
#[derive(Serialize)]
struct Quote {
    quote_id: String,
    valid_for_seconds: u32,
    lines: Vec<Line>,
}

#[derive(Serialize)]
struct Line {
    sku: String,
    quantity: u32,
    unit_price_cents: u64,
    in_stock: bool,
    note: Option<String>,
}

/// A result that a model might return: numbers.
#[derive(Serialize)]
struct Scores {
    model: &'static str,
    scores: Vec<f64>,
}

fn receipt() -> Receipt {
    Receipt {
        receipt_id: "0f9619ff-8b86-d011-b42d-00cf4fc964ff".to_owned(),
        order_id: 9_007_199_254_740_993,
        amount: "129.50".to_owned(),
        currency: "EUR",
        charged_at: "2026-11-21T14:00:00Z",
    }
}

fn quote() -> Quote {
    Quote {
        quote_id: "Q-000000000042".to_owned(),
        valid_for_seconds: 900,
        lines: (0..20)
            .map(|n| Line {
                sku: format!("K-{n:06}"),
                quantity: n % 7 + 1,
                unit_price_cents: u64::from(n) * 137 + 995,
                in_stock: !n.is_multiple_of(3),
                note: n
                    .is_multiple_of(5)
                    .then(|| "delivered from another warehouse".to_owned()),
            })
            .collect(),
    }
}

fn scores() -> Scores {
    Scores {
        model: "risk-7",
        scores: (0..256_u32)
            .map(|n| f64::from(n * 7_919 % 10_007) / 10_007.0)
            .collect(),
    }
}

/// The same numbers in a custom format.
fn raw_scores() -> Raw {
    Raw(scores()
        .scores
        .into_iter()
        .flat_map(f64::to_le_bytes)
        .collect())
}

fn stored(result: &(impl ToStored + ?Sized), codec: Codec) -> Bytes {
    result.to_stored(codec).expect("it can be encoded")
}

async fn run(plan: &Plan) -> Vec<Figure> {
    let json = Codec::Json;
    let pack = Codec::MessagePack;
    let results: [(&str, Bytes); 8] = [
        ("nothing", stored(&(), json)),
        ("receipt, JSON", stored(&receipt(), json)),
        ("receipt, MessagePack", stored(&receipt(), pack)),
        ("quote, JSON", stored(&quote(), json)),
        ("quote, MessagePack", stored(&quote(), pack)),
        ("256 numbers, JSON", stored(&scores(), json)),
        ("256 numbers, MessagePack", stored(&scores(), pack)),
        ("256 numbers, raw", stored(&raw_scores(), json)),
    ];
    let mut figures: Vec<Figure> = Vec::new();
    let by_name: BTreeMap<&str, f64> = results
        .iter()
        .map(|(name, stored)| (*name, stored.len() as f64))
        .collect();
    for (name, size) in results
        .iter()
        .map(|(name, stored)| (*name, stored.len() as f64))
    {
        let figure = Figure::new(name, Unit::BytesPerResult, &[size]);
        let in_json = name
            .split_once(", ")
            .map(|(what, _)| format!("{what}, JSON"));
        let in_json = in_json.and_then(|json| by_name.get(json.as_str()).copied());
        figures.push(match in_json {
            Some(in_json) if !name.ends_with("JSON") => figure.against("JSON", &[in_json]),
            _ => figure,
        });
    }
    let count = plan.size(100_000, 1_000);
    for (names, result) in [
        (
            [
                "Redis, no result",
                "SQLite, no result",
                "PostgreSQL, no result",
            ],
            stored(&(), json),
        ),
        (
            ["Redis, receipt", "SQLite, receipt", "PostgreSQL, receipt"],
            stored(&receipt(), json),
        ),
    ] {
        let mut rounds = plan.cold_rounds("sizes", &names);
        while rounds.next() {
            measure(&mut rounds, names, &result, count).await;
        }
        figures.extend(names.map(|name| rounds.figure(name, Unit::BytesPerKey)));
    }
    figures
}

async fn measure(
    rounds: &mut Rounds,
    [redis, sqlite, postgres]: [&'static str; 3],
    result: &Bytes,
    count: usize,
) {
    rounds.measure(redis, in_redis(result, count)).await;
    rounds.measure(sqlite, in_sqlite(result, count)).await;
    rounds.measure(postgres, in_postgres(result, count)).await;
}

async fn in_redis(result: &Bytes, count: usize) -> f64 {
    let server = RedisServer::start_with(&BENCH_REDIS).await;
    let mut bare = Bare::connect(&server).await;
    let store = RedisStore::connect(server.url())
        .await
        .expect("the server answers");
    // Memory for scripts and buffers is not counted.
    fill(&store, result, 2 * BATCH).await;
    let before = bare.used_memory_bytes().await;
    fill(&store, result, count).await;
    (bare.used_memory_bytes().await - before) / count as f64
}

async fn in_sqlite(result: &Bytes, count: usize) -> f64 {
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("records.db");
    fill(
        &SqliteStore::open(&path).await.expect("a new file"),
        result,
        count,
    )
    .await;
    let connection = Connection::open(&path).expect("the file is there");
    let pragma = |name| connection.pragma_query_value(None, name, |row| row.get::<_, i64>(0));
    let pages =
        pragma("page_count").expect("a number") - pragma("freelist_count").expect("a number");
    (pages * pragma("page_size").expect("a number")) as f64 / count as f64
}

async fn in_postgres(result: &Bytes, count: usize) -> f64 {
    let server = PostgresServer::start().await;
    let store = PostgresStore::connect(server.url())
        .await
        .expect("the server answers");
    store.create_schema().await.expect("an empty database");
    fill(&store, result, count).await;
    let client = server.connection().await;
    // The final state after autovacuum: without the rows that the completions have replaced.
    client
        .batch_execute("VACUUM FULL oncegate_records")
        .await
        .expect("it can be packed");
    let size = client
        .query_one("SELECT pg_total_relation_size('oncegate_records')", &[])
        .await;
    size.expect("a number").get::<_, i64>(0) as f64 / count as f64
}

/// Claims and completes `count` keys.
async fn fill(store: &dyn Store, result: &Bytes, count: usize) {
    let scope = Scope::new(fresh_scope()).expect("a valid name");
    for first in (0..count).step_by(BATCH) {
        let numbers = first..count.min(first + BATCH);
        let keys: Vec<(StoreKey, Token)> = numbers.map(|_| random_key(&scope)).collect();
        let claims = keys.iter().map(|(key, token)| {
            let operation = Operation::Claim {
                token: *token,
                lease: GateSettings::DEFAULT.lease,
                fingerprint: None,
                fenced: false,
                longest_lease: Duration::MAX,
            };
            Command {
                key: key.clone(),
                operation,
            }
        });
        for reply in store.execute(claims.collect()).await {
            let granted = matches!(
                reply,
                Ok(Reply::Verdict {
                    verdict: Verdict::Granted(_),
                    ..
                })
            );
            assert!(granted, "a new key is granted: {reply:?}");
        }
        let completions = keys.iter().map(|(key, token)| {
            let operation = Operation::Complete {
                token: *token,
                fingerprint: None,
                result: result.clone(),
                retention: GateSettings::DEFAULT.retention,
            };
            Command {
                key: key.clone(),
                operation,
            }
        });
        for reply in store.execute(completions.collect()).await {
            assert!(
                matches!(reply, Ok(Reply::Applied { .. })),
                "its owner completes it: {reply:?}"
            );
        }
    }
}

fn random_key(scope: &Scope) -> (StoreKey, Token) {
    let digest = Digest::from_bytes(fastrand::u128(..).to_be_bytes());
    (
        StoreKey::new(scope, digest),
        Token::from_bits(fastrand::u128(..)),
    )
}
