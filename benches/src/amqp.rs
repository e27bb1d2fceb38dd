//! Measures the path from a queue of RabbitMQ through the gate to the ack, on a real server and a
//! real Redis.

use std::sync::Arc;
use std::time::Instant;

use futures_util::StreamExt as _;
use lapin::options::{BasicAckOptions, BasicConsumeOptions, BasicQosOptions};
use lapin::types::FieldTable;
use lapin::{Connection, ConnectionProperties};
use oncegate::amqp::AmqpSource;
use oncegate::redis::RedisStore;
use oncegate::{Attempt, Consumer, Failure, Gate, Message, Observer};
use oncegate_testkit::{QueueKind, RabbitMq, RabbitMqServer, RabbitQueue, Redis, RedisServer};

use crate::bare::Bare;
use crate::cores::Cores;
use crate::figure::{Bound, Figure, Unit};
use crate::messages::{fresh_scope, key, payload};
use crate::rounds::Plan;
use crate::stopwatch::{Stopwatch, Timed};
use crate::{BENCH_REDIS, Benchmark};

pub(crate) const BENCHMARK: Benchmark = Benchmark {
    name: "amqp",
    question: "RabbitMQ, gate, an empty handler, ack: how fast beside a bare loop of its client?",
    cores: Cores::Shared,
    run: |plan| Box::pin(run(plan)),
};

/// The number of messages that the broker delivers before the first of them is acknowledged, and
/// that are handled at a time.
const PREFETCH: u16 = 256;

async fn run(plan: &Plan) -> Vec<Figure> {
    let redis = RedisServer::start_with(&BENCH_REDIS).await;
    let server = RabbitMqServer::start().await;
    let mut bare = Bare::connect(&redis).await;
    let count = plan.size(50_000, 1_000);
    let mut rounds = plan.rounds(
        "amqp",
        &[
            "unique",
            "replay",
            "bare loop",
            "bare loop, acks of many",
            "classic: unique",
        ],
    );
    while rounds.next() {
        bare.flush().await;
        let queue = server.new_queue("bench", QueueKind::Quorum).await;
        let work = Work {
            server: &server,
            redis: &redis,
            queue: &queue,
            scope: fresh_scope(),
            count,
        };
        rounds.measure("unique", work.through_the_gate(count)).await;
        // A replay is sent to the same queue, because the queue's name is a part of the keys.
        rounds.measure("replay", work.through_the_gate(0)).await;
        rounds.measure("bare loop", work.bare_loop(1)).await;
        rounds
            .measure(
                "bare loop, acks of many",
                work.bare_loop(u64::from(PREFETCH) / 4),
            )
            .await;
        server.delete_queue(&queue).await;
        let queue = server.new_queue("bench", QueueKind::Classic).await;
        let work = Work {
            queue: &queue,
            scope: fresh_scope(),
            ..work
        };
        rounds
            .measure("classic: unique", work.through_the_gate(count))
            .await;
        server.delete_queue(&queue).await;
    }
    let rate = Unit::MessagesPerSecond;
    vec![
        rounds
            .against("unique", rate, "bare loop")
            .target(Bound::RatioAtLeast, 0.8),
        rounds.against("replay", rate, "bare loop"),
        rounds.against("unique", rate, "bare loop, acks of many"),
        rounds.against("classic: unique", rate, "bare loop"),
    ]
}

/// A queue to consume.
struct Work<'a> {
    server: &'a RabbitMq,
    redis: &'a Redis,
    queue: &'a RabbitQueue,
    scope: String,
    count: usize,
}

impl Work<'_> {
    async fn fill(&self) {
        self.queue
            .send(
                (0..self.count)
                    .map(|n| String::from_utf8(payload(n).to_vec()).expect("JSON is text")),
            )
            .await;
    }

    /// Messages per second. Asserts the number of handler runs.
    async fn through_the_gate(&self, expected_runs: usize) -> f64 {
        self.fill().await;
        let stopwatch = Stopwatch::new(self.count);
        let source = AmqpSource::new(self.server.uri(), self.queue.name()).prefetch(PREFETCH);
        let source = Timed {
            source,
            stopwatch: Arc::clone(&stopwatch),
        };
        let store = RedisStore::connect(self.redis.url())
            .await
            .expect("the server may be used");
        let gate = Gate::new(self.scope.as_str(), key(), store);
        let consumer = Consumer::new(source, gate, nothing_to_do).concurrency(u32::from(PREFETCH));
        let consumer = consumer.observer(Arc::clone(&stopwatch) as Arc<dyn Observer>);
        consumer
            .run_until(Arc::clone(&stopwatch).over())
            .await
            .expect("the consumer runs to the end");
        assert_eq!(
            stopwatch.runs(),
            expected_runs,
            "each message runs once, and none of a replay"
        );
        // Taken, not counted: the broker counts a little late.
        assert_eq!(
            self.queue.take().await.len(),
            0,
            "everything is acknowledged"
        );
        stopwatch.rate()
    }

    /// The minimal consumer with the same prefetch: one ack for so many messages.
    async fn bare_loop(&self, acked_at_once: u64) -> f64 {
        self.fill().await;
        let connected =
            Connection::connect(&self.server.uri(), ConnectionProperties::default()).await;
        let connection = connected.expect("the server answers");
        let channel = connection
            .create_channel()
            .await
            .expect("it opens channels");
        channel
            .basic_qos(PREFETCH, BasicQosOptions::default())
            .await
            .expect("it limits");
        let options = BasicConsumeOptions::default();
        let table = FieldTable::default();
        let consumed = channel
            .basic_consume(self.queue.name().into(), "".into(), options, table)
            .await;
        let mut deliveries = consumed.expect("it delivers");
        let mut started = None;
        for number in 1..=self.count as u64 {
            let delivery = deliveries
                .next()
                .await
                .expect("it goes on")
                .expect("it is whole");
            started.get_or_insert_with(Instant::now);
            if number % acked_at_once == 0 || number == self.count as u64 {
                let options = BasicAckOptions {
                    multiple: acked_at_once > 1,
                };
                channel
                    .basic_ack(delivery.delivery_tag, options)
                    .await
                    .expect("it is sent");
            }
        }
        // The answer says that the broker has read the acks.
        channel.close(200, "OK".into()).await.expect("it closes");
        let elapsed = started.expect("messages came").elapsed();
        connection.close(200, "OK".into()).await.expect("it closes");
        // Of acks for single messages, a quorum queue may not have taken the last ones when the
        // channel closes.
        self.queue.take().await;
        self.count as f64 / elapsed.as_secs_f64()
    }
}

async fn nothing_to_do(_: Message, _: Attempt) -> Result<(), Failure> {
    Ok(())
}
