//! What a member receives, commits and gives away.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use oncegate::health::PartitionStatus;
use oncegate::kafka::KafkaSource;
use oncegate::observe::Counters;
use oncegate::source::{Delivery, Source};
use oncegate_testkit::{Kafka, KafkaBroker, unique, until};
use tokio::task::JoinSet;

use crate::stage::{
    CLOSE, LIMIT, NEW, QUICK, RANGE, finish, half_done, number, numbered, open, place, receive,
    source, until_committed, with, within,
};

#[tokio::test]
async fn everything_is_received_once_and_committed() {
    let kafka = Kafka::shared().await;
    let topic = kafka.new_topic("all", 3).await;
    let group = unique("group");
    kafka.produce(&topic, numbered(5_000, 3)).await;
    let source = source(&kafka, &group, &topic);
    let counters = open(&source).await;

    let messages = finish(receive(&source, 5_000).await);

    let numbers: BTreeSet<_> = messages.iter().map(number).collect();
    assert_eq!(numbers.len(), 5_000);
    until_committed(&kafka, &group, &topic, &kafka.end_offsets(&topic).await).await;
    source.close(CLOSE).await.expect("closes");
    assert!(counters.total("commits") >= 1 && counters.total("source_errors") == 0);
    assert!(
        source.receive(1).await.expect("no error").is_none(),
        "a closed source has no more"
    );
}

// invariant: commit-past-unfinished
#[tokio::test]
async fn commits_and_restarts_never_pass_an_unfinished_message() {
    let kafka = Kafka::shared().await;
    let topic = kafka.new_topic("gap", 2).await;
    let group = unique("group");
    kafka.produce(&topic, numbered(2_000, 2)).await;
    let first = source(&kafka, &group, &topic);
    open(&first).await;

    let mut received = receive(&first, 2_000).await;
    let held = received
        .iter()
        .position(|one| place(&one.message) == (0, 10))
        .expect("it was received");
    let held = received.swap_remove(held);
    finish(received);

    until_committed(
        &kafka,
        &group,
        &topic,
        &BTreeMap::from([(0, 10), (1, 1_000)]),
    )
    .await;
    // Dropped without an ack, in the middle of an attempt.
    assert!(held.ack_handle.start());
    drop(held);
    first.close(CLOSE).await.expect("closes");
    until_committed(
        &kafka,
        &group,
        &topic,
        &BTreeMap::from([(0, 10), (1, 1_000)]),
    )
    .await;

    let second = source(&kafka, &group, &topic);
    open(&second).await;
    let again = finish(receive(&second, 990).await);
    assert_eq!(place(&again[0]), (0, 10));
    assert_eq!(
        again
            .iter()
            .map(|message| place(message).0)
            .collect::<BTreeSet<_>>(),
        [0].into()
    );
    second.close(CLOSE).await.expect("closes");
    until_committed(&kafka, &group, &topic, &kafka.end_offsets(&topic).await).await;
}

#[tokio::test]
async fn closing_commits_what_was_finished_a_moment_ago() {
    let kafka = Kafka::shared().await;
    let topic = kafka.new_topic("close", 4).await;
    let group = unique("group");
    kafka.produce(&topic, numbered(1_000, 4)).await;
    let source = source(&kafka, &group, &topic).commit_interval(Duration::from_secs(3_600));
    let counters = open(&source).await;

    finish(receive(&source, 1_000).await);
    source.close(CLOSE).await.expect("closes");

    assert_eq!(
        kafka.committed_offsets(&group, &topic).await,
        kafka.end_offsets(&topic).await
    );
    assert_eq!(counters.total("commits"), 1);
}

#[tokio::test]
async fn a_source_that_is_dropped_leaves_its_group_all_the_same() {
    let kafka = Kafka::shared().await;
    let topic = kafka.new_topic("drop", 2).await;
    let group = unique("group");
    kafka.produce(&topic, numbered(100, 2)).await;
    // Longer than the test may take: waiting for the end of the dropped member's session would fail
    // it.
    let member = || {
        let member = source(&kafka, &group, &topic).commit_interval(Duration::from_secs(3_600));
        member.property("session.timeout.ms", "300000")
    };
    let first = member();
    open(&first).await;
    finish(receive(&first, 60).await);
    drop(first);

    let second = member();
    open(&second).await;
    finish(receive(&second, 40).await);
    second.close(CLOSE).await.expect("closes");
    assert_eq!(
        kafka.committed_offsets(&group, &topic).await,
        kafka.end_offsets(&topic).await
    );
}

