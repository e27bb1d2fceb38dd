//! Partitions that are paused, because the buffer is full or too many messages are unfinished.

use std::collections::BTreeSet;
use std::time::Duration;

use oncegate::health::{PartitionStatus, PauseCause};
use oncegate::source::Source;
use oncegate_testkit::{Kafka, unique};

use crate::stage::{
    CLOSE, NEW, QUICK, RANGE, finish, finish_if_ours, member, number, numbered, open, place,
    receive, source, within,
};

// invariant: unbounded-queue
#[tokio::test]
async fn a_full_buffer_pauses_keeps_the_membership_and_goes_on() {
    let kafka = Kafka::shared().await;
    let topic = kafka.new_topic("full", 4).await;
    let group = unique("group");
    kafka.produce(&topic, numbered(8_000, 4)).await;
    let first = source(&kafka, &group, &topic).buffered_messages(100);
    open(&first).await;
    // The test does not receive from the first member. The second can join only because the first
    // still polls.
    let mut finished: BTreeSet<_> = finish(receive(&first, 1).await)
        .iter()
        .map(number)
        .collect();
    let second = source(&kafka, &group, &topic);
    open(&second).await;
    finished.extend(finish(receive(&second, 1).await).iter().map(number));

    within("the rest", async {
        while finished.len() < 8_000 {
            let batch = tokio::select! {
                batch = first.receive(64) => batch,
                batch = second.receive(64) => batch,
            };
            for delivery in batch.expect("receives").expect("more") {
                if finish_if_ours(&delivery) {
                    finished.insert(number(&delivery.message));
                }
            }
        }
    })
    .await;
    first.close(CLOSE).await.expect("closes");
    second.close(CLOSE).await.expect("closes");
    assert_eq!(
        kafka.committed_offsets(&group, &topic).await,
        kafka.end_offsets(&topic).await
    );
}

#[tokio::test]
async fn an_unfinished_message_holds_its_partition_back_and_no_other() {
    let kafka = Kafka::shared().await;
    let topic = kafka.new_topic("span", 2).await;
    let group = unique("group");
    kafka.produce(&topic, numbered(1_000, 2)).await;
    let source = source(&kafka, &group, &topic).unfinished_messages(50);
    open(&source).await;

    let mut held = None;
    let mut counts = [0, 0];
    within("the other partition", async {
        while counts[1] < 500 || held.is_none() {
            for delivery in source.receive(10).await.expect("receives").expect("more") {
                let (partition, offset) = place(&delivery.message);
                counts[partition as usize] += 1;
                if (partition, offset) == (0, 0) {
                    held = Some(delivery);
                } else {
                    drop(finish([delivery]));
                }
            }
        }
    })
    .await;
    assert!(
        counts[0] <= 51,
        "{} messages beyond an unfinished one",
        counts[0]
    );
    finish(held);
    for _ in counts[0]..500 {
        finish(receive(&source, 1).await);
    }
    source.close(CLOSE).await.expect("closes");
    assert_eq!(
        kafka.committed_offsets(&group, &topic).await,
        kafka.end_offsets(&topic).await
    );
}

// invariant: unbounded-queue
#[tokio::test]
async fn the_unfinished_messages_of_all_partitions_are_bounded() {
    const PARTITIONS: i32 = 40;
    const EACH: usize = 40;
    let kafka = Kafka::shared().await;
    let all = EACH * PARTITIONS as usize;
    let topic = kafka.new_topic("total", PARTITIONS).await;
    let group = unique("group");
    kafka.produce(&topic, numbered(all, PARTITIONS)).await;
    // No partition has as many.
    let source = source(&kafka, &group, &topic).unfinished_messages(EACH + 10);
    open(&source).await;
    let is_settled = |one: &PartitionStatus| {
        one.paused == Some(PauseCause::Span) || one.received == Some(EACH as i64 - 1)
    };
    let mut held = Vec::new();
    within("the limit of all partitions", async {
        while source
            .status()
            .partitions
            .iter()
            .filter(|one| is_settled(one))
            .count()
            < PARTITIONS as usize
        {
            held.extend(source.receive(10).await.expect("receives").expect("more"));
        }
    })
    .await;
    let partitions = source.status().partitions;
    let unfinished = partitions
        .iter()
        .map(|one| one.received.map_or(0, |last| last + 1));
    let unfinished = unfinished.sum::<i64>();
    let bound = 2 * 10 * (EACH as i64 + 10);
    assert!(unfinished <= bound, "{unfinished} are unfinished");
    let mut finished = finish(held).len();
    while finished < all {
        finished += finish(receive(&source, 1).await).len();
    }
    source.close(CLOSE).await.expect("closes");
    assert_eq!(
        kafka.committed_offsets(&group, &topic).await,
        kafka.end_offsets(&topic).await
    );
}

/// Both partitions are paused behind their first messages when a second member takes one of them,
/// and gives it back.
async fn comes_back_paused(properties: &[(&str, &str)]) {
    let kafka = Kafka::shared().await;
    let topic = kafka.new_topic("back", 2).await;
    let group = unique("group");
    kafka.produce(&topic, numbered(2_000, 2)).await;
    let source = || member(&kafka, &group, &topic, properties).unfinished_messages(50);
    let first = source();
    let second = source();
    let counters = open(&first).await;
    let before = receive(&first, 102).await;
    assert_eq!(counters.get("source_pauses", "span"), 2);

    open(&second).await;
    let taken = receive(&second, 1).await;
    let gone = place(&taken[0].message).0;
    drop(taken);
    second.close(CLOSE).await.expect("closes");
    within("the partition that came back", async {
        while !receive(&first, 1)
            .await
            .iter()
            .any(|one| place(&one.message) == (gone, 0))
        {}
    })
    .await;
    drop(before);
    first.close(CLOSE).await.expect("closes");
}

#[tokio::test]
async fn a_partition_that_comes_back_paused_is_resumed() {
    tokio::join!(
        comes_back_paused(QUICK),
        comes_back_paused(RANGE),
        comes_back_paused(NEW)
    );
}

#[tokio::test]
async fn a_slow_receiver_does_not_make_the_client_drop_messages() {
    let kafka = Kafka::shared().await;
    let topic = kafka.new_topic("slow", 2).await;
    let group = unique("group");
    kafka.produce(&topic, numbered(400, 2)).await;
    let source = source(&kafka, &group, &topic).buffered_messages(4);
    let counters = open(&source).await;
    let mut pace = tokio::time::interval(Duration::from_millis(10));
    for _ in 0..200 {
        pace.tick().await;
        finish(receive(&source, 1).await);
    }
    // The buffer was full nearly all of the time. It takes a quarter of a second without a receive
    // to pause.
    let pauses = counters.get("source_pauses", "full");
    assert!(pauses <= 10, "paused {pauses} times for 200 messages");
    source.close(CLOSE).await.expect("closes");
}
