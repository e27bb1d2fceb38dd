//! Stopping: what has started ends, and the rest goes back at once.

use std::time::Duration;

use oncegate::{Consumer, Ordering};
use oncegate_tests::Sqs;

use crate::stage::{Clerk, Stage};

/// So long that nothing is visible again by itself before a test ends.
const LONG: Duration = Duration::from_secs(600);
const MESSAGES: u32 = 8;

#[tokio::test(flavor = "multi_thread")]
async fn a_stop_hands_back_what_has_not_started_and_what_does_not_end() {
    let stage = Stage::on(&Sqs::shared().await).await;
    stage.send(0..MESSAGES).await;
    let clerk = Clerk::waiting();
    // One lane: the first one runs, and the others wait behind it.
    let one_lane = |consumer: Consumer| {
        consumer.ordering(Ordering::Partition).stop_deadline(Duration::from_secs(2)).concurrency(MESSAGES)
    };
    let running = stage.start_with(stage.source().visibility(LONG), clerk.clone(), one_lane).await;
    clerk.book.until("started", |lines| !lines.is_empty()).await;
    stage.queue.until("received", |depth| depth.in_flight == u64::from(MESSAGES)).await;
    let watched = running.stop().await;
    let depth = stage.queue.depth().await;
    assert_eq!((depth.visible, depth.in_flight), (MESSAGES.into(), 0), "all are visible at once");
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
#[tokio::test(flavor = "multi_thread")]
async fn what_a_long_poll_brings_during_a_stop_goes_back_at_once() {
    const MESSAGES: u64 = 40;
    let stage = Stage::on(&Sqs::shared().await).await;
    let clerk = Clerk::new();
    let running = stage.start_with(stage.source().visibility(LONG), clerk.clone(), |consumer| consumer).await;
    running.watched.until("sqs_calls", 1).await;
    let (watched, ()) = tokio::join!(running.stop(), stage.send(0..40));
    stage.queue.until("given back", |depth| depth.in_flight == 0).await;
    let handled = watched.total("acks");
    assert_eq!(stage.queue.depth().await.visible, MESSAGES - handled, "visible at once, or done");
    assert_eq!(clerk.charges().len() as u64, handled);
}
