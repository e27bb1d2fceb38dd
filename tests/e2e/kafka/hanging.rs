//! A transaction that stays open: no consumer gets what is behind it.

// invariant (all tests): withheld-unseen

use std::time::Duration;

use oncegate::health::PartitionStatus;
use oncegate::kafka::TopicReader;
use oncegate::source::Source;
use oncegate_testkit::{Kafka, Record, unique, until};
use rdkafka::producer::{BaseProducer, BaseRecord, Producer};

use crate::stage::{CLOSE, LIMIT, finish, open, receive, source};

/// Begins a transaction with two messages, and leaves it open.
fn hang(kafka: &Kafka, topic: &str) -> BaseProducer {
    let producer: BaseProducer = kafka
        .config()
        .set("transactional.id", unique("hangs"))
        .set("transaction.timeout.ms", "900000")
        .create()
        .unwrap();
    producer.init_transactions(LIMIT).unwrap();
    producer.begin_transaction().unwrap();
    for _ in 0..2 {
        let record = BaseRecord::<(), str>::to(topic)
            .payload("open")
            .partition(0);
        producer.send(record).unwrap();
    }
    producer.flush(LIMIT).unwrap();
    producer
}

#[tokio::test]
async fn what_waits_behind_an_open_transaction_is_lag_and_is_not_read() {
    let kafka = Kafka::shared().await;
    let topic = kafka.new_topic("hanging", 1).await;
    kafka.produce(&topic, [Record::new("before")]).await;
    let broker = kafka.clone();
    let name = topic.clone();
    let hanging = tokio::task::spawn_blocking(move || hang(&broker, &name))
        .await
        .unwrap();
    kafka
        .produce(&topic, ["1", "2", "3"].map(Record::new))
        .await;

    let mut reader = TopicReader::open(kafka.bootstrap(), topic.as_str(), [])
        .await
        .unwrap();
    assert_eq!((reader.total(), reader.withheld()), (1, 5));
    assert_eq!(reader.next_batch().await.unwrap().unwrap().len(), 1);
    assert!(reader.next_batch().await.unwrap().is_none());

    let consumer = source(&kafka, &unique("group"), &topic);
    open(&consumer).await;
    finish(receive(&consumer, 1).await);
    let until_partition = async |what: &str, so: fn(&PartitionStatus) -> bool| {
        until(what, LIMIT, async || {
            match &consumer.status().partitions[..] {
                [partition] if so(partition) => Ok(()),
                other => Err(format!("{other:?}")),
            }
        })
        .await;
    };
    until_partition("lag to the end of the log", |partition| {
        partition.lag == Some(5)
            && partition.undelivered == Some(0)
            && partition.withheld == Some(5)
            && partition.withheld_for.is_some()
    })
    .await;
    tokio::task::spawn_blocking(move || hanging.abort_transaction(LIMIT).unwrap())
        .await
        .unwrap();
    finish(receive(&consumer, 3).await);
    until_partition("no lag", |partition| {
        partition.lag == Some(0) && partition.withheld_for.is_none()
    })
    .await;
    consumer.close(CLOSE).await.unwrap();
    let reader = TopicReader::open(kafka.bootstrap(), topic.as_str(), [])
        .await
        .unwrap();
    assert_eq!(reader.withheld(), 0);
}

#[tokio::test]
async fn a_group_that_begins_with_the_history_is_told_before() {
    let kafka = Kafka::shared().await;
    let topic = kafka.new_topic("history", 3).await;
    let group = unique("group");
    let consumer = || source(&kafka, &group, &topic).commit_interval(Duration::from_millis(50));
    assert_eq!(consumer().history().await.unwrap(), [""; 0], "it is empty");
    let records = (0..60).map(|number: i32| Record::new(number.to_string()).partition(number % 3));
    kafka.produce(&topic, records.collect::<Vec<_>>()).await;
    let told = consumer().history().await.unwrap();
    assert!(
        matches!(&told[..], [words] if words.contains("60 messages") && words.contains(&group)),
        "{told:?}"
    );
    assert_eq!(consumer().from_end().history().await.unwrap(), [""; 0]);
    let first = consumer();
    open(&first).await;
    finish(receive(&first, 60).await);
    first.close(CLOSE).await.unwrap();
    assert_eq!(consumer().history().await.unwrap(), [""; 0], "it has begun");
}
