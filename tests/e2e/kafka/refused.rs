//! Groups that refuse a member, again and again.

// invariant (all tests): stall-unreported

use std::sync::Arc;

use oncegate::health::{Health, Reason};
use oncegate::kafka::KafkaSource;
use oncegate::source::Source as _;
use oncegate::{Attempt, Consumer, Failure, Gate, Key, MemoryStore, Message};
use oncegate_testkit::{Kafka, KafkaBroker, Watched, unique, until};
use tokio::sync::oneshot;

use crate::stage::{CLOSE, LIMIT, QUICK, RANGE, finish, member, numbered, open, receive, with};

/// Runs a consumer in the group until it says what to change. Then `mends` ends the cause, and the
/// consumer is ready.
async fn is_told(
    kafka: &Kafka,
    (group, topic): (&str, &str),
    properties: &[(&str, &str)],
    named: &[&str],
    mends: impl Future<Output = ()>,
) {
    let source = with(
        KafkaSource::new(kafka.bootstrap(), group, [topic]),
        properties,
    );
    let gate = Gate::new(unique("refused"), Key::json(["id"]), MemoryStore::new());
    let consumer = Consumer::new(source, gate, async |_: Message, _: Attempt| {
        Ok::<(), Failure>(())
    });
    let consumer = consumer.observer(Watched::new() as Arc<_>);
    let monitor = consumer.monitor();
    let (stop, stopped) = oneshot::channel();
    let ended = tokio::spawn(consumer.run_until(async { _ = stopped.await }));
    let until_health = async |what: &str, so: fn(&Health) -> bool| {
        until(what, LIMIT, async || {
            let status = monitor.status();
            let health = Health::of(&status);
            if so(&health) {
                Ok(health)
            } else {
                Err(format!("{health}: {status:?}"))
            }
        })
        .await
    };
    let health = until_health("a refused member", |health| {
        health
            .reasons()
            .iter()
            .any(|one| matches!(one, Reason::SourceFails { operation, .. } if operation == "join"))
    })
    .await;
    assert!(!health.is_ready() && health.is_live(), "{health}");
    let text = health.to_string();
    assert!(
        named.iter().all(|part| text.contains(part)) && text.contains(group),
        "{text}"
    );
    mends.await;
    until_health("ready", |health| matches!(health, Health::Healthy)).await;
    stop.send(()).expect("it runs");
    ended.await.unwrap().unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cooperative_member_beside_range_ones_is_told_the_setting() {
    let kafka = Kafka::shared().await;
    let topic = kafka.new_topic("refused", 2).await;
    let group = unique("group");
    let former = member(&kafka, &group, &topic, RANGE);
    open(&former).await;
    kafka.produce(&topic, numbered(10, 2)).await;
    finish(receive(&former, 10).await);
    let named = [
        "partition.assignment.strategy is cooperative-sticky",
        "range",
        "docs/KAFKA.md",
    ];
    let mends = async { former.close(CLOSE).await.expect("closes") };
    is_told(&kafka, (&group, &topic), QUICK, &named, mends).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_session_out_of_bounds_and_a_full_group_are_told() {
    let settings = ["group.max.size=1", "group.min.session.timeout.ms=6000"];
    let kafka = KafkaBroker::start_with(&settings).await;
    let topic = kafka.new_topic("refused", 2).await;
    let group = unique("group");
    let first = member(&kafka, &group, &topic, QUICK);
    open(&first).await;
    kafka.produce(&topic, numbered(10, 2)).await;
    finish(receive(&first, 10).await);
    let mends = async { first.close(CLOSE).await.expect("closes") };
    is_told(&kafka, (&group, &topic), QUICK, &["group.max.size"], mends).await;

    let short = [
        ("session.timeout.ms", "2000"),
        ("heartbeat.interval.ms", "200"),
    ];
    let source = with(
        KafkaSource::new(kafka.bootstrap(), unique("group"), [topic.as_str()]),
        &short,
    );
    open(&source).await;
    until("the refused session", LIMIT, async || {
        let failures = source.status().failures;
        let told = failures.iter().any(|one| {
            one.operation == "join"
                && one.stops_delivery
                && one.error.contains("session.timeout.ms is 2000")
                && one.error.contains("group.min.session.timeout.ms")
        });
        if told {
            Ok(())
        } else {
            Err(format!("{failures:?}"))
        }
    })
    .await;
    source.close(CLOSE).await.expect("closes");
}
