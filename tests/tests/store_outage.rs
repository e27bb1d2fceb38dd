//! The store goes away in the middle, and comes back with its data.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test that cannot go on has failed")]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use oncegate::kafka::KafkaSource;
use oncegate::redis::RedisStore;
use oncegate::{Consumer, Gate, Key, Message};
use oncegate_tests::{Kafka, Record, RedisServer, Watched, unique};
use tokio::sync::oneshot;

const MESSAGES: u64 = 6_000;
const CONCURRENCY: u32 = 16;
/// How long Redis is away: a part of the fault, not a wait for anything.
const OUTAGE: Duration = Duration::from_secs(10);

#[tokio::test(flavor = "multi_thread")]
async fn consumption_pauses_and_resumes_when_redis_is_away_for_ten_seconds() {
    let kafka = Kafka::shared().await;
    let mut redis = RedisServer::start().await;
    let topic = kafka.new_topic("outage", 4).await;
    let records = (0..MESSAGES).map(|n| Record::new(format!(r#"{{"id":{n}}}"#)).key(n.to_string()));
    kafka.produce(&topic, records).await;

    let runs = Arc::new(AtomicU64::new(0));
    let counted = Arc::clone(&runs);
    let handler = move |_: Message| {
        let counted = Arc::clone(&counted);
        async move {
            tokio::time::sleep(Duration::from_millis(5)).await;
            counted.fetch_add(1, Relaxed);
            Ok(())
        }
    };
    let (group, watched) = (unique("outage"), Watched::new());
    let store = RedisStore::connect(redis.url()).await.unwrap();
    // The lease outlives the outage, so that no run is cut short and none is taken over.
    let gate = Gate::new(unique("outage"), Key::json(["id"]), store).lease(Duration::from_secs(60));
    let source = KafkaSource::new(kafka.bootstrap(), group.as_str(), [topic.as_str()]);
    let consumer =
        Consumer::new(source, gate, handler).concurrency(CONCURRENCY).observer(Arc::clone(&watched) as _);
    let (stop, stopped) = oneshot::channel::<()>();
    let running = tokio::spawn(consumer.run_until(async { _ = stopped.await }));

    watched.until("acks", MESSAGES / 4).await;
    assert_eq!(watched.total("store_errors"), 0, "nothing is wrong before the outage");
    redis.kill();
    watched.until("store_errors", 1).await;
    let acked = watched.total("acks");
    tokio::time::sleep(OUTAGE).await;
    // What the store had answered before may still be acknowledged after.
    let late = watched.total("acks") - acked;
    assert!(late <= u64::from(CONCURRENCY), "{late} messages were acknowledged while the store was away");
    let asked = watched.total("store_errors");
    assert!(asked < 16 * 40, "the store is asked a few times a second, not {asked} times in ten seconds");
    redis.start_again().await;
    watched.until("acks", MESSAGES).await;
    stop.send(()).unwrap();
    running.await.unwrap().unwrap();

    assert_eq!(runs.load(Relaxed), MESSAGES, "every message ran once");
    assert_eq!(watched.total("extra_runs"), 0);
    let committed: i64 = kafka.committed_offsets(&group, &topic).await.values().sum();
    assert_eq!(committed, i64::try_from(MESSAGES).unwrap());
}
