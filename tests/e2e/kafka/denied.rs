//! Topics that a consumer may no longer write to, or that are deleted, while it writes to them.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use oncegate::consumer::Monitor;
use oncegate::dead_letters::DeadLetters as _;
use oncegate::health::{Health, Reason};
use oncegate::kafka::{KafkaRetries, KafkaSource};
use oncegate::observe::{Event, Observer};
use oncegate::redis::RedisStore;
use oncegate::{Attempt, Consumer, Failure, Gate, Handler, Key, MemoryStore, Message};
use oncegate_testkit::{
    Certificates, Kafka, On, Record, Redis, Right, SecuredKafka, Watched, unique, until,
};
use tokio::sync::oneshot;

use crate::secured::Access;
use crate::stage::{LIMIT, QUICK, member, until_committed, within};

const USER: &str = "worker";
const PARTITIONS: i32 = 2;
/// Every such message is given up.
const GIVEN_UP: u64 = 4;
/// How many dead letters are written before something happens to their topic.
const BEFORE: u64 = 10;

fn id(message: &Message) -> u64 {
    #[derive(serde::Deserialize)]
    struct Payload {
        id: u64,
    }
    message.json::<Payload>().expect("an id").id
}

fn record(id: u64) -> Record {
    let partition = i32::try_from(id).expect("a few") % PARTITIONS;
    Record::new(format!(r#"{{"id":{id}}}"#)).partition(partition)
}

/// The most dead letters that may be missing while more messages are produced. The next consumer
/// writes them all, so they must not be as many as a fast producer sends until the first one has
/// ended.
const BEHIND_MOST: usize = 200;

/// Remembers the origins of the messages whose dead letters are written.
#[derive(Debug)]
struct Written {
    watched: Arc<Watched>,
    origins: Mutex<BTreeSet<String>>,
}

impl Written {
    fn new() -> Arc<Self> {
        Arc::new(Self {
            watched: Watched::new(),
            origins: Mutex::default(),
        })
    }
}

impl Observer for Written {
    fn observe(&self, event: Event<'_>) {
        if let Event::DeadLettered { origin, .. } = &event {
            self.origins.lock().unwrap().insert(origin.to_string());
        }
        self.watched.observe(event);
    }
}

/// A topic, its dead-letter topic, and the group that consumes it.
struct Stage {
    kafka: Kafka,
    topic: String,
    dead: String,
    group: String,
}

impl Stage {
    /// A consumer that gives up every fourth message.
    async fn consumer(&self, source: KafkaSource, written: &Arc<Written>) -> Consumer {
        let letters = source.dead_letters(&*self.dead);
        let store = RedisStore::connect(Redis::shared().await.url())
            .await
            .unwrap();
        let gate = Gate::new(&*self.group, Key::json(["id"]), store).lease(Duration::from_secs(60));
        let handler = async |message: Message, _: Attempt| match id(&message) {
            id if id.is_multiple_of(GIVEN_UP) => Err(Failure::permanent("it is never accepted")),
            _ => Ok(()),
        };
        Consumer::new(source, gate, handler)
            .dead_letters(letters)
            .observer(Arc::clone(written) as _)
    }

    /// Produces until `over`, as long as the consumer keeps up, and returns the origins of the
    /// messages that are given up.
    async fn produce_until(&self, over: &AtomicBool, written: &Written) -> BTreeSet<String> {
        let mut next = 0;
        let mut given_up = BTreeSet::new();
        while !over.load(Relaxed) {
            if given_up.len() > written.origins.lock().unwrap().len() + BEHIND_MOST {
                tokio::time::sleep(Duration::from_millis(10)).await;
                continue;
            }
            let places = self
                .kafka
                .produce(&self.topic, (next..next + 20).map(record))
                .await;
            for ((partition, offset), id) in places.into_iter().zip(next..) {
                if id.is_multiple_of(GIVEN_UP) {
                    given_up.insert(format!("{}/{partition}@{offset}", self.topic));
                }
            }
            next += 20;
        }
        given_up
    }

    /// Consumes under load until the consumer has ended because of what `take_away` does to its
    /// dead-letter topic, and again after `give_back`. Demands that nothing is lost, and returns
    /// the error.
    async fn ends_loudly(
        &self,
        source: impl Fn() -> KafkaSource,
        take_away: impl Future<Output = ()>,
        give_back: impl Future<Output = ()>,
    ) -> String {
        let first = Written::new();
        let over = AtomicBool::new(false);
        let consumer = self.consumer(source(), &first).await;
        let ended = async {
            let running = tokio::spawn(consumer.run_until(std::future::pending()));
            first.watched.until("dead_letters", BEFORE).await;
            take_away.await;
            let ended = within("the consumer's end", running).await.unwrap();
            over.store(true, Relaxed);
            ended.unwrap_err().to_string()
        };
        let (error, given_up) = tokio::join!(ended, self.produce_until(&over, &first));
        let written = first.origins.lock().unwrap().clone();
        let committed = self.kafka.committed_offsets(&self.group, &self.topic).await;
        for origin in given_up.difference(&written) {
            let (partition, offset) = origin.rsplit_once('@').unwrap();
            let (_, partition) = partition.rsplit_once('/').unwrap();
            let position = committed
                .get(&partition.parse().unwrap())
                .copied()
                .unwrap_or_default();
            assert!(
                position <= offset.parse().unwrap(),
                "committed past {origin}, which is in no topic"
            );
        }

        give_back.await;
        let second = Written::new();
        let ends = self.kafka.end_offsets(&self.topic).await;
        let consumer = self.consumer(source(), &second).await;
        let (stop, stopped) = oneshot::channel::<()>();
        let running = tokio::spawn(consumer.run_until(async { _ = stopped.await }));
        until_committed(&self.kafka, &self.group, &self.topic, &ends).await;
        stop.send(()).expect("it runs");
        running.await.unwrap().unwrap();
        let written: BTreeSet<String> = written
            .union(&second.origins.lock().unwrap())
            .cloned()
            .collect();
        assert_eq!(
            given_up.difference(&written).count(),
            0,
            "every dead letter is written"
        );
        error
    }
}

// invariant: dead-letter-lost, stall-unreported, retry-topic
#[tokio::test(flavor = "multi_thread")]
async fn a_lost_right_is_told_and_loses_nothing() {
    let certificates = Certificates::for_names("IP:127.0.0.1");
    let broker = SecuredKafka::start_with(&certificates, &[USER], &[]).await;
    let access = Access::user(&broker, &certificates, USER);
    a_right_lost_under_load_ends_the_consumer(&broker, &access).await;
    an_unwritable_retry_topic_is_in_the_status(&broker, &access).await;
}

async fn a_right_lost_under_load_ends_the_consumer(broker: &SecuredKafka, access: &Access) {
    let kafka = Kafka::at(broker.bootstrap());
    let topic = kafka.new_topic("orders", PARTITIONS).await;
    let dead = kafka.new_topic("dead", 1).await;
    let stage = Stage {
        kafka,
        topic,
        dead,
        group: unique("denied"),
    };
    let write = (USER, Right::Write, On::Topic(&stage.dead));
    let rights = [
        (USER, Right::Read, On::Topic(&stage.topic)),
        (USER, Right::Read, On::Group(&stage.group)),
        write,
    ];
    broker.grant(&rights).await;
    let source = || {
        access
            .member(&stage.group, &stage.topic)
            .open_timeout(LIMIT)
    };
    let may_all = async || {
        until("the rights", LIMIT, async || {
            source()
                .check_topics()
                .await
                .map_err(|error| error.to_string())?;
            source()
                .dead_letters(&*stage.dead)
                .open()
                .await
                .map_err(|error| error.to_string())
        })
        .await;
    };
    may_all().await;
    let give_back = async {
        broker.grant(&[write]).await;
        may_all().await;
    };
    let error = stage
        .ends_loudly(source, broker.revoke(write), give_back)
        .await;
    assert!(
        error.contains("grant WRITE") && error.contains(&stage.dead),
        "{error}"
    );
}

// invariant: dead-letter-lost
#[tokio::test(flavor = "multi_thread")]
async fn a_dead_letter_topic_deleted_under_load_loses_no_later_letter() {
    let kafka = Kafka::shared().await;
    let topic = kafka.new_topic("orders", PARTITIONS).await;
    let dead = kafka.new_topic("dead", 1).await;
    let stage = Stage {
        kafka,
        topic,
        dead,
        group: unique("denied"),
    };
    let source = || member(&stage.kafka, &stage.group, &stage.topic, QUICK);
    let delete = stage.kafka.delete_topic(&stage.dead);
    let error = stage
        .ends_loudly(source, delete, stage.kafka.create_topic(&stage.dead, 1))
        .await;
    assert!(
        error.contains("create the topic") && error.contains(&stage.dead),
        "{error}"
    );
}

/// Fails until its dependency is up.
#[derive(Clone, Default)]
struct Dependent {
    is_up: Arc<AtomicBool>,
}

impl Handler for Dependent {
    type Output = ();

    async fn handle(&self, _: &Message, _: &Attempt) -> Result<(), Failure> {
        if self.is_up.load(Relaxed) {
            return Ok(());
        }
        Err(Failure::retry_after(
            Duration::from_secs(1),
            "the dependency is down",
        ))
    }
}

/// A source with a retry topic, once the broker heeds its rights.
async fn retrying(access: &Access, group: &str, topic: &str, later: &str) -> KafkaRetries {
    let source = access
        .member(group, topic)
        .open_timeout(LIMIT)
        .retry_topics([(Duration::from_secs(2), later)])
        .beyond(Duration::ZERO);
    until("the rights", LIMIT, async || {
        source
            .check_topics()
            .await
            .map_err(|error| error.to_string())
    })
    .await;
    source
}

async fn until_no_failure(monitor: &Monitor) {
    until("the end of the failure", LIMIT, async || {
        let failures = monitor.status().source.failures;
        if failures.is_empty() {
            Ok(())
        } else {
            Err(format!("{failures:?}"))
        }
    })
    .await;
}

async fn an_unwritable_retry_topic_is_in_the_status(broker: &SecuredKafka, access: &Access) {
    let topic = broker.new_topic("orders", 1).await;
    let later = broker.new_topic("later", 1).await;
    let group = unique("denied");
    let group_of_later = format!("{group}.{later}");
    let write = (USER, Right::Write, On::Topic(&later));
    let rights = [
        (USER, Right::Read, On::Topic(&topic)),
        (USER, Right::Read, On::Topic(&later)),
        (USER, Right::Read, On::Group(&group)),
        (USER, Right::Read, On::Group(&group_of_later)),
        write,
    ];
    broker.grant(&rights).await;
    let source = retrying(access, &group, &topic, &later).await;
    let handler = Dependent::default();
    let watched = Watched::new();
    let gate = Gate::new(unique("denied"), Key::json(["id"]), MemoryStore::new());
    let consumer = Consumer::new(source, gate, handler.clone())
        .ordering(oncegate::Ordering::Unordered)
        .max_attempts(254)
        .observer(Arc::clone(&watched) as _);
    let monitor = consumer.monitor();
    let (stop, stopped) = oneshot::channel::<()>();
    let mut running = tokio::spawn(consumer.run_until(async { _ = stopped.await }));
    broker.produce(&topic, [record(0)]).await;
    tokio::select! {
        // Its copy in the retry topic is consumed, too.
        () = watched.until("acks", 2) => {}
        ended = &mut running => panic!("{ended:?}"),
    }

    broker.revoke(write).await;
    let is_it = |reason: &Reason| {
        matches!(reason, Reason::SourceFails { operation, error, stops_delivery: false, .. }
            if operation == "retry" && error.contains(&later))
    };
    until("the failure in the health", LIMIT, async || {
        let health = Health::of(&monitor.status());
        if health.is_ready() && health.reasons().iter().any(is_it) {
            Ok(())
        } else {
            Err(health.to_string())
        }
    })
    .await;
    broker.grant(&[write]).await;
    until_no_failure(&monitor).await;
    handler.is_up.store(true, Relaxed);
    until("its success", LIMIT, async || {
        match watched.get("handler_runs", "succeeded") {
            1 => Ok(()),
            count => Err(format!("{count} have succeeded")),
        }
    })
    .await;
    for (group, topic) in [(&group, &topic), (&group_of_later, &later)] {
        until_committed(broker, group, topic, &broker.end_offsets(topic).await).await;
    }
    stop.send(()).expect("it runs");
    running.await.unwrap().unwrap();
}
