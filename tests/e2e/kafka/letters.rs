//! Dead letters that are written, that are refused, and whose producer fails.

// invariant (all tests): dead-letter-lost

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use oncegate::dead_letters::{DeadLetter, DeadLetterCause, DeadLetters};
use oncegate::kafka::{KafkaDeadLetters, KafkaSource};
use oncegate::message::{Message, Origin};
use oncegate::source::Source as _;
use oncegate::{Attempt, Consumer, ConsumerError, Failure, Gate, Key, MemoryStore};
use oncegate_testkit::{Kafka, KafkaBroker, Record, Watched, unique};
use rdkafka::Message as _;
use rdkafka::message::{Headers, OwnedMessage};
use rdkafka::mocking::MockCluster;
use rdkafka::types::{RDKafkaApiKey, RDKafkaRespErr};

use crate::data::{consume, consume_routed};
use crate::stage::{CLOSE, open, within};

/// What the dead-letter topic takes, in bytes, and what the payload has.
const TAKES: usize = 50_000;
const PAYLOAD: usize = 4 * TAKES;

/// A consumer that gives up every message of `topic`.
fn giving_up(kafka: &Kafka, topic: &str, dead: Option<&str>) -> Consumer {
    let group = unique("letters");
    let source =
        KafkaSource::new(kafka.bootstrap(), &group, [topic]).open_timeout(Duration::from_secs(1));
    let dead = dead.map(|dead| source.dead_letters(dead));
    let gate = Gate::new(&group, Key::json(["id"]), MemoryStore::new());
    let handler =
        async |_: Message, _: Attempt| Err::<(), _>(Failure::permanent("it is never accepted"));
    let consumer = Consumer::new(source, gate, handler);
    match dead {
        Some(dead) => consumer.dead_letters(dead),
        None => consumer,
    }
}

