//! Measures how much later the handlers start that wait beside one that does not end.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use oncegate::source::{AckHandle, Delivery, Source, SourceError};
use oncegate::{Attempt, Consumer, Failure, Gate, MemoryStore, Message, Observer, Ordering};
use tokio::sync::Notify;
use tokio::task::JoinSet;
use tokio::time::sleep;

use crate::Benchmark;
use crate::cores::Cores;
use crate::figure::{Figure, Unit};
use crate::held::percentile;
use crate::messages::{fresh_scope, key, message};
use crate::rounds::Plan;

pub(crate) const BENCHMARK: Benchmark = Benchmark {
    name: "neighbours",
    question: "63 handlers that end at once beside one that takes 50 ms: how long does the slowest of a hundred wait?",
    cores: Cores::Shared,
    run: |plan| Box::pin(run(plan)),
};

/// The number of messages that are delivered together, and that run at a time.
const TOGETHER: usize = 64;
const WORK: Duration = Duration::from_millis(50);

/// The behaviour of the handler of the first message of each delivery.
#[derive(Clone, Copy, Debug)]
enum Slow {
    No,
    Computes,
    Blocks,
    Sleeps,
}

/// The names of a consumer and of its baseline, a task for each message without a gate.
const CASES: [(Slow, &str, &str); 4] = [
    (Slow::No, "none", "tasks, none"),
    (Slow::Computes, "computes", "tasks, computes"),
    (Slow::Blocks, "blocks", "tasks, blocks"),
    (Slow::Sleeps, "sleeps", "tasks, sleeps"),
];

async fn run(plan: &Plan) -> Vec<Figure> {
    let deliveries = plan.size(100, 5);
    let names: Vec<&'static str> = CASES
        .iter()
        .flat_map(|(_, ours, theirs)| [*ours, *theirs])
        .collect();
    let mut rounds = plan.rounds("neighbours", &names);
    while rounds.next() {
        for (slow, ours, theirs) in CASES {
            rounds.measure(ours, of_consumer(slow, deliveries)).await;
            rounds.measure(theirs, of_tasks(slow, deliveries)).await;
        }
    }
    CASES
        .map(|(_, ours, theirs)| rounds.against(ours, Unit::Micros, theirs))
        .into()
}

impl Slow {
    async fn work(self) {
        match self {
            Self::No => {}
            Self::Computes => {
                let began = Instant::now();
                while began.elapsed() < WORK {
                    std::hint::spin_loop();
                }
            }
            Self::Blocks => std::thread::sleep(WORK),
            Self::Sleeps => sleep(WORK).await,
        }
    }
}

/// The waits of handlers between delivery and start.
#[derive(Debug, Default)]
struct Waits {
    delivered_at: Mutex<Option<Instant>>,
    micros: Mutex<Vec<f64>>,
}

impl Waits {
    fn deliver(&self) {
        *self
            .delivered_at
            .lock()
            .unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
    }

    fn note(&self) {
        let delivered_at = *self
            .delivered_at
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let waited = delivered_at.map(|at| at.elapsed()).unwrap_or_default();
        self.micros
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(waited.as_secs_f64() * 1e6);
    }

    fn p99(&self) -> f64 {
        let mut micros = self
            .micros
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone();
        micros.sort_by(f64::total_cmp);
        percentile(&micros, 0.99)
    }
}

async fn of_consumer(slow: Slow, deliveries: usize) -> f64 {
    let waits = Arc::new(Waits::default());
    let source = Bursts {
        waiting: Mutex::new((0..deliveries * TOGETHER).map(message).collect()),
        acks: Arc::new(Acks {
            left: Mutex::new(0),
            all: Notify::new(),
        }),
        waits: Arc::clone(&waits),
    };
    let gate = Gate::new(fresh_scope(), key(), MemoryStore::new());
    let noted = Arc::clone(&waits);
    let consumer = Consumer::new(source, gate, move |message: Message, _: Attempt| {
        let waits = Arc::clone(&noted);
        async move {
            if message.key().is_some_and(is_first) {
                slow.work().await;
            } else {
                waits.note();
            }
            Ok::<(), Failure>(())
        }
    });
    let consumer = consumer
        .concurrency(TOGETHER as u32)
        .ordering(Ordering::Unordered);
    consumer
        .run_until(std::future::pending())
        .await
        .expect("the consumer runs to the end");
    waits.p99()
}

/// A task for each message: what an executor alone can do for its neighbours.
async fn of_tasks(slow: Slow, deliveries: usize) -> f64 {
    let waits = Arc::new(Waits::default());
    for _ in 0..deliveries {
        waits.deliver();
        let mut tasks = JoinSet::new();
        tasks.spawn(slow.work());
        for _ in 1..TOGETHER {
            let waits = Arc::clone(&waits);
            tasks.spawn(async move { waits.note() });
        }
        while let Some(ended) = tasks.join_next().await {
            ended.expect("no task panics");
        }
    }
    waits.p99()
}

/// Returns whether this is the broker's key of the first message of a delivery.
fn is_first(key: &[u8]) -> bool {
    key.ends_with(FIRST)
}

const FIRST: &[u8] = b"!";

/// A source that delivers the next messages when all of the last ones are acknowledged.
#[derive(Debug)]
struct Bursts {
    waiting: Mutex<VecDeque<Message>>,
    acks: Arc<Acks>,
    waits: Arc<Waits>,
}

#[derive(Debug)]
struct Acks {
    left: Mutex<usize>,
    all: Notify,
}

#[async_trait]
impl Source for Bursts {
    async fn open(&self, _: Arc<dyn Observer>) -> Result<(), SourceError> {
        Ok(())
    }

    async fn receive(&self, _: usize) -> Result<Option<Vec<Delivery>>, SourceError> {
        while *self
            .acks
            .left
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            > 0
        {
            self.acks.all.notified().await;
        }
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        let most = TOGETHER.min(waiting.len());
        let mut messages: Vec<Message> = waiting.drain(..most).collect();
        drop(waiting);
        if let Some(first) = messages.first_mut() {
            *first = first.clone().with_key(FIRST);
        }
        *self
            .acks
            .left
            .lock()
            .unwrap_or_else(PoisonError::into_inner) = messages.len();
        let deliveries: Vec<Delivery> = messages
            .into_iter()
            .map(|message| Delivery {
                message,
                ack_handle: Arc::clone(&self.acks) as Arc<dyn AckHandle>,
            })
            .collect();
        self.waits.deliver();
        Ok(if deliveries.is_empty() {
            None
        } else {
            Some(deliveries)
        })
    }

    async fn close(&self, _: Duration) -> Result<(), SourceError> {
        Ok(())
    }
}

impl AckHandle for Acks {
    fn start(&self) -> bool {
        true
    }

    fn ack(&self) {
        let mut left = self.left.lock().unwrap_or_else(PoisonError::into_inner);
        *left = left.saturating_sub(1);
        if *left == 0 {
            self.all.notify_one();
        }
    }

    fn stop(&self) {}
}
