//! Compares the scripts with the same rules by WATCH, MULTI and EXEC, while several workers claim
//! the same keys.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use oncegate_testkit::RedisServer;
use redis::Value;
use redis::aio::MultiplexedConnection;
use tokio::sync::Barrier;
use tokio::time::sleep;

use crate::bare::{
    Bare, CLAIM, COMPLETE, LEASE_MILLIS, RETENTION_MILLIS, assembled, completed_record,
    first_record,
};
use crate::cores::Cores;
use crate::figure::{Figure, Unit};
use crate::held::percentile;
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
/// The number of clients that want one key, each with a connection of its own.
const CLIENTS: usize = 200;
/// The number of times that each of them requests it.
const REQUESTS: usize = 10;
/// The time that the handler of the key takes.
const HANDLER: Duration = Duration::from_millis(50);
/// The time between two claims of a client that has found the key busy.
const ASK_AGAIN: Duration = Duration::from_millis(10);

/// The names of what is measured of a contestant.
#[derive(Clone, Copy, Debug)]
struct Series {
    rate: &'static str,
    p99: &'static str,
    cpu: &'static str,
}

/// The keys that each worker wants.
#[derive(Clone, Copy, Debug)]
enum Wanted {
    /// The same keys for all workers.
    Same,
    /// Other keys for each worker.
    Own,
    /// A single key for all clients, whose handler takes a while.
    One,
}

/// A contest of scripts and WATCH.
struct Case {
    wanted: Wanted,
    scripts: Series,
    watch: Series,
    tries: &'static str,
}

const CASES: [Case; 3] = [
    Case {
        wanted: Wanted::Same,
        scripts: Series {
            rate: "scripts, contended",
            p99: "p99, scripts, contended",
            cpu: "CPU, scripts, contended",
        },
        watch: Series {
            rate: "WATCH, contended",
            p99: "p99, WATCH, contended",
            cpu: "CPU, WATCH, contended",
        },
        tries: "tries of WATCH, contended",
    },
    Case {
        wanted: Wanted::Own,
        scripts: Series {
            rate: "scripts, alone",
            p99: "p99, scripts, alone",
            cpu: "CPU, scripts, alone",
        },
        watch: Series {
            rate: "WATCH, alone",
            p99: "p99, WATCH, alone",
            cpu: "CPU, WATCH, alone",
        },
        tries: "tries of WATCH, alone",
    },
    Case {
        wanted: Wanted::One,
        scripts: Series {
            rate: "scripts, one key",
            p99: "p99, scripts, one key",
            cpu: "CPU, scripts, one key",
        },
        watch: Series {
            rate: "WATCH, one key",
            p99: "p99, WATCH, one key",
            cpu: "CPU, WATCH, one key",
        },
        tries: "tries of WATCH, one key",
    },
];

