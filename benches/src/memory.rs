//! What a completed key occupies on the server.

use oncegate_tests::RedisServer;

use crate::bare::Bare;
use crate::figure::{Bound, Figure, Unit};
use crate::gate::{IN_FLIGHT, rate, redis_gate};
use crate::messages::messages;
use crate::rounds::Plan;
use crate::{BENCH_REDIS, Benchmark};

pub(crate) const BENCHMARK: Benchmark = Benchmark {
    name: "memory",
    question: "the server's memory per completed key without a result, short scope",
    run: |plan| Box::pin(run(plan)),
};

async fn run(plan: &Plan) -> Vec<Figure> {
    let count = plan.size(1_000_000, 10_000);
    let mut rounds = plan.cold_rounds("memory", &["completed"]);
    while rounds.next() {
        rounds.measure("completed", bytes_per_key(count)).await;
    }
    vec![rounds.figure("completed", Unit::BytesPerKey).target(Bound::ValueAtMost, 150.0)]
}

async fn bytes_per_key(count: usize) -> f64 {
    let server = RedisServer::start_with(&BENCH_REDIS).await;
    let mut bare = Bare::connect(&server).await;
    let before = bare.used_memory_bytes().await;
    rate(redis_gate(&server).await, &messages(count).into(), IN_FLIGHT).await;
    (bare.used_memory_bytes().await - before) / count as f64
}
