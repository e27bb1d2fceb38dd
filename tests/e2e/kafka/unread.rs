//! Partitions that a client cannot begin to read, because the brokers withhold where the group
//! stands.

// invariant (all tests): stall-unreported

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use oncegate::health::{Health, Reason, SourceStatus, Status};
use oncegate::kafka::KafkaSource;
use oncegate::observe::Counters;
use oncegate::source::Source;
use oncegate::{Attempt, Consumer, Failure, Gate, Key, MemoryStore, Message};
use oncegate_testkit::{Kafka, Watched, unique, until};
use rdkafka::TopicPartitionList;
use rdkafka::consumer::{BaseConsumer, Consumer as _};
use rdkafka::producer::{BaseProducer, Producer as _};
use rdkafka::topic_partition_list::Offset;
use tokio::sync::oneshot;

use crate::stage::{
    CLOSE, LIMIT, NEW, QUICK, RANGE, finish, member, numbered, open, place, receive, with,
};

/// A transaction that commits an offset of the group in a partition, and is open. The brokers do
/// not tell the offset meanwhile.
async fn open_transaction(kafka: &Kafka, group: &str, topic: &str, partition: i32) -> BaseProducer {
    let mut writes = kafka.config();
    let mut reads = kafka.config();
    let topic = topic.to_owned();
    writes
        .set("transactional.id", unique("tx"))
        .set("transaction.timeout.ms", "600000");
    reads.set("group.id", group);
    let begin = move || {
        let producer: BaseProducer = writes.create().expect("valid");
        let group: BaseConsumer = reads.create().expect("valid");
        let mut offsets = TopicPartitionList::new();
        offsets
            .add_partition(&topic, partition)
            .set_offset(Offset::Offset(1))
            .expect("an offset");
        producer.init_transactions(LIMIT).expect("transactions");
        producer.begin_transaction().expect("begins");
        let group = group.group_metadata().expect("it has a group");
        producer
            .send_offsets_to_transaction(&offsets, &group, LIMIT)
            .expect("sent");
        producer
    };
    tokio::task::spawn_blocking(begin).await.expect("no panic")
}

async fn abort(transaction: BaseProducer) {
    let end = tokio::task::spawn_blocking(move || transaction.abort_transaction(LIMIT));
    end.await.expect("no panic").expect("ends");
}

async fn commit(transaction: BaseProducer) {
    let end = tokio::task::spawn_blocking(move || transaction.commit_transaction(LIMIT));
    end.await.expect("no panic").expect("ends");
}

fn is_withheld(status: &SourceStatus, partition: &str) -> bool {
    status
        .failures
        .iter()
        .any(|one| one.operation == "offset" && one.error.contains(partition))
}

/// Of six partitions one has an offset in an open transaction.
async fn costs_only_itself(kafka: &Kafka, properties: &[(&str, &str)]) {
    let group = unique("unread");
    let topic = kafka.new_topic("unread", 6).await;
    kafka.produce(&topic, numbered(60, 6)).await;
    let transaction = open_transaction(kafka, &group, &topic, 3).await;
    let source = member(kafka, &group, &topic, properties);
    let counters = open(&source).await;
    let received = receive(&source, 50).await;
    let read: BTreeSet<i32> = received.iter().map(|one| place(&one.message).0).collect();
    assert_eq!(read, BTreeSet::from([0, 1, 2, 4, 5]));
    finish(received);
    until("the withheld partition in the status", LIMIT, async || {
        let status = source.status();
        if is_withheld(&status, &format!("{topic}/3")) {
            Ok(())
        } else {
            Err(format!("{status:#?}"))
        }
    })
    .await;
    // A partition that comes later is not held up either.
    kafka.produce(&topic, numbered(60, 6)).await;
    finish(receive(&source, 50).await);
    commit(transaction).await;
    let late = finish(receive(&source, 19).await);
    assert!(late.iter().all(|message| place(message).0 == 3), "{late:?}");
    let first = late.iter().map(|message| place(message).1).min();
    assert_eq!(first, Some(1), "the transaction has committed 1");
    until("no failure", LIMIT, async || {
        match source.status().failures.as_slice() {
            [] => Ok(()),
            failures => Err(format!("{failures:?}")),
        }
    })
    .await;
    assert_eq!(counters.total("members_replaced"), 0);
    source.close(CLOSE).await.expect("closes");
}

