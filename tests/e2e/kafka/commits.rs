//! Commits that the coordinator refuses, for every reason that it has.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use futures_util::future::join_all;
use oncegate::source::{CommitAnnotation, Source};
use oncegate_testkit::{Kafka, KafkaBroker, Record, unique, until};
use rdkafka::mocking::MockCluster;
use rdkafka::types::{RDKafkaApiKey, RDKafkaRespErr};

use crate::stage::{
    CLOSE, LIMIT, QUICK, finish, finish_all, member, open, receive, until_committed, within,
};

/// What is refused, and whether it counts as trouble: a healthy group refuses around every
/// rebalance.
const REFUSALS: &[(RDKafkaRespErr, bool)] = &[
    (
        RDKafkaRespErr::RD_KAFKA_RESP_ERR_REBALANCE_IN_PROGRESS,
        false,
    ),
    (RDKafkaRespErr::RD_KAFKA_RESP_ERR_ILLEGAL_GENERATION, false),
    (RDKafkaRespErr::RD_KAFKA_RESP_ERR_UNKNOWN_MEMBER_ID, false),
    (RDKafkaRespErr::RD_KAFKA_RESP_ERR_STALE_MEMBER_EPOCH, false),
    (RDKafkaRespErr::RD_KAFKA_RESP_ERR_FENCED_MEMBER_EPOCH, false),
    (
        RDKafkaRespErr::RD_KAFKA_RESP_ERR_OFFSET_METADATA_TOO_LARGE,
        true,
    ),
    (
        RDKafkaRespErr::RD_KAFKA_RESP_ERR_INVALID_COMMIT_OFFSET_SIZE,
        true,
    ),
    (
        RDKafkaRespErr::RD_KAFKA_RESP_ERR_TOPIC_AUTHORIZATION_FAILED,
        true,
    ),
    (
        RDKafkaRespErr::RD_KAFKA_RESP_ERR_GROUP_AUTHORIZATION_FAILED,
        true,
    ),
];

/// Errors that the client retries by itself: the commit takes longer and succeeds.
const REPEATED: &[RDKafkaRespErr] = &[
    RDKafkaRespErr::RD_KAFKA_RESP_ERR_NOT_COORDINATOR,
    RDKafkaRespErr::RD_KAFKA_RESP_ERR_COORDINATOR_NOT_AVAILABLE,
    RDKafkaRespErr::RD_KAFKA_RESP_ERR_COORDINATOR_LOAD_IN_PROGRESS,
    RDKafkaRespErr::RD_KAFKA_RESP_ERR_REQUEST_TIMED_OUT,
    RDKafkaRespErr::RD_KAFKA_RESP_ERR_UNKNOWN_TOPIC_OR_PART,
];

/// How many of them a member meets, one after the other.
const AT_A_TIME: usize = 2;

/// What a coordinator answers that starts or moves.
const NOT_YET: &[RDKafkaRespErr] = &[
    RDKafkaRespErr::RD_KAFKA_RESP_ERR_NOT_COORDINATOR,
    RDKafkaRespErr::RD_KAFKA_RESP_ERR_COORDINATOR_NOT_AVAILABLE,
    RDKafkaRespErr::RD_KAFKA_RESP_ERR_COORDINATOR_LOAD_IN_PROGRESS,
];

#[tokio::test]
async fn committed_offsets_are_retried_while_the_coordinator_moves() {
    let mock = MockCluster::new(1).expect("a cluster in this process");
    let topic = unique("moves");
    mock.create_topic(&topic, 1, 1).expect("a topic");
    for answer in NOT_YET {
        mock.request_errors(RDKafkaApiKey::OffsetFetch, &[*answer; 3]);
        let brokers = mock.bootstrap_servers();
        let offsets =
            oncegate::kafka::committed_offsets(&brokers, &unique("group"), &topic, &[]).await;
        assert_eq!(
            offsets.expect("an answer"),
            BTreeMap::new(),
            "after {answer:?}"
        );
    }
}