/// A client that ends while it returns its partitions does not leave its group. The test repeats
/// this often, at once.
// invariant: member-that-has-gone
#[tokio::test(flavor = "multi_thread")]
async fn a_consumer_that_stops_is_no_member_any_more() {
    const AT_ONCE: usize = 8;
    const IN_TURN: usize = 10;
    let kafka = Kafka::shared().await;
    let topic = kafka.new_topic("go", 2).await;
    kafka.produce(&topic, numbered(100, 2)).await;
    let mut comings = JoinSet::new();
    for closes in (0..AT_ONCE).map(|number| number % 2 == 0) {
        let kafka = kafka.clone();
        let topic = topic.clone();
        comings.spawn(async move {
            for _ in 0..IN_TURN {
                let group = unique("group");
                let source =
                    source(&kafka, &group, &topic).commit_interval(Duration::from_secs(3_600));
                // Longer than the test may take.
                let source = source.property("session.timeout.ms", "300000");
                open(&source).await;
                finish(receive(&source, 60).await);
                if closes {
                    source.close(CLOSE).await.expect("closes");
                } else {
                    drop(source);
                }
                let deadline = Instant::now() + LIMIT;
                while kafka.members(&group).await > 0 {
                    assert!(
                        Instant::now() < deadline,
                        "{group} still has a member (closed: {closes})"
                    );
                }
            }
        });
    }
    while let Some(comings) = comings.join_next().await {
        comings.expect("each of them goes");
    }
}

/// The first member has started some messages and not others when a second one joins.
async fn a_second_member_takes_over(properties: &[(&str, &str)]) {
    let kafka = Kafka::shared().await;
    let topic = kafka.new_topic("join", 4).await;
    let group = unique("group");
    kafka.produce(&topic, numbered(400, 4)).await;
    let member = || {
        let source = KafkaSource::new(kafka.bootstrap(), &group, [&topic])
            .commit_interval(Duration::from_secs(3_600))
            .drain_timeout(Duration::from_secs(30));
        with(source, properties)
    };
    let first = member();
    let second = member();
    open(&first).await;
    let (running, waiting) = half_done(receive(&first, 400).await);

    open(&second).await;
    until_one_is_refused(&waiting).await;
    // The revoke waits for what runs: finished now, it is still committed before the partitions go.
    finish_running(running);
    let taken = receive(&second, 25).await;

    let given = first_offsets(&taken);
    assert!(
        given.values().all(|offset| *offset == 75),
        "{given:?}: finished ones came again, or some are lost"
    );
    let committed = async |when: &str| {
        let committed = kafka.committed_offsets(&group, &topic).await;
        assert!(
            given.keys().all(|gone| committed.get(gone) == Some(&75)),
            "{when}: {committed:?}"
        );
    };
    committed("before they went").await;
    for delivery in waiting {
        let gone = given.contains_key(&place(&delivery.message).0);
        assert!(
            !(gone && delivery.ack_handle.start()),
            "a partition that is gone"
        );
        delivery.ack_handle.ack();
    }
    first.close(CLOSE).await.expect("the first member closes");
    committed("late acks of what is gone").await;
    second.close(CLOSE).await.expect("the second member closes");
}

async fn until_one_is_refused(waiting: &[Delivery]) {
    let starts = |delivery: &Delivery| {
        let started = delivery.ack_handle.start();
        delivery.ack_handle.stop();
        started
    };
    within("a revoke", async {
        while waiting.iter().all(starts) {
            tokio::task::yield_now().await;
        }
    })
    .await;
}

fn first_offsets(deliveries: &[Delivery]) -> BTreeMap<i32, i64> {
    let mut first = BTreeMap::new();
    for (partition, offset) in deliveries.iter().map(|delivery| place(&delivery.message)) {
        first.entry(partition).or_insert(offset);
    }
    first
}

fn finish_running(running: Vec<Delivery>) {
    for delivery in running {
        delivery.ack_handle.ack();
        delivery.ack_handle.stop();
    }
}

// invariant: commit-of-revoked-partition
#[tokio::test]
async fn a_second_member_takes_over_cooperatively() {
    a_second_member_takes_over(QUICK).await;
}

// invariant: commit-of-revoked-partition
#[tokio::test]
async fn a_second_member_takes_over_eagerly() {
    a_second_member_takes_over(RANGE).await;
}

// invariant: commit-of-revoked-partition
#[tokio::test]
async fn a_second_member_takes_over_in_the_new_protocol() {
    a_second_member_takes_over(NEW).await;
}