#[tokio::test]
async fn a_withheld_offset_costs_only_its_partition() {
    let kafka = Kafka::shared().await;
    tokio::join!(
        costs_only_itself(&kafka, QUICK),
        costs_only_itself(&kafka, RANGE),
        costs_only_itself(&kafka, NEW),
    );
}

/// A group that begins at the end must know whether it has an offset: the transaction decides that.
#[tokio::test]
async fn a_source_that_begins_at_the_end_waits_for_the_transaction() {
    let kafka = Kafka::shared().await;
    let group = unique("unread");
    let topic = kafka.new_topic("unread", 2).await;
    kafka.produce(&topic, numbered(10, 2)).await;
    let transaction = open_transaction(&kafka, &group, &topic, 0).await;
    let source = member(&kafka, &group, &topic, QUICK).from_end();
    open(&source).await;
    until("the withheld partition in the status", LIMIT, async || {
        let status = source.status();
        if is_withheld(&status, &format!("{topic}/0")) {
            Ok(())
        } else {
            Err(format!("{status:#?}"))
        }
    })
    .await;
    commit(transaction).await;
    // Partition 0 goes on at 1, and the other one, of which the group has no offset, begins at its
    // first message.
    let received = receive(&source, 9).await;
    assert_eq!(
        received
            .iter()
            .filter(|one| place(&one.message).0 == 0)
            .count(),
        4
    );
    finish(received);
    source.close(CLOSE).await.expect("closes");
}

/// The owner of a partition has died with a transaction, and the survivor gets the partition.
async fn is_unready(kafka: &Kafka, properties: &'static [(&'static str, &'static str)]) {
    let group = unique("unready");
    let topic = kafka.new_topic("unready", 6).await;
    let transaction = open_transaction(kafka, &group, &topic, 3).await;
    let source = KafkaSource::new(kafka.bootstrap(), group.as_str(), [topic.as_str()]);
    let source = with(
        source.commit_interval(Duration::from_millis(50)),
        properties,
    );
    let gate = Gate::new(unique("unready"), Key::json(["id"]), MemoryStore::new());
    let watched = Watched::new();
    let consumer = Consumer::new(source, gate, async |_: Message, _: Attempt| {
        Ok::<(), Failure>(())
    });
    let consumer = consumer.observer(Arc::clone(&watched) as _);
    let monitor = consumer.monitor();
    let (stop, stopped) = oneshot::channel();
    let ended = tokio::spawn(consumer.run_until(async { _ = stopped.await }));
    let until_status = async |what: &str, so: fn(&Status, &Health) -> bool| {
        until(what, LIMIT, async || {
            let status = monitor.status();
            let health = Health::of(&status);
            if so(&status, &health) {
                Ok(health)
            } else {
                Err(format!("{health}: {status:?}"))
            }
        })
        .await
    };
    let health = until_status("unready", |_, health| {
        health.reasons().iter().any(
            |one| matches!(one, Reason::SourceFails { operation, .. } if operation == "offset"),
        )
    })
    .await;
    assert!(!health.is_ready() && health.is_live(), "{health}");
    assert!(
        health.to_string().contains("/3") && health.to_string().contains("transaction"),
        "{health}"
    );
    abort(transaction).await;
    until_status("ready", |status, health| {
        health.is_ready() && status.source.failures.is_empty()
    })
    .await;
    stop.send(()).expect("it runs");
    ended.await.unwrap().unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_consumer_is_unready_until_a_withheld_partition_reads() {
    let kafka = Kafka::shared().await;
    tokio::join!(is_unready(&kafka, QUICK), is_unready(&kafka, NEW));
}

/// The commit's metadata of a group can be read while a transaction holds back one of its offsets,
/// so that a consumer starts.
#[tokio::test]
async fn a_consumer_starts_while_an_offset_is_withheld() {
    let kafka = Kafka::shared().await;
    let group = unique("starts");
    let topic = kafka.new_topic("starts", 2).await;
    let transaction = open_transaction(&kafka, &group, &topic, 0).await;
    let source = member(&kafka, &group, &topic, QUICK);
    assert_eq!(
        source.commit_annotations().await.expect("it is told"),
        Vec::<String>::new()
    );
    source.check_topics().await.expect("it is granted");
    source
        .open(Arc::new(Counters::default()))
        .await
        .expect("opens");
    source.close(CLOSE).await.expect("closes");
    abort(transaction).await;
}
