//! Stopping: what has started ends, and the rest goes back at once.

use std::sync::Arc;
use std::time::Duration;

use oncegate::Consumer;
use oncegate_testkit::Sqs;

use crate::stage::{Clerk, Stage, body};

/// So long that nothing is visible again by itself before a test ends.
const LONG: Duration = Duration::from_secs(600);
const MESSAGES: u32 = 8;

// invariant: hidden-after-stop
#[tokio::test(flavor = "multi_thread")]
async fn a_stop_hands_back_what_has_not_started_and_what_does_not_end() {
    let stage = Stage::fifo_on(&Sqs::shared().await).await;
    stage
        .queue
        .send_to_group("g", (0..MESSAGES).map(body))
        .await;
    let clerk = Clerk::waiting();
    // One group: the first one runs, and the others wait behind it.
    let hurried = |consumer: Consumer| {
        consumer
            .stop_deadline(Duration::from_secs(2))
            .concurrency(MESSAGES)
    };
    let running = stage
        .start_with(stage.source().visibility(LONG), clerk.clone(), hurried)
        .await;
    clerk.book.until("started", |lines| !lines.is_empty()).await;
    stage
        .queue
        .until("received", |depth| depth.in_flight == u64::from(MESSAGES))
        .await;
    let watched = running.stop().await;
    let depth = stage.queue.depth().await;
    assert_eq!(
        (depth.visible, depth.in_flight),
        (MESSAGES.into(), 0),
        "all are visible at once"
    );
    assert_eq!(watched.total("acks") + watched.total("dead_letters"), 0);

    clerk.open();
    let running = stage.start(clerk.clone()).await;
    running.watched.until("acks", MESSAGES.into()).await;
    let watched = running.stop().await;
    assert_eq!(clerk.charges().len(), MESSAGES as usize);
    assert!(clerk.charges().values().all(|count| *count == 1));
    assert_eq!(watched.total("extra_runs"), 0, "a stop is no crash");
}

/// A long poll that is cut strands what it would have brought.
// invariant: hidden-after-stop
#[tokio::test(flavor = "multi_thread")]
async fn what_a_long_poll_brings_during_a_stop_goes_back_at_once() {
    const MESSAGES: u64 = 40;
    let stage = Stage::on(&Sqs::shared().await).await;
    let clerk = Clerk::new();
    let running = stage
        .start_with(stage.source().visibility(LONG), clerk.clone(), |consumer| {
            consumer
        })
        .await;
    running.watched.until_source("sqs_receive", 1).await;
    let (watched, ()) = tokio::join!(running.stop(), stage.send(0..40));
    stage
        .queue
        .until("given back", |depth| depth.in_flight == 0)
        .await;
    let handled = watched.total("acks");
    assert_eq!(
        stage.queue.depth().await.visible,
        MESSAGES - handled,
        "visible at once, or done"
    );
    assert_eq!(clerk.charges().len() as u64, handled);
}

/// A handler that is slow to end delays only its own message.
// invariant: hidden-after-stop
#[tokio::test(flavor = "multi_thread")]
async fn what_comes_during_a_stop_does_not_wait_for_the_handlers() {
    let stage = Stage::on(&Sqs::shared().await).await;
    stage.send([1]).await;
    let clerk = Clerk::waiting();
    let two = |consumer: Consumer| consumer.concurrency(2);
    let running = stage
        .start_with(stage.source().visibility(LONG), clerk.clone(), two)
        .await;
    clerk.book.until_line("start 1").await;
    // Another receive is in progress: there is a permit for one more.
    running.watched.until_source("sqs_receive", 2).await;
    let watched = Arc::clone(&running.watched);
    let late = async {
        stage.send([2]).await;
        watched.until_source("sqs_returned", 1).await;
        clerk.open();
    };
    let (watched, ()) = tokio::join!(running.stop(), late);
    assert_eq!(watched.total("acks"), 1, "the first may end");
    assert_eq!(clerk.book.lines(), ["start 1", "charge 1"]);
    let depth = stage.queue.depth().await;
    assert_eq!((depth.visible, depth.in_flight), (1, 0));
}