/// Gives up a message with this text: returns how the consumer ended, and how many dead letters
/// there are.
async fn give_up(text: &str) -> (Result<(), ConsumerError>, usize) {
    let kafka = Kafka::shared().await;
    let topic = kafka.new_topic("large", 1).await;
    let dead = unique("dead");
    kafka
        .create_topic_with(&dead, &[("max.message.bytes", &TAKES.to_string())])
        .await;
    kafka
        .produce(
            &topic,
            [Record::new(format!(r#"{{"id":1,"text":"{text}"}}"#))],
        )
        .await;
    let watched = Watched::new();
    let consumer = giving_up(&kafka, &topic, Some(&dead)).observer(Arc::clone(&watched) as _);
    let acked = async { watched.until("acks", 1).await };
    let ended = within("the consumer's end", consumer.run_until(acked)).await;
    (ended, kafka.read_all(&dead).await.len())
}

#[tokio::test]
async fn a_dead_letter_that_only_fits_when_compressed_is_written() {
    let (ended, letters) = give_up(&"a".repeat(PAYLOAD)).await;
    ended.unwrap();
    assert_eq!(letters, 1);
}

#[tokio::test]
async fn a_dead_letter_its_topic_will_never_take_ends_the_consumer() {
    let noise: String = std::iter::repeat_with(fastrand::alphanumeric)
        .take(PAYLOAD)
        .collect();
    let (ended, letters) = give_up(&noise).await;
    let error = ended.unwrap_err().to_string();
    assert!(
        error.contains("max.message.bytes") && error.contains("dead"),
        "{error}"
    );
    assert_eq!(letters, 0);
}

/// Errors that end a producer's client for good, and the requests that they answer.
const FATAL: [(RDKafkaApiKey, RDKafkaRespErr); 2] = [
    (
        RDKafkaApiKey::InitProducerId,
        RDKafkaRespErr::RD_KAFKA_RESP_ERR_CLUSTER_AUTHORIZATION_FAILED,
    ),
    (
        RDKafkaApiKey::Produce,
        RDKafkaRespErr::RD_KAFKA_RESP_ERR_OUT_OF_ORDER_SEQUENCE_NUMBER,
    ),
];

/// What a real broker answers to the message of the check of rights, which the mock would write.
const NOT_WRITTEN: RDKafkaRespErr = RDKafkaRespErr::RD_KAFKA_RESP_ERR_INVALID_REQUIRED_ACKS;

fn message() -> Message {
    Message::new("orders", Origin::Other("test".into()), None)
}

#[tokio::test]
async fn a_producer_that_has_failed_is_replaced() {
    for (request, error) in FATAL {
        let mock = MockCluster::new(1).expect("a cluster in this process");
        let dead = unique("dead");
        mock.create_topic(&dead, 1, 1).expect("a topic");
        mock.request_errors(RDKafkaApiKey::Produce, &[NOT_WRITTEN]);
        let letters = KafkaDeadLetters::new(mock.bootstrap_servers(), &dead);
        letters.open().await.unwrap();
        mock.request_errors(request, &[error]);
        let letter = DeadLetter {
            message: message(),
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
            within("the dead letter", letters.send(&letter))
                .await
                .unwrap();
        }
        let count = Kafka::at(mock.bootstrap_servers())
            .read_all(&dead)
            .await
            .len();
        assert_eq!(count, 2, "after {error:?}");
    }
}

// invariant: retry-topic
#[tokio::test]
async fn a_producer_of_retry_topics_that_has_failed_is_replaced() {
    const WAIT: Duration = Duration::from_secs(60);
    for (request, error) in FATAL {
        let mock = MockCluster::new(1).expect("a cluster in this process");
        let [topic, later] = ["orders", "later"].map(unique);
        for name in [&topic, &later] {
            mock.create_topic(name, 1, 1).expect("a topic");
        }
        let source = KafkaSource::new(mock.bootstrap_servers(), unique("group"), [&topic]);
        let source = source.retry_topics([(WAIT, &later)]);
        mock.request_errors(RDKafkaApiKey::Produce, &[NOT_WRITTEN]);
        open(&source).await;
        mock.request_errors(request, &[error]);
        let queue = source.retry_queue().expect("it has a retry topic");
        for _ in 0..2 {
            within("the copy", queue.send(&message(), WAIT))
                .await
                .unwrap();
        }
        let count = Kafka::at(mock.bootstrap_servers())
            .read_all(&later)
            .await
            .len();
        assert_eq!(count, 2, "after {error:?}");
        source.close(CLOSE).await.expect("it leaves");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_consumer_waits_for_brokers_that_are_away_at_the_start() {
    let mut broker = KafkaBroker::start().await;
    let topic = broker.new_topic("start", 1).await;
    let dead = broker.new_topic("dead", 1).await;
    broker.produce(&topic, [Record::new(r#"{"id":1}"#)]).await;
    broker.kill();
    let kafka = Kafka::at(broker.bootstrap());
    let started = [None, Some(&*dead)].map(|dead| {
        let watched = Watched::new();
        let consumer = giving_up(&kafka, &topic, dead).observer(Arc::clone(&watched) as _);
        (
            watched,
            tokio::spawn(consumer.run_until(std::future::pending())),
        )
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

fn letter(message: Message) -> DeadLetter {
    DeadLetter {
        message,
        scope: "billing".to_owned(),
        key: Some("the-key".to_owned()),
        cause: DeadLetterCause::Permanent,
        reason: "é".repeat(1_000),
        attempts: 3,
        first_failed_at: UNIX_EPOCH.checked_add(Duration::from_secs(1)),
        failed_at: UNIX_EPOCH + Duration::from_secs(2),
    }
}

fn header_of<'a>(message: &'a OwnedMessage, name: &str) -> Option<&'a [u8]> {
    let mut named = message
        .headers()?
        .iter()
        .filter(|header| header.key == name);
    let value = named.next()?.value;
    assert!(named.next().is_none(), "{name} is there twice");
    value
}

// invariant: dead-letter-id
#[tokio::test]
async fn a_dead_letter_keeps_the_message_and_says_where_it_came_from() {
    let kafka = Kafka::shared().await;
    let topic = kafka.new_topic("orders", 1).await;
    let dead = kafka.new_topic("dead", 1).await;
    let record = Record::new(b"\xff bytes".as_slice())
        .key("k")
        .header("own", "kept");
    kafka
        .produce(
            &topic,
            [
                record.header("oncegate-reason", "an earlier one"),
                Record::tombstone(),
            ],
        )
        .await;
    let messages = consume(&kafka, &topic, 2).await;

    let source = KafkaSource::new(kafka.bootstrap(), "g", [&topic]);
    let letters = source.dead_letters(&dead);
    letters.open().await.expect("opens");
    let ids: Vec<String> = messages
        .iter()
        .map(|message| letter(message.clone()).id())
        .collect();
    for message in messages {
        letters.send(&letter(message)).await.expect("kept");
    }

    let kept = kafka.read_all(&dead).await;
    let [first, tombstone] = kept.as_slice() else {
        panic!("{} letters", kept.len())
    };
    assert_eq!(
        (first.payload(), first.key()),
        (Some(b"\xff bytes".as_slice()), Some(b"k".as_slice()))
    );
    assert_eq!((tombstone.payload(), tombstone.key()), (None, None));
    for (name, value) in [
        ("own", "kept"),
        ("oncegate-route", topic.as_str()),
        ("oncegate-origin-topic", topic.as_str()),
        ("oncegate-origin-partition", "0"),
        ("oncegate-origin-offset", "0"),
        ("oncegate-scope", "billing"),
        ("oncegate-key", "the-key"),
        ("oncegate-cause", "permanent"),
        ("oncegate-reason", "é".repeat(512).as_str()),
        ("oncegate-attempts", "3"),
    ] {
        assert_eq!(header_of(first, name), Some(value.as_bytes()), "{name}");
    }
    assert_eq!(
        header_of(first, "oncegate-first-failed-at"),
        Some(b"1000".as_slice())
    );
    assert_eq!(
        header_of(first, "oncegate-failed-at"),
        Some(b"2000".as_slice())
    );
    assert!(header_of(first, "oncegate-origin-timestamp").is_some());
    assert_eq!(header_of(first, "oncegate-id"), Some(ids[0].as_bytes()));
    assert_eq!(header_of(tombstone, "oncegate-id"), Some(ids[1].as_bytes()));
    // A consumer of the dead-letter topic sees the first route.
    assert_eq!(consume_routed(&kafka, &dead, 2).await[1].route(), topic);
}

#[tokio::test]
async fn dead_letters_that_would_be_lost_or_come_back_are_refused() {
    let kafka = Kafka::shared().await;
    let topic = kafka.new_topic("loop", 1).await;
    kafka.produce(&topic, [Record::new("x")]).await;
    let refusal =
        async |letters: KafkaDeadLetters| letters.open().await.expect_err("refused").to_string();

    let source = KafkaSource::new(kafka.bootstrap(), "g", [&topic]);
    assert!(refusal(source.dead_letters(&topic)).await.contains(&topic));
    assert!(
        refusal(KafkaDeadLetters::new(kafka.bootstrap(), unique("absent")))
            .await
            .contains("absent")
    );
    let careless = KafkaDeadLetters::new(kafka.bootstrap(), &topic).property("acks", "1");
    assert!(refusal(careless).await.contains("acks"));

    let unaware = KafkaDeadLetters::new(kafka.bootstrap(), &topic);
    let message = consume(&kafka, &topic, 1).await.remove(0);
    assert!(
        unaware.send(&letter(message.clone())).await.is_err(),
        "not opened"
    );
    unaware.open().await.expect("it cannot know");
    let refused = unaware
        .send(&letter(message))
        .await
        .expect_err("it came from there");
    assert!(refused.to_string().contains(&topic));
    assert_eq!(kafka.end_offsets(&topic).await, BTreeMap::from([(0, 1)]));
}
