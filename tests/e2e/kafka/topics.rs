//! Logs that are not what they were: topics made again, messages deleted.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use oncegate::health::PauseCause;
use oncegate::kafka::KafkaSource;
use oncegate::source::Source;
use oncegate_testkit::{Kafka, Record, unique, until};
use rdkafka::client::ClientContext;
use rdkafka::config::RDKafkaLogLevel;
use rdkafka::consumer::{BaseConsumer, Consumer, ConsumerContext};
use rdkafka::{Offset, TopicPartitionList};

use crate::stage::{
    CLOSE, LIMIT, NEW, QUICK, RANGE, finish, finish_if_ours, member, number, numbered, open, place,
    receive, until_committed,
};

/// How many messages each of the two partitions holds before the topic goes.
const BEFORE: usize = 50;

/// The numbers of the messages in the second topic.
const AGAIN: usize = 1_000;

/// One member has finished everything but the last message of partition 0 when the topic is made
/// again.
async fn made_again(properties: &[(&str, &str)], per_partition: usize) {
    let kafka = Kafka::shared().await;
    let topic = kafka.new_topic("again", 2).await;
    let group = unique("group");
    kafka.produce(&topic, numbered(2 * BEFORE, 2)).await;
    let source = member(&kafka, &group, &topic, properties);
    let counters = open(&source).await;
    let mut received = receive(&source, 2 * BEFORE).await;
    let last = received
        .iter()
        .position(|one| place(&one.message) == (0, 49))
        .expect("it was received");
    let late = received.swap_remove(last);
    finish(received);
    until_committed(&kafka, &group, &topic, &BTreeMap::from([(0, 49), (1, 50)])).await;

    kafka.delete_topic(&topic).await;
    kafka.create_topic(&topic, 2).await;
    let payload = |n: usize| Record::new((AGAIN + n).to_string()).partition((n % 2) as i32);
    kafka
        .produce(&topic, (0..2 * per_partition).map(payload))
        .await;

    let numbers = all_from_the_start(&source, per_partition).await;
    assert_eq!(numbers, (AGAIN..AGAIN + 2 * per_partition).collect());
    late.ack_handle.ack();
    assert!(!late.ack_handle.start(), "its topic is gone");
    until_committed(&kafka, &group, &topic, &kafka.end_offsets(&topic).await).await;
    assert_eq!(counters.total("topics_made_again"), 1);
    assert_eq!(counters.total("messages_gone"), 0);
    source.close(CLOSE).await.expect("closes");
}

/// Receives and finishes until the new topic's partitions have come from their first message to
/// their last.
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

// invariant: recreated-topic
#[tokio::test]
async fn a_topic_made_again_with_more_messages_is_read_anew() {
    made_again(QUICK, 3 * BEFORE).await;
}

// invariant: recreated-topic
#[tokio::test]
async fn a_topic_made_again_with_fewer_messages_is_read_anew() {
    made_again(QUICK, BEFORE / 5).await;
}

// invariant: recreated-topic
#[tokio::test]
async fn a_topic_made_again_is_read_anew_in_an_eager_group() {
    made_again(RANGE, 3 * BEFORE).await;
    made_again(RANGE, BEFORE / 5).await;
}

// invariant: recreated-topic
#[tokio::test]
async fn a_topic_made_again_is_read_anew_in_the_new_protocol() {
    made_again(NEW, 3 * BEFORE).await;
    made_again(NEW, BEFORE / 5).await;
}

// invariant: recreated-topic
#[tokio::test]
async fn a_topic_made_again_keeps_its_position_where_that_is_wanted() {
    let kafka = Kafka::shared().await;
    let topic = kafka.new_topic("kept", 1).await;
    let group = unique("group");
    kafka.produce(&topic, numbered(2 * BEFORE, 1)).await;
    let source = member(&kafka, &group, &topic, QUICK).keep_positions_of_recreated_topics();
    let source = source.buffered_messages(1);
    let counters = open(&source).await;
    // It fetches nothing while the topic has fewer messages than before.
    let paused = async || match source.status().partitions.first().map(|one| one.paused) {
        Some(Some(PauseCause::Full)) => Ok(()),
        other => Err(format!("paused: {other:?}")),
    };
    until("the pause", LIMIT, paused).await;
    kafka.delete_topic(&topic).await;
    kafka.create_topic(&topic, 1).await;
    kafka.produce(&topic, numbered(6 * BEFORE, 1)).await;

    let numbers: Vec<usize> = finish(receive(&source, 6 * BEFORE).await)
        .iter()
        .map(number)
        .collect();
    assert_eq!(
        numbers,
        (0..6 * BEFORE).collect::<Vec<_>>(),
        "each once, of the one topic or the other"
    );
    source.close(CLOSE).await.expect("closes");
    assert_eq!(
        kafka.committed_offsets(&group, &topic).await,
        kafka.end_offsets(&topic).await
    );
    assert_eq!(counters.total("topics_made_again"), 0);
}

