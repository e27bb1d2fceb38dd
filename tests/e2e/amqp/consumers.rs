//! Several consumers of one queue.

use lapin::options::BasicConsumeOptions;
use lapin::types::FieldTable;
use lapin::{Connection, ConnectionProperties};
use oncegate::health::Phase;
use oncegate_testkit::{QueueKind, RabbitMq, until};
use serde_json::json;

use crate::stage::{Clerk, LIMIT, Stage, fails};

#[tokio::test(flavor = "multi_thread")]
async fn a_single_active_consumer_is_followed_by_its_standby() {
    let server = RabbitMq::shared().await;
    let arguments = [("x-single-active-consumer", json!(true))];
    let queue = server
        .new_queue_with("orders", QueueKind::Quorum, &arguments)
        .await;
    let stage = Stage::of(&server, queue).await;
    let first = Clerk::new();
    let active = stage.start(first.clone()).await;
    stage.send(0..10).await;
    active.watched.until("acks", 10).await;
    let second = Clerk::new();
    let standby = stage.start(second.clone()).await;
    standby
        .until_health("ready", |health| health.is_ready())
        .await;
    stage.send(10..20).await;
    active.watched.until("acks", 20).await;
    assert_eq!(
        second.book.count("charge"),
        0,
        "the broker delivers to the active one alone"
    );
    active.stop().await;
    stage.send(20..30).await;
    standby.watched.until("acks", 10).await;
    standby.stop().await;
    first.book.charged_once(20);
    second.book.charged_once(10);
}

// invariant: amqp-order
#[tokio::test(flavor = "multi_thread")]
async fn a_stop_of_the_active_consumer_keeps_the_order() {
    let server = RabbitMq::shared().await;
    let arguments = [("x-single-active-consumer", json!(true))];
    let queue = server
        .new_queue_with("orders", QueueKind::Quorum, &arguments)
        .await;
    let stage = Stage::of(&server, queue).await;
    let first = Clerk::waiting();
    let second = Clerk::new();
    let active = stage
        .start_with(stage.source().in_order(), first.clone(), |consumer| {
            consumer
        })
        .await;
    stage.send(0..10).await;
    first.book.until_count("start", 1).await;
    let standby = stage
        .start_with(stage.source().in_order(), second.clone(), |consumer| {
            consumer
        })
        .await;
    standby
        .until_health("ready", |health| health.is_ready())
        .await;
    let monitor = active.monitor();
    let stopping = tokio::spawn(active.stop());
    until("it stops", LIMIT, async || match monitor.status().phase {
        Phase::Stopping => Ok(()),
        other => Err(format!("{other:?}")),
    })
    .await;
    // What it has in hand, and the nine behind it, stay with it until it has ended.
    assert_eq!(
        (first.book.count("start"), second.book.count("charge")),
        (1, 0)
    );
    first.open();
    stopping.await.unwrap();
    standby.watched.until("acks", 9).await;
    standby.stop().await;
    first.book.charged_once(1);
    assert_eq!(
        second.book.charges(),
        (1..10).map(|id| format!("charge {id}")).collect::<Vec<_>>()
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn the_consumer_of_a_higher_priority_gets_the_messages() {
    let stage = Stage::on(&RabbitMq::shared().await, QueueKind::Classic).await;
    let low = Clerk::new();
    let of_low = stage
        .start_with(stage.source().priority(1), low.clone(), |consumer| consumer)
        .await;
    let high = Clerk::new();
    let of_high = stage
        .start_with(stage.source().priority(9), high.clone(), |consumer| {
            consumer
        })
        .await;
    for running in [&of_low, &of_high] {
        running
            .until_health("ready", |health| health.is_ready())
            .await;
    }
    stage.send(0..20).await;
    of_high.watched.until("acks", 20).await;
    of_high.stop().await;
    stage.send(20..30).await;
    of_low.watched.until("acks", 10).await;
    of_low.stop().await;
    high.book.charged_once(20);
    low.book.charged_once(10);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_exclusive_consumer_is_waited_for() {
    let stage = Stage::on(&RabbitMq::shared().await, QueueKind::Classic).await;
    stage.send([1]).await;
    let other = Connection::connect(&stage.uri, ConnectionProperties::default())
        .await
        .unwrap();
    let channel = other.create_channel().await.unwrap();
    let exclusive = BasicConsumeOptions {
        exclusive: true,
        ..BasicConsumeOptions::default()
    };
    let queue = stage.queue.name().into();
    let consumer = channel
        .basic_consume(queue, "".into(), exclusive, FieldTable::default())
        .await
        .unwrap();
    let clerk = Clerk::new();
    let running = stage.start(clerk.clone()).await;
    let health = running
        .until_health("a reason at the start", |health| {
            fails(health, "open").is_some()
        })
        .await;
    assert!(
        fails(&health, "open")
            .unwrap()
            .contains("has the queue exclusively"),
        "{health}"
    );
    drop(consumer);
    other.close(200, "OK".into()).await.unwrap();
    running.watched.until("acks", 1).await;
    running.stop().await;
    clerk.book.charged_once(1);
}

/// The store gates what two consumers get, one message each.
#[tokio::test(flavor = "multi_thread")]
async fn two_consumers_share_a_queue_and_a_scope() {
    let stage = Stage::on(&RabbitMq::shared().await, QueueKind::Quorum).await;
    let clerk = Clerk::new();
    let one = stage
        .start_with(stage.source().prefetch(4), clerk.clone(), |consumer| {
            consumer
        })
        .await;
    let two = stage
        .start_with(stage.source().prefetch(4), clerk.clone(), |consumer| {
            consumer
        })
        .await;
    stage.send((0..200).map(|n| n % 100)).await;
    stage.queue.until_ready(0).await;
    clerk.book.until_count("charge", 100).await;
    clerk.book.until_count("answer", 100).await;
    one.stop().await;
    two.stop().await;
    clerk.book.charged_once(100);
    assert_eq!(stage.queue.ready().await, 0);
}