#[tokio::test]
async fn whatever_the_coordinator_says_the_next_commit_catches_up() {
    let codes = REFUSALS
        .iter()
        .map(|(code, _)| *code)
        .chain(REPEATED.iter().copied());
    let codes: Vec<RDKafkaRespErr> = codes.collect();
    // Some at a time, each with a coordinator of their own: a member waits before it asks again.
    join_all(codes.chunks(AT_A_TIME).map(each_is_made_up_for)).await;
}

#[expect(
    clippy::future_not_send,
    reason = "a mock cluster stays on the thread of its test"
)]
async fn each_is_made_up_for(codes: &[RDKafkaRespErr]) {
    let mock = MockCluster::new(1).expect("a cluster in this process");
    let kafka = Kafka::at(mock.bootstrap_servers());
    let topic = unique("refused");
    let group = unique("group");
    mock.create_topic(&topic, 1, 1).expect("a topic");
    let source = member(&kafka, &group, &topic, QUICK);
    let counters = open(&source).await;
    for (code, end) in codes.iter().zip(1..) {
        let before = counters.get("source_errors", "commit");
        mock.request_errors(RDKafkaApiKey::OffsetCommit, &[*code]);
        kafka.produce(&topic, [Record::new("one more")]).await;
        let committed = BTreeMap::from([(0, end)]);
        tokio::select! {
            () = until_committed(&kafka, &group, &topic, &committed) => {}
            () = finish_all(&source) => {}
        }
        let counted = counters.get("source_errors", "commit") - before;
        if let Some((_, trouble)) = REFUSALS.iter().find(|(refusal, _)| refusal == code) {
            assert_eq!(counted, u64::from(*trouble), "{code:?}");
        }
    }
    source.close(CLOSE).await.expect("closes");
}

// invariant: stall-unreported
#[tokio::test]
async fn a_refused_commit_is_in_the_status_until_one_is_accepted() {
    let kafka = KafkaBroker::start_with(&["offset.metadata.max.bytes=8"]).await;
    let topic = kafka.new_topic("refused", 1).await;
    let group = unique("group");
    kafka.produce(&topic, [Record::new("one")]).await;
    let source = member(&kafka, &group, &topic, QUICK);
    let is_long = Arc::new(AtomicBool::new(true));
    let text = Arc::clone(&is_long);
    source.annotate_commits(CommitAnnotation::new(move || {
        if text.load(Ordering::Relaxed) {
            "longer than eight bytes".to_owned()
        } else {
            String::new()
        }
    }));
    open(&source).await;
    finish(receive(&source, 1).await);
    until("the refusal in the status", LIMIT, async || {
        let failures = source.status().failures;
        let refused = failures
            .iter()
            .find(|failure| failure.operation == "commit");
        match refused {
            Some(failure)
                if failure.failures > 1 && failure.error.contains("offset.metadata.max.bytes") =>
            {
                Ok(())
            }
            _ => Err(format!("{failures:?}")),
        }
    })
    .await;
    is_long.store(false, Ordering::Relaxed);
    until_committed(&kafka, &group, &topic, &BTreeMap::from([(0, 1)])).await;
    until("the end of the refusal in the status", LIMIT, async || {
        let failures = source.status().failures;
        if failures.is_empty() {
            Ok(())
        } else {
            Err(format!("{failures:?}"))
        }
    })
    .await;
    source.close(CLOSE).await.expect("closes");
}

#[tokio::test]
async fn a_commit_thread_that_dies_ends_the_source() {
    let kafka = Kafka::shared().await;
    let topic = kafka.new_topic("dies", 1).await;
    let group = unique("group");
    kafka.produce(&topic, [Record::new("one")]).await;
    let source = member(&kafka, &group, &topic, QUICK);
    source.annotate_commits(CommitAnnotation::new(|| {
        panic!("the thread dies at its first commit")
    }));
    open(&source).await;
    finish(receive(&source, 1).await);
    let error = within("the source's end", source.receive(1))
        .await
        .unwrap_err()
        .to_string();
    assert!(error.contains("commits"), "{error}");
    assert!(
        source.close(CLOSE).await.is_err(),
        "the last offset is not committed"
    );
}
