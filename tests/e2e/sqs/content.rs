//! What is in messages: attributes of every type, envelopes of SNS, dead letters.

use std::collections::BTreeMap;

use aws_sdk_sqs::primitives::Blob;
use aws_sdk_sqs::types::{MessageAttributeValue, SendMessageBatchRequestEntry};
use oncegate::sqs::Body;
use oncegate::{Attempt, Failure, Message};
use oncegate_testkit::{Moto, Sqs};

use crate::stage::{Book, Clerk, Stage, body, id};

fn attribute(data_type: &str) -> aws_sdk_sqs::types::builders::MessageAttributeValueBuilder {
    MessageAttributeValue::builder().data_type(data_type)
}

const BINARY: [u8; 4] = [0, 255, 10, 128];

async fn attributes_arrive_as_headers_and_stay_with_a_dead_letter(sqs: &Sqs) {
    let stage = Stage::on(sqs).await;
    let entry = SendMessageBatchRequestEntry::builder()
        .message_body(body(7))
        .message_attributes(
            "tenant",
            attribute("String").string_value("acme").build().unwrap(),
        )
        .message_attributes(
            "weight",
            attribute("Number").string_value("10.50").build().unwrap(),
        )
        .message_attributes(
            "seal",
            attribute("Binary")
                .binary_value(Blob::new(BINARY))
                .build()
                .unwrap(),
        );
    stage.queue.send_in_order(vec![entry]).await;
    let book = Book::new();
    let lines = book.clone();
    let handler = move |message: Message, _: Attempt| {
        let lines = lines.clone();
        async move {
            assert_eq!(message.payload(), body(7).as_bytes());
            assert_eq!(message.header("tenant"), Some(&b"acme"[..]));
            assert_eq!(message.header("weight"), Some(&b"10.50"[..]));
            assert_eq!(message.header("seal"), Some(&BINARY[..]));
            assert_eq!(
                message.header("AWS.ApproximateReceiveCount"),
                Some(&b"1"[..])
            );
            assert!(message.timestamp_ms().is_some_and(|sent| sent > 0));
            lines.write("seen");
            Err::<(), _>(Failure::permanent("rejected\nby \u{202e}rule"))
        }
    };
    let running = stage.start(handler).await;
    running.watched.until("acks", 1).await;
    let watched = running.stop().await;
    assert_eq!(book.lines(), ["seen"]);
    assert_eq!(watched.get("dead_letters", "permanent"), 1);
    stage.queue.until_empty().await;

    let dead = stage.dead.take_all().await;
    let [letter] = &dead[..] else {
        panic!("{} dead letters", dead.len())
    };
    check_letter(letter, stage.queue.name());
}

/// Demands the body and the attributes of the message, and those of oncegate.
fn check_letter(letter: &aws_sdk_sqs::types::Message, queue: &str) {
    assert_eq!(letter.body(), Some(&*body(7)));
    let attributes = letter
        .message_attributes()
        .expect("a dead letter has attributes");
    let text = |name: &str| attributes[name].string_value().unwrap_or_default();
    assert_eq!(
        (text("tenant"), attributes["weight"].data_type()),
        ("acme", "Number")
    );
    assert_eq!(
        attributes["seal"].binary_value().map(AsRef::as_ref),
        Some(&BINARY[..])
    );
    assert!(
        text("oncegate-reason").contains("permanent")
            && text("oncegate-reason").contains("rejected")
    );
    assert!(
        text("oncegate-reason").ends_with("rejected by rule"),
        "{}",
        text("oncegate-reason")
    );
    let origin: serde_json::Value = serde_json::from_str(text("oncegate-origin")).unwrap();
    assert_eq!(origin["route"], queue);
    assert_eq!(
        (&origin["cause"], origin["attempts"].as_u64()),
        (&"permanent".into(), Some(1))
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn attributes_arrive_and_stay_with_a_dead_letter_on_elasticmq() {
    attributes_arrive_as_headers_and_stay_with_a_dead_letter(&Sqs::shared().await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn attributes_arrive_and_stay_with_a_dead_letter_on_moto() {
    attributes_arrive_as_headers_and_stay_with_a_dead_letter(Moto::shared().await.sqs()).await;
}

fn envelope(message: &str) -> String {
    serde_json::json!({
        "Type": "Notification", "MessageId": "m-1", "TopicArn": "arn:aws:sns:us-east-1:000000000000:orders",
        "Message": message, "Timestamp": "2026-01-01T00:00:00.000Z",
        "MessageAttributes": {"tenant": {"Type": "String", "Value": "acme"}},
    })
    .to_string()
}

#[tokio::test(flavor = "multi_thread")]
async fn an_envelope_of_sns_is_opened_and_what_is_none_is_buried() {
    let stage = Stage::on(&Sqs::shared().await).await;
    // The last one is a duplicate of the first: only what is inside the envelope counts.
    stage
        .queue
        .send([envelope(&body(1)), body(2), "no JSON".to_owned()])
        .await;
    let book = Book::new();
    let lines = book.clone();
    let handler = move |message: Message, _: Attempt| {
        let lines = lines.clone();
        async move {
            assert_eq!(message.header("tenant"), Some(&b"acme"[..]));
            assert_eq!(message.payload(), body(1).as_bytes());
            lines.write(format!("charge {}", id(&message)?));
            Ok::<(), Failure>(())
        }
    };
    let running = stage
        .start_with(stage.source().body(Body::Sns), handler, |consumer| consumer)
        .await;
    running.watched.until("acks", 3).await;
    let watched = running.stop().await;
    assert_eq!(book.lines(), ["charge 1"]);
    assert_eq!(watched.get("dead_letters", "bad_key"), 2);
    let mut dead_lettered: Vec<_> = stage
        .dead
        .take_all()
        .await
        .into_iter()
        .filter_map(|letter| letter.body)
        .collect();
    dead_lettered.sort_unstable();
    assert_eq!(
        dead_lettered,
        ["no JSON".to_owned(), body(2)],
        "as they came"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn the_same_payload_in_another_envelope_is_a_duplicate() {
    let stage = Stage::on(&Sqs::shared().await).await;
    let another = envelope(&body(1))
        .replace("m-1", "m-2")
        .replace("00:00:00", "01:00:00");
    stage.queue.send([envelope(&body(1)), another]).await;
    let clerk = Clerk::new();
    let running = stage
        .start_with(stage.source().body(Body::Sns), clerk.clone(), |consumer| {
            consumer
        })
        .await;
    running.watched.until("acks", 2).await;
    running.stop().await;
    assert_eq!(
        clerk.charges(),
        BTreeMap::from([("charge 1".to_owned(), 1)])
    );
}
