//! Measures a store in the steady state, in which as many records expire as arrive, in little more
//! than a minute.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use oncegate::postgres::PostgresStore;
use oncegate::redis::RedisStore;
use oncegate::sqlite::SqliteStore;
use oncegate_core::key::{Digest, Scope, StoreKey};
use oncegate_core::record::Token;
use oncegate_core::rules::{Operation, Reply, Verdict};
use oncegate_core::store::{Command, Store};
use oncegate_testkit::{PostgresServer, RedisServer};
use tokio::task::JoinSet;
use tokio_postgres::Client;

use crate::bare::Bare;
use crate::cores::Cores;
use crate::figure::{Bound, Figure, Unit};
use crate::messages::fresh_scope;
use crate::rounds::Plan;
use crate::{BENCH_REDIS, Benchmark};

pub(crate) const BENCHMARK: Benchmark = Benchmark {
    name: "sustained",
    question: "as many records expire as arrive: size, rate and p99 of the last quarter, against those of the second",
    cores: Cores::Shared,
    run: |plan| Box::pin(run(plan)),
};

/// The number of messages in flight: between the claim and the end of the completion.
const IN_FLIGHT: usize = 256;

/// The retention of a completed record, and the length of a quarter.
const RETENTION: Duration = Duration::from_secs(10);
const QUARTER: Duration = Duration::from_secs(30);
const QUARTERS: usize = 4;

const MEBIBYTE: f64 = 1_048_576.0;

/// The interval in which the size is measured.
const SAMPLE_EVERY: Duration = Duration::from_millis(250);

/// Server settings for the shorter time scale: autovacuum checks the tables every second instead of
/// every minute, because records live for seconds instead of hours.
const POSTGRES: [&str; 1] = ["autovacuum_naptime=1s"];

/// The names of the figures of a store.
struct Names {
    rate: &'static str,
    p99: &'static str,
    size: &'static str,
    record: &'static str,
}

/// The baseline of each figure.
const BASELINE: &str = "2nd quarter";

const REDIS: Names = Names {
    rate: "Redis, rate",
    p99: "Redis, p99",
    size: "Redis, size",
    record: "Redis, size a record",
};
const SQLITE: Names = Names {
    rate: "SQLite, rate",
    p99: "SQLite, p99",
    size: "SQLite, size",
    record: "SQLite, size a record",
};
const POSTGRESQL: Names = Names {
    rate: "PostgreSQL, rate",
    p99: "PostgreSQL, p99",
    size: "PostgreSQL, size",
    record: "PostgreSQL, size a record",
};

async fn run(plan: &Plan) -> Vec<Figure> {
    let quarter = if plan.quick {
        Duration::from_millis(500)
    } else {
        QUARTER
    };
    let mut figures = Vec::new();
    {
        let server = RedisServer::start_with(&BENCH_REDIS).await;
        let store = RedisStore::connect(server.url())
            .await
            .expect("the server may be used");
        let place = Place::Redis(Bare::connect(&server).await);
        figures.extend(
            sustained(Arc::new(store), place, quarter)
                .await
                .figures(&REDIS),
        );
    }
    {
        let dir = tempfile::tempdir().expect("a folder");
        let file = dir.path().join("records.db");
        let store = SqliteStore::open(&file).await.expect("the disk takes it");
        figures.extend(
            sustained(Arc::new(store), Place::Sqlite(file), quarter)
                .await
                .figures(&SQLITE),
        );
    }
    let server = PostgresServer::start_with(&POSTGRES).await;
    let store = PostgresStore::connect(server.url())
        .await
        .expect("the server may be used");
    store.create_schema().await.expect("new tables");
    let place = Place::Postgres(server.connection().await);
    figures.extend(
        sustained(Arc::new(store), place, quarter)
            .await
            .figures(&POSTGRESQL),
    );
    figures
}

/// The store under test.
enum Place {
    Redis(Bare),
    Sqlite(PathBuf),
    Postgres(Client),
}

impl Place {
    /// The size in bytes: memory, the file and its log, or the table and its index.
    async fn bytes(&mut self) -> f64 {
        match self {
            Self::Redis(bare) => bare.used_memory_bytes().await,
            Self::Sqlite(file) => {
                let mut log = file.clone().into_os_string();
                log.push("-wal");
                let bytes: u64 = [file.as_path(), Path::new(&log)]
                    .iter()
                    .filter_map(|path| std::fs::metadata(path).ok())
                    .map(|metadata| metadata.len())
                    .sum();
                bytes as f64
            }
            Self::Postgres(client) => {
                let size = client
                    .query_one("SELECT pg_total_relation_size('oncegate_records')", &[])
                    .await;
                size.expect("the server answers").get::<_, i64>(0) as f64
            }
        }
    }
}

