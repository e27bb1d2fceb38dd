//! The store goes away in the middle, and comes back with its data.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use oncegate::consumer::Monitor;
use oncegate::health::{Health, PauseCause, Reason};
use oncegate::kafka::KafkaSource;
use oncegate::redis::RedisStore;
use oncegate::{Attempt, Consumer, ConsumerError, Gate, Key, Message};
use oncegate_testkit::{
    Consuming, Kafka, Proxy, ProxyMode, Record, Redis, RedisServer, Watched, unique, until,
};
use tokio::sync::{oneshot, watch};
use tokio::task::JoinHandle;

const MESSAGES: u64 = 6_000;
const LEASE: Duration = Duration::from_secs(60);
/// The longest that a test waits for a fact.
const LIMIT: Duration = Duration::from_secs(240);
/// How long Redis is away: a part of the fault, not a wait for anything.
const OUTAGE: Duration = Duration::from_secs(10);

// invariant: run-without-store
#[tokio::test(flavor = "multi_thread")]
async fn consumption_pauses_while_redis_is_away_and_resumes() {
    let mut redis = RedisServer::synced().await;
    let store = RedisStore::connect(redis.url()).await.unwrap();
    let consuming = Consuming::start(store, MESSAGES, LEASE, String::new()).await;
    let watched = &consuming.watched;

    watched.until("acks", MESSAGES / 4).await;
    assert_eq!(
        watched.total("store_errors"),
        0,
        "nothing is wrong before the outage"
    );
    redis.kill();
    watched.until("store_errors", 1).await;
    let acked = watched.total("acks");
    tokio::time::sleep(OUTAGE).await;
    // What the store had answered before may still be acknowledged after.
    let late = watched.total("acks") - acked;
    assert!(
        late <= u64::from(Consuming::CONCURRENCY),
        "{late} messages were acknowledged while the store was away"
    );
    let asked = watched.total("store_errors");
    assert!(
        asked < 16 * 40,
        "the store is asked a few times a second, not {asked} times in ten seconds"
    );
    redis.start_again().await;
    consuming.ends_well().await;
}

// invariant: run-without-store
#[tokio::test(flavor = "multi_thread")]
async fn a_consumer_whose_redis_is_full_says_so_and_resumes_with_room() {
    let redis = RedisServer::synced().await;
    let store = RedisStore::connect(redis.url()).await.unwrap();
    let mut monitor = None;
    let watching = |consumer: Consumer| {
        monitor = Some(consumer.monitor());
        consumer
    };
    let consuming = Consuming::start_with(store, MESSAGES, LEASE, String::new(), watching).await;
    let monitor = monitor.unwrap();
    let watched = Arc::clone(&consuming.watched);
    watched.until("acks", MESSAGES / 4).await;
    redis.command(&["CONFIG", "SET", "maxmemory", "1"]).await;
    until("the reason", LEASE, async || {
        let status = monitor.status();
        let health = Health::of(&monitor.status());
        let is_full = |reason: &Reason| {
            let text = reason.to_string();
            matches!(reason, Reason::StoreAway { .. })
                && text.contains("the server is full (maxmemory)")
                && !text.contains("answer")
        };
        let is_paused = status.paused.contains(&PauseCause::StoreAway);
        if is_paused
            && !health.is_ready()
            && health.is_live()
            && health.reasons().iter().any(is_full)
        {
            Ok(())
        } else {
            Err(format!("{health}: {status:?}"))
        }
    })
    .await;
    redis.command(&["CONFIG", "SET", "maxmemory", "0"]).await;
    consuming.ends_well().await;
    assert_eq!(
        watched.get("store_errors", "unavailable"),
        watched.total("store_errors")
    );
}

// invariant: fail-open
#[tokio::test(flavor = "multi_thread")]
async fn a_consumer_that_fails_open_goes_on_without_and_with_redis() {
    const PATIENCE: Duration = Duration::from_secs(2);
    let mut redis = RedisServer::synced().await;
    let store = RedisStore::connect(redis.url()).await.unwrap();
    let open = |consumer: Consumer| consumer.fail_open_after(PATIENCE);
    let mut consuming = Consuming::start_with(store, MESSAGES, LEASE, String::new(), open).await;
    let watched = Arc::clone(&consuming.watched);
    watched.until("acks", MESSAGES / 4).await;
    assert_eq!(watched.total("extra_runs"), 0);
    redis.kill();
    watched.until("acks", MESSAGES).await;
    let fail_open = watched.get("extra_runs", "fail_open");
    assert!(fail_open > 0, "it was through before Redis was gone");
    let granted = watched.get("claims", "granted");
    redis.start_again().await;
    // The store is asked by messages alone, and not by every one: they go on until one has found it
    // back.
    let mut messages = MESSAGES;
    let found_back = async {
        while watched.get("claims", "granted") == granted {
            consuming.more(1).await;
            messages += 1;
            watched.until("acks", messages).await;
        }
    };
    tokio::time::timeout(LEASE, found_back)
        .await
        .expect("it asks the store again");
    let runs = consuming.ends().await;
    let fail_open = watched.get("extra_runs", "fail_open");
    assert!(
        runs - messages <= fail_open,
        "{runs} runs of {messages} messages, {fail_open} without the store"
    );
    assert_eq!(
        watched.total("extra_runs"),
        fail_open,
        "nothing else explains a run"
    );
}