async fn run(plan: &Plan) -> Vec<Figure> {
    let server = RedisServer::start_with(&BENCH_REDIS).await;
    let mut bare = Bare::connect(&server).await;
    let _loaded = bare.load(CLAIM, COMPLETE, false).await;
    let shas: Arc<[String; 2]> = Arc::new(
        [CLAIM, COMPLETE].map(|text| redis::Script::new(&assembled(text)).get_hash().to_owned()),
    );
    let names: Vec<&'static str> = CASES
        .iter()
        .flat_map(|case| [case.scripts.rate, case.watch.rate])
        .collect();
    let mut rounds = plan.rounds("contention", &names);
    while rounds.next() {
        for case in &CASES {
            let keys = match case.wanted {
                Wanted::Same | Wanted::Own => plan.size(4_000, 100),
                Wanted::One => plan.size(20, 2),
            };
            let tried = Arc::new(AtomicU64::new(0));
            let contestants = [
                (case.scripts, By::Scripts(Arc::clone(&shas))),
                (case.watch, By::Watch(Arc::clone(&tried))),
            ];
            let mut requests = 0;
            for (series, by) in contestants {
                bare.flush().await;
                let before = bare.server_cpu_micros().await;
                let mut micros = Vec::new();
                let contest = async {
                    let (elapsed, taken) = compete(&server, &by, case.wanted, keys).await;
                    micros = taken;
                    micros.len() as f64 / elapsed.as_secs_f64()
                };
                rounds.measure(series.rate, contest).await;
                requests = micros.len();
                micros.sort_by(f64::total_cmp);
                rounds.note(series.p99, percentile(&micros, 0.99));
                let used = bare.server_cpu_micros().await - before;
                rounds.note(series.cpu, used / requests as f64);
            }
            rounds.note(case.tries, tried.load(Relaxed) as f64 / requests as f64);
        }
    }
    let figures = CASES.iter().flat_map(
        |Case {
             scripts,
             watch,
             tries,
             ..
         }| {
            [
                rounds.against(scripts.rate, Unit::MessagesPerSecond, watch.rate),
                rounds.against(scripts.p99, Unit::Micros, watch.p99),
                rounds.against(scripts.cpu, Unit::MicrosPerMessage, watch.cpu),
                rounds.figure(tries, Unit::TriesPerMessage),
            ]
        },
    );
    figures.collect()
}

/// The method of a worker.
#[derive(Clone)]
enum By {
    Scripts(Arc<[String; 2]>),
    /// Counts the transactions.
    Watch(Arc<AtomicU64>),
}

/// The result of a claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Claimed {
    Granted,
    Busy,
    Completed,
}

/// Returns how long all requests of all workers took, and how long each took, in microseconds.
async fn compete(
    server: &RedisServer,
    by: &By,
    wanted: Wanted,
    keys: usize,
) -> (Duration, Vec<f64>) {
    let workers = match wanted {
        Wanted::Same | Wanted::Own => WORKERS,
        Wanted::One => CLIENTS,
    };
    let scope = fresh_scope();
    let barrier = Arc::new(Barrier::new(workers + 1));
    let together = Arc::new(Barrier::new(workers));
    let effects = Arc::new(AtomicU64::new(0));
    let connections = join_all((0..workers).map(|_| server.connection())).await;
    let tasks: Vec<_> = connections
        .into_iter()
        .enumerate()
        .map(|(number, connection)| {
            // Without contention, each worker has its own keys.
            let owner = if matches!(wanted, Wanted::Own) {
                number
            } else {
                0
            };
            let worker = Worker {
                by: by.clone(),
                connection,
                keys: format!("{scope}:{owner:02}"),
                effects: Arc::clone(&effects),
            };
            let barrier = Arc::clone(&barrier);
            let together = Arc::clone(&together);
            tokio::spawn(async move {
                barrier.wait().await;
                match wanted {
                    Wanted::Same | Wanted::Own => worker.claim_all(keys).await,
                    Wanted::One => worker.request_all(keys, &together).await,
                }
            })
        })
        .collect();
    barrier.wait().await;
    let started = Instant::now();
    let mut micros = Vec::new();
    for task in tasks {
        micros.extend(task.await.expect("no worker panics"));
    }
    let elapsed = started.elapsed();
    let expected = if matches!(wanted, Wanted::Own) {
        keys * workers
    } else {
        keys
    };
    assert_eq!(
        effects.load(Relaxed),
        expected as u64,
        "each key is handled once"
    );
    (elapsed, micros)
}

/// A worker or a client.
struct Worker {
    by: By,
    connection: MultiplexedConnection,
    /// The beginning of the names of its keys.
    keys: String,
    /// The handlers that have run.
    effects: Arc<AtomicU64>,
}

impl Worker {
    fn key(&self, number: usize) -> String {
        format!("{}{number:020}", self.keys)
    }

