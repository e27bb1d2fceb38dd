//! Measures the server's memory and processor time per completed key, with its own key and in a
//! bucket.

use oncegate::redis::RedisBuilder;
use oncegate_testkit::RedisServer;

use crate::bare::Bare;
use crate::cores::Cores;
use crate::figure::{Bound, Figure, Unit};
use crate::gate::{IN_FLIGHT, gate_over, rate, redis_store};
use crate::messages::messages;
use crate::rounds::Plan;
use crate::{BENCH_REDIS, Benchmark};

pub(crate) const BENCHMARK: Benchmark = Benchmark {
    name: "memory",
    question: "the server's memory per completed key without a result, short scope",
    cores: Cores::Shared,
    run: |plan| Box::pin(run(plan)),
};

async fn run(plan: &Plan) -> Vec<Figure> {
    let count = plan.size(1_000_000, 10_000);
    let mut rounds = plan.cold_rounds("memory", &["completed", "completed, compact"]);
    while rounds.next() {
        let plain = completed(count, |store| store).await;
        rounds.measure("completed", async { plain.bytes }).await;
        rounds.note("server CPU", plain.cpu_micros);
        let compact = completed(count, |store| store.compact(count as u64)).await;
        rounds
            .measure("completed, compact", async { compact.bytes })
            .await;
        rounds.note("server CPU, compact", compact.cpu_micros);
    }
    vec![
        rounds
            .figure("completed", Unit::BytesPerKey)
            .target(Bound::ValueAtMost, 150.0),
        rounds
            .figure("completed, compact", Unit::BytesPerKey)
            .target(Bound::ValueAtMost, 45.0),
        rounds.against("server CPU, compact", Unit::MicrosPerMessage, "server CPU"),
    ]
}

/// The server's cost of a key.
struct Taken {
    bytes: f64,
    cpu_micros: f64,
}

async fn completed(count: usize, kept: impl Fn(RedisBuilder) -> RedisBuilder) -> Taken {
    let server = RedisServer::start_with(&BENCH_REDIS).await;
    let mut bare = Bare::connect(&server).await;
    let gate = gate_over(kept(redis_store(&server))).await;
    let messages = messages(count).into();
    let bytes = bare.used_memory_bytes().await;
    let cpu_micros = bare.server_cpu_micros().await;
    rate(gate, &messages, IN_FLIGHT).await;
    Taken {
        bytes: (bare.used_memory_bytes().await - bytes) / count as f64,
        cpu_micros: (bare.server_cpu_micros().await - cpu_micros) / count as f64,
    }
}
