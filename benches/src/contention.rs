//! Compares the scripts with the same rules by WATCH, MULTI and EXEC, while several workers claim the same keys.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Instant;

use futures_util::future::join_all;
use oncegate_testkit::RedisServer;
use redis::Value;
use redis::aio::MultiplexedConnection;
use tokio::sync::Barrier;

use crate::bare::{
    Bare, CLAIM, COMPLETE, LEASE_MILLIS, RETENTION_MILLIS, assembled, completed_record, first_record,
};
use crate::cores::Cores;
use crate::figure::{Figure, Unit};
use crate::messages::fresh_scope;
use crate::rounds::Plan;
use crate::{BENCH_REDIS, Benchmark};

pub(crate) const BENCHMARK: Benchmark = Benchmark {
    name: "contention",
    question: "workers that want the same keys: scripts beside WATCH, MULTI and EXEC",
    cores: Cores::Shared,
    run: |plan| Box::pin(run(plan)),
};

/// The number of workers. Each has its own connection, as WATCH needs, and one call in flight.
const WORKERS: usize = 16;

/// The names of a contest, and whether all workers claim the same keys or each its own.
const CASES: [(&str, &str, &str, bool); 2] = [
    ("scripts, contended", "WATCH, contended", "tries of WATCH, contended", true),
    ("scripts, alone", "WATCH, alone", "tries of WATCH, alone", false),
];

async fn run(plan: &Plan) -> Vec<Figure> {
    let server = RedisServer::start_with(&BENCH_REDIS).await;
    let mut bare = Bare::connect(&server).await;
    let _loaded = bare.load(CLAIM, COMPLETE, false).await;
    let shas: Arc<[String; 2]> =
        Arc::new([CLAIM, COMPLETE].map(|text| redis::Script::new(&assembled(text)).get_hash().to_owned()));
    let keys = plan.size(4_000, 100);
    let names: Vec<&'static str> = CASES.iter().flat_map(|(scripts, watch, ..)| [*scripts, *watch]).collect();
    let mut rounds = plan.rounds("contention", &names);
    while rounds.next() {
        for (scripts, watch, tries, contended) in CASES {
            bare.flush().await;
            let by_scripts = By::Scripts(Arc::clone(&shas));
            rounds.measure(scripts, compete(&server, &by_scripts, keys, contended)).await;
            bare.flush().await;
            let tried = Arc::new(AtomicU64::new(0));
            rounds.measure(watch, compete(&server, &By::Watch(Arc::clone(&tried)), keys, contended)).await;
            rounds.note(tries, tried.load(Relaxed) as f64 / (keys * WORKERS) as f64);
        }
    }
    let figures = CASES.into_iter().flat_map(|(scripts, watch, tries, _)| {
        [rounds.against(scripts, Unit::MessagesPerSecond, watch), rounds.figure(tries, Unit::TriesPerMessage)]
    });
    figures.collect()
}

/// The method of a worker.
#[derive(Clone)]
enum By {
    Scripts(Arc<[String; 2]>),
    /// Counts the transactions.
    Watch(Arc<AtomicU64>),
}

/// Each worker claims each key and completes the granted ones. Returns the claims per second.
async fn compete(server: &RedisServer, by: &By, keys: usize, contended: bool) -> f64 {
    let (scope, barrier) = (fresh_scope(), Arc::new(Barrier::new(WORKERS + 1)));
    let connections = join_all((0..WORKERS).map(|_| server.connection())).await;
    let spawn = |(worker, mut connection): (usize, MultiplexedConnection)| {
        let (by, scope, barrier) = (by.clone(), scope.clone(), Arc::clone(&barrier));
        tokio::spawn(async move {
            barrier.wait().await;
            for number in 0..keys {
                // Without contention, each worker has its own keys.
                let owner = if contended { 0 } else { worker };
                let (key, record) = (format!("{scope}:{owner:02}{number:020}"), first_record());
                if by.claim(&mut connection, &key, &record).await {
                    assert!(by.complete(&mut connection, &key, &record).await, "no other worker owns it");
                }
            }
        })
    };
    let workers: Vec<_> = connections.into_iter().enumerate().map(spawn).collect();
    barrier.wait().await;
    let started = Instant::now();
    for worker in workers {
        worker.await.expect("no worker panics");
    }
    (keys * WORKERS) as f64 / started.elapsed().as_secs_f64()
}

impl By {
    async fn claim(&self, connection: &mut MultiplexedConnection, key: &str, record: &[u8]) -> bool {
        match self {
            Self::Scripts(shas) => {
                let mut call = redis::cmd("EVALSHA");
                let [claim, _] = &**shas;
                call.arg(claim).arg(1).arg(key).arg(record).arg(LEASE_MILLIS);
                let reply: Vec<u8> = call.query_async(connection).await.expect("the server answers");
                reply.first() == Some(&b'P')
            }
            Self::Watch(tries) => loop {
                tries.fetch_add(1, Relaxed);
                if watched(connection, key).await.is_some() {
                    let () = redis::cmd("UNWATCH").query_async(connection).await.expect("the server answers");
                    return false;
                }
                if exchanged(connection, key, record, LEASE_MILLIS).await {
                    return true;
                }
            },
        }
    }

    async fn complete(&self, connection: &mut MultiplexedConnection, key: &str, record: &[u8]) -> bool {
        let completed = completed_record(record);
        match self {
            Self::Scripts(shas) => {
                let mut call = redis::cmd("EVALSHA");
                let [_, complete] = &**shas;
                call.arg(complete).arg(1).arg(key).arg(record).arg(completed).arg(RETENTION_MILLIS);
                let reply: Vec<u8> = call.query_async(connection).await.expect("the server answers");
                reply == b"H"
            }
            Self::Watch(_) => loop {
                if watched(connection, key).await.as_deref() != Some(record) {
                    return false;
                }
                if exchanged(connection, key, &completed, RETENTION_MILLIS).await {
                    return true;
                }
            },
        }
    }
}

/// Reads the record and watches it until EXEC.
async fn watched(connection: &mut MultiplexedConnection, key: &str) -> Option<Vec<u8>> {
    let mut both = redis::pipe();
    both.cmd("WATCH").arg(key).ignore().cmd("GET").arg(key);
    let (found,) = both.query_async(connection).await.expect("the server answers");
    found
}

/// Runs the transaction. Returns whether the record was unchanged since the WATCH.
async fn exchanged(connection: &mut MultiplexedConnection, key: &str, record: &[u8], millis: u64) -> bool {
    let mut change = redis::pipe();
    change.atomic().cmd("SET").arg(key).arg(record).arg("PX").arg(millis);
    let reply: Value = change.query_async(connection).await.expect("the server answers");
    reply != Value::Nil
}
