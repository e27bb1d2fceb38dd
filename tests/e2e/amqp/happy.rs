//! What should go well.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use lapin::BasicProperties;
use lapin::types::{AMQPValue, FieldTable};
use oncegate::{Attempt, Failure, Handler, Message};
use oncegate_testkit::{QueueKind, RabbitMq};

use crate::stage::{Book, Clerk, MAX_ATTEMPTS, Stage, body, id};

const ORDERS: u32 = 200;
const MESSAGES: u32 = 300;

/// Half of the orders come a second time.
async fn each_order_is_charged_once(kind: QueueKind) {
    let stage = Stage::on(&RabbitMq::shared().await, kind).await;
    stage.send((0..MESSAGES).map(|n| n % ORDERS)).await;
    let clerk = Clerk::new();
    let running = stage.start(clerk.clone()).await;
    running.watched.until("acks", MESSAGES.into()).await;
    let watched = running.stop().await;
    // What was not acknowledged would be ready again.
    assert_eq!(stage.queue.ready().await, 0);
    clerk.book.charged_once(ORDERS);
    assert_eq!(
        clerk.book.count("answer"),
        (MESSAGES - ORDERS) as usize,
        "duplicates get the stored result"
    );
    for name in ["extra_runs", "dead_letters", "source_errors"] {
        assert_eq!(watched.total(name), 0, "{name}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn each_order_of_a_classic_queue_is_charged_once() {
    each_order_is_charged_once(QueueKind::Classic).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn each_order_of_a_quorum_queue_is_charged_once() {
    each_order_is_charged_once(QueueKind::Quorum).await;
}

/// A stop comes while the last acks are on their way.
#[tokio::test(flavor = "multi_thread")]
async fn a_stop_sends_the_acks_that_came_while_others_were_sent() {
    const ORDERS: u32 = 3_000;
    let server = RabbitMq::shared().await;
    for round in 0..5 {
        let stage = Stage::on(&server, QueueKind::Quorum).await;
        stage.send(0..ORDERS).await;
        let handler = async |_: Message, _: Attempt| Ok::<(), Failure>(());
        let source = stage.source().prefetch(256);
        let running = stage
            .start_with(source, handler, |consumer| consumer.concurrency(256))
            .await;
        running.watched.until("acks", ORDERS.into()).await;
        running.stop().await;
        // Its counter would be late.
        let left = stage.queue.take().await.len();
        assert_eq!(left, 0, "round {round}: finished and not acknowledged");
    }
}

/// Fails twice, and writes what the broker says about the delivery.
struct Failing {
    runs: Arc<AtomicU32>,
    book: Book,
}

impl Handler for Failing {
    type Output = ();

    async fn handle(&self, message: &Message, attempt: &Attempt) -> Result<(), Failure> {
        let redelivered = message
            .header("AMQP.redelivered")
            .map(String::from_utf8_lossy)
            .unwrap();
        self.book.write(format!(
            "attempt {} of {}, {redelivered}",
            attempt.number(),
            id(message)?
        ));
        if self.runs.fetch_add(1, Ordering::SeqCst) + 1 < MAX_ATTEMPTS {
            return Err(Failure::retry("not yet"));
        }
        Ok(())
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_retry_waits_here_and_is_no_redelivery() {
    let stage = Stage::on(&RabbitMq::shared().await, QueueKind::Quorum).await;
    stage.send([1]).await;
    let book = Book::new();
    let running = stage
        .start(Failing {
            runs: Arc::default(),
            book: book.clone(),
        })
        .await;
    running.watched.until("acks", 1).await;
    let watched = running.stop().await;
    assert_eq!(book.count("attempt"), MAX_ATTEMPTS as usize);
    assert_eq!(
        book.count(&format!("attempt {MAX_ATTEMPTS} of 1, false")),
        1,
        "a retry costs no delivery"
    );
    assert_eq!(
        (watched.total("retries"), watched.total("dead_letters")),
        ((MAX_ATTEMPTS - 1).into(), 0)
    );
}

/// Writes the message's headers.
struct Reading(Book);

impl Handler for Reading {
    type Output = ();

    async fn handle(&self, message: &Message, _attempt: &Attempt) -> Result<(), Failure> {
        for header in message.headers() {
            let value = header
                .value
                .as_deref()
                .map(String::from_utf8_lossy)
                .unwrap_or_default();
            self.0.write(format!("{}={value}", header.name));
        }
        self.0
            .write(format!("timestamp={:?}", message.timestamp_ms()));
        Ok(())
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn properties_and_headers_arrive() {
    let stage = Stage::on(&RabbitMq::shared().await, QueueKind::Classic).await;
    let mut headers = FieldTable::default();
    headers.insert("tenant".into(), AMQPValue::LongString("a".into()));
    headers.insert("count".into(), AMQPValue::LongInt(7));
    let properties = BasicProperties::default()
        .with_headers(headers)
        .with_timestamp(12);
    let properties = properties
        .with_content_type("application/json".into())
        .with_correlation_id("c9".into());
    stage
        .queue
        .send_with([(properties, body(1).into_bytes())])
        .await;
    let book = Book::new();
    let running = stage.start(Reading(book.clone())).await;
    running.watched.until("acks", 1).await;
    running.stop().await;
    let queue = stage.queue.name();
    for line in [
        "tenant=a",
        "count=7",
        "content-type=application/json",
        "AMQP.correlation-id=c9",
        "AMQP.exchange=",
        &format!("AMQP.routing-key={queue}"),
        "AMQP.redelivered=false",
        "timestamp=Some(12000)",
    ] {
        assert_eq!(book.count(line), 1, "{line}");
    }
}
