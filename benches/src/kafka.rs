//! Measures the path from a Kafka topic through the gate to the commit, on a real broker and a real
//! Redis.

use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use oncegate::OnStoreLoss;
use oncegate::consumer::ConsumerSettings;
use oncegate::core::key::{CompiledKey, Scope};
use oncegate::core::record::Token;
use oncegate::core::rules::{Operation, Reply, Verdict};
use oncegate::core::store::{Command, Store as _};
use oncegate::kafka::KafkaSource;
use oncegate::redis::RedisStore;
use oncegate::source::{Delivery, Source};
use oncegate::{Attempt, Consumer, Counters, Failure, Gate, Message, Observer};
use oncegate_testkit::{Kafka, KafkaBroker, Record, Redis, RedisServer, unique};
use rdkafka::consumer::{BaseConsumer, CommitMode, Consumer as _};
use rdkafka::message::{BorrowedMessage, Message as _};
use tokio::task::JoinSet;

use crate::bare::Bare;
use crate::by_hand::ByHand;
use crate::cores::Cores;
use crate::figure::{Bound, Figure, Unit};
use crate::gate::{IN_FLIGHT, rate, redis_gate};
use crate::machine::own_cpu_micros;
use crate::messages::{ROUTE, broker_key, fresh_scope, key, messages, payload};
use crate::rounds::{Plan, Rounds};
use crate::stopwatch::{Stopwatch, Timed};
use crate::{BENCH_REDIS, Benchmark};

pub(crate) const BENCHMARK: Benchmark = Benchmark {
    name: "kafka",
    question: "Kafka, gate, an empty handler, commit: how fast, and how fast is a replay?",
    cores: Cores::Shared,
    run: |plan| Box::pin(run(plan)),
};

const PARTITIONS: i32 = 12;
/// The maximum time to close a source.
const CLOSE_LIMIT: Duration = Duration::from_secs(30);
/// The number of messages that are taken at once where no consumer of oncegate takes them.
const RECEIVE_MOST: usize = 512;
/// The commit interval of the bare consumer: the same as in `KafkaSource`.
const COMMIT_INTERVAL: Duration = Duration::from_secs(1);

const CONTESTANTS: [&str; 10] = [
    "gate alone",
    "unique",
    "unique, default concurrency",
    "replay",
    "units",
    "units, replay",
    "by hand",
    "by hand, replay",
    "no gate",
    "poll and commit",
];

/// The names of the figures at the default concurrency.
const AT_DEFAULT: [&str; 2] = [
    "unique, default concurrency",
    "CPU, unique, default concurrency",
];

async fn run(plan: &Plan) -> Vec<Figure> {
    let redis = RedisServer::start_with(&BENCH_REDIS).await;
    let broker = KafkaBroker::start_for_long().await;
    let mut bare = Bare::connect(&redis).await;
    let count = plan.size(300_000, 5_000);
    let topic = produced(&broker, count).await;
    let alone: Arc<[Message]> = messages(count).into();

    let mut rounds = plan.rounds("kafka", &CONTESTANTS);
    while rounds.next() {
        bare.flush().await;
        rounds
            .measure(
                "gate alone",
                rate(redis_gate(&redis).await, &alone, IN_FLIGHT),
            )
            .await;
        bare.flush().await;
        let work = Work {
            kafka: &broker,
            redis: &redis,
            topic: &topic,
            scope: &fresh_scope(),
            count,
        };
        let other_scope = fresh_scope();
        let at_default = Work {
            scope: &other_scope,
            ..work
        };
        let most = IN_FLIGHT as u32;
        let unique = ["unique", "CPU, unique"];
        work.measured(&mut rounds, unique, count, most).await;
        let unique = AT_DEFAULT;
        let default = ConsumerSettings::DEFAULT.concurrency;
        at_default
            .measured(&mut rounds, unique, count, default)
            .await;
        let replay = ["replay", "CPU, replay"];
        work.measured(&mut rounds, replay, 0, most).await;
        bare.flush().await;
        let units = Work {
            scope: &fresh_scope(),
            ..work
        };
        for (contestant, cpu) in [
            ("units", "CPU, units"),
            ("units, replay", "CPU, units, replay"),
        ] {
            let before = own_cpu_micros();
            rounds.measure(contestant, units.in_units()).await;
            rounds.note(cpu, (own_cpu_micros() - before) / count as f64);
        }
        let by_hand = Arc::new(Mutex::new(ByHand::connect(redis.url())));
        for (contestant, cpu) in [
            ("by hand", "CPU, by hand"),
            ("by hand, replay", "CPU, by hand, replay"),
        ] {
            let before = own_cpu_micros();
            rounds.measure(contestant, work.by_hand(&by_hand)).await;
            rounds.note(cpu, (own_cpu_micros() - before) / count as f64);
        }
        rounds.measure("no gate", work.without_gate()).await;
        rounds.measure("poll and commit", work.looped(|_| ())).await;
    }
    figures(&rounds)
}

