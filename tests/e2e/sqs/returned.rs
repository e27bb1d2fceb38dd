//! Dead letters that the queue's own tools have moved back.

use aws_sdk_sqs::types::SendMessageBatchRequestEntry;
use oncegate::{Attempt, Failure, Message};
use oncegate_testkit::Sqs;

use crate::stage::{Book, Stage, id};

const ORDERS: u32 = 10;

/// The console's button and `StartMessageMoveTask` move each dead letter as it is, with its
/// attributes.
// invariant: redrive-that-loses
#[tokio::test(flavor = "multi_thread")]
async fn letters_that_sqs_moves_back_run_again() {
    let stage = Stage::on(&Sqs::shared().await).await;
    stage.send(0..ORDERS).await;
    let broken = stage
        .start(async |_: Message, _: Attempt| Err::<(), _>(Failure::permanent("closed")))
        .await;
    broken.watched.until("dead_letters", ORDERS.into()).await;
    stage.queue.until_empty().await;
    broken.stop().await;

    let letters = stage.dead.take_all().await;
    assert_eq!(letters.len(), ORDERS as usize);
    let moved = letters.into_iter().map(|letter| {
        let entry = SendMessageBatchRequestEntry::builder().set_message_body(letter.body);
        entry.set_message_attributes(letter.message_attributes)
    });
    stage.queue.send_in_order(moved.collect()).await;

    let book = Book::new();
    let noted = book.clone();
    let mended = move |message: Message, _: Attempt| {
        let book = noted.clone();
        async move {
            book.write(format!("handled {}", id(&message)?));
            Ok::<(), Failure>(())
        }
    };
    let running = stage.start(mended).await;
    running.watched.until("acks", ORDERS.into()).await;
    stage.queue.until_empty().await;
    let watched = running.stop().await;
    let mut handled = book.lines();
    handled.sort_unstable();
    assert_eq!(
        handled,
        (0..ORDERS)
            .map(|id| format!("handled {id}"))
            .collect::<Vec<_>>()
    );
    assert_eq!(watched.get("extra_runs", "reset"), u64::from(ORDERS));
}