/// A group has committed 10 of 100 messages, and comes back when 40 are deleted.
async fn comes_back_late(properties: &[(&str, &str)], end: fn(KafkaSource) -> KafkaSource) {
    let kafka = Kafka::shared().await;
    let topic = kafka.new_topic("retention", 1).await;
    let group = unique("group");
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
    let places: Vec<_> = received
        .iter()
        .map(|delivery| place(&delivery.message))
        .collect();
    assert_eq!(
        places,
        (40..100).map(|offset| (0, offset)).collect::<Vec<_>>()
    );
    finish(received);
    second.close(CLOSE).await.expect("closes");
    until_committed(&kafka, &group, &topic, &BTreeMap::from([(0, 100)])).await;
}

// invariant: deleted-by-retention
#[tokio::test]
async fn messages_that_retention_has_deleted_are_counted_and_skipped() {
    comes_back_late(QUICK, |source| source).await;
    comes_back_late(NEW, |source| source).await;
}

// invariant: deleted-by-retention
#[tokio::test]
async fn a_group_that_begins_at_the_end_does_not_skip_to_it_on_delete() {
    comes_back_late(QUICK, KafkaSource::from_end).await;
    comes_back_late(RANGE, KafkaSource::from_end).await;
    comes_back_late(NEW, KafkaSource::from_end).await;
}

/// A client's log.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<(RDKafkaLogLevel, String)>>>);

impl ClientContext for Log {
    fn log(&self, level: RDKafkaLogLevel, _facility: &str, line: &str) {
        self.0.lock().unwrap().push((level, line.to_owned()));
    }
}

impl ConsumerContext for Log {}

impl Log {
    /// Polls until the log has a line of this level that begins like this.
    fn wait_for(&self, client: &BaseConsumer<Self>, level: RDKafkaLogLevel, begins: &str) {
        let deadline = Instant::now() + LIMIT;
        let is_it = |(at, line): &(RDKafkaLogLevel, String)| {
            let told = line.split_once("]: ").map_or(&**line, |(_, told)| told);
            *at as i32 == level as i32 && told.starts_with(begins)
        };
        while !self.0.lock().unwrap().iter().any(is_it) {
            assert!(
                Instant::now() < deadline,
                "librdkafka no longer logs \"{begins}\": kafka/notices.rs must read another text"
            );
            drop(client.poll(Duration::from_millis(100)));
        }
    }
}

/// `kafka/notices.rs` reads these lines, because librdkafka reports the facts nowhere else.
// invariant: recreated-topic
#[tokio::test(flavor = "multi_thread")]
async fn the_client_still_logs_the_lines_that_are_read() {
    let kafka = Kafka::shared().await;
    let topic = kafka.new_topic("log", 1).await;
    kafka.produce(&topic, numbered(BEFORE, 1)).await;
    kafka.delete_records(&topic, 0, 40).await;
    let log = Log::default();
    let mut config = kafka.config();
    config
        .set("group.id", unique("group"))
        .set("debug", "metadata")
        .set("auto.offset.reset", "earliest");
    config
        .set("topic.metadata.refresh.interval.ms", "500")
        .set_log_level(RDKafkaLogLevel::Debug);
    let client: BaseConsumer<Log> = config.create_with_context(log.clone()).unwrap();
    let mut assigned = TopicPartitionList::new();
    assigned
        .add_partition(&topic, 0)
        .set_offset(Offset::Offset(10))
        .unwrap();
    client.assign(&assigned).unwrap();
    let wait =
        |level, begins: &str| tokio::task::block_in_place(|| log.wait_for(&client, level, begins));
    wait(
        RDKafkaLogLevel::Warning,
        &format!("{topic} [0]: offset reset (at offset 10 "),
    );
    let first_id = format!("Topic {topic} changed id from AAAAAAAAAAAAAAAAAAAAAA to ");
    wait(RDKafkaLogLevel::Debug, &first_id);
    let id = {
        let lines = log.0.lock().unwrap();
        let id = lines
            .iter()
            .find_map(|(_, line)| Some(line.split_once(&first_id)?.1.trim().to_owned()));
        id.unwrap()
    };
    kafka.delete_topic(&topic).await;
    kafka.create_topic(&topic, 1).await;
    wait(
        RDKafkaLogLevel::Debug,
        &format!("Topic {topic} changed id from {id} to "),
    );
}
