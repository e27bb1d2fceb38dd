//! Measures what a message costs at everyday rates: a producer at a fixed rate, an empty handler,
//! 64 at a time.
//!
//! Producer and consumers are processes of their own (this program with [`Task`] as an argument),
//! so that the processor time of one is not counted for another.

mod baseline;
mod consumer;
mod producer;
mod threads;

use std::process::Stdio;
use std::time::Duration;

use oncegate::postgres::PostgresStore;
use oncegate_testkit::{Kafka, KafkaBroker, PostgresServer, RedisServer, unique};
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, BufReader};
use tokio::process::Command;

use crate::cores::Cores;
use crate::figure::{Bound, Figure, Unit};
use crate::messages::{ROUTE, fresh_scope};
use crate::rounds::{Plan, Rounds};
use crate::{BENCH_REDIS, Benchmark};
use threads::Used;

pub(crate) const BENCHMARK: Benchmark = Benchmark {
    name: "rates",
    question: "a producer at 100 to 20,000 messages a second: what does a message cost, and how long does it take?",
    cores: Cores::Shared,
    run: |plan| Box::pin(run(plan)),
};

/// Messages per second.
const RATES: [u32; 4] = [100, 1_000, 5_000, 20_000];
const PARTITIONS: i32 = 12;
/// The time for which messages are produced before the measurement begins, and during it.
const WARM_UP: Duration = Duration::from_secs(2);
const MEASURED: Duration = Duration::from_secs(6);
/// The line that a consumer prints when it has its partitions.
const READY: &str = "ready";

/// The argument of a process of its own, as JSON.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Task {
    role: Role,
    brokers: String,
    topic: String,
    /// Messages per second.
    rate: u32,
    /// The number of messages before the first one that is measured.
    warm_up: usize,
    /// The number of messages that are measured.
    count: usize,
}

/// The role of a process.
#[derive(Clone, Debug, Serialize, Deserialize)]
enum Role {
    Produce,
    /// A consumer of oncegate, over the store at this URL or path.
    Redis(String),
    Sqlite(String),
    Postgres(String),
    /// A hand-written loop over Redis.
    BareLoop(String),
    PollAndCommit,
}

/// The measurements of a consumer.
#[derive(Debug, Serialize, Deserialize)]
struct Measured {
    used: Vec<Used>,
    /// From the call of the producer to the handler, in microseconds.
    to_effect: Percentiles,
    /// From the handler to the ack, after which the next commit covers the message.
    to_ack: Percentiles,
    rss_mebibytes: f64,
}

/// Percentiles of times in microseconds.
#[derive(Debug, Serialize, Deserialize)]
struct Percentiles {
    p50: f64,
    p99: f64,
    p999: f64,
}

impl Percentiles {
    fn of(mut micros: Vec<u32>) -> Self {
        micros.sort_unstable();
        let [p50, p99, p999] = [0.5, 0.99, 0.999].map(|share| {
            let place = (micros.len() as f64 * share) as usize;
            micros
                .get(place.min(micros.len().saturating_sub(1)))
                .copied()
                .map_or(f64::NAN, f64::from)
        });
        Self { p50, p99, p999 }
    }
}

/// Does the work of a process of its own.
pub(crate) async fn work(task: &Task) {
    let measured = match &task.role {
        Role::Produce => return producer::produce(task),
        Role::BareLoop(redis) => baseline::bare_loop(task, redis),
        Role::PollAndCommit => baseline::poll_and_commit(task),
        Role::Redis(_) | Role::Sqlite(_) | Role::Postgres(_) => consumer::consume(task).await,
    };
    println!(
        "{}",
        serde_json::to_string(&measured).expect("numbers can be written")
    );
}

/// The contestants. The first three are consumers of oncegate.
const CONTESTANTS: [&str; 5] = [
    "Redis",
    "SQLite",
    "PostgreSQL",
    "bare loop",
    "poll and commit",
];

async fn run(plan: &Plan) -> Vec<Figure> {
    let redis = RedisServer::start_with(&BENCH_REDIS).await;
    let kafka = KafkaBroker::start_for_long().await;
    let postgres = PostgresServer::start().await;
    let folder = tempfile::tempdir().expect("a folder");
    let store = PostgresStore::connect(postgres.url())
        .await
        .expect("the server may be used");
    store.create_schema().await.expect("new tables");
    let turns: Vec<&'static str> = RATES
        .iter()
        .flat_map(|rate| CONTESTANTS.map(|contestant| name(contestant, *rate, "CPU")))
        .collect();
    let mut rounds = plan.cold_rounds("rates", &turns);
    while rounds.next() {
        for rate in RATES {
            for contestant in CONTESTANTS {
                let topic = kafka.new_topic(ROUTE, PARTITIONS).await;
                let role = match contestant {
                    "Redis" => Role::Redis(redis.url().to_owned()),
                    "SQLite" => {
                        Role::Sqlite(folder.path().join(fresh_scope()).display().to_string())
                    }
                    "PostgreSQL" => Role::Postgres(postgres.url().to_owned()),
                    "bare loop" => Role::BareLoop(redis.url().to_owned()),
                    _ => Role::PollAndCommit,
                };
                let task = task(plan, &kafka, topic, rate, role);
                measure(&mut rounds, contestant, &task).await;
            }
        }
    }
    RATES
        .iter()
        .flat_map(|rate| figures(&rounds, *rate))
        .collect()
}

