//! Connections that are lost, and channels that the broker closes.

use std::sync::Arc;
use std::time::Duration;

use oncegate::observe::Counters;
use oncegate::source::Source as _;
use oncegate_testkit::{QueueKind, RabbitMq, RabbitMqServer, until};

use crate::stage::{Clerk, LIMIT, Stage, fails};

/// The name that a source's connection has at the broker.
fn consuming(stage: &Stage) -> String {
    format!("oncegate consumes {}", stage.queue.name())
}

/// A run ends under its lease, and its answer counts: calling it again would repeat its effect.
// invariant: amqp-ack-of-an-old-channel, lost-delivery-stops-no-run
#[tokio::test(flavor = "multi_thread")]
async fn a_lost_connection_stops_no_run() {
    const MESSAGES: u32 = 5;
    let server = RabbitMq::shared().await;
    let stage = Stage::on(&server, QueueKind::Quorum).await;
    stage.send(0..MESSAGES).await;
    let clerk = Clerk::waiting();
    let running = stage.start(clerk.clone()).await;
    clerk.book.until_count("start", MESSAGES as usize).await;
    server.close_connection(&consuming(&stage)).await;
    running.watched.until("source_errors", 1).await;
    running
        .until_health("ready", |health| health.is_ready())
        .await;
    clerk.open();
    // They are delivered again, by another channel, and answered.
    clerk.book.until_count("answer", MESSAGES as usize).await;
    let watched = running.stop().await;
    clerk.book.charged_once(MESSAGES);
    assert_eq!(clerk.book.count("cancelled"), 0);
    assert_eq!(clerk.book.count("start"), MESSAGES as usize);
    assert_eq!(stage.queue.ready().await, 0);
    assert_eq!(
        watched.total("dead_letters"),
        0,
        "a lost connection uses up no attempts"
    );
}

/// An ack of the old channel would acknowledge another message on the new one.
// invariant: amqp-ack-of-an-old-channel
#[tokio::test(flavor = "multi_thread")]
async fn what_ends_after_a_lost_connection_is_answered_later() {
    const MESSAGES: u32 = 8;
    let server = RabbitMq::shared().await;
    let stage = Stage::on(&server, QueueKind::Classic).await;
    stage.send(0..MESSAGES).await;
    let clerk = Clerk::stubborn();
    let running = stage.start(clerk.clone()).await;
    clerk.book.until_count("start", MESSAGES as usize).await;
    server.close_connection(&consuming(&stage)).await;
    running.watched.until("source_errors", 1).await;
    clerk.open();
    running.watched.until("acks", MESSAGES.into()).await;
    clerk.book.until_count("answer", MESSAGES as usize).await;
    running.stop().await;
    clerk.book.charged_once(MESSAGES);
    assert_eq!(stage.queue.ready().await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_silent_connection_is_given_up_after_heartbeats() {
    let mut server = RabbitMqServer::start().await;
    let mut stage = Stage::on(&server, QueueKind::Quorum).await;
    stage.uri = format!("{}?heartbeat=1", stage.uri);
    let clerk = Clerk::new();
    let running = stage.start(clerk.clone()).await;
    stage.send([1]).await;
    running.watched.until("acks", 1).await;
    server.process().signal("STOP");
    running.watched.until("source_errors", 1).await;
    let health = running
        .until_health("not ready", |health| fails(health, "receive").is_some())
        .await;
    assert!(health.is_live() && !health.is_ready(), "{health}");
    server.process().signal("CONT");
    running
        .until_health("ready", |health| {
            health.is_ready() && fails(health, "receive").is_none()
        })
        .await;
    stage.send([2]).await;
    clerk.book.until_charged(2).await;
    running.stop().await;
    clerk.book.charged_once(2);
    stage.queue.until_ready(0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_brokers_consumer_timeout_is_named() {
    let server = RabbitMqServer::start_with("consumer_timeout = 1000").await;
    // RabbitMQ 4.3 has no such timeout for classic queues, and cancels the consumer of a quorum
    // queue.
    let stage = Stage::on(&server, QueueKind::Quorum).await;
    stage.send([1]).await;
    let clerk = Clerk::waiting();
    let running = stage.start(clerk.clone()).await;
    let said = running.until_failure("receive", "consumer_timeout").await;
    assert!(said.contains("rabbitmq.conf"), "{said}");
    clerk.open();
    running.watched.until("acks", 1).await;
    running.stop().await;
    clerk.book.charged_once(1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_queue_that_is_deleted_and_made_again_is_consumed() {
    let server = RabbitMq::shared().await;
    let stage = Stage::on(&server, QueueKind::Classic).await;
    let clerk = Clerk::new();
    let running = stage.start(clerk.clone()).await;
    stage.send([1]).await;
    running.watched.until("acks", 1).await;
    server.delete_queue(&stage.queue).await;
    running.until_failure("receive", "does not exist").await;
    let path = format!("/api/queues/%2F/{}", stage.queue.name());
    server
        .manage(
            "PUT",
            &path,
            r#"{"durable":true,"arguments":{"x-queue-type":"quorum"}}"#,
        )
        .await;
    stage.send([2]).await;
    running.watched.until("acks", 2).await;
    running.stop().await;
    clerk.book.charged_once(2);
}

// invariant: hidden-after-stop
#[tokio::test(flavor = "multi_thread")]
async fn a_stop_returns_what_has_not_started_and_does_not_end() {
    const MESSAGES: u32 = 8;
    let stage = Stage::on(&RabbitMq::shared().await, QueueKind::Quorum).await;
    stage.send(0..MESSAGES).await;
    let clerk = Clerk::waiting();
    let running = stage
        .start_with(stage.source(), clerk.clone(), |consumer| {
            consumer
                .stop_deadline(Duration::from_secs(2))
                .concurrency(2)
        })
        .await;
    clerk.book.until_count("start", 2).await;
    stage.queue.until_ready(0).await;
    let watched = running.stop().await;
    assert_eq!(stage.queue.ready().await, MESSAGES, "all are back");
    assert_eq!(watched.total("acks") + watched.total("dead_letters"), 0);

    clerk.open();
    let running = stage.start(clerk.clone()).await;
    running.watched.until("acks", MESSAGES.into()).await;
    let watched = running.stop().await;
    clerk.book.charged_once(MESSAGES);
    assert_eq!(watched.total("extra_runs"), 0, "a stop is no crash");
}

/// The queue is consumed, and `open` has not been polled since.
// invariant: member-that-has-gone
#[tokio::test(flavor = "multi_thread")]
async fn a_source_dropped_while_it_opens_leaves_its_queue() {
    let server = RabbitMq::shared().await;
    let stage = Stage::on(&server, QueueKind::Quorum).await;
    let source = stage.source();
    let mut opening = source.open(Arc::new(Counters::default()));
    let ended = futures_util::poll!(&mut opening);
    assert!(ended.is_pending(), "the thread has just begun: {ended:?}");
    let consumers = async |count: usize| match server.consumers(&stage.queue).await {
        found if found == count => Ok(()),
        found => Err(format!("{found} consumers")),
    };
    until("it consumes", LIMIT, async || consumers(1).await).await;
    drop(opening);
    until("it has left", LIMIT, async || consumers(0).await).await;
}
