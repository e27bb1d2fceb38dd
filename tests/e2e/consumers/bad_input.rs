//! Messages that no key can be made of: each reaches the dead letters with its bytes and the
//! reason.

use std::sync::Arc;

use oncegate::kafka::KafkaSource;
use oncegate::redis::RedisStore;
use oncegate::{Attempt, Consumer, Gate, Key, Message};
use oncegate_testkit::{Kafka, Record, Redis, Watched, unique};
use rdkafka::Message as _;
use rdkafka::message::{Headers, OwnedMessage};
use tokio::sync::oneshot;

fn nested(levels: usize) -> String {
    format!(r#"{{"id":{}1{}}}"#, "[".repeat(levels), "]".repeat(levels))
}

/// Payload, and what the reason must name. `None` is a tombstone.
fn bad() -> Vec<(Option<Vec<u8>>, &'static str)> {
    let text = |text: &str| Some(text.as_bytes().to_vec());
    vec![
        (text("{not json"), "JSON"),
        (text(r#"{"id":1}{"id":2}"#), "JSON"),
        (text(r#"{"id":1,"id":2}"#), "repeats"),
        (text(r#"{"other":1}"#), "id"),
        (text(r#"{"id":null}"#), "id"),
        (text(r#"{"id":"  "}"#), "id"),
        (text(&nested(10_000)), "deep"),
        (text(""), ""),
        (Some(vec![b'{', 0xff, 0xfe, b'}']), ""),
        (None, "payload"),
    ]
}

fn header<'a>(letter: &'a OwnedMessage, name: &str) -> &'a str {
    let headers = letter.headers().expect("a dead letter has headers");
    let found = headers
        .iter()
        .find(|header| header.key == name)
        .unwrap_or_else(|| panic!("no header {name}"));
    std::str::from_utf8(found.value.expect("a value")).expect("text")
}

/// The dead letter of the bad message with this number.
fn letter_of(letters: &[OwnedMessage], n: usize) -> &OwnedMessage {
    let key = format!("bad-{n}");
    letters
        .iter()
        .find(|letter| letter.key() == Some(key.as_bytes()))
        .expect("its letter")
}

/// Demands the message as it came, and a reason that has the word `names`.
fn check_letter(letters: &[OwnedMessage], n: usize, payload: Option<&[u8]>, names: &str) {
    let letter = letter_of(letters, n);
    assert_eq!(letter.payload(), payload, "the bytes are untouched");
    assert_eq!(header(letter, "oncegate-cause"), "bad_key");
    let reason = header(letter, "oncegate-reason");
    assert!(
        reason.contains(names),
        "bad-{n}: {reason:?} should name {names:?}"
    );
    let kept = letter
        .headers()
        .unwrap()
        .iter()
        .find(|header| header.key == "kept")
        .unwrap();
    assert_eq!(
        kept.value,
        Some([0xff, 0x00, u8::try_from(n).unwrap()].as_slice()),
        "headers are untouched"
    );
}

// invariant: constant-key
#[tokio::test(flavor = "multi_thread")]
async fn bad_messages_reach_the_dead_letters_and_good_ones_do_not() {
    let kafka = Kafka::shared().await;
    let redis = Redis::shared().await;
    let topic = kafka.new_topic("bad", 2).await;
    let dead = kafka.new_topic("dead", 1).await;
    let mut records: Vec<Record> = Vec::new();
    for (n, (payload, _)) in bad().into_iter().enumerate() {
        let record = payload.map_or_else(Record::tombstone, Record::new);
        records.push(
            record
                .key(format!("bad-{n}"))
                .header("kept", [0xff, 0x00, n.try_into().unwrap()]),
        );
        records.push(
            Record::new(format!(r#"{{"id":{n}}}"#))
                .key("good")
                .header("trace", [0xff, 0xfe]),
        );
    }
    let large = format!(r#"{{"id":"large","filler":"{}"}}"#, "x".repeat(1 << 20));
    records.push(Record::new(large).key("large"));
    let messages = records.len() as u64;
    kafka.produce(&topic, records).await;

    let group = unique("bad");
    let watched = Watched::new();
    let store = RedisStore::connect(redis.url()).await.unwrap();
    let gate = Gate::new(unique("bad"), Key::json(["id"]), store);
    let source = KafkaSource::new(kafka.bootstrap(), group.as_str(), [topic.as_str()]);
    let dead_letters = source.dead_letters(dead.as_str());
    let consumer = Consumer::new(source, gate, async |_: Message, _: Attempt| Ok(()))
        .dead_letters(dead_letters)
        .observer(Arc::clone(&watched) as _);
    let (stop, stopped) = oneshot::channel::<()>();
    let running = tokio::spawn(consumer.run_until(async { _ = stopped.await }));
    watched.until("acks", messages).await;
    stop.send(()).unwrap();
    running.await.unwrap().unwrap();

    assert_eq!(
        watched.get("handler_runs", "succeeded"),
        bad().len() as u64 + 1,
        "every good message ran"
    );
    let letters = kafka.read_all(&dead).await;
    assert_eq!(letters.len(), bad().len());
    for (n, (payload, names)) in bad().into_iter().enumerate() {
        check_letter(&letters, n, payload.as_deref(), names);
        assert_eq!(
            header(letter_of(&letters, n), "oncegate-origin-topic"),
            topic
        );
    }
    let committed: i64 = kafka.committed_offsets(&group, &topic).await.values().sum();
    assert_eq!(committed.unsigned_abs(), messages);
}
