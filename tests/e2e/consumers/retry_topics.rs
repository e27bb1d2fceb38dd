//! Retries that wait in topics, on a real broker.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime};

use oncegate::health::PauseCause;
use oncegate::kafka::{KafkaRetries, KafkaSource};
use oncegate::redis::RedisStore;
use oncegate::source::Source;
use oncegate::{
    Attempt, Backoff, BoxError, Consumer, Failure, Gate, Handler, Key, Message, Ordering, Origin,
};
use oncegate_testkit::{Kafka, Record, Redis, Watched, unique, until};
use rdkafka::Message as _;
use rdkafka::message::Headers as _;
use tokio::sync::oneshot;

const WAIT: Duration = Duration::from_secs(3);
/// A header that is no text.
const TENANT: &[u8] = b"\xff acme";
pub(crate) const LIMIT: Duration = Duration::from_secs(240);

/// A topic of one partition and its retry topic.
pub(crate) struct Stage {
    pub(crate) kafka: Kafka,
    pub(crate) redis: Redis,
    pub(crate) topic: String,
    pub(crate) later: String,
    group: String,
}

impl Stage {
    pub(crate) async fn with(messages: u64) -> Self {
        let kafka = Kafka::shared().await;
        let redis = Redis::shared().await;
        let topic = kafka.new_topic("retries", 1).await;
        let later = kafka.new_topic("later", 1).await;
        let record = |id: u64| {
            Record::new(format!(r#"{{"id":{id}}}"#))
                .key(format!("key-{id}"))
                .header("tenant", TENANT)
        };
        kafka
            .produce(&topic, (0..messages).map(record).collect::<Vec<Record>>())
            .await;
        Self {
            kafka,
            redis,
            topic,
            later,
            group: unique("retries"),
        }
    }

    fn source(&self) -> KafkaRetries {
        self.retrying(WAIT, Duration::from_secs(1))
    }

    fn retrying(&self, wait: Duration, beyond: Duration) -> KafkaRetries {
        KafkaSource::new(self.kafka.bootstrap(), &self.group, [&self.topic])
            .commit_interval(Duration::from_millis(50))
            .retry_topics([(wait, &self.later)])
            .beyond(beyond)
    }

    async fn consumer(
        &self,
        source: impl Source + 'static,
        watched: &Arc<Watched>,
        handler: impl Handler,
    ) -> Consumer {
        let store = RedisStore::connect(self.redis.url()).await.unwrap();
        let gate = Gate::new(&self.group, Key::json(["id"]), store).lease(Duration::from_secs(1));
        Consumer::new(source, gate, handler)
            .ordering(Ordering::Unordered)
            .observer(Arc::clone(watched) as _)
    }

    async fn until_committed(&self, offset: i64) {
        let look = async || match self
            .kafka
            .committed_offsets(&self.group, &self.topic)
            .await
            .get(&0)
        {
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

    async fn handle(&self, message: &Message, attempt: &Attempt) -> Result<u32, Failure> {
        let seen = Seen {
            attempt: attempt.number(),
            at: Instant::now(),
            message: Known {
                origin: message.origin().clone(),
                route: message.route().to_owned(),
                timestamp_ms: message.timestamp_ms(),
                key: message.key().unwrap().to_vec(),
                headers: message.headers().to_vec(),
            },
        };
        self.runs
            .lock()
            .unwrap()
            .entry(id(message))
            .or_default()
            .push(seen);
        if id(message).is_multiple_of(10) && !self.is_up.load(Relaxed) {
            return Err(Failure::retry_after(
                Duration::from_secs(2),
                "the dependency is down",
            ));
        }
        Ok(attempt.number())
    }
}

// invariant: retry-topic
#[tokio::test(flavor = "multi_thread")]
async fn a_dependency_down_for_some_keys_holds_up_no_other_or_offset() {
    let stage = Stage::with(30).await;
    let dependent = Dependent::default();
    let watched = Watched::new();
    let consumer = stage
        .consumer(stage.source(), &watched, dependent.clone())
        .await;
    let watch = async {
        // The dependency is down until everything is committed: it holds up nothing.
        stage.until_committed(30).await;
        dependent.is_up.store(true, Relaxed);
        let runs = Arc::clone(&watched);
        until("the retries", LIMIT, async || {
            match runs.get("handler_runs", "succeeded") {
                30 => Ok(()),
                others => Err(format!("{others} have succeeded")),
            }
        })
        .await;
    };
    run_while(consumer, watch).await;
    let runs = dependent.runs.lock().unwrap();
    assert_eq!(runs.len(), 30, "nothing is lost");
    for (id, seen) in runs.iter() {
        let attempts: Vec<u32> = seen.iter().map(|seen| seen.attempt).collect();
        assert_eq!(
            attempts,
            (1..=u32::try_from(seen.len()).unwrap()).collect::<Vec<_>>(),
            "{id}"
        );
        assert!(
            seen.len() > 1 || !id.is_multiple_of(10),
            "{id}: {attempts:?}"
        );
        for again in seen.windows(2) {
            assert!(
                again[1].at - again[0].at >= WAIT - Duration::from_millis(100),
                "{id} ran before it was due"
            );
            assert_eq!(again[1].message, again[0].message, "{id}");
            assert_eq!(again[1].message.headers[0].value.as_deref(), Some(TENANT));
        }
    }
    assert_eq!(
        watched.total("extra_runs") + watched.total("dead_letters"),
        0
    );
}

/// Copies of a retry topic's partition that are due `after` from now, by the clock of the process
/// that wrote them.
fn copies(partition: i32, after: Duration, count: usize) -> impl Iterator<Item = Record> + Send {
    let due = in_millis(SystemTime::now() + after).to_string();
    let record = move |_| {
        Record::new("{}")
            .partition(partition)
            .header("oncegate-due", &due)
    };
    (0..count).map(record)
}

/// Receives until `count` messages have come.
async fn receive(source: &dyn Source, count: usize) {
    let receiving = async {
        let mut received = 0;
        while received < count {
            let deliveries = source.receive(count).await.unwrap().unwrap();
            received += deliveries.len();
            deliveries
                .iter()
                .for_each(|delivery| delivery.ack_handle.ack());
        }
    };
    tokio::time::timeout(LIMIT, receiving)
        .await
        .expect("due messages are received");
}

// invariant: retry-topic
#[tokio::test(flavor = "multi_thread")]
async fn a_message_that_is_not_due_holds_up_none_that_is() {
    let stage = Stage::with(0).await;
    let soon = stage.kafka.new_topic("soon", 1).await;
    let late = stage.kafka.new_topic("late", 2).await;
    let hour = Duration::from_secs(3_600);
    let wait = Duration::from_secs(600);
    let source = KafkaSource::new(stage.kafka.bootstrap(), &stage.group, [&stage.topic])
        .retry_topics([(Duration::from_secs(1), &soon), (wait, &late)])
        .beyond(Duration::ZERO);
    source.open(Watched::new() as _).await.unwrap();
    // A clock that is an hour ahead.
    stage.kafka.produce(&soon, copies(0, hour, 1)).await;
    stage
        .kafka
        .produce(&late, copies(0, wait, 2_000).chain(copies(1, hour, 1)))
        .await;
    let partitions = || {
        let partitions = source.status().partitions;
        partitions
            .into_iter()
            .filter(|one| *one.topic == *late)
            .collect::<Vec<_>>()
    };
    let all_wait = async {
        until("messages that are not due", LIMIT, async || {
            let waiting = partitions()
                .iter()
                .filter(|one| one.paused == Some(PauseCause::NotDue))
                .count();
            if waiting == 2 {
                Ok(())
            } else {
                Err(format!("{:?}", partitions()))
            }
        })
        .await;
    };
    // A topic with a wait of a second says nothing of an hour.
    tokio::join!(receive(&source, 1), all_wait);
    for count in [7, 100, 300] {
        stage
            .kafka
            .produce(&late, copies(1, Duration::ZERO, count))
            .await;
        receive(&source, count).await;
    }
    for partition in partitions() {
        assert_eq!(partition.paused, Some(PauseCause::NotDue), "{partition:?}");
        assert!(
            partition.received.unwrap() < 1_000,
            "few wait in memory: {partition:?}"
        );
    }
    source.close(LIMIT).await.unwrap();
}

/// Receives and acknowledges until the source is closed.
async fn receive_all(source: Arc<KafkaRetries>, origins: Arc<Mutex<Vec<String>>>) {
    while let Some(deliveries) = source.receive(16).await.unwrap() {
        for delivery in deliveries {
            origins
                .lock()
                .unwrap()
                .push(delivery.message.origin().to_string());
            delivery.ack_handle.ack();
        }
    }
}

/// The test's clock goes on by the messages' wait once the group has rebalanced.
// invariant: retry-topic
#[tokio::test]
async fn a_revoke_drops_what_waits_and_the_next_owner_delivers_it() {
    const EACH: usize = 5;
    let stage = Stage::with(0).await;
    let hour = Duration::from_secs(3_600);
    let late = stage.kafka.new_topic("late", 2).await;
    let join = async || {
        let source = KafkaSource::new(stage.kafka.bootstrap(), &stage.group, [&stage.topic])
            .commit_interval(Duration::from_millis(50))
            .property("heartbeat.interval.ms", "200")
            .retry_topics([(hour, &late)]);
        source.open(Watched::new() as _).await.unwrap();
        let source = Arc::new(source);
        let origins = Arc::<Mutex<Vec<String>>>::default();
        let receiving = tokio::spawn(receive_all(Arc::clone(&source), Arc::clone(&origins)));
        (source, origins, receiving)
    };
    // How many partitions have messages that are not due.
    let waiting = |source: &KafkaRetries| {
        let partitions = source.status().partitions;
        let late = partitions.iter().filter(|one| *one.topic == *late);
        late.filter(|one| one.paused == Some(PauseCause::NotDue))
            .map(|one| one.received)
            .collect::<Vec<_>>()
    };
    let all = Some(i64::try_from(EACH).unwrap() - 1);
    let first = join().await;
    stage
        .kafka
        .produce(&late, copies(0, hour, EACH).chain(copies(1, hour, EACH)))
        .await;
    until(
        "everything with the first member",
        LIMIT,
        async || match waiting(&first.0) {
            partitions if partitions == [all, all] => Ok(()),
            partitions => Err(format!("{partitions:?}")),
        },
    )
    .await;
    let second = join().await;
    until("a partition for each", LIMIT, async || {
        match (waiting(&first.0), waiting(&second.0)) {
            (ours, theirs) if ours == [all] && theirs == [all] => Ok(()),
            partitions => Err(format!("{partitions:?}")),
        }
    })
    .await;
    tokio::time::pause();
    tokio::time::advance(hour).await;
    tokio::time::resume();
    let counts = || [&first, &second].map(|(_, origins, _)| origins.lock().unwrap().len());
    until("both partitions", LIMIT, async || {
        let ends = stage.kafka.end_offsets(&late).await;
        let committed = stage
            .kafka
            .committed_offsets(&format!("{}.{late}", stage.group), &late)
            .await;
        if committed == ends {
            Ok(())
        } else {
            Err(format!("{committed:?} of {ends:?}, {:?}", counts()))
        }
    })
    .await;
    assert_eq!(counts(), [EACH; 2], "no member delivers what it has lost");
    for (source, _, receiving) in [first, second] {
        // The deadline is counted by the system's clock, an hour behind the test's.
        source.close(hour + LIMIT).await.unwrap();
        receiving.await.unwrap();
    }
}

/// When each attempt ran, and what it got about the first failure.
type Attempts = Arc<Mutex<Vec<(SystemTime, Option<SystemTime>)>>>;

// invariant: retry-topic
#[tokio::test(flavor = "multi_thread")]
async fn retry_topics_carry_the_first_failure_time_to_dead_letters() {
    let stage = Stage::with(1).await;
    let attempts = Attempts::default();
    let dead = stage.kafka.new_topic("dead", 1).await;
    // Each attempt runs in another consumer: none has seen two of them.
    for attempt in 1..=3 {
        let seen = Arc::clone(&attempts);
        let watched = Watched::new();
        let handler = move |message: Message, _: Attempt| {
            seen.lock()
                .unwrap()
                .push((SystemTime::now(), message.first_failed_at()));
            std::future::ready(Err::<(), Failure>(Failure::retry("the dependency is down")))
        };
        let source = stage.retrying(Duration::from_secs(1), Duration::ZERO);
        let letters = source.dead_letters(dead.as_str());
        let consumer = stage.consumer(source, &watched, handler).await;
        let consumer = consumer
            .dead_letters(letters)
            .max_attempts(3)
            .backoff(Backoff::new(
                Duration::from_millis(500),
                Duration::from_secs(1),
            ));
        let watch = async {
            watched.until("handler_runs", 1).await;
            let ended = if attempt == 3 {
                "dead_letters"
            } else {
                "retries"
            };
            watched.until(ended, 1).await;
            watched.until("acks", 1).await;
        };
        run_while(consumer, watch).await;
    }
    let attempts = attempts.lock().unwrap().clone();
    let [
        (ran_at, None),
        (ran_again_at, Some(known)),
        (_, Some(known_later)),
    ] = attempts[..]
    else {
        panic!("{attempts:?}")
    };
    assert!(known == known_later && in_millis(ran_at) <= in_millis(known) && known < ran_again_at);
    let letters = stage.kafka.read_all(&dead).await;
    let headers = letters[0].headers().unwrap();
    let header = headers
        .iter()
        .find(|header| header.key == "oncegate-first-failed-at")
        .unwrap();
    assert_eq!(header.value, Some(in_millis(known).to_string().as_bytes()));
}

/// As headers have it.
fn in_millis(time: SystemTime) -> u128 {
    time.duration_since(SystemTime::UNIX_EPOCH)
        .unwrap()
        .as_millis()
}

#[tokio::test(flavor = "multi_thread")]
async fn topics_that_do_not_fit_are_refused_by_name() -> Result<(), BoxError> {
    let stage = Stage::with(0).await;
    let main = || KafkaSource::new(stage.kafka.bootstrap(), "g", [&stage.topic]);
    let refused = async |source: KafkaRetries| {
        source
            .open(Watched::new() as _)
            .await
            .unwrap_err()
            .to_string()
    };
    let same = refused(main().retry_topics([(WAIT * 10, &stage.topic)])).await;
    assert!(same.contains(&stage.topic), "{same}");
    let short = refused(main().retry_topics([(Duration::from_secs(1), &stage.later)])).await;
    assert!(
        short.contains("`beyond`") && short.contains(&stage.later),
        "{short}"
    );
    let missing = refused(main().retry_topics([(WAIT * 10, "no-such-topic")])).await;
    assert!(missing.contains("no-such-topic"), "{missing}");
    let source = main().retry_topics([(WAIT * 10, &stage.later)]);
    let looped =
        oncegate::dead_letters::DeadLetters::open(&source.dead_letters(&stage.later)).await;
    assert!(looped.unwrap_err().to_string().contains(&stage.later));
    Ok(())
}