#[tokio::test]
async fn the_status_says_where_each_partition_stands() {
    let kafka = Kafka::shared().await;
    let topic = kafka.new_topic("status", 2).await;
    let group = unique("group");
    kafka.produce(&topic, numbered(100, 2)).await;
    let source = source(&kafka, &group, &topic).property("statistics.interval.ms", "200");
    assert!(
        source.status().partitions.is_empty(),
        "nothing is known before it opens"
    );
    open(&source).await;
    let mut received = receive(&source, 100).await;
    let held = received
        .iter()
        .position(|one| place(&one.message) == (1, 3))
        .expect("it was received");
    let held = received.swap_remove(held);
    finish(received);

    let standing = async || {
        let status = source.status();
        let stand =
            |one: &PartitionStatus| (one.watermark, one.committed, one.lag, one.undelivered);
        let stands: Vec<_> = status.partitions.iter().map(stand).collect();
        let wanted = [
            (Some(50), Some(50), Some(0), Some(0)),
            (Some(3), Some(3), Some(47), Some(0)),
        ];
        if stands == wanted {
            Ok(status)
        } else {
            Err(format!("{stands:?}"))
        }
    };
    let status = until("the facts", LIMIT, standing).await;
    assert!(status.polled_ago.is_some());
    let [all, behind] = status.partitions.as_slice() else {
        panic!("{status:?}")
    };
    assert_eq!(
        (all.topic.as_str(), all.partition, all.received),
        (topic.as_str(), 0, Some(49))
    );
    assert!(all.oldest_unfinished.is_none() && behind.oldest_unfinished.is_some());
    assert!(all.uncommitted_for.is_none() && behind.paused.is_none());
    drop(held);
    source.close(CLOSE).await.expect("closes");
}

#[tokio::test]
async fn a_broker_that_dies_and_returns_costs_nothing() {
    let mut broker = KafkaBroker::start().await;
    let kafka = Kafka::at(broker.bootstrap());
    let topic = kafka.new_topic("kill", 2).await;
    let group = unique("group");
    kafka.produce(&topic, numbered(100, 2)).await;
    // With a session longer than the outage, no member loses its partitions.
    let source = source(&kafka, &group, &topic).property("session.timeout.ms", "45000");
    let counters = open(&source).await;
    let before = receive(&source, 100).await;

    broker.kill();
    finish(before);
    within("a report of it", async {
        while counters.get("source_errors", "broker") == 0 {
            tokio::task::yield_now().await;
        }
    })
    .await;
    broker.start_again().await;
    kafka.produce(&topic, numbered(100, 2)).await;

    let after = finish(receive(&source, 100).await);
    assert!(
        after.iter().all(|message| place(message).1 >= 50),
        "nothing comes again"
    );
    until_committed(
        &kafka,
        &group,
        &topic,
        &BTreeMap::from([(0, 100), (1, 100)]),
    )
    .await;
    source.close(CLOSE).await.expect("closes");
}

#[tokio::test]
async fn opening_says_what_is_wrong() {
    let kafka = Kafka::shared().await;
    let topic = kafka.new_topic("real", 1).await;
    let absent = unique("absent");
    let refusal = async |source: KafkaSource| {
        let error = source
            .open(Arc::new(Counters::default()))
            .await
            .expect_err("refused");
        error.to_string()
    };

    let missing = KafkaSource::new(kafka.bootstrap(), "g", [topic.clone(), absent.clone()]);
    let text = refusal(missing).await;
    assert!(text.contains(&absent) && !text.contains(&topic), "{text}");

    let unreachable =
        KafkaSource::new("127.0.0.1:1", "g", ["t"]).open_timeout(Duration::from_millis(500));
    assert!(refusal(unreachable).await.contains("127.0.0.1:1"));

    let reckless =
        KafkaSource::new(kafka.bootstrap(), "g", [&topic]).property("enable.auto.commit", "true");
    assert!(refusal(reckless).await.contains("enable.auto.commit"));

    let typo =
        KafkaSource::new(kafka.bootstrap(), "g", [&topic]).property("no.such.thing", "s3cret");
    let text = refusal(typo).await;
    assert!(
        text.contains("no.such.thing") && !text.contains("s3cret"),
        "{text}"
    );

    let slow =
        KafkaSource::new(kafka.bootstrap(), "g", [&topic]).drain_timeout(Duration::from_secs(200));
    assert!(refusal(slow).await.contains("drain_timeout"));

    let unopened = KafkaSource::new(kafka.bootstrap(), "g", [&topic]);
    assert!(unopened.receive(1).await.is_err());
    unopened
        .close(CLOSE)
        .await
        .expect("there is nothing to close");
}
