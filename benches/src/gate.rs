//! Compares the gate's public API with a loop that only sends two commands for each message.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Instant;

use oncegate::redis::{RedisBuilder, RedisStore};
use oncegate::{Completion, Entry, Gate, MemoryStore, Message, OnStoreLoss};
use oncegate_testkit::{Redis, RedisServer};
use tokio::task::JoinSet;

use crate::bare::{Bare, CLAIM, COMPLETE};
use crate::cores::Cores;
use crate::figure::{Bound, Figure, Unit};
use crate::machine::own_cpu_micros;
use crate::messages::{fresh_scope, key, messages};
use crate::rounds::Plan;
use crate::{BENCH_REDIS, Benchmark};

pub(crate) const BENCHMARK: Benchmark = Benchmark {
    name: "gate",
    question: "claim and complete of fresh keys, 256 in flight: what does the framework cost?",
    cores: Cores::Apart,
    run: |plan| Box::pin(run(plan)),
};

/// The number of messages in flight: between `enter` and the end of `complete`.
pub(crate) const IN_FLIGHT: usize = 256;

async fn run(plan: &Plan) -> Vec<Figure> {
    let server = RedisServer::start_with(&BENCH_REDIS).await;
    let mut bare = Bare::connect(&server).await;
    let pair = bare.load(CLAIM, COMPLETE, false).await.plain_claim();
    let count = plan.size(200_000, 5_000);
    let messages: Arc<[Message]> = messages(count).into();

    let mut rounds = plan.rounds(
        "gate",
        &["public API", "bare pipelines", "public API, memory"],
    );
    while rounds.next() {
        bare.flush().await;
        let cpu = own_cpu_micros();
        rounds
            .measure(
                "public API",
                rate(redis_gate(&server).await, &messages, IN_FLIGHT),
            )
            .await;
        rounds.note(
            "CPU of this process",
            (own_cpu_micros() - cpu) / count as f64,
        );

        bare.flush().await;
        let cpu = own_cpu_micros();
        let scope = fresh_scope();
        let loop_rate = async {
            let started = Instant::now();
            bare.run(&pair, &scope, count, IN_FLIGHT).await;
            count as f64 / started.elapsed().as_secs_f64()
        };
        rounds.measure("bare pipelines", loop_rate).await;
        rounds.note(
            "CPU of the bare loop",
            (own_cpu_micros() - cpu) / count as f64,
        );

        let gate = Gate::new(fresh_scope(), key(), MemoryStore::new());
        rounds
            .measure("public API, memory", rate(gate, &messages, IN_FLIGHT))
            .await;
    }
    vec![
        rounds
            .against("public API", Unit::MessagesPerSecond, "bare pipelines")
            .target(Bound::RatioAtLeast, 0.9),
        rounds.against(
            "CPU of this process",
            Unit::MicrosPerMessage,
            "CPU of the bare loop",
        ),
        rounds.against(
            "public API, memory",
            Unit::MessagesPerSecond,
            "bare pipelines",
        ),
    ]
}

pub(crate) async fn redis_gate(redis: &Redis) -> Gate {
    gate_over(redis_store(redis)).await
}

pub(crate) fn redis_store(redis: &Redis) -> RedisBuilder {
    // The benchmark itself flushes the server between the rounds, which the store would report as a
    // loss.
    RedisStore::builder(redis.url()).grant_after_loss()
}

pub(crate) async fn gate_over(store: RedisBuilder) -> Gate {
    let store = store.connect().await.expect("the server may be used");
    Gate::new(fresh_scope(), key(), store).on_store_loss(OnStoreLoss::Continue)
}

/// Messages per second through `enter` and `complete`.
pub(crate) async fn rate(gate: Gate, messages: &Arc<[Message]>, in_flight: usize) -> f64 {
    gate.open().await.expect("the gate opens");
    let gate = Arc::new(gate);
    let next = Arc::new(AtomicUsize::new(0));
    let started = Instant::now();
    let mut workers = JoinSet::new();
    for _ in 0..in_flight {
        let gate = Arc::clone(&gate);
        let next = Arc::clone(&next);
        let messages = Arc::clone(messages);
        workers.spawn(async move {
            while let Some(message) = messages.get(next.fetch_add(1, Relaxed)) {
                let entry = gate.enter(message).await.expect("the store answers");
                let Entry::Granted(lease) = entry else {
                    panic!("a fresh key is {entry:?}")
                };
                assert_eq!(
                    lease.complete(&()).await.expect("nothing to keep"),
                    Completion::Applied
                );
            }
        });
    }
    while let Some(worker) = workers.join_next().await {
        worker.expect("no worker panics");
    }
    messages.len() as f64 / started.elapsed().as_secs_f64()
}
