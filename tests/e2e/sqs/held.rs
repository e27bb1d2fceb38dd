//! Visibility: kept as long as a message is needed, and what happens when it is lost.

use oncegate::{Attempt, Consumer, Failure, Message};
use oncegate_testkit::{Fault, Moto, Sqs, SqsProxy};

use crate::stage::{Clerk, EXTENDED_VISIBILITY, SHORT_VISIBILITY, Stage};

const EXTEND: &str = "ChangeMessageVisibilityBatch";
const DELETE: &str = "DeleteMessageBatch";

/// How many extensions of one message show that it was held beyond its first visibility timeout:
/// each comes after half of it.
const EXTENSIONS: u64 = 3;

async fn a_long_handler_keeps_its_message(sqs: &Sqs) {
    let stage = Stage::on(sqs).await.with_visibility(EXTENDED_VISIBILITY);
    stage.send([7]).await;
    let clerk = Clerk::waiting();
    let running = stage.start(clerk.clone()).await;
    clerk.book.until_line("start 7").await;
    running
        .watched
        .until_source("sqs_visibility_extended", EXTENSIONS)
        .await;
    assert!(
        stage.queue.receive(SHORT_VISIBILITY).await.is_empty(),
        "no other consumer receives it"
    );
    clerk.open();
    running.watched.until("acks", 1).await;
    let watched = running.stop().await;
    assert_eq!(clerk.book.lines(), ["start 7", "charge 7"]);
    assert_eq!(
        watched.total("extra_runs") + watched.source("sqs_visibility_lost"),
        0
    );
    stage.queue.until_empty().await;
}

// invariant: visibility-lost
#[tokio::test(flavor = "multi_thread")]
async fn a_long_handler_keeps_its_message_on_elasticmq() {
    a_long_handler_keeps_its_message(&Sqs::shared().await).await;
}

// invariant: visibility-lost
#[tokio::test(flavor = "multi_thread")]
async fn a_long_handler_keeps_its_message_on_moto() {
    a_long_handler_keeps_its_message(Moto::shared().await.sqs()).await;
}

