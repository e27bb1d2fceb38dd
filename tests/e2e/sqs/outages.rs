//! Servers that are away for a while.

use std::time::Duration;

use oncegate::{Attempt, Message};
use oncegate_testkit::{ElasticmqServer, RedisServer, Sqs, SqsProxy};

use crate::stage::{Book, Clerk, EXTENDED_VISIBILITY, SHORT_VISIBILITY, Stage, id};

// invariant: queue-message-lost
#[tokio::test(flavor = "multi_thread")]
async fn a_killed_queue_server_is_waited_for_and_nothing_is_lost() {
    const MESSAGES: u32 = 100;
    let mut server = ElasticmqServer::start_durable().await;
    // What a lost answer has hidden comes again.
    let stage = Stage::on(&server).await.with_visibility(SHORT_VISIBILITY);
    stage.send(0..MESSAGES).await;
    let clerk = Clerk::new();
    let running = stage.start(clerk.clone()).await;
    running.watched.until("acks", u64::from(MESSAGES) / 4).await;
    let before = running.watched.total("source_errors");
    server.kill();
    running.watched.until("source_errors", before + 3).await;
    server.start_again().await;
    running.watched.until("acks", MESSAGES.into()).await;
    stage.queue.until_empty().await;
    let watched = running.stop().await;
    assert_eq!(clerk.charges().len(), MESSAGES as usize, "none is lost");
    assert!(
        clerk.charges().values().all(|count| *count == 1),
        "none is charged twice"
    );
    assert_eq!(
        watched.total("extra_runs") + watched.total("dead_letters"),
        0
    );
}

/// Nothing is received that could not be handled, and what is held stays held.
// invariant: receive-without-handler
#[tokio::test(flavor = "multi_thread")]
async fn in_a_store_outage_nothing_is_received_and_held_ones_stay() {
    const MESSAGES: u32 = 30;
    let sqs = Sqs::shared().await;
    let proxy = SqsProxy::before(&sqs).await;
    let mut redis = RedisServer::synced().await;
    let stage = Stage::on(&sqs)
        .await
        .with_visibility(EXTENDED_VISIBILITY)
        .with_redis(&redis)
        .through(&proxy);
    stage.queue.redrive_to(&stage.dead, 2).await;
    let clerk = Clerk::new();
    let running = stage
        .start_with(stage.source(), clerk.clone(), |consumer| {
            consumer.concurrency(4)
        })
        .await;
    stage.send(0..10).await;
    running.watched.until("acks", 10).await;
    redis.kill();
    stage.send(10..MESSAGES).await;
    running.watched.until("store_errors", 1).await;
    running
        .watched
        .until_source("sqs_visibility_extended", 8)
        .await;
    // One that was in progress when the store went away may still have come back.
    let receives = proxy.calls("ReceiveMessage");
    stage.queue.until("held", |depth| depth.in_flight > 0).await;
    running
        .watched
        .until_source("sqs_visibility_extended", 16)
        .await;
    assert_eq!(
        proxy.calls("ReceiveMessage"),
        receives,
        "half of {EXTENDED_VISIBILITY:?} and more without a receive"
    );
    redis.start_again().await;
    running.watched.until("acks", MESSAGES.into()).await;
    running.stop().await;
    assert_eq!(clerk.charges().len(), MESSAGES as usize);
    assert!(clerk.charges().values().all(|count| *count == 1));
    assert_eq!(
        stage.dead.depth().await.total(),
        0,
        "the redrive policy took nothing"
    );
    assert_eq!(stage.queue.depth().await.total(), 0);
}

// invariant: result-of-an-outage
#[tokio::test(flavor = "multi_thread")]
async fn a_queue_handler_that_ends_in_a_long_outage_runs_once() {
    const LEASE: Duration = Duration::from_secs(6);
    let sqs = Sqs::shared().await;
    let mut redis = RedisServer::synced().await;
    let stage = Stage::on(&sqs).await.with_redis(&redis).with_lease(LEASE);
    stage.queue.redrive_to(&stage.dead, 2).await;
    stage.send([7]).await;
    let book = Book::new();
    let handler = {
        let book = book.clone();
        move |message: Message, attempt: Attempt| {
            let book = book.clone();
            async move {
                let id = id(&message)?;
                book.write(format!("start {id}"));
                // Resolves because no heartbeat is confirmed. The handler goes on all the same,
                // past the end of its lease.
                attempt.cancelled().await;
                tokio::time::sleep(LEASE).await;
                book.write(format!("charge {id}"));
                Ok(())
            }
        }
    };
    let running = stage.start(handler).await;
    book.until_line("start 7").await;
    redis.kill();
    book.until_line("charge 7").await;
    assert_eq!(
        running.watched.total("acks"),
        0,
        "nothing is acknowledged before the store has answered"
    );
    redis.start_again().await;
    running.watched.until("acks", 1).await;
    let watched = running.stop().await;
    assert_eq!(book.lines(), ["start 7", "charge 7"]);
    assert_eq!(
        watched.total("extra_runs") + watched.total("dead_letters"),
        0
    );
    assert_eq!(
        (
            stage.queue.depth().await.total(),
            stage.dead.depth().await.total()
        ),
        (0, 0)
    );
}
