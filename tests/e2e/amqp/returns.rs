//! What the broker counts, and takes away or drops by itself.

use std::time::Duration;

use oncegate::admin::dead_letter_reader::DeadLetterReader;
use oncegate::amqp::{AmqpDeadLetterReader, QueuePlan};
use oncegate::{Attempt, Backoff, Failure, Handler, Message};
use oncegate_testkit::{
    Proxy, ProxyMode, QueueKind, RabbitMqServer, RabbitQueue, RabbitRelease, unique, until,
};
use serde_json::json;
use tokio::time::Instant;

use crate::stage::{Book, Clerk, LIMIT, Stage, body, fails, id};

/// Wants message 1 later until a time, fails message 2 before it, and runs message 3 until then.
struct Patient {
    book: Book,
    until: Instant,
}

impl Handler for Patient {
    type Output = u32;

    async fn handle(&self, message: &Message, _attempt: &Attempt) -> Result<u32, Failure> {
        let id = id(message)?;
        let is_early = Instant::now() < self.until;
        match id {
            1 if is_early => {
                return Err(Failure::later(Duration::from_secs(4), "the bank is closed"));
            }
            2 if is_early => return Err(Failure::retry("the bank does not answer")),
            3 => {
                self.book.write("start 3");
                tokio::time::sleep_until(self.until).await;
            }
            _ => {}
        }
        self.book.write(format!("charge {id}"));
        Ok(id)
    }
}

/// The broker takes away what is held for three seconds, and drops at the third return.
async fn waits_longer_than_the_broker_allows(release: RabbitRelease) {
    let server = RabbitMqServer::start_release(release, "consumer_timeout = 3000").await;
    let arguments = [("x-delivery-limit", json!(2))];
    let queue = server
        .new_queue_with("orders", QueueKind::Quorum, &arguments)
        .await;
    let stage = Stage::of(&server, queue).await;
    let patient = Patient {
        book: Book::new(),
        until: Instant::now() + Duration::from_secs(40),
    };
    let book = patient.book.clone();
    stage.send(1..=3).await;
    let source = stage.source().management(server.management_url());
    let long = Backoff::new(Duration::from_secs(8), Duration::from_secs(9));
    let running = stage
        .start_with(source, patient, |consumer| {
            consumer.backoff(long).max_attempts(50)
        })
        .await;
    book.until_charged(3).await;
    running.stop().await;
    book.charged_once(3);
    assert_eq!(book.count("start 3"), 1, "it runs once, and to its end");
    assert_eq!(
        (stage.queue.ready().await, stage.dead.ready().await),
        (0, 0)
    );
}

// invariant: amqp-time-out-of-what-waits
#[tokio::test(flavor = "multi_thread")]
async fn what_waits_longer_than_the_broker_allows_is_not_dropped() {
    for release in RabbitRelease::ALL {
        waits_longer_than_the_broker_allows(release).await;
    }
}

/// Wants the first messages later, by far.
struct Postponing {
    clerk: Clerk,
    first: u32,
}

impl Handler for Postponing {
    type Output = u32;

    async fn handle(&self, message: &Message, attempt: &Attempt) -> Result<u32, Failure> {
        if id(message)? <= self.first {
            return Err(Failure::later(Duration::from_secs(600), "not today"));
        }
        self.clerk.handle(message, attempt).await
    }
}

// invariant: amqp-time-out-of-what-waits
#[tokio::test(flavor = "multi_thread")]
async fn a_prefetch_full_of_waiting_messages_lets_others_through() {
    for release in RabbitRelease::ALL {
        let server = RabbitMqServer::start_release(release, "").await;
        let stage = Stage::on(&server, QueueKind::Quorum).await;
        let clerk = Clerk::new();
        let postponing = Postponing {
            clerk: clerk.clone(),
            first: 50,
        };
        stage.send(1..=50).await;
        let running = stage
            .start_with(stage.source().prefetch(4), postponing, |consumer| consumer)
            .await;
        stage.queue.until_ready(0).await;
        stage.send(51..=60).await;
        clerk.book.until_charged(10).await;
        running.watched.until("acks", 10).await;
        running.stop().await;
        clerk.book.charged_once(10);
        // RabbitMQ 3.10 may forget single acks that come with many returns: see AMQP.md, "A stop".
        let left = stage.queue.ready().await;
        assert!((50..=60).contains(&left), "{release:?}: {left} are left");
    }
}

/// The prefetch cannot grow where the broker delivers to one consumer alone.
#[tokio::test(flavor = "multi_thread")]
async fn a_queue_that_delivers_nothing_because_all_waits_is_not_ready() {
    let server = RabbitMqServer::start().await;
    let arguments = [("x-single-active-consumer", json!(true))];
    let queue = server
        .new_queue_with("orders", QueueKind::Quorum, &arguments)
        .await;
    let stage = Stage::of(&server, queue).await;
    let postponing = Postponing {
        clerk: Clerk::new(),
        first: 4,
    };
    stage.send(1..=8).await;
    let running = stage
        .start_with(stage.source().prefetch(4), postponing, |consumer| consumer)
        .await;
    let health = running
        .until_health("not ready", |health| fails(health, "receive").is_some())
        .await;
    let said = fails(&health, "receive").unwrap();
    assert!(
        said.contains("4 messages") && said.contains("`prefetch`"),
        "{said}"
    );
    running.stop().await;
}

