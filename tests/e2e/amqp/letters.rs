//! Dead letters: what is written, and when the message is acknowledged.

use lapin::BasicProperties;
use lapin::types::{AMQPValue, FieldTable, ShortString};
use oncegate::{Attempt, Failure, Handler, Message};
use oncegate_testkit::{QueueKind, RabbitMq};

use crate::stage::{Clerk, MAX_ATTEMPTS, Stage, body, id};

/// Message 1 is hopeless, and message 2 fails each time.
struct Failing;

impl Handler for Failing {
    type Output = ();

    async fn handle(&self, message: &Message, _attempt: &Attempt) -> Result<(), Failure> {
        match id(message)? {
            1 => Err(Failure::permanent("no such account")),
            2 => Err(Failure::retry("the bank is closed")),
            _ => Ok(()),
        }
    }
}

fn header(message: &lapin::message::Delivery, name: &str) -> Option<String> {
    let headers = message.properties.headers().as_ref()?;
    match headers.inner().get(name)? {
        AMQPValue::LongString(text) => Some(text.to_string()),
        other => Some(format!("{other:?}")),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn dead_letters_have_payload_headers_and_reason() {
    let stage = Stage::on(&RabbitMq::shared().await, QueueKind::Classic).await;
    let mut headers = FieldTable::default();
    headers.insert("tenant".into(), AMQPValue::LongString("a".into()));
    headers.insert("count".into(), AMQPValue::LongLongInt(7));
    let properties = BasicProperties::default()
        .with_headers(headers)
        .with_message_id("m1".into())
        .with_correlation_id("c9".into())
        .with_expiration("600000".into())
        .with_priority(3);
    let bodies = [
        b"\xff\x00 not json".to_vec(),
        body(1).into_bytes(),
        body(2).into_bytes(),
    ];
    stage
        .queue
        .send_with(bodies.iter().map(|body| (properties.clone(), body.clone())))
        .await;
    let running = stage.start(Failing).await;
    running.watched.until("acks", 3).await;
    running.stop().await;
    assert_eq!(stage.queue.ready().await, 0);

    let mut letters = stage.dead.take().await;
    letters.sort_by_key(|letter| header(letter, "oncegate-reason"));
    let reasons: Vec<_> = letters
        .iter()
        .map(|letter| header(letter, "oncegate-reason").unwrap())
        .collect();
    assert_eq!(reasons.len(), 3);
    assert!(
        reasons[0].starts_with("attempts_used_up: ") && reasons[0].contains("the bank is closed")
    );
    assert!(reasons[1].starts_with("bad_key: "), "{reasons:?}");
    assert_eq!(reasons[2], "permanent: no such account");
    assert_eq!(letters[1].data, bodies[0], "unchanged");
    for letter in &letters {
        let properties = &letter.properties;
        assert_eq!(header(letter, "tenant").as_deref(), Some("a"));
        assert_eq!(header(letter, "count").as_deref(), Some("LongLongInt(7)"));
        assert_eq!(
            properties
                .correlation_id()
                .as_ref()
                .map(ShortString::as_str),
            Some("c9")
        );
        assert_eq!(
            (*properties.priority(), *properties.delivery_mode()),
            (Some(3), Some(2))
        );
        assert_eq!(
            *properties.expiration(),
            None,
            "a dead letter does not expire with its message"
        );
        let origin: serde_json::Value =
            serde_json::from_str(&header(letter, "oncegate-origin").unwrap()).unwrap();
        assert_eq!(origin["route"], stage.queue.name());
        assert_eq!(origin["scope"], stage.scope.as_str());
        assert_eq!(origin["origin"], format!("{}#m1", stage.queue.name()));
    }
    let origin: serde_json::Value =
        serde_json::from_str(&header(&letters[0], "oncegate-origin").unwrap()).unwrap();
    assert_eq!(origin["attempts"], MAX_ATTEMPTS);
}

// invariant: ack-before-completed
#[tokio::test(flavor = "multi_thread")]
async fn without_a_place_for_its_dead_letter_a_message_stays() {
    let server = RabbitMq::shared().await;
    let stage = Stage::on(&server, QueueKind::Quorum).await;
    let running = stage.start(Clerk::new()).await;
    stage.send([5]).await;
    running.watched.until("acks", 1).await;
    server.delete_queue(&stage.dead).await;
    stage.queue.send(["no json".to_owned()]).await;
    running.watched.until("source_errors", 2).await;
    assert_eq!(running.watched.total("acks"), 1, "it is not acknowledged");
    let path = format!("/api/queues/%2F/{}", stage.dead.name());
    server.manage("PUT", &path, r#"{"durable":true}"#).await;
    running.watched.until("acks", 2).await;
    running.stop().await;
    assert_eq!(
        (stage.queue.ready().await, stage.dead.ready().await),
        (0, 1)
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_connection_for_dead_letters_is_opened_again() {
    let server = RabbitMq::shared().await;
    let stage = Stage::on(&server, QueueKind::Classic).await;
    let running = stage.start(Clerk::new()).await;
    for count in 1..=3 {
        stage.queue.send(["no json".to_owned()]).await;
        running.watched.until("acks", count).await;
        let writing = format!("oncegate writes dead letters to {}", stage.dead.name());
        server.close_connection(&writing).await;
    }
    running.stop().await;
    assert_eq!(stage.dead.ready().await, 3);
}
