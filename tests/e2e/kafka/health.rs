//! Health while the brokers are unreachable.

// invariant (all tests): stall-unreported

use std::sync::Arc;
use std::time::{Duration, Instant};

use oncegate::health::{Health, Reason, Status};
use oncegate::kafka::KafkaSource;
use oncegate::{Attempt, Consumer, Failure, Gate, Key, MemoryStore, Message};
use oncegate_testkit::{KafkaBroker, Record, Watched, unique, until};
use tokio::sync::oneshot;

use crate::stage::{QUICK, with};

const LIMIT: Duration = Duration::from_secs(180);

/// A frozen broker must be known by then: before the client gives up its first request.
const FROZEN_LIMIT: Duration = Duration::from_secs(55);

/// An idle consumer receives no message: the client's statistics show that its broker answers
/// again.
#[tokio::test(flavor = "multi_thread")]
async fn an_idle_consumer_is_unready_while_its_broker_is_away() {
    let mut broker = KafkaBroker::start().await;
    let topic = broker.new_topic("orders", 1).await;
    let group = unique("group");
    let source = with(
        KafkaSource::new(broker.bootstrap(), group.as_str(), [topic.as_str()]),
        // The group waits for longer than this consumer for a broker that does not answer.
        &[QUICK[0], ("session.timeout.ms", "45000")],
    );
    let gate = Gate::new(unique("health"), Key::json(["id"]), MemoryStore::new());
    let watched = Watched::new();
    let consumer = Consumer::new(source, gate, async |_: Message, _: Attempt| {
        Ok::<(), Failure>(())
    });
    let consumer = consumer.observer(Arc::clone(&watched) as _);
    let monitor = consumer.monitor();
    let (stop, stopped) = oneshot::channel();
    let ended = tokio::spawn(consumer.run_until(async { _ = stopped.await }));
    broker.produce(&topic, [Record::new(r#"{"id":1}"#)]).await;
    watched.until("acks", 1).await;
    let until_status = async |what: &str, so: fn(&Status, &Health) -> bool| {
        until(what, LIMIT, async || {
            let status = monitor.status();
            let health = Health::of(&status);
            if so(&status, &health) {
                Ok(health)
            } else {
                Err(format!("{health}: {status:?}"))
            }
        })
        .await
    };
    until_status("ready", |_, health| health.is_ready()).await;
    broker.kill();
    let health = until_status("unready", |_, health| !health.is_ready()).await;
    let brings_nothing = |reason: &Reason| {
        matches!(reason, Reason::SourceFails { operation, stops_delivery: true, error, .. }
            if operation == "broker" && !error.is_empty())
    };
    assert!(
        health.is_live() && health.reasons().iter().any(brings_nothing),
        "{health}"
    );
    broker.start_again().await;
    until_status("ready again", |status, health| {
        health.is_ready() && status.source.failures.is_empty()
    })
    .await;
    // A broker that is frozen keeps its connections. The client gives a request up after a minute.
    let frozen_at = Instant::now();
    broker.process().signal("STOP");
    let health = until_status("unready", |_, health| !health.is_ready()).await;
    let took = frozen_at.elapsed();
    broker.process().signal("CONT");
    assert!(
        took < FROZEN_LIMIT && health.reasons().iter().any(brings_nothing),
        "{took:?}: {health}"
    );
    until_status("ready again", |status, health| {
        health.is_ready() && status.source.failures.is_empty()
    })
    .await;
    broker.produce(&topic, [Record::new(r#"{"id":2}"#)]).await;
    watched.until("acks", 2).await;
    stop.send(()).expect("it runs");
    ended.await.unwrap().unwrap();
}
