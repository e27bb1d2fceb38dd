//! Measures the gate's public API with few and many messages in flight, on one connection and on
//! four.

use std::sync::Arc;
use std::time::Instant;

use futures_util::future::join_all;
use oncegate::Message;
use oncegate_testkit::RedisServer;

use crate::bare::{Bare, CLAIM, COMPLETE, Pair};
use crate::cores::Cores;
use crate::figure::{Bound, Figure, Unit};
use crate::gate::{rate, redis_gate};
use crate::messages::{fresh_scope, messages};
use crate::rounds::Plan;
use crate::{BENCH_REDIS, Benchmark};

pub(crate) const BENCHMARK: Benchmark = Benchmark {
    name: "in_flight",
    question: "claim and complete of fresh keys: few and many in flight, on one connection and on four",
    cores: Cores::Apart,
    run: |plan| Box::pin(run(plan)),
};

/// The names of the gate and its baseline, the number of messages in flight, and the number of
/// connections.
const CASES: [(&str, &str, usize, usize); 6] = [
    ("64 on 1", "bare, 64 on 1", 64, 1),
    ("256 on 1", "bare, 256 on 1", 256, 1),
    ("1,024 on 1", "bare, 1,024 on 1", 1_024, 1),
    ("64 on 4", "bare, 64 on 4", 64, 4),
    ("256 on 4", "bare, 256 on 4", 256, 4),
    ("1,024 on 4", "bare, 1,024 on 4", 1_024, 4),
];

async fn run(plan: &Plan) -> Vec<Figure> {
    let server = RedisServer::start_with(&BENCH_REDIS).await;
    let mut bare = Bare::connect(&server).await;
    let pair = bare.load(CLAIM, COMPLETE, false).await.plain_claim();
    let count = plan.size(80_000, 4_096);
    let names: Vec<&'static str> = CASES
        .iter()
        .flat_map(|(ours, theirs, ..)| [*ours, *theirs])
        .collect();
    let mut rounds = plan.rounds("in_flight", &names);
    while rounds.next() {
        for (ours, theirs, in_flight, connections) in CASES {
            bare.flush().await;
            rounds
                .measure(ours, gates(&server, count, in_flight, connections))
                .await;
            bare.flush().await;
            rounds
                .measure(
                    theirs,
                    bare_loops(&server, &pair, count, in_flight, connections),
                )
                .await;
        }
    }
    CASES
        .into_iter()
        .map(|(ours, theirs, ..)| {
            rounds
                .against(ours, Unit::MessagesPerSecond, theirs)
                .target(Bound::RatioAtLeast, 0.95)
        })
        .collect()
}

/// Rate of several stores. A store uses one connection for everything but heartbeats, so four
/// connections are four stores.
async fn gates(server: &RedisServer, count: usize, in_flight: usize, connections: usize) -> f64 {
    let messages: Arc<[Message]> = messages(count / connections).into();
    let gates = join_all((0..connections).map(|_| redis_gate(server))).await;
    let rates = gates
        .into_iter()
        .map(|gate| tokio::spawn(share(gate, Arc::clone(&messages), in_flight / connections)));
    let rates: Vec<f64> = join_all(rates)
        .await
        .into_iter()
        .map(|rate| rate.expect("no worker panics"))
        .collect();
    rates.iter().sum()
}

async fn share(gate: oncegate::Gate, messages: Arc<[Message]>, in_flight: usize) -> f64 {
    rate(gate, &messages, in_flight).await
}

async fn bare_loops(
    server: &RedisServer,
    pair: &Pair,
    count: usize,
    in_flight: usize,
    connections: usize,
) -> f64 {
    let loops = join_all((0..connections).map(|_| Bare::connect(server))).await;
    let rates = loops.into_iter().map(|mut bare| {
        let pair = pair.clone();
        let scope = fresh_scope();
        let count = count / connections;
        tokio::spawn(async move {
            let started = Instant::now();
            bare.run(&pair, &scope, count, in_flight / connections)
                .await;
            count as f64 / started.elapsed().as_secs_f64()
        })
    });
    join_all(rates)
        .await
        .into_iter()
        .map(|rate| rate.expect("no loop panics"))
        .sum()
}
