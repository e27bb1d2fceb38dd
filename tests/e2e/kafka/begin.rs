//! Where a group begins that has committed nothing, and what of a log holds no message.

// invariant (all tests): begin-at-the-end

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use futures_util::future::join_all;
use oncegate::health::PartitionStatus;
use oncegate::kafka::KafkaSource;
use oncegate::source::Source;
use oncegate_testkit::{Kafka, Record, unique, until};
use rdkafka::producer::{BaseProducer, BaseRecord, Producer};

use crate::stage::{
    CLOSE, LIMIT, NEW, QUICK, RANGE, finish, finish_all, finish_if_ours, logged, member, number,
    numbered, open, place, receive, until_committed,
};

/// The numbers of messages that come after the group has begun.
const LATER: usize = 1_000;

/// One message for each partition, numbered from `first` on.
fn one_each(first: usize, partitions: i32) -> impl Iterator<Item = Record> + Send {
    (0..partitions).map(move |partition| {
        Record::new((first + partition as usize).to_string()).partition(partition)
    })
}

/// Nothing has finished when the source is stopped and started again; meanwhile messages come.
async fn restarts_at_the_end(properties: &[(&str, &str)]) {
    let kafka = Kafka::shared().await;
    let topic = kafka.new_topic("end", 3).await;
    let group = unique("group");
    kafka.produce(&topic, numbered(90, 3)).await;
    let ends = kafka.end_offsets(&topic).await;
    let source = || member(&kafka, &group, &topic, properties).from_end();
    let first = source().commit_interval(Duration::from_secs(3_600));
    open(&first).await;
    until_committed(&kafka, &group, &topic, &ends).await;
    first.close(CLOSE).await.expect("closes");

    kafka.produce(&topic, one_each(LATER, 3)).await;
    let second = source();
    open(&second).await;
    let numbers: BTreeSet<usize> = finish(receive(&second, 3).await)
        .iter()
        .map(number)
        .collect();
    assert_eq!(numbers, (LATER..LATER + 3).collect());
    second.close(CLOSE).await.expect("closes");
    assert_eq!(
        kafka.committed_offsets(&group, &topic).await,
        kafka.end_offsets(&topic).await
    );
}

#[tokio::test]
async fn a_group_that_begins_at_the_end_and_restarts_skips_nothing() {
    tokio::join!(
        restarts_at_the_end(QUICK),
        restarts_at_the_end(RANGE),
        restarts_at_the_end(NEW)
    );
}

/// The first member has messages in its handlers, and has finished none, when a second one takes a
/// partition.
async fn gives_away_unfinished(properties: &[(&str, &str)]) {
    let kafka = Kafka::shared().await;
    let topic = kafka.new_topic("end", 2).await;
    let group = unique("group");
    kafka.produce(&topic, numbered(20, 2)).await;
    let source = || {
        let source = member(&kafka, &group, &topic, properties).from_end();
        source.drain_timeout(Duration::from_millis(200))
    };
    let first = source();
    let second = source();
    open(&first).await;
    until_committed(&kafka, &group, &topic, &kafka.end_offsets(&topic).await).await;
    kafka.produce(&topic, one_each(LATER, 2)).await;
    let running = receive(&first, 2).await;
    assert!(running.iter().all(|delivery| delivery.ack_handle.start()));

    open(&second).await;
    let taken = finish(receive(&second, 1).await);
    assert!(
        taken.iter().all(|message| place(message).1 == 10),
        "{taken:?}"
    );
    drop(running);
    first.close(CLOSE).await.expect("closes");
    second.close(CLOSE).await.expect("closes");
}

#[tokio::test]
async fn a_group_that_begins_at_the_end_skips_nothing_in_a_rebalance() {
    tokio::join!(
        gives_away_unfinished(QUICK),
        gives_away_unfinished(RANGE),
        gives_away_unfinished(NEW)
    );
}

/// The topic gains partitions, and messages in them before any member sees them.
async fn gains_partitions(properties: &[(&str, &str)]) {
    let kafka = Kafka::shared().await;
    let topic = kafka.new_topic("gain", 1).await;
    let group = unique("group");
    kafka.produce(&topic, numbered(10, 1)).await;
    let source = || member(&kafka, &group, &topic, properties).from_end();
    let first = source();
    open(&first).await;
    until_committed(&kafka, &group, &topic, &BTreeMap::from([(0, 10)])).await;
    first.close(CLOSE).await.expect("closes");

    kafka.add_partitions(&topic, 3).await;
    kafka.produce(&topic, one_each(LATER, 3)).await;
    let second = source();
    open(&second).await;
    let numbers: BTreeSet<usize> = finish(receive(&second, 3).await)
        .iter()
        .map(number)
        .collect();
    assert_eq!(numbers, (LATER..LATER + 3).collect());
    second.close(CLOSE).await.expect("closes");
}

