//! A client that is connected and cannot begin to read, because the brokers do not say where the group stands.
use oncegate::source::Source as _;
use oncegate_testkit::{Kafka, unique, until};
use rdkafka::TopicPartitionList;
use rdkafka::consumer::{BaseConsumer, Consumer as _};
use rdkafka::producer::{BaseProducer, Producer as _};
use rdkafka::topic_partition_list::Offset;

use crate::stage::{CLOSE, LIMIT, NEW, QUICK, finish, member, numbered, open, receive};

/// A transaction that commits an offset of the group in partition 0, and is open. The brokers do not tell the offset meanwhile.
async fn open_transaction(kafka: &Kafka, group: &str, topic: &str) -> BaseProducer {
    let (mut writes, mut reads, topic) = (kafka.config(), kafka.config(), topic.to_owned());
    writes.set("transactional.id", unique("tx")).set("transaction.timeout.ms", "600000");
    reads.set("group.id", group);
    let begin = move || {
        let producer: BaseProducer = writes.create().expect("valid");
        let group: BaseConsumer = reads.create().expect("valid");
        let mut offsets = TopicPartitionList::new();
        offsets.add_partition(&topic, 0).set_offset(Offset::Offset(1)).expect("an offset");
        producer.init_transactions(LIMIT).expect("transactions");
        producer.begin_transaction().expect("begins");
        let group = group.group_metadata().expect("it has a group");
        producer.send_offsets_to_transaction(&offsets, &group, LIMIT).expect("sent");
        producer
    };
    tokio::task::spawn_blocking(begin).await.expect("no panic")
}

async fn is_replaced(kafka: &Kafka, properties: &[(&str, &str)]) {
    let (group, topic) = (unique("unread"), kafka.new_topic("unread", 2).await);
    kafka.produce(&topic, numbered(4, 2)).await;
    let transaction = open_transaction(kafka, &group, &topic).await;
    let source = member(kafka, &group, &topic, properties);
    let counters = open(&source).await;
    until("another client", LIMIT, async || match counters.get("members_replaced", "unread") {
        0 => Err(format!("{:#?}", source.status())),
        _ => Ok(()),
    })
    .await;
    let end = tokio::task::spawn_blocking(move || transaction.abort_transaction(LIMIT));
    end.await.expect("no panic").expect("ends");
    finish(receive(&source, 4).await);
    assert_eq!(counters.get("members_replaced", "unread"), 1, "the next one had more time");
    source.close(CLOSE).await.expect("closes");
}

// invariant: stall-unreported
#[tokio::test]
async fn a_client_that_does_not_begin_to_read_is_replaced_and_the_next_one_waits_longer() {
    let kafka = Kafka::shared().await;
    tokio::join!(is_replaced(&kafka, QUICK), is_replaced(&kafka, NEW));
}