/// The measurements of each quarter.
struct Quarters {
    seconds: f64,
    /// The time of each message, in microseconds.
    micros: Vec<Vec<u32>>,
    /// Sizes in bytes.
    sizes: Vec<Vec<f64>>,
}

/// Claims and completes new keys at the maximum rate for four quarters.
async fn sustained(store: Arc<dyn Store>, mut place: Place, quarter: Duration) -> Quarters {
    let scope = Scope::new(fresh_scope()).expect("it is one");
    let started = Instant::now();
    let mut workers = JoinSet::new();
    for _ in 0..IN_FLIGHT {
        let store = Arc::clone(&store);
        let scope = scope.clone();
        workers.spawn(async move {
            let mut micros = vec![Vec::new(); QUARTERS];
            while let Some(quarter) = micros.get_mut(number(started, quarter)) {
                let began = Instant::now();
                message(&*store, &scope).await;
                quarter.push(u32::try_from(began.elapsed().as_micros()).unwrap_or(u32::MAX));
            }
            micros
        });
    }
    let mut sizes = vec![Vec::new(); QUARTERS];
    while let Some(quarter) = sizes.get_mut(number(started, quarter)) {
        quarter.push(place.bytes().await);
        tokio::time::sleep(SAMPLE_EVERY).await;
    }
    let mut micros = vec![Vec::new(); QUARTERS];
    while let Some(worker) = workers.join_next().await {
        let worker = worker.expect("no worker panics");
        micros
            .iter_mut()
            .zip(worker)
            .for_each(|(all, one)| all.extend(one));
    }
    Quarters {
        seconds: quarter.as_secs_f64(),
        micros,
        sizes,
    }
}

fn number(started: Instant, quarter: Duration) -> usize {
    (started.elapsed().as_nanos() / quarter.as_nanos()) as usize
}

async fn message(store: &dyn Store, scope: &Scope) {
    let key = StoreKey::new(scope, Digest::from_bytes(fastrand::u128(..).to_be_bytes()));
    let token = Token::from_bits(fastrand::u128(1..));
    let lease = Duration::from_secs(30);
    let claim = Operation::Claim {
        token,
        lease,
        fingerprint: None,
        fenced: false,
        longest_lease: Duration::MAX,
    };
    let claimed = store
        .execute_one(Command {
            key: key.clone(),
            operation: claim,
        })
        .await;
    let is_granted = matches!(
        claimed,
        Ok(Reply::Verdict {
            verdict: Verdict::Granted(_),
            ..
        })
    );
    assert!(is_granted, "a fresh key is {claimed:?}");
    let result = b"".as_slice().into();
    let complete = Operation::Complete {
        token,
        fingerprint: None,
        result,
        retention: RETENTION,
    };
    let completed = store
        .execute_one(Command {
            key,
            operation: complete,
        })
        .await;
    assert!(
        matches!(completed, Ok(Reply::Applied { .. })),
        "a claim's completion is {completed:?}"
    );
}

impl Quarters {
    /// The last quarter compared with the second.
    fn figures(self, names: &Names) -> [Figure; 4] {
        [
            self.compared(names.rate, Unit::MessagesPerSecond, Self::rate)
                .target(Bound::RatioAtLeast, 0.9),
            self.compared(names.p99, Unit::MicrosPerMessage, Self::p99)
                .target(Bound::RatioAtMost, 1.1),
            self.compared(names.size, Unit::Mebibytes, Self::size)
                .target(Bound::RatioAtMost, 1.1),
            self.compared(names.record, Unit::BytesPerKey, Self::bytes_per_key),
        ]
    }

    fn compared(&self, name: &'static str, unit: Unit, of: fn(&Self, usize) -> f64) -> Figure {
        Figure::new(name, unit, &[of(self, QUARTERS - 1)]).against(BASELINE, &[of(self, 1)])
    }

    fn rate(&self, quarter: usize) -> f64 {
        self.of(&self.micros, quarter).len() as f64 / self.seconds
    }

    fn size(&self, quarter: usize) -> f64 {
        let sizes = self.of(&self.sizes, quarter);
        sizes.iter().sum::<f64>() / sizes.len() as f64 / MEBIBYTE
    }

    fn p99(&self, quarter: usize) -> f64 {
        let mut micros = self.of(&self.micros, quarter).to_vec();
        micros.sort_unstable();
        micros
            .get(micros.len() * 99 / 100)
            .copied()
            .map_or(f64::NAN, f64::from)
    }

    /// The store holds the records that arrived within the retention.
    fn bytes_per_key(&self, quarter: usize) -> f64 {
        self.size(quarter) * MEBIBYTE / (self.rate(quarter) * RETENTION.as_secs_f64())
    }

    fn of<'a, T>(&self, quarters: &'a [Vec<T>], number: usize) -> &'a [T] {
        quarters.get(number).map(Vec::as_slice).unwrap_or_default()
    }
}
