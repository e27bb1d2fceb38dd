//! A broker that is killed and comes back.

use oncegate::{Attempt, Failure, Handler, Message};
use oncegate_testkit::{QueueKind, RabbitMqServer, RabbitRelease};

use crate::stage::{Clerk, Stage, body, fails};

/// Gives every message up once its clerk may go on.
struct Refusing(Clerk);

impl Handler for Refusing {
    type Output = u32;

    async fn handle(&self, message: &Message, attempt: &Attempt) -> Result<u32, Failure> {
        self.0.handle(message, attempt).await?;
        Err(Failure::permanent("refused"))
    }
}

async fn is_waited_for_at_the_start(server: &mut RabbitMqServer) {
    let stage = Stage::on(server, QueueKind::Quorum).await;
    server.write_down().await;
    stage.send([1]).await;
    server.kill();
    let clerk = Clerk::new();
    let running = stage.start(clerk.clone()).await;
    running
        .until_health("a reason at the start", |health| {
            fails(health, "open").is_some()
        })
        .await;
    server.start_again().await;
    running.watched.until("acks", 1).await;
    running.stop().await;
    clerk.book.charged_once(1);
}

// invariant: queue-message-lost
#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_lost_when_the_broker_is_killed() {
    const MESSAGES: u32 = 200;
    let mut server = RabbitMqServer::start().await;
    is_waited_for_at_the_start(&mut server).await;
    for kind in [QueueKind::Classic, QueueKind::Quorum] {
        let stage = Stage::on(&server, kind).await;
        server.write_down().await;
        stage.send(0..MESSAGES).await;
        let clerk = Clerk::waiting();
        let running = stage.start(clerk.clone()).await;
        clerk.book.until_count("start", 8).await;
        server.kill();
        running
            .until_health("not ready", |health| fails(health, "receive").is_some())
            .await;
        clerk.open();
        server.start_again().await;
        clerk.book.until_charged(MESSAGES).await;
        running
            .until_health("ready", |health| health.is_ready())
            .await;
        running.stop().await;
        clerk.book.charged_once(MESSAGES);
        assert_eq!(stage.queue.ready().await, 0, "{kind:?}");
    }
}

/// Two nodes, each of which takes the other for dead: a quorum queue has no majority, and goes on
/// when they meet again.
// invariant: queue-message-lost
#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_lost_when_the_nodes_of_a_cluster_are_parted() {
    const MESSAGES: u32 = 200;
    // It restarts the node with fewer clients. RabbitMQ 4.3 has no such setting, and needs none.
    let first = RabbitMqServer::start_with("cluster_partition_handling = autoheal").await;
    let second = first.start_joined().await;
    for kind in [QueueKind::Classic, QueueKind::Quorum] {
        let stage = Stage::on(&first, kind).await;
        stage.send(0..MESSAGES).await;
        let clerk = Clerk::waiting();
        let running = stage.start(clerk.clone()).await;
        clerk.book.until_count("start", 8).await;
        first.part_from(&second).await;
        // Results are stored, and acknowledged to a queue that may not take it.
        clerk.open();
        clerk.book.until_count("charge", 8).await;
        first.rejoin(&second).await;
        clerk.book.until_charged(MESSAGES).await;
        running
            .until_health("ready", |health| health.is_ready())
            .await;
        running.stop().await;
        clerk.book.charged_once(MESSAGES);
        stage.queue.until_ready(0).await;
    }
}

/// A broker that is short of memory reads nothing from connections that publish, and goes on with
/// acks.
// invariant: ack-before-completed
#[tokio::test(flavor = "multi_thread")]
async fn an_alarm_of_the_broker_holds_up_dead_letters_and_no_acks() {
    let server = RabbitMqServer::start().await;
    acks_continue(&server).await;
    dead_letters_wait(&server).await;
}

/// A backlog may be what the broker is short of memory for.
#[tokio::test(flavor = "multi_thread")]
async fn a_consumer_starts_during_an_alarm_and_empties_the_queue() {
    for release in RabbitRelease::ALL {
        let server = RabbitMqServer::start_release(release, "").await;
        let stage = Stage::on(&server, QueueKind::Quorum).await;
        stage.send([1, 2]).await;
        server.raise_memory_alarm().await;
        let clerk = Clerk::new();
        let running = stage.start(clerk.clone()).await;
        running.watched.until("acks", 2).await;
        server.clear_memory_alarm().await;
        running.stop().await;
        clerk.book.charged_once(2);
    }
}

async fn acks_continue(server: &RabbitMqServer) {
    let stage = Stage::on(server, QueueKind::Quorum).await;
    let clerk = Clerk::waiting();
    let running = stage.start(clerk.clone()).await;
    stage
        .queue
        .send([body(1), "no json".to_owned(), body(2)])
        .await;
    clerk.book.until_count("start", 2).await;
    stage.dead.until_ready(1).await;
    running.watched.until("acks", 1).await;
    // The connection that publishes is blocked at its next message.
    server.raise_memory_alarm().await;
    clerk.open();
    running.watched.until("acks", 3).await;
    server.clear_memory_alarm().await;
    running.stop().await;
    clerk.book.charged_once(2);
}

async fn dead_letters_wait(server: &RabbitMqServer) {
    let stage = Stage::on(server, QueueKind::Quorum).await;
    let clerk = Clerk::waiting();
    let running = stage.start(Refusing(clerk.clone())).await;
    stage.send([1, 2]).await;
    clerk.book.until_count("start", 2).await;
    server.raise_memory_alarm().await;
    clerk.open();
    let said = running
        .until_failure("dead_letter", "short of memory or disk")
        .await;
    assert!(said.contains("check_local_alarms"), "{said}");
    assert_eq!(
        running.watched.total("acks"),
        0,
        "no ack without a dead letter"
    );
    server.clear_memory_alarm().await;
    running.watched.until("acks", 2).await;
    running.stop().await;
    // A letter whose confirmation was lost with its connection is written again.
    assert!(stage.dead.ready().await >= 2);
    assert_eq!(stage.queue.ready().await, 0);
}