/// A topic with so many messages.
pub(crate) async fn produced(broker: &Kafka, count: usize) -> String {
    let topic = broker.new_topic(ROUTE, PARTITIONS).await;
    let records = (0..count).map(|n| Record::new(payload(n)).key(broker_key(n)));
    broker.produce(&topic, records).await;
    topic
}

fn figures(rounds: &Rounds) -> Vec<Figure> {
    let rate = Unit::MessagesPerSecond;
    vec![
        rounds
            .against("unique", rate, "gate alone")
            .target(Bound::RatioAtLeast, 0.7),
        rounds
            .against("replay", rate, "unique")
            .target(Bound::RatioAtLeast, 2.5),
        rounds
            .against("unique", rate, "by hand")
            .target(Bound::RatioAtLeast, 1.1),
        rounds
            .against("unique, default concurrency", rate, "by hand")
            .target(Bound::RatioAtLeast, 1.1),
        rounds
            .against("unique", rate, "units")
            .target(Bound::RatioAtLeast, 0.8),
        rounds.against("units", rate, "by hand"),
        rounds
            .against("replay", rate, "by hand, replay")
            .target(Bound::RatioAtLeast, 1.3),
        rounds.against("replay", rate, "units, replay"),
        rounds.against("no gate", rate, "poll and commit"),
        rounds.against("unique", rate, "no gate"),
        rounds
            .against("CPU, unique", Unit::MicrosPerMessage, "CPU, by hand")
            .target(Bound::RatioAtMost, 2.2),
        rounds
            .against(
                "CPU, unique, default concurrency",
                Unit::MicrosPerMessage,
                "CPU, by hand",
            )
            .target(Bound::RatioAtMost, 2.2),
        rounds.against("CPU, unique", Unit::MicrosPerMessage, "CPU, units"),
        rounds.against(
            "CPU, replay",
            Unit::MicrosPerMessage,
            "CPU, by hand, replay",
        ),
    ]
}

/// The number of messages that a unit without an engine has at most, and of units that run at once.
const UNIT_MOST: usize = 256;
const UNITS_AT_ONCE: usize = 4;
/// The lease and the retention of a unit without an engine.
const LEASE: Duration = Duration::from_secs(30);
const RETENTION: Duration = Duration::from_secs(3_600);

/// A topic to consume from its beginning, with a new consumer group.
#[derive(Clone, Copy)]
struct Work<'a> {
    kafka: &'a Kafka,
    redis: &'a Redis,
    topic: &'a str,
    scope: &'a str,
    count: usize,
}