/// Connections are cut again and again, while a message runs and the others wait behind it: each
/// cut counts for all of them, more often than the limit allows. Of the two effects between two
/// cuts, the second is of a message that came by the new connection.
async fn is_not_dropped_beside_another(release: RabbitRelease) {
    const MESSAGES: u32 = 20;
    const CUTS: u32 = 8;
    let server = RabbitMqServer::start_release(release, "").await;
    let arguments = [("x-delivery-limit", json!(3))];
    let queue = server
        .new_queue_with("orders", QueueKind::Quorum, &arguments)
        .await;
    let mut stage = Stage::of(&server, queue).await;
    let proxy = Proxy::before_address(server.address()).await;
    let direct = stage.uri.clone();
    stage.uri = direct.replace(server.address(), &proxy.address().to_string());
    let clerk = Clerk::waiting();
    stage.send(0..MESSAGES).await;
    let source = stage.source().management(server.management_url());
    let running = stage
        .start_with(source, clerk.clone(), |consumer| consumer.concurrency(1))
        .await;
    for cut in 1..=CUTS {
        for effect in [2 * cut - 1, 2 * cut] {
            clerk.let_one_through();
            clerk.book.until_charged(effect).await;
        }
        proxy.set(ProxyMode::Refuse);
        running.watched.until("source_errors", cut.into()).await;
        proxy.set(ProxyMode::Pass);
        running
            .until_health("ready", |health| fails(health, "receive").is_none())
            .await;
    }
    clerk.open();
    clerk.book.until_charged(MESSAGES).await;
    running.stop().await;
    // Messages that were sent again may still be there, and are duplicates.
    clerk.book.charged_once(MESSAGES);
    assert_eq!(stage.dead.ready().await, 0);
}

// invariant: amqp-returns-of-innocents
#[tokio::test(flavor = "multi_thread")]
async fn no_message_is_dropped_because_of_lost_connections() {
    for release in RabbitRelease::ALL {
        is_not_dropped_beside_another(release).await;
    }
}

/// Reads the dead letters of a queue once, and returns how many there are.
async fn list(server: &RabbitMqServer, queue: &str) -> usize {
    let mut letters = AmqpDeadLetterReader::new(server.uri(), queue);
    letters.open().await.unwrap();
    let mut count = 0;
    while let Some(batch) = letters.next_batch().await.unwrap() {
        count += batch.len();
    }
    letters.close().await.unwrap();
    count
}

// invariant: amqp-read-loses-letters
#[tokio::test(flavor = "multi_thread")]
async fn reading_dead_letters_loses_none() {
    const LETTERS: u32 = 20;
    for release in RabbitRelease::ALL {
        let server = RabbitMqServer::start_release(release, "").await;
        let stage = Stage::on(&server, QueueKind::Quorum).await;
        let made = unique("made");
        let plan = QueuePlan::new(made.as_str());
        stage.source().create_queue(&plan).await.unwrap();
        let queue = RabbitQueue::of(server.uri(), made.clone());
        queue.send((0..LETTERS).map(body)).await;
        for look in 0..3 {
            let listed = list(&server, &made).await;
            assert_eq!(listed, LETTERS as usize, "{release:?}, look {look}");
        }
        queue.until_ready(LETTERS).await;
    }
    // RabbitMQ 4.3 counts failures, and a look is none.
    let server = RabbitMqServer::start_release(RabbitRelease::Newer, "").await;
    let arguments = [("x-delivery-limit", json!(1))];
    let queue = server
        .new_queue_with("dead", QueueKind::Quorum, &arguments)
        .await;
    queue.send((0..LETTERS).map(body)).await;
    for _ in 0..3 {
        assert_eq!(list(&server, queue.name()).await, LETTERS as usize);
    }
}

// invariant: amqp-read-loses-letters
#[tokio::test(flavor = "multi_thread")]
async fn a_queue_whose_letters_a_look_would_drop_is_refused() {
    let server = RabbitMqServer::start().await;
    let arguments = [("x-delivery-limit", json!(-1))];
    let queue = server
        .new_queue_with("dead", QueueKind::Quorum, &arguments)
        .await;
    queue.send((0..3).map(body)).await;
    let mut letters = AmqpDeadLetterReader::new(server.uri(), queue.name());
    let error = letters.open().await.unwrap_err().to_string();
    assert!(
        error.contains("-1") && error.contains("would drop"),
        "{error}"
    );
    until("all are there", LIMIT, async || match queue.ready().await {
        3 => Ok(()),
        ready => Err(format!("{ready} messages")),
    })
    .await;
}