// invariant: result-of-an-outage
#[tokio::test(flavor = "multi_thread")]
async fn a_handler_that_ends_in_an_outage_beyond_its_lease_runs_once() {
    const SHORT_LEASE: Duration = Duration::from_secs(1);
    /// Longer than the lease and the grace of a cancelled handler: a part of the handler's work.
    const REST_OF_THE_WORK: Duration = Duration::from_secs(4);
    let mut redis = RedisServer::synced().await;
    let store = RedisStore::connect(redis.url()).await.unwrap();
    let kafka = Kafka::shared().await;
    let topic = kafka.new_topic("long-outage", 1).await;
    kafka.produce(&topic, [Record::new(r#"{"id":1}"#)]).await;
    let (begun, mut has_begun) = watch::channel(0);
    let (ended, mut has_ended) = watch::channel(0);
    let begun = Arc::new(begun);
    let ended = Arc::new(ended);
    let handler = move |_: Message, attempt: Attempt| {
        let begun = Arc::clone(&begun);
        let ended = Arc::clone(&ended);
        async move {
            begun.send_modify(|runs| *runs += 1);
            // Resolves because no heartbeat is confirmed; a handler may go on all the same.
            attempt.cancelled().await;
            tokio::time::sleep(REST_OF_THE_WORK).await;
            ended.send_modify(|runs| *runs += 1);
            Ok(())
        }
    };
    let watched = Watched::new();
    let gate = Gate::new(unique("long-outage"), Key::json(["id"]), store).lease(SHORT_LEASE);
    let source = KafkaSource::new(kafka.bootstrap(), unique("long-outage"), [topic.as_str()]);
    let consumer = Consumer::new(source, gate, handler).observer(Arc::clone(&watched) as _);
    let (stop, stopped) = oneshot::channel::<()>();
    let running = tokio::spawn(consumer.run_until(async { _ = stopped.await }));
    has_begun.wait_for(|runs| *runs == 1).await.unwrap();
    redis.kill();
    tokio::time::timeout(LEASE, has_ended.wait_for(|runs| *runs == 1))
        .await
        .expect("it ends")
        .unwrap();
    assert_eq!(
        watched.total("acks"),
        0,
        "nothing is acknowledged before the store has answered"
    );
    redis.start_again().await;
    watched.until("acks", 1).await;
    _ = stop.send(());
    running.await.unwrap().unwrap();
    assert_eq!((*has_begun.borrow(), watched.total("extra_runs")), (1, 0));
}

// invariant: idle-store-away
#[tokio::test(flavor = "multi_thread")]
async fn an_idle_consumer_is_unready_while_its_redis_is_killed() {
    let mut redis = RedisServer::synced().await;
    let store = RedisStore::connect(redis.url()).await.unwrap();
    let kafka = Kafka::shared().await;
    let topic = kafka.new_topic("idle", 1).await;
    let gate = Gate::new(unique("idle"), Key::json(["id"]), store);
    let source = KafkaSource::new(kafka.bootstrap(), unique("idle"), [topic.as_str()]);
    let consumer = Consumer::new(source, gate, async |_: Message, _: Attempt| Ok(()));
    let monitor = consumer.monitor();
    let (stop, stopped) = oneshot::channel::<()>();
    let running = tokio::spawn(consumer.run_until(async { _ = stopped.await }));
    let until_ready = async || {
        until("the consumer to be ready", LIMIT, async || {
            match monitor.health() {
                health if health.is_ready() => Ok(()),
                health => Err(health.to_string()),
            }
        })
        .await;
    };
    until_ready().await;
    redis.kill();
    let health = until("the outage to be noticed", LIMIT, async || {
        match monitor.health() {
            health if health.is_ready() => Err(health.to_string()),
            health => Ok(health),
        }
    })
    .await;
    assert!(
        matches!(health.reasons(), [Reason::StoreAway { all: true, .. }]),
        "{health}"
    );
    assert!(health.is_live(), "a restart would not help: {health}");
    assert!(!monitor.status().scopes[0].is_store_up());
    redis.start_again().await;
    until_ready().await;
    assert!(monitor.status().scopes[0].is_store_up());
    _ = stop.send(());
    running.await.unwrap().unwrap();
}

/// One of the consumers of a group.
struct Member {
    watched: Arc<Watched>,
    monitor: Monitor,
    stop: oneshot::Sender<()>,
    running: JoinHandle<Result<(), ConsumerError>>,
}

/// The number of each attempt, and whether it was marked as one after a crash.
type Attempts = Arc<Mutex<Vec<(u32, bool)>>>;

impl Member {
    async fn join(url: &str, kafka: &Kafka, topic: &str, name: &str, attempts: &Attempts) -> Self {
        let noted = Arc::clone(attempts);
        let handler = move |_: Message, attempt: Attempt| {
            noted
                .lock()
                .unwrap()
                .push((attempt.number(), attempt.recovered()));
            std::future::ready(Ok(()))
        };
        let store = RedisStore::connect(url).await.unwrap();
        let gate = Gate::new(name, Key::json(["id"]), store).lease(LEASE * 10);
        let source = KafkaSource::new(kafka.bootstrap(), name, [topic]);
        // A rebalance revokes every partition of every member.
        let source = source.property("partition.assignment.strategy", "range");
        let watched = Watched::new();
        let consumer = Consumer::new(source, gate, handler).observer(Arc::clone(&watched) as _);
        let monitor = consumer.monitor();
        let (stop, stopped) = oneshot::channel::<()>();
        let running = tokio::spawn(consumer.run_until(async { _ = stopped.await }));
        Self {
            watched,
            monitor,
            stop,
            running,
        }
    }

    async fn stop(self) {
        _ = self.stop.send(());
        self.running.await.unwrap().unwrap();
    }
}

// invariant: claim-left-behind
#[tokio::test(flavor = "multi_thread")]
async fn a_revoke_while_a_claims_answer_is_lost_leaves_no_claim() {
    let redis = Redis::shared().await;
    let kafka = Kafka::shared().await;
    let proxy = Proxy::before(&redis).await;
    let topic = kafka.new_topic("revoked", 1).await;
    let name = unique("revoked");
    let attempts = Attempts::default();
    let first = Member::join(&proxy.url(), &kafka, &topic, &name, &attempts).await;
    until("the partition", LIMIT, async || {
        match first.monitor.status().source.partitions.len() {
            1 => Ok(()),
            other => Err(format!("{other} partitions")),
        }
    })
    .await;
    let rebalances = first.watched.total("rebalances");
    let mut connection = redis.connection().await;
    let mut before = 0;
    loop {
        let errors = first.watched.total("store_errors");
        proxy.set(ProxyMode::HoldAll);
        let order = format!(r#"{{"id":{before}}}"#);
        kafka.produce(&topic, [Record::new(order)]).await;
        let mut is_claimed = false;
        until("the claim to be executed", LIMIT, async || {
            let keys: Vec<String> = redis::cmd("KEYS")
                .arg(format!("{name}:*"))
                .query_async(&mut connection)
                .await
                .unwrap();
            let claims = keys.iter().filter(|key| !key.ends_with(":descriptor"));
            is_claimed = claims.count() > before;
            if is_claimed || first.watched.total("store_errors") > errors {
                Ok(())
            } else {
                Err(format!("{keys:?}"))
            }
        })
        .await;
        if is_claimed {
            break;
        }
        // A slow machine had lost the connection, and without replies there is no other.
        proxy.set(ProxyMode::Pass);
        before += 1;
        first.watched.until("acks", before as u64).await;
    }
    let second = Member::join(redis.url(), &kafka, &topic, &name, &attempts).await;
    first.watched.until("rebalances", rebalances + 1).await;
    proxy.set(ProxyMode::Pass);
    // Long before a lease is over.
    until("the message to be acknowledged", LIMIT, async || {
        let acks = first.watched.total("acks") + second.watched.total("acks");
        if acks > before as u64 {
            Ok(())
        } else {
            Err(format!("{:?}", attempts.lock().unwrap()))
        }
    })
    .await;
    for member in [first, second] {
        assert_eq!(member.watched.total("extra_runs"), 0);
        member.stop().await;
    }
    assert_eq!(
        *attempts.lock().unwrap(),
        vec![(1, false); before + 1],
        "an attempt was burnt"
    );
}
