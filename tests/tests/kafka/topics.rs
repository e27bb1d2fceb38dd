//! Logs that are not what they were: topics made again, messages deleted.

use std::collections::{BTreeMap, BTreeSet};

use oncegate::kafka::KafkaSource;
use oncegate::source::Source;
use oncegate_tests::{Kafka, Record, unique, until};

use crate::stage::{
    CLOSE, LIMIT, NEW, QUICK, RANGE, finish, finish_if_ours, member, number, numbered, open, place, receive,
    until_committed,
};

/// How many messages each of the two partitions holds before the topic goes.
const BEFORE: usize = 50;

/// The numbers of the messages in the second topic.
const AGAIN: usize = 1_000;

/// One member has finished everything but the last message of partition 0 when the topic is made again.
async fn made_again(properties: &[(&str, &str)], per_partition: usize) {
    let kafka = Kafka::shared().await;
    let (topic, group) = (kafka.new_topic("again", 2).await, unique("group"));
    kafka.produce(&topic, numbered(2 * BEFORE, 2)).await;
    let source = member(&kafka, &group, &topic, properties);
    let counters = open(&source).await;
    let mut received = receive(&source, 2 * BEFORE).await;
    let last = received.iter().position(|one| place(&one.message) == (0, 49)).expect("it was received");
    let late = received.swap_remove(last);
    finish(received);
    until_committed(&kafka, &group, &topic, &BTreeMap::from([(0, 49), (1, 50)])).await;

    kafka.delete_topic(&topic).await;
    kafka.create_topic(&topic, 2).await;
    let payload = |n: usize| Record::new((AGAIN + n).to_string()).partition((n % 2) as i32);
    kafka.produce(&topic, (0..2 * per_partition).map(payload)).await;

    let numbers = all_from_the_start(&source, per_partition).await;
    assert_eq!(numbers, (AGAIN..AGAIN + 2 * per_partition).collect());
    late.ack_handle.ack();
    assert!(!late.ack_handle.start(), "its topic is gone");
    until_committed(&kafka, &group, &topic, &kafka.end_offsets(&topic).await).await;
    assert_eq!(counters.total("topics_made_again"), 1);
    assert_eq!(counters.total("messages_gone"), 0);
    source.close(CLOSE).await.expect("closes");
}

/// Receives and finishes until the new topic's partitions have come from their first message to their last.
async fn all_from_the_start(source: &KafkaSource, per_partition: usize) -> BTreeSet<usize> {
    let mut numbers = BTreeSet::new();
    while numbers.len() < 2 * per_partition {
        for delivery in receive(source, 1).await {
            // One that was received before its partition began anew is not started.
            if finish_if_ours(&delivery) {
                numbers.insert(number(&delivery.message));
            }
        }
    }
    numbers
}

#[tokio::test]
async fn a_topic_made_again_with_more_messages_is_read_from_its_beginning() {
    made_again(QUICK, 3 * BEFORE).await;
}

#[tokio::test]
async fn a_topic_made_again_with_fewer_messages_is_read_from_its_beginning() {
    made_again(QUICK, BEFORE / 5).await;
}

#[tokio::test]
async fn a_topic_made_again_is_read_from_its_beginning_in_an_eager_group() {
    made_again(RANGE, 3 * BEFORE).await;
    made_again(RANGE, BEFORE / 5).await;
}

#[tokio::test]
async fn a_topic_made_again_is_read_from_its_beginning_in_the_new_protocol() {
    made_again(NEW, 3 * BEFORE).await;
    made_again(NEW, BEFORE / 5).await;
}

/// A group has committed 10 of 100 messages, and comes back when 40 are deleted.
async fn comes_back_late(properties: &[(&str, &str)], end: fn(KafkaSource) -> KafkaSource) {
    let kafka = Kafka::shared().await;
    let (topic, group) = (kafka.new_topic("retention", 1).await, unique("group"));
    kafka.produce(&topic, numbered(100, 1)).await;
    let first = member(&kafka, &group, &topic, properties);
    open(&first).await;
    finish(receive(&first, 10).await);
    first.close(CLOSE).await.expect("closes");
    until_committed(&kafka, &group, &topic, &BTreeMap::from([(0, 10)])).await;

    kafka.delete_records(&topic, 0, 40).await;
    let second = end(member(&kafka, &group, &topic, properties));
    let counters = open(&second).await;
    let received = receive(&second, 60).await;
    let gone = async || match counters.total("messages_gone") {
        30 => Ok(()),
        other => Err(format!("{other} messages are said to be gone")),
    };
    until("the count of what is gone", LIMIT, gone).await;
    let places: Vec<_> = received.iter().map(|delivery| place(&delivery.message)).collect();
    assert_eq!(places, (40..100).map(|offset| (0, offset)).collect::<Vec<_>>());
    finish(received);
    second.close(CLOSE).await.expect("closes");
    until_committed(&kafka, &group, &topic, &BTreeMap::from([(0, 100)])).await;
}

#[tokio::test]
async fn messages_that_retention_has_deleted_are_counted_and_the_rest_is_read() {
    comes_back_late(QUICK, |source| source).await;
    comes_back_late(NEW, |source| source).await;
}

#[tokio::test]
async fn a_group_that_begins_at_the_end_does_not_skip_to_it_when_messages_are_deleted() {
    comes_back_late(QUICK, KafkaSource::from_end).await;
    comes_back_late(RANGE, KafkaSource::from_end).await;
    comes_back_late(NEW, KafkaSource::from_end).await;
}