/// The fault itself: both threads of the runtime do nothing else for three visibility timeouts.
// invariant: visibility-lost
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_handler_that_blocks_its_thread_keeps_its_message() {
    let sqs = Sqs::shared().await;
    let stage = Stage::on(&sqs).await.with_visibility(SHORT_VISIBILITY);
    stage.send([1, 2]).await;
    let blocking = async |_: Message, _: Attempt| {
        std::thread::sleep(SHORT_VISIBILITY * 3);
        Ok::<(), Failure>(())
    };
    let running = stage.start(blocking).await;
    running.watched.until("acks", 2).await;
    let watched = running.stop().await;
    assert_eq!(watched.get("handler_runs", "succeeded"), 2);
    assert_eq!(
        watched.total("extra_runs") + watched.source("sqs_visibility_lost"),
        0
    );
    stage.queue.until_empty().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn extensions_go_in_batches_and_failed_parts_repeat_in_time() {
    const MESSAGES: u64 = 20;
    let sqs = Sqs::shared().await;
    let proxy = SqsProxy::before(&sqs).await;
    let stage = Stage::on(&sqs)
        .await
        .with_visibility(EXTENDED_VISIBILITY)
        .through(&proxy);
    stage.send(0..20).await;
    let clerk = Clerk::waiting();
    let at = vec![0, 4];
    proxy.next(
        2,
        EXTEND,
        Fault::FailEntries {
            at,
            code: "InternalError",
            senders_fault: false,
        },
    );
    let running = stage.start(clerk.clone()).await;
    running
        .watched
        .until_source("sqs_visibility_extended", MESSAGES * EXTENSIONS)
        .await;
    assert!(
        stage.queue.receive(SHORT_VISIBILITY).await.is_empty(),
        "all of them are still held"
    );
    let calls = proxy.calls(EXTEND);
    let entries = proxy.entries(EXTEND);
    assert!(
        calls * 3 < entries,
        "{entries} extensions took {calls} calls"
    );
    clerk.open();
    running.watched.until("acks", MESSAGES).await;
    let watched = running.stop().await;
    assert!(clerk.charges().values().all(|count| *count == 1));
    assert_eq!(watched.source("sqs_visibility_lost"), 0);
    assert_eq!(watched.get("claims", "completed"), 0, "none came again");
}

/// The queue reports an invalid receipt handle: another consumer has the message, or will receive
/// it. The key is still this run's, so the run ends under its lease.
// invariant: delete-after-loss
#[tokio::test(flavor = "multi_thread")]
async fn a_message_that_is_lost_in_mid_handler_is_finished_not_acked() {
    let sqs = Sqs::shared().await;
    let proxy = SqsProxy::before(&sqs).await;
    let stage = Stage::on(&sqs)
        .await
        .with_visibility(SHORT_VISIBILITY)
        .through(&proxy);
    stage.send([7]).await;
    let clerk = Clerk::waiting();
    let running = stage.start(clerk.clone()).await;
    clerk.book.until_line("start 7").await;
    let deletes = proxy.calls(DELETE);
    let code = "ReceiptHandleIsInvalid";
    proxy.next(
        1,
        EXTEND,
        Fault::FailEntries {
            at: vec![0],
            code,
            senders_fault: true,
        },
    );
    running.watched.until_source("sqs_visibility_lost", 1).await;
    let extended = running.watched.source("sqs_visibility_extended");
    assert_eq!(proxy.calls(DELETE), deletes, "what is lost is not deleted");
    // It comes again when the visibility timeout that was not extended is over, to this consumer.
    running
        .watched
        .until_source("sqs_visibility_extended", extended + 1)
        .await;
    clerk.open();
    running.watched.until("acks", 1).await;
    let watched = running.stop().await;
    assert_eq!(clerk.book.lines(), ["start 7", "charge 7"]);
    assert_eq!(
        watched.total("extra_runs") + watched.get("handler_runs", "discarded"),
        0
    );
    stage.queue.until_empty().await;
}

/// No extension gets through, so the queue shows the message to a second consumer. The first goes
/// on under its lease, and leaves the message alone; the second waits for its result.
// invariant: delete-after-loss
#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_cannot_extend_finishes_and_the_next_answers() {
    let sqs = Sqs::shared().await;
    let proxy = SqsProxy::before(&sqs).await;
    let stage = Stage::on(&sqs)
        .await
        .with_visibility(SHORT_VISIBILITY)
        .through(&proxy);
    stage.send([7]).await;
    let first = Clerk::waiting();
    let mut second = Clerk::new();
    // One book for both shows the order.
    second.book = first.book.clone();
    // With one place and a message in it, no receive is in progress.
    let one_at_a_time = |consumer: Consumer| consumer.concurrency(1);
    let cut_off = stage
        .start_with(stage.source(), first.clone(), one_at_a_time)
        .await;
    first.book.until_line("start 7").await;
    proxy.every(EXTEND, Fault::Hold);
    proxy.every("ReceiveMessage", Fault::Hold);
    let deletes = proxy.entries(DELETE);
    let next = stage.beside(&sqs).start(second).await;
    next.watched.until_label("claims", "busy", 1).await;
    cut_off.watched.until_source("sqs_visibility_lost", 1).await;
    first.open();
    next.watched.until("acks", 1).await;
    assert_eq!(
        first.book.lines(),
        ["start 7", "charge 7", "answer 7, receive 2"]
    );
    proxy.heal();
    let cut_off = cut_off.stop().await;
    let next = next.stop().await;
    assert_eq!(
        proxy.entries(DELETE),
        deletes,
        "the first has deleted nothing"
    );
    assert_eq!(cut_off.get("handler_runs", "discarded"), 0);
    assert_eq!(cut_off.total("extra_runs") + next.total("extra_runs"), 0);
    stage.queue.until_empty().await;
}

/// Another worker has the key. Returning the message again and again would use up its receives, and
/// the redrive policy would take a healthy message.
// invariant: busy-returned-to-queue
#[tokio::test(flavor = "multi_thread")]
async fn a_busy_message_waits_without_using_up_its_receives() {
    let sqs = Sqs::shared().await;
    let stage = Stage::on(&sqs).await.with_visibility(EXTENDED_VISIBILITY);
    stage.queue.redrive_to(&stage.dead, 3).await;
    stage.send([7]).await;
    let clerk = Clerk::waiting();
    // The owner has one place, and it is taken: the duplicate goes to the other one.
    let one_at_a_time = |consumer: Consumer| consumer.concurrency(1);
    let owner = stage
        .start_with(stage.source(), clerk.clone(), one_at_a_time)
        .await;
    clerk.book.until_line("start 7").await;
    stage.send([7]).await;
    let other = stage.start(clerk.clone()).await;
    other
        .watched
        .until_source("sqs_visibility_extended", EXTENSIONS)
        .await;
    assert!(
        other.watched.get("claims", "busy") > 1,
        "it has asked again and again"
    );
    clerk.open();
    other.watched.until("acks", 1).await;
    other.stop().await;
    owner.stop().await;
    assert_eq!(
        clerk.book.lines(),
        ["start 7", "charge 7", "answer 7, receive 1"]
    );
    stage.queue.until_empty().await;
    assert_eq!(
        stage.dead.depth().await.total(),
        0,
        "the redrive policy took nothing"
    );
}