#[tokio::test]
async fn partitions_that_a_topic_gains_begin_at_their_start() {
    tokio::join!(
        gains_partitions(QUICK),
        gains_partitions(RANGE),
        gains_partitions(NEW)
    );
}

/// An answer about the end of the log that comes after the seek would move the client: it must not
/// ask.
async fn is_told_where_to_begin(properties: &[(&str, &str)]) {
    let kafka = Kafka::shared().await;
    let topic = kafka.new_topic("told", 4).await;
    let group = unique("group");
    kafka.produce(&topic, numbered(40, 4)).await;
    let source = || {
        member(&kafka, &group, &topic, properties)
            .from_end()
            .property("debug", "topic")
    };
    let first = source();
    let second = source();
    open(&first).await;
    open(&second).await;
    until_committed(&kafka, &group, &topic, &kafka.end_offsets(&topic).await).await;
    kafka.produce(&topic, one_each(LATER, 4)).await;
    let ends = kafka.end_offsets(&topic).await;
    tokio::select! {
        () = until_committed(&kafka, &group, &topic, &ends) => {}
        _ = join_all([&first, &second].map(|source| finish_all(source))) => unreachable!("they receive for ever"),
    }
    first.close(CLOSE).await.expect("closes");
    second.close(CLOSE).await.expect("closes");
    assert!(
        !logged()
            .with(&[&format!("Seek {topic}"), "to offset 10 "])
            .is_empty(),
        "it seeks"
    );
    let begun = logged().with(&[&format!("Start fetch for {topic}")]);
    assert!(
        !begun.is_empty() && begun.iter().all(|line| line.contains(" at offset 0 ")),
        "{begun:#?}"
    );
}

#[tokio::test]
async fn a_client_told_where_to_begin_does_not_ask_for_the_log_end() {
    logged();
    tokio::join!(
        is_told_where_to_begin(QUICK),
        is_told_where_to_begin(RANGE),
        is_told_where_to_begin(NEW)
    );
}

/// Members that begin at the same moment, each with partitions of its own: none takes its own for
/// later ones.
async fn begin_together(properties: &[(&str, &str)]) {
    const MEMBERS: usize = 4;
    const PARTITIONS: i32 = 8;
    let kafka = Kafka::shared().await;
    let topic = kafka.new_topic("together", PARTITIONS).await;
    let group = unique("group");
    kafka.produce(&topic, numbered(80, PARTITIONS)).await;
    let sources: Vec<KafkaSource> = (0..MEMBERS)
        .map(|_| member(&kafka, &group, &topic, properties).from_end())
        .collect();
    let counters = join_all(sources.iter().map(open)).await;
    until_committed(&kafka, &group, &topic, &kafka.end_offsets(&topic).await).await;
    kafka.produce(&topic, one_each(LATER, PARTITIONS)).await;
    let ends = kafka.end_offsets(&topic).await;
    let receiving = async |source: &KafkaSource| {
        loop {
            let batch = source.receive(16).await.expect("receives").expect("more");
            let numbers: Vec<usize> = batch.iter().map(|one| number(&one.message)).collect();
            assert!(
                numbers.iter().all(|number| *number >= LATER),
                "from before it began: {numbers:?}"
            );
            for delivery in &batch {
                finish_if_ours(delivery);
            }
        }
    };
    let committed = until("the later messages to be committed", LIMIT, async || {
        let committed = kafka.committed_offsets(&group, &topic).await;
        let statuses = || sources.iter().map(KafkaSource::status).collect::<Vec<_>>();
        if committed == ends {
            Ok(())
        } else {
            Err(format!("{committed:?}, {properties:?}, {:#?}", statuses()))
        }
    });
    tokio::select! {
        () = committed => {}
        _ = join_all(sources.iter().map(receiving)) => unreachable!("they receive for ever"),
    }
    drop(counters);
    for source in &sources {
        source.close(CLOSE).await.expect("closes");
    }
}

#[tokio::test]
async fn members_that_begin_together_at_the_end_begin_there() {
    tokio::join!(
        begin_together(QUICK),
        begin_together(RANGE),
        begin_together(NEW)
    );
}

