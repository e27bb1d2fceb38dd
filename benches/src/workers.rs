//! Measures `oncegate run` with workers in other languages: how fast it is, and what a message
//! costs each side.
//!
//! The command is the one beside this program, the Python library is that of `packages/python`,
//! and the workers are those of `benches/workers`. Their effect is empty.

mod programs;
mod rows;
mod running;
mod usage;

use std::sync::{Arc, Mutex};

use oncegate_testkit::{Kafka, KafkaBroker, RedisServer};
use rdkafka::message::Message as _;

use crate::bare::Bare;
use crate::by_hand::ByHand;
use crate::cores::Cores;
use crate::figure::{Bound, Figure, Unit};
use crate::kafka::{poll_and_commit, produced};
use crate::machine::own_cpu_micros;
use crate::rounds::{Plan, Rounds};
use crate::{BENCH_REDIS, Benchmark};
use programs::Programs;
use rows::{Limit, ROWS, Row};
use running::{Costs, Setting};

pub(crate) const BENCHMARK: Benchmark = Benchmark {
    name: "workers",
    question: "`oncegate run` with a worker in Python, Go or Node and an empty effect: how fast, and what does a message cost?",
    cores: Cores::Shared,
    run: |plan| Box::pin(run(plan)),
};

/// The baseline: a loop in Rust that handles one message at a time, without oncegate.
const BY_HAND: &str = "by hand";
const BY_HAND_CPU: &str = "CPU, by hand";

async fn run(plan: &Plan) -> Vec<Figure> {
    let programs = Programs::prepare();
    let redis = RedisServer::start_with(&BENCH_REDIS).await;
    let kafka = KafkaBroker::start_for_long().await;
    let mut bare = Bare::connect(&redis).await;
    let count = plan.size(40_000, 8_000);
    let setting = Setting {
        topic: produced(&kafka, count).await,
        dead_letters: kafka.new_topic("dead", 1).await,
        kafka: &kafka,
        redis: &redis,
        programs: &programs,
        count,
    };
    let rows: Vec<&Row> = ROWS.iter().filter(|row| programs.have(row.kind)).collect();
    let names: Vec<&'static str> = std::iter::once(BY_HAND)
        .chain(rows.iter().map(|row| row.name))
        .collect();
    let mut rounds = plan.rounds("workers", &names);
    while rounds.next() {
        bare.flush().await;
        let store = Arc::new(Mutex::new(ByHand::connect(redis.url())));
        let before = own_cpu_micros();
        rounds
            .measure(BY_HAND, by_hand(store, &kafka, &setting.topic, count))
            .await;
        rounds.note(BY_HAND_CPU, (own_cpu_micros() - before) / count as f64);
        for row in &rows {
            bare.flush().await;
            measure(&mut rounds, row, &setting).await;
        }
    }
    rows.iter().flat_map(|row| figures(&rounds, row)).collect()
}

/// The rate of the baseline.
async fn by_hand(store: Arc<Mutex<ByHand>>, kafka: &Kafka, topic: &str, count: usize) -> f64 {
    let kafka = Kafka::clone(kafka);
    let topic = topic.to_owned();
    let looped = tokio::task::spawn_blocking(move || {
        poll_and_commit(&kafka, &topic, count, |polled| {
            store.lock().expect("one loop at a time").one_by_one(
                polled
                    .iter()
                    .map(|message| message.payload().unwrap_or_default()),
            );
        })
    });
    looped.await.expect("the loop ends")
}

async fn measure(rounds: &mut Rounds, row: &Row, setting: &Setting<'_>) {
    let mut measured = None;
    let rate = async {
        let costs = setting.costs(row.kind).await;
        let rate = costs.rate;
        measured = Some(costs);
        rate
    };
    rounds.measure(row.name, rate).await;
    let Costs {
        oncegate_micros,
        worker_micros,
        switches,
        ..
    } = measured.expect("it was measured");
    rounds.note(series("CPU", row), oncegate_micros);
    rounds.note(series("worker CPU", row), worker_micros);
    rounds.note(series("switches", row), switches);
}

/// The figures of one row: the rate, and what a message costs the command and the worker.
fn figures(rounds: &Rounds, row: &Row) -> [Figure; 4] {
    let micros = Unit::MicrosPerMessage;
    let rate = rounds.against(row.name, Unit::MessagesPerSecond, BY_HAND);
    let oncegate = rounds.against(series("CPU", row), micros, BY_HAND_CPU);
    let worker = rounds.figure(series("worker CPU", row), micros);
    let switches = rounds.figure(series("switches", row), Unit::SwitchesPerMessage);
    [
        limited(rate, Bound::ValueAtLeast, row.rate_at_least),
        limited(oncegate, Bound::ValueAtMost, row.oncegate_micros_at_most),
        limited(worker, Bound::ValueAtMost, row.worker_micros_at_most),
        switches,
    ]
}

fn limited(figure: Figure, bound: Bound, limit: Limit) -> Figure {
    match limit {
        Some(limit) => figure.target(bound, limit),
        None => figure,
    }
}

/// The name of a series. There are a few dozen, and each is needed to the end of the program.
fn series(what: &str, row: &Row) -> &'static str {
    format!("{what}, {}", row.name).leak()
}
