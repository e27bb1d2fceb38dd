//! Measures the path from an SQS queue through the gate to the delete, on a real server
//! (`ElasticMQ`) and a real Redis.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::{Duration, Instant};

use aws_sdk_sqs::types::{DeleteMessageBatchRequestEntry, MessageSystemAttributeName};
use oncegate::redis::RedisStore;
use oncegate::sqs::SqsSource;
use oncegate::{Attempt, Consumer, Counters, Event, Failure, Gate, Message, Observer};
use oncegate_testkit::{ElasticmqServer, Queue, Redis, RedisServer, Sqs};
use tokio::task::JoinSet;

use crate::bare::Bare;
use crate::cores::Cores;
use crate::figure::{Bound, Figure, Unit};
use crate::messages::{ROUTE, fresh_scope, key, payload};
use crate::rounds::Plan;
use crate::stopwatch::{Stopwatch, Timed};
use crate::{BENCH_REDIS, Benchmark};

pub(crate) const BENCHMARK: Benchmark = Benchmark {
    name: "sqs",
    question: "SQS, gate, an empty handler, delete: how fast, and how many calls?",
    cores: Cores::Shared,
    run: |plan| Box::pin(run(plan)),
};

/// The maximum number of messages that a call can receive or delete.
const BATCH: usize = 10;
/// The number of messages in flight.
const CONCURRENCY: usize = 100;
/// The number of loops that have as many messages in flight.
const LOOPS: usize = CONCURRENCY / BATCH;
/// The time that a receive waits on an empty queue. Long enough that no consumer needs two empty
/// receives.
const WAIT: Duration = Duration::from_secs(5);

async fn run(plan: &Plan) -> Vec<Figure> {
    let redis = RedisServer::start_with(&BENCH_REDIS).await;
    let server = ElasticmqServer::start().await;
    let mut bare = Bare::connect(&redis).await;
    let count = plan.size(20_000, 500);
    let mut rounds = plan.rounds("sqs", &["unique", "replay", "bare loop", "ten bare loops"]);
    while rounds.next() {
        bare.flush().await;
        // A replay is sent to the same queue, because the queue's name is a part of the keys.
        let queue = server.new_queue(ROUTE).await;
        let work = Work {
            sqs: &server,
            redis: &redis,
            queue: &queue,
            scope: fresh_scope(),
            count,
        };
        let mut calls = 0.0;
        fill(&queue, count).await;
        rounds
            .measure("unique", work.through_the_gate(count, &mut calls))
            .await;
        rounds.note("calls, unique", calls);
        fill(&queue, count).await;
        rounds
            .measure("replay", work.through_the_gate(0, &mut calls))
            .await;
        fill(&queue, count).await;
        rounds
            .measure("bare loop", receive_and_delete(&server, &queue, count, 1))
            .await;
        fill(&queue, count).await;
        rounds
            .measure(
                "ten bare loops",
                receive_and_delete(&server, &queue, count, LOOPS),
            )
            .await;
    }
    let rate = Unit::MessagesPerSecond;
    vec![
        rounds
            .against("unique", rate, "bare loop")
            .target(Bound::RatioAtLeast, 0.8),
        rounds.against("replay", rate, "bare loop"),
        rounds.against("unique", rate, "ten bare loops"),
        rounds.against("replay", rate, "ten bare loops"),
        // 100 receives and 100 deletes are the minimum for 1,000 messages.
        rounds
            .figure("calls, unique", Unit::CallsPerThousand)
            .target(Bound::ValueAtMost, 240.0),
    ]
}

async fn fill(queue: &Queue, count: usize) {
    queue
        .send((0..count).map(|n| String::from_utf8(payload(n).to_vec()).expect("JSON is text")))
        .await;
}

/// A queue to consume.
struct Work<'a> {
    sqs: &'a Sqs,
    redis: &'a Redis,
    queue: &'a Queue,
    scope: String,
    count: usize,
}

