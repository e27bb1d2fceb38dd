//! Compares a handler that takes messages one by one with one that takes them in batches. Neither
//! does anything.

use std::sync::Arc;

use oncegate::{
    Attempt, BatchHandler, BatchLimits, BatchMessage, Batched, Consumer, Failure, Gate, Message,
    Observer, Ordering,
};
use oncegate_testkit::RedisServer;

use crate::bare::Bare;
use crate::cores::Cores;
use crate::figure::{Bound, Figure, Unit};
use crate::gate::redis_gate;
use crate::handler::Queue;
use crate::machine::own_cpu_micros;
use crate::messages::messages;
use crate::rounds::Plan;
use crate::stopwatch::{Stopwatch, Timed};
use crate::{BENCH_REDIS, Benchmark};

pub(crate) const BENCHMARK: Benchmark = Benchmark {
    name: "batches",
    question: "an empty handler over Redis: what does a message cost in batches of 100, and one by one?",
    cores: Cores::Apart,
    run: |plan| Box::pin(run(plan)),
};

const BATCH: usize = 100;
/// As many messages at a time, in batches or one by one.
const CALLS: u32 = 4;

async fn run(plan: &Plan) -> Vec<Figure> {
    let server = RedisServer::start_with(&BENCH_REDIS).await;
    let mut bare = Bare::connect(&server).await;
    let count = plan.size(200_000, 5_000);
    let messages = messages(count);
    let mut rounds = plan.rounds("batches", &["one by one", "batches"]);
    while rounds.next() {
        bare.flush().await;
        let gate = redis_gate(&server).await;
        let cpu = own_cpu_micros();
        rounds
            .measure("one by one", one_by_one(gate, &messages))
            .await;
        rounds.note("CPU, one by one", (own_cpu_micros() - cpu) / count as f64);
        bare.flush().await;
        let gate = redis_gate(&server).await;
        let cpu = own_cpu_micros();
        rounds.measure("batches", in_batches(gate, &messages)).await;
        rounds.note("CPU, batches", (own_cpu_micros() - cpu) / count as f64);
    }
    vec![
        rounds
            .against("CPU, batches", Unit::MicrosPerMessage, "CPU, one by one")
            .target(Bound::RatioAtMost, 0.7),
        rounds.against("batches", Unit::MessagesPerSecond, "one by one"),
    ]
}

struct Nothing;

impl BatchHandler for Nothing {
    type Output = ();

    async fn handle(&self, batch: &[BatchMessage]) -> Result<Vec<Result<(), Failure>>, Failure> {
        Ok(batch.iter().map(|_| Ok(())).collect())
    }
}

async fn one_by_one(gate: Gate, messages: &[Message]) -> f64 {
    let stopwatch = Stopwatch::new(messages.len());
    let source = Timed {
        source: Queue::of(messages),
        stopwatch: Arc::clone(&stopwatch),
    };
    let consumer = Consumer::new(source, gate, async |_: Message, _: Attempt| {
        Ok::<(), Failure>(())
    })
    .concurrency(CALLS * BATCH as u32);
    rate(consumer, stopwatch).await
}

async fn in_batches(gate: Gate, messages: &[Message]) -> f64 {
    let stopwatch = Stopwatch::new(messages.len());
    let source = Timed {
        source: Queue::of(messages),
        stopwatch: Arc::clone(&stopwatch),
    };
    let handler = Batched::new(BatchLimits::new(BATCH), Nothing);
    rate(
        Consumer::new(source, gate, handler).concurrency(CALLS),
        stopwatch,
    )
    .await
}

async fn rate(consumer: Consumer, stopwatch: Arc<Stopwatch>) -> f64 {
    let consumer = consumer.ordering(Ordering::Unordered);
    let consumer = consumer.observer(Arc::clone(&stopwatch) as Arc<dyn Observer>);
    consumer
        .run_until(std::future::pending())
        .await
        .expect("the consumer runs to the end");
    stopwatch.rate()
}
