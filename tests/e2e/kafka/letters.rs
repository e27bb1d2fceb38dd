//! Dead letters that are written, that are refused, and whose producer fails.

// invariant (all tests): dead-letter-lost

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use oncegate::dead_letters::{DeadLetter, DeadLetterCause, DeadLetters};
use oncegate::kafka::{KafkaDeadLetters, KafkaSource};
use oncegate::message::{Message, Origin};
use oncegate::{Attempt, Consumer, ConsumerError, Failure, Gate, Key, MemoryStore};
use oncegate_testkit::{Kafka, KafkaBroker, Record, Watched, unique};
use rdkafka::mocking::MockCluster;
use rdkafka::types::{RDKafkaApiKey, RDKafkaRespErr};

use crate::stage::within;

/// What the dead-letter topic takes, in bytes, and what the payload has.
const TAKES: usize = 50_000;
const PAYLOAD: usize = 4 * TAKES;

/// A consumer that gives up every message of `topic`.
fn giving_up(kafka: &Kafka, topic: &str, dead: Option<&str>) -> Consumer {
    let group = unique("letters");
    let source = KafkaSource::new(kafka.bootstrap(), &group, [topic]).open_timeout(Duration::from_secs(1));
    let dead = dead.map(|dead| source.dead_letters(dead));
    let gate = Gate::new(&group, Key::json(["id"]), MemoryStore::new());
    let handler = async |_: Message, _: Attempt| Err::<(), _>(Failure::permanent("it is never accepted"));
    let consumer = Consumer::new(source, gate, handler);
    match dead {
        Some(dead) => consumer.dead_letters(dead),
        None => consumer,
    }
}

/// Gives up a message with this text: returns how the consumer ended, and how many dead letters there are.
async fn give_up(text: &str) -> (Result<(), ConsumerError>, usize) {
    let kafka = Kafka::shared().await;
    let (topic, dead) = (kafka.new_topic("large", 1).await, unique("dead"));
    kafka.create_topic_with(&dead, &[("max.message.bytes", &TAKES.to_string())]).await;
    kafka.produce(&topic, [Record::new(format!(r#"{{"id":1,"text":"{text}"}}"#))]).await;
    let watched = Watched::new();
    let consumer = giving_up(&kafka, &topic, Some(&dead)).observer(Arc::clone(&watched) as _);
    let acked = async { watched.until("acks", 1).await };
    let ended = within("the consumer's end", consumer.run_until(acked)).await;
    (ended, kafka.read_all(&dead).await.len())
}

#[tokio::test]
async fn a_dead_letter_that_only_fits_when_it_is_compressed_is_written() {
    let (ended, letters) = give_up(&"a".repeat(PAYLOAD)).await;
    ended.unwrap();
    assert_eq!(letters, 1);
}

#[tokio::test]
async fn a_dead_letter_that_its_topic_will_never_take_ends_the_consumer() {
    let noise: String = std::iter::repeat_with(fastrand::alphanumeric).take(PAYLOAD).collect();
    let (ended, letters) = give_up(&noise).await;
    let error = ended.unwrap_err().to_string();
    assert!(error.contains("max.message.bytes") && error.contains("dead"), "{error}");
    assert_eq!(letters, 0);
}

#[tokio::test]
async fn a_producer_that_has_failed_is_replaced() {
    let mock = MockCluster::new(1).expect("a cluster in this process");
    let dead = unique("dead");
    mock.create_topic(&dead, 1, 1).expect("a topic");
    let refused = RDKafkaRespErr::RD_KAFKA_RESP_ERR_CLUSTER_AUTHORIZATION_FAILED;
    mock.request_errors(RDKafkaApiKey::InitProducerId, &[refused]);
    // As a real broker answers the message of the check of rights, which the mock would write.
    let not_written = RDKafkaRespErr::RD_KAFKA_RESP_ERR_INVALID_REQUIRED_ACKS;
    mock.request_errors(RDKafkaApiKey::Produce, &[not_written]);
    let letters = KafkaDeadLetters::new(mock.bootstrap_servers(), &dead);
    letters.open().await.unwrap();
    let letter = DeadLetter {
        message: Message::new("orders", Origin::Other("test".into()), None),
        scope: "billing".to_owned(),
        key: None,
        cause: DeadLetterCause::Permanent,
        reason: String::new(),
        attempts: 1,
        first_failed_at: None,
        failed_at: SystemTime::now(),
    };
    // The first one meets the error, which ends the client for good.
    for _ in 0..2 {
        within("the dead letter", letters.send(&letter)).await.unwrap();
    }
    assert_eq!(Kafka::at(mock.bootstrap_servers()).read_all(&dead).await.len(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_consumer_waits_for_brokers_that_are_away_at_the_start() {
    let mut broker = KafkaBroker::start().await;
    let (topic, dead) = (broker.new_topic("start", 1).await, broker.new_topic("dead", 1).await);
    broker.produce(&topic, [Record::new(r#"{"id":1}"#)]).await;
    broker.kill();
    let kafka = Kafka::at(broker.bootstrap());
    let started = [None, Some(&*dead)].map(|dead| {
        let watched = Watched::new();
        let consumer = giving_up(&kafka, &topic, dead).observer(Arc::clone(&watched) as _);
        (watched, tokio::spawn(consumer.run_until(std::future::pending())))
    });
    for (watched, _) in &started {
        watched.until("source_errors", 1).await;
    }
    broker.start_again().await;
    for (watched, running) in started {
        watched.until("handler_runs", 1).await;
        running.abort();
    }
}