impl Work<'_> {
    fn source(&self, stopwatch: &Arc<Stopwatch>) -> Timed<KafkaSource> {
        let source = KafkaSource::new(self.kafka.bootstrap(), unique("bench"), [self.topic]);
        Timed {
            source,
            stopwatch: Arc::clone(stopwatch),
        }
    }

    /// Measures the rate and the processor time of a consumer.
    async fn measured(
        &self,
        rounds: &mut Rounds,
        [contestant, cpu]: [&'static str; 2],
        expected_runs: usize,
        concurrency: u32,
    ) {
        let before = own_cpu_micros();
        let rate = self.through_the_gate(expected_runs, concurrency);
        rounds.measure(contestant, rate).await;
        rounds.note(cpu, (own_cpu_micros() - before) / self.count as f64);
    }

    /// Messages per second. Asserts the number of handler runs.
    async fn through_the_gate(&self, expected_runs: usize, concurrency: u32) -> f64 {
        let stopwatch = Stopwatch::new(self.count);
        // The benchmark itself flushes the server between the rounds, which the store would report
        // as a loss.
        let store = RedisStore::connect(self.redis.url());
        let store = store.await.expect("the server may be used");
        let gate = Gate::new(self.scope, key(), store).on_store_loss(OnStoreLoss::Continue);
        let consumer = Consumer::new(self.source(&stopwatch), gate, nothing_to_do);
        let consumer = consumer.concurrency(concurrency);
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
        stopwatch.rate()
    }

    /// The topic in a loop by hand, on a thread of its own.
    async fn looped(&self, work: impl FnMut(&[BorrowedMessage<'_>]) + Send + 'static) -> f64 {
        let kafka = Kafka::clone(self.kafka);
        let topic = self.topic.to_owned();
        let count = self.count;
        let looped =
            tokio::task::spawn_blocking(move || poll_and_commit(&kafka, &topic, count, work));
        looped.await.expect("the loop ends")
    }

    /// The loop of [`ByHand`].
    async fn by_hand(&self, store: &Arc<Mutex<ByHand>>) -> f64 {
        let store = Arc::clone(store);
        let looped = self.looped(move |polled| {
            let mut store = store.lock().expect("one loop at a time");
            let claims = store.claim(
                polled
                    .iter()
                    .map(|message| message.payload().unwrap_or_default()),
            );
            store.complete(&claims);
        });
        looped.await
    }

    /// The bound of a consumer: its source, keys, store and acks in a loop without an engine. A
    /// unit has one claim call, a boxed handler for each message, and one completion call. No
    /// failure is handled.
    async fn in_units(&self) -> f64 {
        let stopwatch = Stopwatch::new(self.count);
        let store = Arc::new(
            RedisStore::connect(self.redis.url())
                .await
                .expect("the server may be used"),
        );
        let scope = Scope::new(self.scope).expect("the scope is valid");
        let key = Arc::new(key().compile(&scope).expect("the key is valid"));
        let source = self.source(&stopwatch);
        source
            .open(Arc::new(Counters::default()))
            .await
            .expect("the source opens");
        let mut left = self.count;
        let mut running = JoinSet::new();
        while left > 0 {
            let deliveries = source.receive(UNIT_MOST).await.expect("the source goes on");
            let deliveries = deliveries.expect("the topic has more");
            left -= deliveries.len();
            while running.len() >= UNITS_AT_ONCE {
                running.join_next().await;
            }
            running.spawn(unit(Arc::clone(&store), Arc::clone(&key), deliveries));
        }
        while running.join_next().await.is_some() {}
        source
            .close(CLOSE_LIMIT)
            .await
            .expect("the last commit arrives");
        stopwatch.rate()
    }

    /// The same source without a gate: each message is acknowledged when it is received.
    async fn without_gate(&self) -> f64 {
        let stopwatch = Stopwatch::new(self.count);
        let source = self.source(&stopwatch);
        source
            .open(Arc::new(Counters::default()))
            .await
            .expect("the source opens");
        let mut left = self.count;
        while left > 0 {
            let deliveries = source
                .receive(RECEIVE_MOST)
                .await
                .expect("the source goes on");
            let deliveries = deliveries.expect("the topic has more");
            left -= deliveries.len();
            for delivery in deliveries {
                assert!(delivery.ack_handle.start(), "the group has no other member");
                delivery.ack_handle.ack();
            }
        }
        source
            .close(CLOSE_LIMIT)
            .await
            .expect("the last commit arrives");
        stopwatch.rate()
    }
}

/// Claims the keys of these messages, runs an empty handler for each that is granted, completes
/// them, and acknowledges all.
async fn unit(store: Arc<RedisStore>, key: Arc<CompiledKey>, deliveries: Vec<Delivery>) {
    let claims: Vec<Command> = deliveries
        .iter()
        .map(|delivery| {
            let key = key
                .derive(ROUTE, &delivery.message)
                .expect("the message has a key");
            Command {
                key,
                operation: Operation::Claim {
                    token: Token::from_bits(fastrand::u128(..)),
                    lease: LEASE,
                    fingerprint: None,
                    fenced: false,
                    longest_lease: LEASE,
                },
            }
        })
        .collect();
    let answers = store.execute(claims.clone()).await;
    let mut completions = Vec::with_capacity(claims.len());
    for (answer, Command { key, operation }) in answers.into_iter().zip(claims) {
        match (answer.expect("the store answers"), operation) {
            (
                Reply::Verdict {
                    verdict: Verdict::Granted(_),
                    ..
                },
                Operation::Claim { token, .. },
            ) => {
                let handler: Pin<Box<dyn Future<Output = ()> + Send>> = Box::pin(async {});
                handler.await;
                let operation = Operation::Complete {
                    token,
                    fingerprint: None,
                    result: Bytes::new(),
                    retention: RETENTION,
                };
                completions.push(Command { key, operation });
            }
            (
                Reply::Verdict {
                    verdict: Verdict::Completed { .. },
                    ..
                },
                _,
            ) => {}
            (other, _) => panic!("{other:?}"),
        }
    }
    if !completions.is_empty() {
        let answers = store.execute(completions).await;
        assert!(
            answers
                .iter()
                .all(|answer| matches!(answer, Ok(Reply::Applied { .. }))),
            "{answers:?}"
        );
    }
    for delivery in deliveries {
        assert!(delivery.ack_handle.start(), "the group has no other member");
        delivery.ack_handle.ack();
    }
}

async fn nothing_to_do(_: Message, _: Attempt) -> Result<(), Failure> {
    Ok(())
}

/// A loop by hand, with the settings of `KafkaSource`: polls, works, and commits every second.
pub(crate) fn poll_and_commit(
    kafka: &Kafka,
    topic: &str,
    count: usize,
    mut work: impl FnMut(&[BorrowedMessage<'_>]),
) -> f64 {
    const PATIENCE: Duration = Duration::from_secs(1);
    let mut config = kafka.config();
    config
        .set("group.id", unique("bench"))
        .set("auto.offset.reset", "earliest");
    config
        .set("enable.auto.commit", "false")
        .set("fetch.queue.backoff.ms", "10");
    config
        .set("queued.min.messages", "10000")
        .set("queued.max.messages.kbytes", "16384");
    let consumer: BaseConsumer = config.create().expect("the settings are valid");
    consumer
        .subscribe(&[topic])
        .expect("the topic can be subscribed to");
    let stopwatch = Stopwatch::new(count);
    let mut left = count;
    let mut committed_at = std::time::Instant::now();
    while left > 0 {
        let first = consumer.poll(PATIENCE);
        let others = std::iter::from_fn(|| consumer.poll(Duration::ZERO));
        let polled: Result<Vec<_>, _> =
            first.into_iter().chain(others).take(RECEIVE_MOST).collect();
        let polled = polled.expect("messages");
        if polled.is_empty() {
            continue;
        }
        stopwatch.received();
        work(&polled);
        stopwatch.acked(polled.len());
        left -= polled.len();
        if committed_at.elapsed() > COMMIT_INTERVAL {
            consumer
                .commit_consumer_state(CommitMode::Async)
                .expect("a commit can be sent");
            committed_at = std::time::Instant::now();
        }
    }
    consumer
        .commit_consumer_state(CommitMode::Sync)
        .expect("the last commit arrives");
    stopwatch.rate()
}
