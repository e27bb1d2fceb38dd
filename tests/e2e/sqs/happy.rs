//! What should go well, on both servers.

use std::sync::Arc;

use oncegate_testkit::{Moto, Sqs, Watched};

use crate::stage::{Clerk, Stage};

/// Half of the orders come a second time. Returns how many duplicates were answered, and what was
/// counted.
async fn each_order_is_charged_once(sqs: &Sqs, orders: u32) -> (usize, Arc<Watched>) {
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
    for name in ["extra_runs", "dead_letters"] {
        assert_eq!(watched.total(name), 0, "{name}: {watched:?}");
    }
    let answers = clerk
        .book
        .lines()
        .iter()
        .filter(|line| line.starts_with("answer"))
        .count();
    (answers, watched)
}

#[tokio::test(flavor = "multi_thread")]
async fn each_order_is_charged_once_on_elasticmq() {
    let (answers, watched) = each_order_is_charged_once(&Sqs::shared().await, 200).await;
    assert_eq!(
        answers, 100,
        "duplicates get the stored result: {watched:?}"
    );
    assert_eq!(watched.total("source_errors"), 0, "{watched:?}");
    for event in ["sqs_visibility_lost", "sqs_delete_failed"] {
        assert_eq!(watched.source(event), 0, "{event}: {watched:?}");
    }
}

/// moto changes its queues without a lock: calls at the same time may fail, and a message that was
/// deleted may come again.
#[tokio::test(flavor = "multi_thread")]
async fn each_order_is_charged_once_on_moto() {
    let (answers, watched) = each_order_is_charged_once(Moto::shared().await.sqs(), 40).await;
    assert!(
        answers >= 20,
        "{answers} duplicates get the stored result: {watched:?}"
    );
}
