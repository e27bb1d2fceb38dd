//! What should go well, on both servers.

use oncegate_tests::{Moto, Sqs};

use crate::stage::{Clerk, Stage};

const MESSAGES: u32 = 300;
const ORDERS: u32 = 200;

async fn each_order_is_charged_once_and_each_message_deleted(sqs: &Sqs) {
    let stage = Stage::on(sqs).await;
    stage.send((0..MESSAGES).map(|n| n % ORDERS)).await;
    let clerk = Clerk::new();
    let running = stage.start(clerk.clone()).await;
    running.watched.until("acks", MESSAGES.into()).await;
    let watched = running.stop().await;
    assert_eq!(stage.queue.depth().await.total(), 0, "everything is deleted once the consumer has stopped");
    let charges = clerk.charges();
    assert_eq!(charges.len(), ORDERS as usize, "none is lost");
    assert!(charges.values().all(|count| *count == 1), "{charges:?}");
    let answers = clerk.book.lines().iter().filter(|line| line.starts_with("answer")).count();
    assert_eq!(answers, (MESSAGES - ORDERS) as usize, "duplicates get the stored result");
    for name in ["extra_runs", "dead_letters", "source_errors", "sqs_visibility_lost", "sqs_deletes_failed"] {
        assert_eq!(watched.total(name), 0, "{name}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn each_order_is_charged_once_on_elasticmq() {
    each_order_is_charged_once_and_each_message_deleted(&Sqs::shared().await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn each_order_is_charged_once_on_moto() {
    each_order_is_charged_once_and_each_message_deleted(Moto::shared().await.sqs()).await;
}
