//! A registry that is away: its messages wait, and none of them is a dead letter.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

use oncegate::kafka::KafkaSource;
use oncegate::schema::{Registry, SchemaFormat};
use oncegate::{Attempt, Consumer, Failure, Gate, Key, MemoryStore, Message, Monitor};
use oncegate_testkit::{Kafka, Proxy, ProxyMode, SchemaRegistry, unique, until};

use super::{LIMIT, produce};

#[tokio::test]
async fn messages_wait_while_the_registry_is_away() {
    let kafka = Kafka::shared().await;
    let registry = SchemaRegistry::start().await;
    let topic = kafka.new_topic("outage", 1).await;
    let letters = kafka.new_topic("outage-dead", 1).await;
    produce(&kafka, &registry.url(), &topic, "avro", 0, 10).await;
    let proxy = Proxy::before_address(registry.address()).await;
    proxy.set(ProxyMode::Refuse);

    let url = registry.url_at(&proxy.address().to_string());
    let format = Arc::new(SchemaFormat::registry(Registry::new(&url)).unwrap());
    let gate = Gate::new(
        unique("outage"),
        Key::json(["order_id"]).format(format),
        MemoryStore::new(),
    );
    let runs = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&runs);
    let handler = move |_: Message, _: Attempt| {
        counted.fetch_add(1, SeqCst);
        async { Ok::<(), Failure>(()) }
    };
    let source = KafkaSource::new(kafka.bootstrap(), unique("outage"), [topic.as_str()]);
    let dead_letters = source.dead_letters(letters.as_str());
    let consumer = Consumer::new(source, gate, handler).dead_letters(dead_letters);
    let monitor = consumer.monitor();
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let running = tokio::spawn(consumer.run_until(async { _ = stopped.await }));

    until("the outage", LIMIT, async || {
        away(&monitor).ok_or_else(|| "no failure".to_owned())
    })
    .await;
    until("health", LIMIT, async || {
        if monitor.health().is_ready() {
            Err("ready".to_owned())
        } else {
            Ok(())
        }
    })
    .await;
    assert_eq!(runs.load(SeqCst), 0);
    proxy.set(ProxyMode::Pass);
    let handled = async || match runs.load(SeqCst) {
        10 => Ok(()),
        other => Err(format!("{other} runs")),
    };
    until("all runs", LIMIT, handled).await;
    assert_eq!(away(&monitor), None);
    stop.send(()).unwrap();
    tokio::time::timeout(LIMIT, running)
        .await
        .expect("it ends in time")
        .unwrap()
        .unwrap();
    assert!(kafka.read_all(&letters).await.is_empty());
}

/// The error of the registry, if it is a failure of the source that stops the delivery.
fn away(monitor: &Monitor) -> Option<String> {
    let failures = monitor.status().source.failures;
    let failure = failures
        .into_iter()
        .find(|failure| failure.operation == "schema" && failure.stops_delivery);
    failure.map(|failure| failure.error)
}
