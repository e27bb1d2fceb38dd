//! Deletes that fail, in part or altogether, and messages that come back all the same.

use std::time::{Duration, Instant};

use oncegate::Consumer;
use oncegate_testkit::{Fault, Sqs, SqsProxy};

use crate::stage::{Clerk, EXTENDED_VISIBILITY, SHORT_VISIBILITY, Stage, body};

const DELETE: &str = "DeleteMessageBatch";

async fn stage_and_proxy() -> (Stage, SqsProxy) {
    let sqs = Sqs::shared().await;
    let proxy = SqsProxy::before(&sqs).await;
    (Stage::on(&sqs).await.through(&proxy), proxy)
}

// invariant: delete-that-failed
#[tokio::test(flavor = "multi_thread")]
async fn those_of_a_batch_that_were_not_deleted_are_deleted_again() {
    const MESSAGES: u32 = 40;
    let (stage, proxy) = stage_and_proxy().await;
    stage.send(0..MESSAGES).await;
    let clerk = Clerk::waiting();
    let running = stage.start(clerk.clone()).await;
    // All at once, so that batches are whole ones.
    clerk
        .book
        .until("all started", |lines| lines.len() == MESSAGES as usize)
        .await;
    let before = proxy.entries(DELETE);
    let at = vec![0, 3];
    proxy.next(
        3,
        DELETE,
        Fault::FailEntries {
            at,
            code: "InternalError",
            senders_fault: false,
        },
    );
    clerk.open();
    running.watched.until("acks", MESSAGES.into()).await;
    stage.queue.until_empty().await;
    // Failed deletes are separated from successful ones: only the failed are sent again.
    assert_eq!(proxy.entries(DELETE) - before, u64::from(MESSAGES) + 2 * 3);
    let watched = running.stop().await;
    assert!(clerk.charges().values().all(|count| *count == 1));
    assert_eq!(watched.get("claims", "completed"), 0, "none came again");
    assert_eq!(watched.get("source_errors", "delete"), 3);
}

