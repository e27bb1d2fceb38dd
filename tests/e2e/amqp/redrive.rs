//! Dead letters that are listed and sent back.

use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt as _;
use lapin::options::{BasicConsumeOptions, BasicQosOptions};
use lapin::types::FieldTable;
use lapin::{BasicProperties, Connection, ConnectionProperties};
use oncegate::admin::dead_letter_reader::{DeadLetterReader, StoredDeadLetter};
use oncegate::admin::{Redrive, Wanted};
use oncegate::amqp::AmqpDeadLetterReader;
use oncegate::{Attempt, Failure, Handler, Message};
use oncegate_testkit::{QueueKind, RabbitMq};
use serde_json::json;

use crate::stage::{Book, Clerk, Stage, body, id};

/// Refuses every message.
struct Refusing;

impl Handler for Refusing {
    type Output = u32;

    async fn handle(&self, message: &Message, _attempt: &Attempt) -> Result<u32, Failure> {
        Err(Failure::permanent(format!("refused {}", id(message)?)))
    }
}

/// Writes the route, and the routing key that the message came by first.
struct Routed(Book);

impl Handler for Routed {
    type Output = u32;

    async fn handle(&self, message: &Message, _attempt: &Attempt) -> Result<u32, Failure> {
        let routing_key = message
            .header("AMQP.routing-key")
            .map(String::from_utf8_lossy)
            .unwrap();
        self.0
            .write(format!("{} by {routing_key}", message.route()));
        id(message)
    }
}

async fn list(stage: &Stage) -> Vec<StoredDeadLetter> {
    let mut letters = AmqpDeadLetterReader::new(stage.uri.as_str(), stage.dead.name());
    letters.open().await.unwrap();
    let mut all = Vec::new();
    while let Some(batch) = letters.next_batch().await.unwrap() {
        all.extend(batch);
    }
    letters.close().await.unwrap();
    all
}

async fn redrive(stage: &Stage, redrive: Redrive) -> u64 {
    let mut letters = AmqpDeadLetterReader::new(stage.uri.as_str(), stage.dead.name());
    letters.open().await.unwrap();
    let redriven = redrive
        .run(&mut letters, |_| Wanted::Yes, |_| {})
        .await
        .unwrap();
    letters.close().await.unwrap();
    redriven.sent
}

#[tokio::test(flavor = "multi_thread")]
async fn dead_letters_are_listed_in_order_and_stay() {
    let stage = Stage::on(&RabbitMq::shared().await, QueueKind::Quorum).await;
    // Two of them have the same id, which a sender may give twice.
    for (number, name) in [(1, "a"), (2, "b"), (3, "a")] {
        let properties = BasicProperties::default().with_message_id(name.into());
        stage
            .queue
            .send_with([(properties, body(number).into_bytes())])
            .await;
    }
    let running = stage
        .start_with(stage.source(), Refusing, |consumer| consumer.concurrency(1))
        .await;
    running.watched.until("acks", 3).await;
    running.stop().await;
    for _ in 0..2 {
        let listed = list(&stage).await;
        let places: Vec<String> = listed
            .iter()
            .map(|letter| letter.place.to_string())
            .collect();
        let dead = stage.dead.name();
        assert_eq!(
            places,
            [
                format!("{dead}#a"),
                format!("{dead}#b"),
                format!("{dead}#a~2")
            ]
        );
        let reasons: Vec<&str> = listed
            .iter()
            .map(|one| one.letter().unwrap().reason.as_str())
            .collect();
        assert_eq!(reasons, ["refused 1", "refused 2", "refused 3"]);
        assert_eq!(stage.dead.ready().await, 3);
    }
}

/// Another consumer has the queue for itself for longer than the reader waits for a byte.
#[tokio::test(flavor = "multi_thread")]
async fn a_queue_that_delivers_late_is_read_to_its_end() {
    let server = RabbitMq::shared().await;
    let mut stage = Stage::on(&server, QueueKind::Quorum).await;
    let alone = [("x-single-active-consumer", json!(true))];
    stage.dead = server
        .new_queue_with("dead", QueueKind::Quorum, &alone)
        .await;
    stage.send(0..3).await;
    let running = stage.start(Refusing).await;
    running.watched.until("acks", 3).await;
    running.stop().await;
    let other = Connection::connect(&stage.uri, ConnectionProperties::default())
        .await
        .unwrap();
    let channel = other.create_channel().await.unwrap();
    let one = BasicQosOptions::default();
    channel.basic_qos(1, one).await.unwrap();
    let queue = stage.dead.name().into();
    let options = BasicConsumeOptions::default();
    let mut consumer = channel
        .basic_consume(queue, "".into(), options, FieldTable::default())
        .await
        .unwrap();
    // It holds one, and the others wait.
    consumer.next().await.unwrap().unwrap();
    let leaves = async {
        tokio::time::sleep(Duration::from_secs(5)).await;
        drop(consumer);
        other.close(200, "OK".into()).await.unwrap();
    };
    let (listed, ()) = tokio::join!(list(&stage), leaves);
    assert_eq!(listed.len(), 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn redriven_messages_run_once_more_and_only_once() {
    const MESSAGES: u32 = 50;
    let stage = Stage::on(&RabbitMq::shared().await, QueueKind::Quorum).await;
    stage.send(0..MESSAGES).await;
    let running = stage.start(Refusing).await;
    running.watched.until("acks", MESSAGES.into()).await;
    running.stop().await;
    assert_eq!(stage.dead.ready().await, MESSAGES);
    let store = Arc::new(stage.store().await);
    let sent = redrive(&stage, Redrive::new(Arc::clone(&store) as _)).await;
    assert_eq!((sent, stage.dead.ready().await), (MESSAGES.into(), 0));
    let clerk = Clerk::new();
    let running = stage.start(clerk.clone()).await;
    running.watched.until("acks", MESSAGES.into()).await;
    running.stop().await;
    clerk.book.charged_once(MESSAGES);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_redriven_elsewhere_keeps_its_route() {
    let server = RabbitMq::shared().await;
    let stage = Stage::on(&server, QueueKind::Classic).await;
    stage.send([1]).await;
    let running = stage.start(Refusing).await;
    running.watched.until("acks", 1).await;
    running.stop().await;
    let other = server.new_queue("repaired", QueueKind::Classic).await;
    let store = Arc::new(stage.store().await);
    assert_eq!(
        redrive(&stage, Redrive::new(store).to(other.name())).await,
        1
    );
    let book = Book::new();
    let source =
        oncegate::amqp::AmqpSource::new(stage.uri.as_str(), other.name()).routes_from_headers();
    let first_route = stage.queue.name().to_owned();
    let running = stage
        .start_with(source, Clerk::new(), |consumer| {
            let gate = oncegate::Gate::new(
                oncegate_testkit::unique("other"),
                oncegate::Key::json(["id"]),
                oncegate::MemoryStore::new(),
            );
            consumer.route(first_route, gate, Routed(book.clone()))
        })
        .await;
    running.watched.until("acks", 1).await;
    running.stop().await;
    assert_eq!(book.count(&format!("{0} by {0}", stage.queue.name())), 1);
}
