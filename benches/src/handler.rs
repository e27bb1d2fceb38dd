//! Measures what the gate adds to a handler that asks a server which answers after 1 ms.

use std::collections::VecDeque;
use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, TcpListener};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use oncegate::source::{AckHandle, Delivery, Source, SourceError};
use oncegate::{Attempt, Consumer, Failure, Gate, Message, Observer};
use oncegate_testkit::RedisServer;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

use crate::bare::Bare;
use crate::cores::Cores;
use crate::figure::{Bound, Figure, Unit};
use crate::gate::redis_gate;
use crate::messages::{messages, messages_over};
use crate::rounds::Plan;
use crate::stopwatch::{Stopwatch, Timed};
use crate::{BENCH_REDIS, Benchmark};

pub(crate) const BENCHMARK: Benchmark = Benchmark {
    name: "handler",
    question: "10,000 messages over 1,000 keys, a handler that waits 1 ms for a server, 64 at a time: what does the gate add?",
    cores: Cores::Shared,
    run: |plan| Box::pin(run(plan)),
};

const CONCURRENCY: u32 = 64;
const BROKER_KEYS: usize = 1_000;
const WORK: Duration = Duration::from_millis(1);

async fn run(plan: &Plan) -> Vec<Figure> {
    let server = RedisServer::start_with(&BENCH_REDIS).await;
    let mut bare = Bare::connect(&server).await;
    let count = plan.size(10_000, 1_000);
    let again = messages_over(count, BROKER_KEYS);
    let distinct = messages(count);
    let downstream = Downstream::start().await;
    let mut rounds = plan.rounds("handler", &["1,000 keys", "10,000 keys", "without a gate"]);
    while rounds.next() {
        bare.flush().await;
        rounds
            .measure(
                "1,000 keys",
                with_gate(redis_gate(&server).await, &downstream, &again),
            )
            .await;
        bare.flush().await;
        rounds
            .measure(
                "10,000 keys",
                with_gate(redis_gate(&server).await, &downstream, &distinct),
            )
            .await;
        rounds
            .measure("without a gate", without_gate(&downstream, &distinct))
            .await;
    }
    let rate = Unit::MessagesPerSecond;
    vec![
        rounds
            .against("1,000 keys", rate, "without a gate")
            .target(Bound::RatioAtLeast, 0.95),
        // The worst case: each handler waits for its claim, and each permit for the completion.
        rounds
            .against("10,000 keys", rate, "without a gate")
            .target(Bound::RatioAtLeast, 0.85),
    ]
}

/// Connections to a server in this process that answers after 1 ms. It has a thread for each,
/// because the timer of a runtime counts whole milliseconds: handlers that began at different times
/// would wake at once.
struct Downstream {
    idle: Mutex<Vec<TcpStream>>,
}

impl Downstream {
    async fn start() -> Arc<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port is free");
        let address = listener.local_addr().expect("it listens");
        // The threads end with their connections.
        thread::spawn(move || {
            for connection in listener.incoming().take(CONCURRENCY as usize) {
                let mut connection = connection.expect("a connection");
                connection.set_nodelay(true).expect("it is open");
                thread::spawn(move || {
                    let mut question = [0];
                    while connection.read_exact(&mut question).is_ok() {
                        thread::sleep(WORK);
                        if connection.write_all(&question).is_err() {
                            return;
                        }
                    }
                });
            }
        });
        let mut idle = Vec::new();
        for _ in 0..CONCURRENCY {
            let connection = TcpStream::connect(address)
                .await
                .expect("the server listens");
            connection.set_nodelay(true).expect("it is open");
            idle.push(connection);
        }
        Arc::new(Self {
            idle: Mutex::new(idle),
        })
    }

    async fn ask(&self) -> std::io::Result<()> {
        let connection = self
            .idle
            .lock()
            .expect("no holder of the lock panics")
            .pop();
        let mut connection = connection.expect("there are as many as handlers");
        connection.write_all(&[7]).await?;
        connection.read_exact(&mut [0]).await?;
        self.idle
            .lock()
            .expect("no holder of the lock panics")
            .push(connection);
        Ok(())
    }
}

async fn with_gate(gate: Gate, downstream: &Arc<Downstream>, messages: &[Message]) -> f64 {
    let downstream = Arc::clone(downstream);
    let stopwatch = Stopwatch::new(messages.len());
    let source = Timed {
        source: Queue::of(messages),
        stopwatch: Arc::clone(&stopwatch),
    };
    let consumer = Consumer::new(source, gate, move |_: Message, _: Attempt| {
        let downstream = Arc::clone(&downstream);
        async move { Ok::<(), Failure>(downstream.ask().await?) }
    })
    .concurrency(CONCURRENCY);
    let consumer = consumer.observer(Arc::clone(&stopwatch) as Arc<dyn Observer>);
    consumer
        .run_until(std::future::pending())
        .await
        .expect("the consumer runs to the end");
    stopwatch.rate()
}

/// The shortest loop that keeps the same order: one message at a time for each broker key, 64 in
/// total.
async fn without_gate(downstream: &Arc<Downstream>, messages: &[Message]) -> f64 {
    let permits = Arc::new(Semaphore::new(CONCURRENCY as usize));
    let turns: Vec<_> = (0..BROKER_KEYS)
        .map(|_| Arc::new(tokio::sync::Mutex::new(())))
        .collect();
    let mut running = JoinSet::new();
    let started = Instant::now();
    // Messages come round-robin over the keys, so the `n`th has the key of this turn.
    for (_, turn) in messages.iter().zip(turns.iter().cycle()) {
        let permit = Arc::clone(&permits)
            .acquire_owned()
            .await
            .expect("the semaphore is never closed");
        let turn = Arc::clone(turn);
        let downstream = Arc::clone(downstream);
        running.spawn(async move {
            let _turn = turn.lock().await;
            downstream.ask().await.expect("the server answers");
            drop(permit);
        });
    }
    while let Some(run) = running.join_next().await {
        run.expect("no handler panics");
    }
    messages.len() as f64 / started.elapsed().as_secs_f64()
}

/// A source without a broker.
#[derive(Debug)]
pub(crate) struct Queue {
    waiting: Mutex<VecDeque<Message>>,
    ack_handle: Arc<NoBroker>,
}

impl Queue {
    pub(crate) fn of(messages: &[Message]) -> Self {
        Self {
            waiting: Mutex::new(messages.iter().cloned().collect()),
            ack_handle: Arc::new(NoBroker),
        }
    }
}

#[async_trait]
impl Source for Queue {
    async fn open(&self, _: Arc<dyn Observer>) -> Result<(), SourceError> {
        Ok(())
    }

    async fn receive(&self, most: usize) -> Result<Option<Vec<Delivery>>, SourceError> {
        let mut waiting = self.waiting.lock().expect("no holder of the lock panics");
        let most = most.min(waiting.len());
        let deliveries: Vec<Delivery> = waiting
            .drain(..most)
            .map(|message| Delivery {
                message,
                ack_handle: Arc::clone(&self.ack_handle) as Arc<dyn AckHandle>,
            })
            .collect();
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

/// An ack handle whose acks are ignored.
#[derive(Debug)]
struct NoBroker;

impl AckHandle for NoBroker {
    fn start(&self) -> bool {
        true
    }

    fn ack(&self) {}

    fn stop(&self) {}
}