impl Work<'_> {
    /// Messages per second. Asserts the number of handler runs. Sets `calls` to the number of calls
    /// per 1,000 messages until the last ack.
    async fn through_the_gate(&self, expected_runs: usize, calls: &mut f64) -> f64 {
        let stopwatch = Stopwatch::new(self.count);
        let watch = Arc::new(Watch {
            stopwatch: Arc::clone(&stopwatch),
            counters: Counters::default(),
        });
        let source = SqsSource::from_client(self.sqs.client().clone(), self.queue.url()).wait(WAIT);
        let source = Timed {
            source,
            stopwatch: Arc::clone(&stopwatch),
        };
        let store = RedisStore::connect(self.redis.url())
            .await
            .expect("the server may be used");
        let gate = Gate::new(self.scope.as_str(), key(), store);
        let consumer = Consumer::new(source, gate, nothing_to_do).concurrency(CONCURRENCY as u32);
        let consumer = consumer.observer(Arc::clone(&watch) as Arc<dyn Observer>);
        let over = async {
            Arc::clone(&stopwatch).over().await;
            let called: u64 = ["sqs_receive", "sqs_delete", "sqs_change_visibility"]
                .map(|event| watch.counters.get("source_events", event))
                .iter()
                .sum();
            *calls = called as f64 * 1_000.0 / self.count as f64;
        };
        consumer
            .run_until(over)
            .await
            .expect("the consumer runs to the end");
        assert_eq!(
            stopwatch.runs(),
            expected_runs,
            "each message runs once, and none of a replay"
        );
        assert_eq!(self.queue.depth().await.total(), 0, "everything is deleted");
        stopwatch.rate()
    }
}

/// Counts calls in addition to the stopwatch.
#[derive(Debug)]
struct Watch {
    stopwatch: Arc<Stopwatch>,
    counters: Counters,
}

impl Observer for Watch {
    fn observe(&self, event: Event<'_>) {
        self.counters.observe(event);
        self.stopwatch.observe(event);
    }
}

async fn nothing_to_do(_: Message, _: Attempt) -> Result<(), Failure> {
    Ok(())
}

/// The minimal consumer, run concurrently in a number of loops: receive ten with their attributes,
/// delete ten, repeat.
async fn receive_and_delete(sqs: &Sqs, queue: &Queue, count: usize, at_once: usize) -> f64 {
    let left = Arc::new(AtomicUsize::new(count));
    let started = Instant::now();
    let mut loops = JoinSet::new();
    for _ in 0..at_once {
        let client = sqs.client().clone();
        let url = queue.url().to_owned();
        let left = Arc::clone(&left);
        loops.spawn(async move {
            while left.load(SeqCst) > 0 {
                // With all attributes, as the source requests them for origin, group and headers.
                let receive = client
                    .receive_message()
                    .queue_url(&url)
                    .max_number_of_messages(BATCH as i32);
                let receive = receive.message_attribute_names("All");
                let receive =
                    receive.message_system_attribute_names(MessageSystemAttributeName::All);
                let received = receive
                    .send()
                    .await
                    .expect("the server answers")
                    .messages
                    .unwrap_or_default();
                if received.is_empty() {
                    continue;
                }
                let entries = received
                    .iter()
                    .enumerate()
                    .map(|(n, message)| {
                        let entry = DeleteMessageBatchRequestEntry::builder().id(n.to_string());
                        entry
                            .set_receipt_handle(message.receipt_handle.clone())
                            .build()
                            .expect("both are set")
                    })
                    .collect();
                let deleted = client
                    .delete_message_batch()
                    .queue_url(&url)
                    .set_entries(Some(entries));
                let deleted = deleted.send().await.expect("the server answers");
                assert!(deleted.failed.is_empty(), "everything is deleted");
                left.fetch_sub(received.len(), SeqCst);
            }
        });
    }
    while let Some(ended) = loops.join_next().await {
        ended.expect("no loop panics");
    }
    count as f64 / started.elapsed().as_secs_f64()
}