    /// Claims each key once, and completes the granted ones.
    async fn claim_all(mut self, keys: usize) -> Vec<f64> {
        let mut micros = Vec::with_capacity(keys);
        for number in 0..keys {
            let key = self.key(number);
            let began = Instant::now();
            self.claim(&key, Duration::ZERO).await;
            micros.push(began.elapsed().as_secs_f64() * 1e6);
        }
        micros
    }

    /// Requests each key until it is completed, several times. All clients begin with a key
    /// together.
    async fn request_all(mut self, keys: usize, together: &Barrier) -> Vec<f64> {
        let mut micros = Vec::with_capacity(keys * REQUESTS);
        for number in 0..keys {
            let key = self.key(number);
            together.wait().await;
            for _ in 0..REQUESTS {
                let began = Instant::now();
                while self.claim(&key, HANDLER).await == Claimed::Busy {
                    sleep(ASK_AGAIN).await;
                }
                micros.push(began.elapsed().as_secs_f64() * 1e6);
            }
        }
        micros
    }

    /// Claims the key; if it is granted, runs the handler and completes it.
    async fn claim(&mut self, key: &str, handler: Duration) -> Claimed {
        let record = first_record();
        let claimed = self.by.claim(&mut self.connection, key, &record).await;
        if claimed == Claimed::Granted {
            self.effects.fetch_add(1, Relaxed);
            if !handler.is_zero() {
                sleep(handler).await;
            }
            let completed = self.by.complete(&mut self.connection, key, &record).await;
            assert!(completed, "no other worker owns it");
        }
        claimed
    }
}

impl By {
    async fn claim(
        &self,
        connection: &mut MultiplexedConnection,
        key: &str,
        record: &[u8],
    ) -> Claimed {
        match self {
            Self::Scripts(shas) => {
                let mut call = redis::cmd("EVALSHA");
                let [claim, _] = &**shas;
                call.arg(claim)
                    .arg(1)
                    .arg(key)
                    .arg(record)
                    .arg(LEASE_MILLIS);
                let reply: Vec<u8> = call
                    .query_async(connection)
                    .await
                    .expect("the server answers");
                match reply.first() {
                    Some(b'P') => Claimed::Granted,
                    Some(b'B') => Claimed::Busy,
                    Some(b'C') => Claimed::Completed,
                    other => panic!("an unexpected answer: {other:?}"),
                }
            }
            Self::Watch(tries) => loop {
                tries.fetch_add(1, Relaxed);
                if let Some(found) = watched(connection, key).await {
                    let () = redis::cmd("UNWATCH")
                        .query_async(connection)
                        .await
                        .expect("the server answers");
                    return if found.first() == Some(&b'C') {
                        Claimed::Completed
                    } else {
                        Claimed::Busy
                    };
                }
                if exchanged(connection, key, record, LEASE_MILLIS).await {
                    return Claimed::Granted;
                }
            },
        }
    }

    async fn complete(
        &self,
        connection: &mut MultiplexedConnection,
        key: &str,
        record: &[u8],
    ) -> bool {
        let completed = completed_record(record);
        match self {
            Self::Scripts(shas) => {
                let mut call = redis::cmd("EVALSHA");
                let [_, complete] = &**shas;
                call.arg(complete)
                    .arg(1)
                    .arg(key)
                    .arg(record)
                    .arg(completed)
                    .arg(RETENTION_MILLIS);
                let reply: Vec<u8> = call
                    .query_async(connection)
                    .await
                    .expect("the server answers");
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
    let (found,) = both
        .query_async(connection)
        .await
        .expect("the server answers");
    found
}

/// Runs the transaction. Returns whether the record was unchanged since the WATCH.
async fn exchanged(
    connection: &mut MultiplexedConnection,
    key: &str,
    record: &[u8],
    millis: u64,
) -> bool {
    let mut change = redis::pipe();
    change
        .atomic()
        .cmd("SET")
        .arg(key)
        .arg(record)
        .arg("PX")
        .arg(millis);
    let reply: Value = change
        .query_async(connection)
        .await
        .expect("the server answers");
    reply != Value::Nil
}
