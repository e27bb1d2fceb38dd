//! Measures the cost and the latency of a message while the server holds few and very many keys.

use std::sync::Arc;
use std::time::{Duration, Instant};

use oncegate::{Completion, Entry, Gate, Message};
use oncegate_testkit::RedisServer;
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, interval};

use crate::bare::Bare;
use crate::cores::Cores;
use crate::figure::{Bound, Figure, Unit};
use crate::gate::{IN_FLIGHT, rate, redis_gate};
use crate::messages::{fresh_scope, messages_over};
use crate::rounds::Plan;
use crate::{BENCH_REDIS, Benchmark};

pub(crate) const BENCHMARK: Benchmark = Benchmark {
    name: "held",
    question: "cost and latency of a message while 100,000, 1,000,000 and 10,000,000 keys are held",
    cores: Cores::Shared,
    run: |plan| Box::pin(run(plan)),
};

/// The number of keys held, and the names of the measurements.
const CASES: [(usize, [&str; 6]); 3] = [
    (
        100_000,
        [
            "server CPU, 100 k",
            "rate, 100 k",
            "claim p50, 100 k",
            "claim p99, 100 k",
            "complete p50, 100 k",
            "complete p99, 100 k",
        ],
    ),
    (
        1_000_000,
        [
            "server CPU, 1 M",
            "rate, 1 M",
            "claim p50, 1 M",
            "claim p99, 1 M",
            "complete p50, 1 M",
            "complete p99, 1 M",
        ],
    ),
    (
        10_000_000,
        [
            "server CPU, 10 M",
            "rate, 10 M",
            "claim p50, 10 M",
            "claim p99, 10 M",
            "complete p50, 10 M",
            "complete p99, 10 M",
        ],
    ),
];

/// The interval in which messages are sent at half of the load.
const TICK: Duration = Duration::from_millis(1);

/// Sets a number of completed keys of a scope in one call, because the client is not measured here.
const FILL: &str = "for number = ARGV[2], ARGV[2] + ARGV[3] - 1 do
  redis.call('SET', string.format('%s:%022d', ARGV[1], number), 'C0123\\0\\0\\0\\0\\0\\0\\0', 'PX', 604800000)
end";
const FILL_AT_ONCE: usize = 20_000;

/// Reads the same keys. A server that resizes its table moves a part of it at each call; afterwards
/// the move is done.
const READ: &str = "for number = ARGV[2], ARGV[2] + ARGV[3] - 1 do
  redis.call('GET', string.format('%s:%022d', ARGV[1], number))
end";

async fn run(plan: &Plan) -> Vec<Figure> {
    let count = plan.size(60_000, 2_000);
    // Each case is filled and measured once in a repetition, without a warm-up round: its first
    // rate is the warm-up.
    let mut rounds = plan.cold_rounds("held", &CASES.map(|(_, [_, rate, ..])| rate));
    while rounds.next() {
        let mut settings = BENCH_REDIS.to_vec();
        settings.extend(["--appendonly", "no"]);
        let server = RedisServer::start_with(&settings).await;
        let mut bare = Bare::connect(&server).await;
        let mut held = 0;
        for (
            keys,
            [
                cpu,
                rate_name,
                claim_p50,
                claim_p99,
                complete_p50,
                complete_p99,
            ],
        ) in CASES
        {
            let keys = if plan.quick { keys / 1_000 } else { keys };
            let scope = fresh_scope();
            for script in [FILL, READ] {
                bare.fill(script, &scope, held, keys, FILL_AT_ONCE).await;
            }
            held = keys;
            let fresh: Arc<[Message]> = messages_over(count, count).into();
            let _warm_up = rate(redis_gate(&server).await, &fresh, IN_FLIGHT).await;
            let before = bare.server_cpu_micros().await;
            let reached = rate(redis_gate(&server).await, &fresh, IN_FLIGHT).await;
            rounds.note(
                cpu,
                (bare.server_cpu_micros().await - before) / count as f64,
            );
            rounds.measure(rate_name, async { reached }).await;
            let [claims, completions] =
                latencies(redis_gate(&server).await, &fresh, reached / 2.0).await;
            rounds.note(claim_p50, percentile(&claims, 0.5));
            rounds.note(claim_p99, percentile(&claims, 0.99));
            rounds.note(complete_p50, percentile(&completions, 0.5));
            rounds.note(complete_p99, percentile(&completions, 0.99));
        }
    }
    let [(_, first), ..] = CASES;
    let mut figures = Vec::new();
    for (_, names) in CASES {
        let [cpu, rate, latencies @ ..] = names;
        figures.push(
            rounds
                .against(cpu, Unit::MicrosPerMessage, first[0])
                .target(Bound::RatioAtMost, 1.25),
        );
        figures.push(rounds.figure(rate, Unit::MessagesPerSecond));
        figures.extend(latencies.map(|name| rounds.figure(name, Unit::MicrosPerMessage)));
    }
    figures
}

/// Sends messages at a steady rate, independent of the replies. Returns the latencies of claims and
/// completions in µs, sorted.
async fn latencies(gate: Gate, messages: &Arc<[Message]>, per_second: f64) -> [Vec<f64>; 2] {
    gate.open().await.expect("the gate opens");
    let gate = Arc::new(gate);
    let started = Instant::now();
    let mut sent = 0;
    let mut running = JoinSet::new();
    let mut ticks = interval(TICK);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Skip);
    while sent < messages.len() {
        ticks.tick().await;
        let due = (started.elapsed().as_secs_f64() * per_second) as usize;
        while sent < due.min(messages.len()) {
            let gate = Arc::clone(&gate);
            let messages = Arc::clone(messages);
            let number = sent;
            running.spawn(
                async move { time(&gate, messages.get(number).expect("there is one")).await },
            );
            sent += 1;
        }
    }
    let (mut claims, mut completions): (Vec<f64>, Vec<f64>) =
        running.join_all().await.into_iter().unzip();
    claims.sort_by(f64::total_cmp);
    completions.sort_by(f64::total_cmp);
    [claims, completions]
}

async fn time(gate: &Gate, message: &Message) -> (f64, f64) {
    let started = Instant::now();
    let entry = gate.enter(message).await.expect("the store answers");
    let claimed = started.elapsed();
    let Entry::Granted(lease) = entry else {
        panic!("a fresh key is {entry:?}")
    };
    let started = Instant::now();
    assert_eq!(
        lease.complete(&()).await.expect("nothing to keep"),
        Completion::Applied
    );
    (
        claimed.as_secs_f64() * 1e6,
        started.elapsed().as_secs_f64() * 1e6,
    )
}

pub(crate) fn percentile(sorted: &[f64], part: f64) -> f64 {
    let place = (part * sorted.len().saturating_sub(1) as f64).round() as usize;
    sorted.get(place).copied().unwrap_or(f64::NAN)
}