fn task(plan: &Plan, kafka: &Kafka, topic: String, rate: u32, role: Role) -> Task {
    let [warm_up, count] = [WARM_UP, MEASURED].map(|time| {
        let count = (f64::from(rate) * time.as_secs_f64()) as usize;
        plan.size(count, count.min(50))
    });
    let brokers = kafka.bootstrap().to_owned();
    Task {
        role,
        brokers,
        topic,
        rate,
        warm_up,
        count,
    }
}

async fn measure(rounds: &mut Rounds, contestant: &'static str, task: &Task) {
    let rate = task.rate;
    let mut measured = None;
    let cpu = async {
        let found = pair(task).await;
        let cpu = found.used.iter().map(|used| used.cpu_micros).sum::<f64>() / task.count as f64;
        measured = Some(found);
        cpu
    };
    rounds.measure(name(contestant, rate, "CPU"), cpu).await;
    let Measured {
        used,
        to_effect,
        to_ack,
        rss_mebibytes,
    } = measured.expect("it was measured");
    let switches = used.iter().map(|used| used.switches).sum::<f64>() / task.count as f64;
    rounds.note(name(contestant, rate, "switches"), switches);
    if contestant == "Redis" {
        for group in threads::GROUPS {
            let micros = used
                .iter()
                .filter(|used| used.group == group)
                .map(|used| used.cpu_micros);
            let per_message = micros.sum::<f64>() / task.count as f64;
            rounds.note(
                name(contestant, rate, &format!("CPU, {group}")),
                per_message,
            );
        }
    }
    for (of, percentiles) in [("to effect", to_effect), ("to ack", to_ack)] {
        rounds.note(
            name(contestant, rate, &format!("{of}, p50")),
            percentiles.p50,
        );
        rounds.note(
            name(contestant, rate, &format!("{of}, p99")),
            percentiles.p99,
        );
        rounds.note(
            name(contestant, rate, &format!("{of}, p99.9")),
            percentiles.p999,
        );
    }
    rounds.note(name(contestant, rate, "RSS"), rss_mebibytes);
}

/// Runs a consumer and, once it has its partitions, the producer.
async fn pair(task: &Task) -> Measured {
    let mut consumer = process(task)
        .stdout(Stdio::piped())
        .spawn()
        .expect("this program can be started");
    let mut output = BufReader::new(consumer.stdout.take().expect("it is piped"));
    let mut line = String::new();
    while line.trim_end() != READY {
        line.clear();
        let read = output
            .read_line(&mut line)
            .await
            .expect("a consumer writes text");
        assert!(read > 0, "the consumer has ended: {task:?}");
    }
    let produced = process(&Task {
        role: Role::Produce,
        ..task.clone()
    })
    .status()
    .await;
    assert!(
        produced.expect("this program can be started").success(),
        "the producer has failed"
    );
    let mut measured = String::new();
    output
        .read_to_string(&mut measured)
        .await
        .expect("a consumer writes text");
    assert!(
        consumer.wait().await.expect("it ends").success(),
        "the consumer has failed: {task:?}"
    );
    serde_json::from_str(&measured).expect("a consumer ends with its figures")
}

fn process(task: &Task) -> Command {
    let mut command = Command::new(std::env::current_exe().expect("this program has a path"));
    command
        .arg("--task")
        .arg(serde_json::to_string(task).expect("text"))
        .kill_on_drop(true);
    command
}

/// The figures of one rate.
fn figures(rounds: &Rounds, rate: u32) -> Vec<Figure> {
    let micros = Unit::MicrosPerMessage;
    let bare = "bare loop";
    let mut figures = Vec::new();
    for contestant in ["Redis", "SQLite", "PostgreSQL"] {
        let against = |what: &str, unit| {
            rounds.against(name(contestant, rate, what), unit, name(bare, rate, what))
        };
        let cpu = against("CPU", micros);
        let is_target = contestant == "Redis";
        figures.push(if is_target {
            cpu.target(Bound::RatioAtMost, 2.0)
        } else {
            cpu
        });
        if is_target {
            figures.extend(threads::GROUPS.iter().map(|group| {
                let name = name(contestant, rate, &format!("CPU, {group}"));
                rounds.figure(name, micros)
            }));
        }
        figures.push(against("switches", Unit::SwitchesPerMessage));
        for (what, limit) in [("to effect, p50", 1_000.0), ("to effect, p99", 5_000.0)] {
            let figure = against(what, Unit::Micros);
            let is_target = is_target && [1_000, 5_000].contains(&rate);
            figures.push(if is_target {
                figure.target(Bound::ValueAtMost, limit)
            } else {
                figure
            });
        }
        for what in [
            "to effect, p99.9",
            "to ack, p50",
            "to ack, p99",
            "to ack, p99.9",
        ] {
            figures.push(against(what, Unit::Micros));
        }
        figures.push(against("RSS", Unit::Mebibytes));
    }
    for what in ["CPU", "switches"] {
        let unit = if what == "CPU" {
            micros
        } else {
            Unit::SwitchesPerMessage
        };
        figures.push(rounds.against(
            name(bare, rate, what),
            unit,
            name("poll and commit", rate, what),
        ));
    }
    figures
}

/// The name of a series. There are about two hundred, and each is needed to the end of the program.
fn name(contestant: &str, rate: u32, what: &str) -> &'static str {
    let rate = match rate / 1_000 {
        0 => rate.to_string(),
        thousands => format!("{thousands},{:03}", rate % 1_000),
    };
    format!("{contestant}, {rate}/s: {what}").leak()
}

/// A new consumer group.
fn group() -> String {
    unique("rates")
}
