//! Loops as one would write them by hand: one that claims, works and completes what a poll has
//! returned, and the same without a store. They handle no failure at all.

use std::time::{Duration, Instant};

use rdkafka::ClientConfig;
use rdkafka::consumer::{BaseConsumer, CommitMode, Consumer as _};
use rdkafka::message::{BorrowedMessage, Headers as _, Message as _};

use super::consumer::Meter;
use super::producer::{STAMP, Stamp};
use super::{Measured, READY, Task, group};
use crate::by_hand::ByHand;

/// The commit interval, as in `KafkaSource`.
const COMMIT_INTERVAL: Duration = Duration::from_secs(1);
/// The time that a poll waits for the first message, and the number of messages that it takes.
const POLL: Duration = Duration::from_millis(100);
const POLL_MOST: usize = 512;

/// Claims and completes in two pipelines for each poll.
pub(super) fn bare_loop(task: &Task, redis: &str) -> Measured {
    let mut store = ByHand::connect(redis);
    consume(task, move |meter, polled| {
        let claims = store.claim(polled.iter().map(|(payload, _)| payload.as_slice()));
        assert_eq!(claims.len(), polled.len(), "every key is new");
        polled.iter().for_each(|(_, stamp)| meter.effect(*stamp));
        store.complete(&claims);
    })
}

/// Polls and commits.
pub(super) fn poll_and_commit(task: &Task) -> Measured {
    consume(task, |meter, polled| {
        polled.iter().for_each(|(_, stamp)| meter.effect(*stamp));
    })
}

/// Polls, works, and commits every second.
fn consume(task: &Task, mut work: impl FnMut(&Meter, &[(Vec<u8>, Stamp)])) -> Measured {
    let consumer = consumer(task);
    let meter = Meter::new(task);
    let mut is_ready = false;
    let mut is_over = false;
    let mut committed_at = Instant::now();
    while !is_over {
        let polled = poll(&consumer);
        if !is_ready
            && consumer
                .assignment()
                .is_ok_and(|assignment| assignment.count() > 0)
        {
            println!("{READY}");
            is_ready = true;
        }
        if polled.is_empty() {
            continue;
        }
        work(&meter, &polled);
        is_over = polled
            .iter()
            .fold(false, |is_over, (_, stamp)| meter.ack(*stamp) || is_over);
        if committed_at.elapsed() > COMMIT_INTERVAL {
            consumer
                .commit_consumer_state(CommitMode::Async)
                .expect("a commit can be sent");
            committed_at = Instant::now();
        }
    }
    consumer
        .commit_consumer_state(CommitMode::Sync)
        .expect("the last commit arrives");
    meter.measured()
}

/// A consumer with the settings of `KafkaSource`.
fn consumer(task: &Task) -> BaseConsumer {
    let mut config = ClientConfig::new();
    config
        .set("bootstrap.servers", &task.brokers)
        .set("group.id", group());
    config
        .set("auto.offset.reset", "earliest")
        .set("enable.auto.commit", "false");
    config.set("fetch.queue.backoff.ms", "10");
    config
        .set("queued.min.messages", "10000")
        .set("queued.max.messages.kbytes", "16384");
    let consumer: BaseConsumer = config.create().expect("the settings are valid");
    consumer
        .subscribe(&[&task.topic])
        .expect("the topic can be subscribed to");
    consumer
}

/// Waits for a message, and takes what else is there.
fn poll(consumer: &BaseConsumer) -> Vec<(Vec<u8>, Stamp)> {
    let mut polled = Vec::new();
    while polled.len() < POLL_MOST {
        let wait = if polled.is_empty() {
            POLL
        } else {
            Duration::ZERO
        };
        let Some(message) = consumer.poll(wait) else {
            break;
        };
        let message = message.expect("a message");
        polled.push((
            message.payload().unwrap_or_default().to_vec(),
            stamp(&message),
        ));
    }
    polled
}

fn stamp(message: &BorrowedMessage<'_>) -> Stamp {
    let headers = message.headers().expect("the producer adds one");
    let stamp = headers
        .iter()
        .find(|header| header.key == STAMP)
        .and_then(|header| header.value);
    Stamp::from_bytes(stamp.expect("the producer adds it"))
}
