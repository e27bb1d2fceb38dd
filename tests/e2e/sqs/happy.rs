//! What should go well, on both servers.

use oncegate_testkit::{Moto, Sqs};

use crate::stage::{Clerk, Stage};

/// Half of the orders come a second time.
async fn each_order_is_charged_once_and_each_message_deleted(sqs: &Sqs, orders: u32) {
    let messages = orders + orders / 2;
    let stage = Stage::on(sqs).await;
    stage.send((0..messages).map(|n| n % orders)).await;
    let clerk = Clerk::new();
    let running = stage.start(clerk.clone()).await;
    running.watched.until("acks", messages.into()).await;
    stage.queue.until_empty().await;
    let watched = running.stop().await;
    let charges = clerk.charges();
    assert_eq!(charges.len(), orders as usize, "none is lost");
    assert!(charges.values().all(|count| *count == 1), "{charges:?}");
    let answers = clerk
        .book
        .lines()
        .iter()
        .filter(|line| line.starts_with("answer"))
        .count();
    assert_eq!(
        answers,
        (messages - orders) as usize,
        "duplicates get the stored result: {watched:?}"
    );
    for name in ["extra_runs", "dead_letters", "source_errors"] {
        assert_eq!(watched.total(name), 0, "{name}: {watched:?}");
    }
    for event in ["sqs_visibility_lost", "sqs_delete_failed"] {
        assert_eq!(watched.source(event), 0, "{event}: {watched:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn each_order_is_charged_once_on_elasticmq() {
    each_order_is_charged_once_and_each_message_deleted(&Sqs::shared().await, 200).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn each_order_is_charged_once_on_moto() {
    each_order_is_charged_once_and_each_message_deleted(Moto::shared().await.sqs(), 40).await;
}