/// Transactions of `size` messages in partition 0, of which these are committed and the others
/// aborted.
async fn transactions(kafka: &Kafka, topic: &str, committed: &'static [bool], size: u8) {
    let mut config = kafka.config();
    let topic = topic.to_owned();
    let produce = move || {
        let producer: BaseProducer = config
            .set("transactional.id", unique("tx"))
            .create()
            .expect("valid");
        producer.init_transactions(LIMIT).expect("transactions");
        for commit in committed {
            producer.begin_transaction().expect("begins");
            for n in 0..size {
                let record = BaseRecord::<[u8], [u8]>::to(&topic)
                    .partition(0)
                    .payload(std::slice::from_ref(&n));
                producer.send(record).expect("queued");
            }
            producer.flush(LIMIT).expect("delivered");
            let ended = if *commit {
                producer.commit_transaction(LIMIT)
            } else {
                producer.abort_transaction(LIMIT)
            };
            ended.expect("ends");
        }
    };
    tokio::task::spawn_blocking(produce)
        .await
        .expect("no panic");
}

async fn until_stands(source: &KafkaSource, what: &str, wanted: &[(Option<u64>, Option<i64>)]) {
    let standing = async || {
        let status = source.status();
        let stand = |one: &PartitionStatus| (one.lag, one.committed);
        let stands: Vec<_> = status.partitions.iter().map(stand).collect();
        if stands == wanted {
            Ok(())
        } else {
            Err(format!("lag and commit are {stands:?}: {status:?}"))
        }
    };
    until(what, LIMIT, standing).await;
}

/// A log that ends with a marker, one that ends with aborted messages, and one that holds nothing
/// else.
async fn markers_are_no_lag(properties: &[(&str, &str)]) {
    let kafka = Kafka::shared().await;
    let topic = kafka.new_topic("lag", 2).await;
    let group = unique("group");
    let source =
        || member(&kafka, &group, &topic, properties).property("statistics.interval.ms", "100");
    let first = source();
    open(&first).await;
    until_stands(
        &first,
        "an empty topic",
        &[(Some(0), None), (Some(0), None)],
    )
    .await;

    transactions(&kafka, &topic, &[false, false], 10).await;
    until_stands(
        &first,
        "aborted messages alone",
        &[(Some(0), Some(22)), (Some(0), None)],
    )
    .await;
    transactions(&kafka, &topic, &[true], 10).await;
    let held = receive(&first, 10).await;
    until_stands(
        &first,
        "messages in handlers",
        &[(Some(10), Some(22)), (Some(0), None)],
    )
    .await;
    finish(held);
    until_stands(
        &first,
        "a marker at the end",
        &[(Some(0), Some(33)), (Some(0), None)],
    )
    .await;
    transactions(&kafka, &topic, &[true, false], 10).await;
    finish(receive(&first, 10).await);
    until_stands(
        &first,
        "aborted messages at the end",
        &[(Some(0), Some(55)), (Some(0), None)],
    )
    .await;
    first.close(CLOSE).await.expect("closes");
    assert_eq!(
        kafka.committed_offsets(&group, &topic).await,
        BTreeMap::from([(0, 55)])
    );

    kafka
        .produce(
            &topic,
            [Record::new("1").partition(0), Record::new("2").partition(1)],
        )
        .await;
    let second = source();
    open(&second).await;
    let places: BTreeSet<(i32, i64)> = finish(receive(&second, 2).await)
        .iter()
        .map(place)
        .collect();
    assert_eq!(places, BTreeSet::from([(0, 55), (1, 0)]));
    second.close(CLOSE).await.expect("closes");
}

// invariant: commit-before-arrival
#[tokio::test]
async fn what_is_no_message_is_no_lag_and_is_committed_past() {
    tokio::join!(
        markers_are_no_lag(QUICK),
        markers_are_no_lag(RANGE),
        markers_are_no_lag(NEW)
    );
}

/// A group that is done comes back, and nothing comes: its lag is known all the same.
#[tokio::test]
async fn the_lag_is_known_before_anything_is_delivered() {
    let kafka = Kafka::shared().await;
    let topic = kafka.new_topic("known", 1).await;
    let group = unique("group");
    kafka.produce(&topic, numbered(10, 1)).await;
    let source = || member(&kafka, &group, &topic, QUICK).property("statistics.interval.ms", "100");
    let first = source();
    open(&first).await;
    finish(receive(&first, 10).await);
    first.close(CLOSE).await.expect("closes");
    let second = source();
    open(&second).await;
    until_stands(&second, "the lag", &[(Some(0), None)]).await;
    second.close(CLOSE).await.expect("closes");
}