// invariant: delete-that-failed
#[tokio::test(flavor = "multi_thread")]
async fn a_delete_whose_answer_is_lost_is_repeated() {
    let (stage, proxy) = stage_and_proxy().await;
    stage.send(0..10).await;
    let clerk = Clerk::waiting();
    let running = stage.start(clerk.clone()).await;
    clerk
        .book
        .until("all started", |lines| lines.len() == 10)
        .await;
    let calls = proxy.calls(DELETE);
    let before = proxy.entries(DELETE);
    proxy.next(1, DELETE, Fault::LoseReply);
    clerk.open();
    proxy.until_calls(DELETE, calls + 2).await;
    let watched = running.stop().await;
    assert_eq!(proxy.faults_met(), 1);
    assert!(
        proxy.entries(DELETE) - before > 10,
        "those of the lost answer were deleted twice"
    );
    stage.queue.until_empty().await;
    assert!(clerk.charges().values().all(|count| *count == 1));
    assert_eq!(watched.get("source_errors", "delete"), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn messages_that_come_one_at_a_time_are_deleted_together() {
    const MESSAGES: u32 = 60;
    let (stage, proxy) = stage_and_proxy().await;
    let clerk = Clerk::new();
    let running = stage.start(clerk.clone()).await;
    for id in 0..MESSAGES {
        stage.send([id]).await;
        running.watched.until("acks", u64::from(id) + 1).await;
    }
    let watched = running.stop().await;
    println!("calls for {MESSAGES} messages: {:?}", proxy.all_calls());
    assert!(
        proxy.entries(DELETE) >= u64::from(MESSAGES),
        "the stop sends the last ones"
    );
    let deletes = proxy.calls(DELETE);
    assert!(
        deletes <= u64::from(MESSAGES / 2),
        "{deletes} calls deleted {MESSAGES} messages"
    );
    stage.queue.until_empty().await;
    assert!(clerk.charges().values().all(|count| *count == 1));
    assert_eq!(watched.total("extra_runs"), 0);
}

/// A standard queue may do so; and so does a delete that comes too late.
// invariant: delivered-after-delete
#[tokio::test(flavor = "multi_thread")]
async fn a_delivery_after_the_delete_is_answered_by_the_record() {
    let (stage, proxy) = stage_and_proxy().await;
    stage.send([7]).await;
    let clerk = Clerk::new();
    let first = stage.start(clerk.clone()).await;
    first.watched.until("acks", 1).await;
    // Until the delete is answered, a delivery is the message that is being deleted.
    let first = first.stop().await;
    stage.queue.until_empty().await;
    let second = stage.start(clerk.clone()).await;
    proxy.deliver_again(&body(7));
    second.watched.until("acks", 1).await;
    let second = second.stop().await;
    assert_eq!(clerk.book.lines(), ["charge 7", "answer 7, receive 1"]);
    assert_eq!(first.total("extra_runs") + second.total("extra_runs"), 0);
}

/// The first consumer finishes, and cannot delete before the queue shows the message to the second
/// one.
// invariant: delivered-after-delete
#[tokio::test(flavor = "multi_thread")]
async fn a_late_delete_costs_a_duplicate_and_no_second_effect() {
    let (stage, proxy) = stage_and_proxy().await;
    let stage = stage.with_visibility(SHORT_VISIBILITY);
    stage.send([7]).await;
    let first = Clerk::waiting();
    let second = Clerk::new();
    // With one place and a message in it no receive is in progress, and none follows: it would get
    // its own message.
    let one_at_a_time = |consumer: Consumer| consumer.concurrency(1);
    let slow = stage
        .start_with(stage.source(), first.clone(), one_at_a_time)
        .await;
    first.book.until_line("start 7").await;
    proxy.every("ReceiveMessage", Fault::Hold);
    proxy.every(DELETE, Fault::Hold);
    first.open();
    slow.watched.until("acks", 1).await;
    let quick = stage
        .beside(&Sqs::shared().await)
        .start(second.clone())
        .await;
    quick.watched.until("acks", 1).await;
    stage.queue.until_empty().await;
    proxy.heal();
    let slow = slow.stop().await;
    let quick = quick.stop().await;
    assert_eq!(first.book.lines(), ["start 7", "charge 7"]);
    assert_eq!(second.book.lines(), ["answer 7, receive 2"]);
    assert_eq!(slow.total("extra_runs") + quick.total("extra_runs"), 0);
}

// invariant: queue-message-lost
#[tokio::test(flavor = "multi_thread")]
async fn throttling_delays_and_loses_nothing() {
    const MESSAGES: u32 = 60;
    let (stage, proxy) = stage_and_proxy().await;
    let stage = stage.with_visibility(EXTENDED_VISIBILITY);
    stage.send(0..MESSAGES).await;
    let clerk = Clerk::waiting();
    proxy.next(3, "ReceiveMessage", Fault::Throttle);
    let running = stage.start(clerk.clone()).await;
    // As many as the consumer runs at once; their visibility is extended while they wait.
    clerk
        .book
        .until("all started", |lines| lines.len() == MESSAGES as usize)
        .await;
    proxy.next(2, "ChangeMessageVisibilityBatch", Fault::Throttle);
    running
        .watched
        .until_source("sqs_visibility_extended", 2 * u64::from(MESSAGES))
        .await;
    proxy.next(3, DELETE, Fault::Throttle);
    proxy.next(3, DELETE, Fault::Unavailable);
    clerk.open();
    running.watched.until("acks", MESSAGES.into()).await;
    stage.queue.until_empty().await;
    let watched = running.stop().await;
    assert_eq!(proxy.faults_met(), 3 + 2 + 6);
    assert_eq!(clerk.charges().len(), MESSAGES as usize);
    assert!(clerk.charges().values().all(|count| *count == 1));
    assert_eq!(
        (
            watched.get("source_errors", "receive"),
            watched.get("source_errors", "delete")
        ),
        (3, 6)
    );
    for name in ["extra_runs", "dead_letters"] {
        assert_eq!(watched.total(name), 0, "{name}");
    }
    for event in ["sqs_visibility_lost", "sqs_delete_failed"] {
        assert_eq!(watched.source(event), 0, "{event}");
    }
}

/// A refused receive is retried with a growing delay, not in a tight loop.
#[tokio::test(flavor = "multi_thread")]
async fn refused_receives_are_not_repeated_in_a_spin() {
    let (stage, proxy) = stage_and_proxy().await;
    proxy.every("ReceiveMessage", Fault::Throttle);
    let running = stage.start(Clerk::new()).await;
    let started = Instant::now();
    proxy.until_calls("ReceiveMessage", 6).await;
    // Five waits that double, from a tenth of a second at the least.
    assert!(
        started.elapsed() > Duration::from_secs(3),
        "after {:?}",
        started.elapsed()
    );
    proxy.heal();
    stage.send([1]).await;
    running.watched.until("acks", 1).await;
    running.stop().await;
}
