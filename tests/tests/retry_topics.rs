//! Retries that wait in topics, on a real broker.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test that cannot go on has failed")]

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use oncegate::kafka::{KafkaRetries, KafkaSource};
use oncegate::observe::Observer;
use oncegate::redis::RedisStore;
use oncegate::source::{Delivery, RetryQueue, Source, SourceError, Ticket};
use oncegate::{BoxError, Consumer, Failure, Gate, Handler, Key, Message, Ordering, Origin};
use oncegate_tests::{Kafka, Record, Redis, Watched, unique, until};
use tokio::sync::oneshot;

const WAIT: Duration = Duration::from_secs(3);
/// A header that is no text.
const TENANT: &[u8] = b"\xff acme";
const LIMIT: Duration = Duration::from_secs(60);

/// A topic of one partition and its retry topic.
struct Stage {
    kafka: Kafka,
    redis: Redis,
    topic: String,
    later: String,
    group: String,
}

impl Stage {
    async fn with(messages: u64) -> Self {
        let (kafka, redis) = (Kafka::shared().await, Redis::shared().await);
        let (topic, later) = (kafka.new_topic("retries", 1).await, kafka.new_topic("later", 1).await);
        let record = |id: u64| {
            Record::new(format!(r#"{{"id":{id}}}"#)).key(format!("key-{id}")).header("tenant", TENANT)
        };
        kafka.produce(&topic, (0..messages).map(record).collect::<Vec<Record>>()).await;
        Self { kafka, redis, topic, later, group: unique("retries") }
    }

    fn source(&self) -> KafkaRetries {
        KafkaSource::new(self.kafka.bootstrap(), &self.group, [&self.topic])
            .commit_interval(Duration::from_millis(50))
            .retry_topics([(WAIT, &self.later)])
            .beyond(Duration::from_secs(1))
    }

    async fn consumer(
        &self,
        source: impl Source + 'static,
        watched: &Arc<Watched>,
        handler: impl Handler,
    ) -> Consumer {
        let store = RedisStore::connect(self.redis.url()).await.unwrap();
        let gate = Gate::new(&self.group, Key::json(["id"]), store).lease(Duration::from_secs(1));
        Consumer::new(source, gate, handler).ordering(Ordering::Unordered).observer(Arc::clone(watched) as _)
    }

    async fn until_committed(&self, offset: i64) {
        let look = async || match self.kafka.committed_offsets(&self.group, &self.topic).await.get(&0) {
            Some(committed) if *committed >= offset => Ok(()),
            other => Err(format!("committed: {other:?}")),
        };
        until("the commits", LIMIT, look).await;
    }
}

/// Runs the consumer until `watch` is through.
async fn run_while(consumer: Consumer, watch: impl Future<Output = ()>) {
    let (stop, stopped) = oneshot::channel::<()>();
    let running = consumer.run_until(async { _ = stopped.await });
    let watching = async {
        watch.await;
        _ = stop.send(());
    };
    let (ended, ()) = tokio::join!(running, watching);
    ended.unwrap();
}

fn id(message: &Message) -> u64 {
    #[derive(serde::Deserialize)]
    struct Payload {
        id: u64,
    }
    message.json::<Payload>().unwrap().id
}

/// A run of the handler: the message as it saw it, and when.
#[derive(Clone, Debug)]
struct Seen {
    attempt: u32,
    at: Instant,
    message: Known,
}

/// What a message must keep while it waits.
#[derive(Clone, Debug, PartialEq)]
struct Known {
    origin: Origin,
    route: String,
    timestamp_ms: Option<i64>,
    key: Vec<u8>,
    headers: Vec<oncegate::Header>,
}

/// Fails for every tenth message while its dependency is down, and remembers every run.
#[derive(Clone, Default)]
struct Dependent {
    is_up: Arc<AtomicBool>,
    runs: Arc<Mutex<BTreeMap<u64, Vec<Seen>>>>,
}

impl Handler for Dependent {
    type Output = u32;

    async fn handle(&self, message: Message) -> Result<u32, Failure> {
        let seen = Seen {
            attempt: message.attempt(),
            at: Instant::now(),
            message: Known {
                origin: message.origin().clone(),
                route: message.route().to_owned(),
                timestamp_ms: message.timestamp_ms(),
                key: message.key().unwrap().to_vec(),
                headers: message.headers().to_vec(),
            },
        };
        self.runs.lock().unwrap().entry(id(&message)).or_default().push(seen);
        if id(&message).is_multiple_of(10) && !self.is_up.load(Relaxed) {
            return Err(Failure::retry_after(Duration::from_secs(2), "the dependency is down"));
        }
        Ok(message.attempt())
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dependency_that_is_down_for_some_keys_holds_up_neither_others_nor_the_committed_offset() {
    let (stage, dependent, watched) = (Stage::with(30).await, Dependent::default(), Watched::new());
    let consumer = stage.consumer(stage.source(), &watched, dependent.clone()).await;
    let watch = async {
        // The dependency is down until everything is committed: it holds up nothing.
        stage.until_committed(30).await;
        dependent.is_up.store(true, Relaxed);
        let runs = Arc::clone(&watched);
        until("the retries", LIMIT, async || match runs.get("handler_runs", "succeeded") {
            30 => Ok(()),
            others => Err(format!("{others} have succeeded")),
        })
        .await;
    };
    run_while(consumer, watch).await;
    let runs = dependent.runs.lock().unwrap();
    assert_eq!(runs.len(), 30, "nothing is lost");
    for (id, seen) in runs.iter() {
        let attempts: Vec<u32> = seen.iter().map(|seen| seen.attempt).collect();
        assert_eq!(attempts, (1..=u32::try_from(seen.len()).unwrap()).collect::<Vec<_>>(), "{id}");
        assert!(seen.len() > 1 || !id.is_multiple_of(10), "{id}: {attempts:?}");
        for again in seen.windows(2) {
            assert!(
                again[1].at - again[0].at >= WAIT - Duration::from_millis(100),
                "{id} ran before it was due"
            );
            assert_eq!(again[1].message, again[0].message, "{id}");
            assert_eq!(again[1].message.headers[0].value.as_deref(), Some(TENANT));
        }
    }
    assert_eq!(watched.total("extra_runs") + watched.total("dead_letters"), 0);
}

/// A source whose consumer never gets to acknowledge: as if it were killed between a copy in the retry topic and the ack.
#[derive(Debug)]
struct NeverAcks(KafkaRetries);

#[derive(Debug)]
struct NoAck(Arc<dyn Ticket>);

impl Ticket for NoAck {
    fn start(&self) -> bool {
        self.0.start()
    }

    fn ack(&self) {}

    fn stop(&self) {
        self.0.stop();
    }
}

#[async_trait]
impl Source for NeverAcks {
    async fn open(&self, observer: Arc<dyn Observer>) -> Result<(), SourceError> {
        self.0.open(observer).await
    }

    async fn receive(&self, most: usize) -> Result<Option<Vec<Delivery>>, SourceError> {
        let received = self.0.receive(most).await?;
        let unacked =
            |Delivery { message, ticket }| Delivery { message, ticket: Arc::new(NoAck(ticket)) as _ };
        Ok(received.map(|received| received.into_iter().map(unacked).collect()))
    }

    fn retry_queue(&self) -> Option<Arc<dyn RetryQueue>> {
        self.0.retry_queue()
    }

    async fn close(&self, deadline: Duration) -> Result<(), SourceError> {
        self.0.close(deadline).await
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_crash_between_the_copy_and_the_ack_leaves_two_and_one_effect() {
    let (stage, dependent, watched) = (Stage::with(1).await, Dependent::default(), Watched::new());
    let consumer = stage.consumer(NeverAcks(stage.source()), &watched, dependent.clone()).await;
    run_while(consumer, watched.until("acks", 1)).await;
    assert_eq!(stage.kafka.read_all(&stage.later).await.len(), 1, "its copy waits");
    assert!(
        stage.kafka.committed_offsets(&stage.group, &stage.topic).await.get(&0).is_none_or(|at| *at == 0)
    );

    dependent.is_up.store(true, Relaxed);
    let watched = Watched::new();
    let consumer = stage.consumer(stage.source(), &watched, dependent.clone()).await;
    let watch = async {
        stage.until_committed(1).await;
        // Both are through: one has run, the other one was answered.
        watched.until("claims", 2).await;
        until("an answer", LIMIT, async || match watched.get("claims", "completed") {
            0 => Err("not answered".to_owned()),
            _ => Ok(()),
        })
        .await;
    };
    run_while(consumer, watch).await;
    let runs = dependent.runs.lock().unwrap();
    assert_eq!(
        runs[&0].iter().map(|seen| seen.attempt).collect::<Vec<_>>(),
        [1, 2],
        "the effect happened once"
    );
    assert_eq!(watched.total("extra_runs"), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn topics_that_do_not_fit_are_refused_by_name() -> Result<(), BoxError> {
    let stage = Stage::with(0).await;
    let main = || KafkaSource::new(stage.kafka.bootstrap(), "g", [&stage.topic]);
    let refused =
        async |source: KafkaRetries| source.open(Watched::new() as _).await.unwrap_err().to_string();
    let same = refused(main().retry_topics([(WAIT * 10, &stage.topic)])).await;
    assert!(same.contains(&stage.topic), "{same}");
    let short = refused(main().retry_topics([(Duration::from_secs(1), &stage.later)])).await;
    assert!(short.contains("`beyond`") && short.contains(&stage.later), "{short}");
    let missing = refused(main().retry_topics([(WAIT * 10, "no-such-topic")])).await;
    assert!(missing.contains("no-such-topic"), "{missing}");
    let source = main().retry_topics([(WAIT * 10, &stage.later)]);
    let looped = oncegate::dead_letters::DeadLetters::open(&source.dead_letters(&stage.later)).await;
    assert!(looped.unwrap_err().to_string().contains(&stage.later));
    Ok(())
}
