//! An outbox that is published to queues of SQS.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::Duration;

use aws_sdk_sqs::types::QueueAttributeName;
use fastrand::Rng;
use oncegate::outbox::{ID_HEADER, OutboxMessage, Relay};
use oncegate::sqs::{SqsPublisher, SqsSource};
use oncegate::{Consumer, Gate, Key, MemoryStore};
use oncegate_testkit::{Fault, Moto, Queue, Sqs, SqsProxy, until};
use tokio_util::sync::CancellationToken;

use crate::kill::{KILLS, Seen, count, expected, handler, until_seen, write_until};
use crate::world::{LIMIT, Running, Table};

const SEND: &str = "SendMessageBatch";

impl Table {
    fn sqs_relay(&self, sqs: &Sqs) -> Relay {
        let publisher = SqsPublisher::from_client(sqs.client().clone());
        Relay::new(self.outbox.clone(), publisher).lease(Duration::from_secs(2))
    }
}

/// The numbers of a key that are in a queue, as bodies.
fn numbers(count: u32) -> Vec<String> {
    (0..count).map(|number| number.to_string()).collect()
}

/// The bodies in a queue, sorted.
async fn bodies(queue: &Queue) -> Vec<String> {
    let mut bodies: Vec<String> = queue
        .take_all()
        .await
        .into_iter()
        .map(|message| message.body.unwrap())
        .collect();
    bodies.sort_by_key(|body| (body.len(), body.clone()));
    bodies
}

/// Consumes behind a gate whose key is the id of each message.
fn consumer(
    sqs: &Sqs,
    queue: &Queue,
    seen: &Seen,
    stop: &CancellationToken,
) -> tokio::task::JoinHandle<()> {
    let source =
        SqsSource::from_client(sqs.client().clone(), queue.url()).wait(Duration::from_secs(1));
    let gate = Gate::new("notices", Key::header(ID_HEADER), MemoryStore::new());
    let consumer =
        Consumer::new(source, gate, handler(seen)).run_until(stop.clone().cancelled_owned());
    tokio::spawn(async move { consumer.await.unwrap() })
}

/// Kills relays while transactions write, and returns what was committed and what the consumer has
/// seen.
async fn with_kills(queue: Queue) -> (BTreeMap<String, u32>, BTreeMap<String, Vec<u32>>) {
    let seed = fastrand::u64(..);
    println!("seed: {seed}");
    let mut rng = Rng::with_seed(seed);
    let sqs = Sqs::shared().await;
    let table = Arc::new(Table::new().await);
    let seen = Seen::default();
    let stop_consumer = CancellationToken::new();
    let stop_writer = Arc::new(AtomicBool::new(false));
    let consumer = consumer(&sqs, &queue, &seen, &stop_consumer);
    let writer = tokio::spawn({
        let table = Arc::clone(&table);
        let stop = Arc::clone(&stop_writer);
        let rng = rng.fork();
        async move { write_until(&table, queue.name(), &stop, rng).await }
    });
    for kill in 0..KILLS {
        let before = count(&seen);
        let more = rng.usize(1..60);
        let mut relay = table.relay_process(sqs.endpoint());
        until(
            &format!("{more} messages of relay {kill} to be seen"),
            LIMIT,
            async || {
                let seen = count(&seen) - before;
                if seen >= more {
                    Ok(())
                } else {
                    Err(format!("{seen} were seen"))
                }
            },
        )
        .await;
        relay.kill();
    }
    let mut relay = table.relay_process(sqs.endpoint());
    stop_writer.store(true, SeqCst);
    let committed = writer.await.unwrap();
    table.until_sent().await;
    until_seen(&seen, &committed).await;
    relay.signal("TERM");
    assert!(relay.end_within(LIMIT).await.success());
    stop_consumer.cancel();
    consumer.await.unwrap();
    let seen = seen.lock().unwrap().clone();
    (committed, seen)
}

// invariant: outbox-exactly-once
// invariant: outbox-order
#[tokio::test]
async fn after_ten_kills_a_fifo_queue_is_consumed_once_and_in_order() {
    let queue = Sqs::shared().await.new_fifo_queue("outbox").await;
    let (committed, seen) = with_kills(queue).await;
    assert_eq!(
        seen,
        expected(&committed),
        "each once, in order, and nothing of a rollback"
    );
}

/// A standard queue has neither keys nor order, and drops no repeats: only the gate does.
// invariant: outbox-exactly-once
#[tokio::test]
async fn after_ten_kills_a_standard_queue_is_consumed_once() {
    let queue = Sqs::shared().await.new_queue("outbox").await;
    let (committed, seen) = with_kills(queue).await;
    let mut numbers: Vec<u32> = seen.into_values().flatten().collect();
    numbers.sort_unstable();
    let mut expected: Vec<u32> = expected(&committed).into_values().flatten().collect();
    expected.sort_unstable();
    assert_eq!(numbers, expected, "each once, and nothing of a rollback");
}

#[tokio::test]
async fn payload_key_and_headers_arrive_unchanged_with_the_id() {
    let sqs = Sqs::shared().await;
    let table = Table::new().await;
    let fifo = sqs.new_fifo_queue("outbox").await;
    let standard = sqs.new_queue("outbox").await;
    let message = |queue: &Queue, id: &str| {
        let message = OutboxMessage::new(queue.url(), r#"{"grüße":1}"#)
            .key("customer-1")
            .id(id);
        message
            .header("type", "shipped")
            .header("bytes", b"\xff\0".as_slice())
    };
    let alone = OutboxMessage::new(fifo.name(), "alone").id("id-of-the-one-alone");
    table
        .write([message(&fifo, "id-1"), alone, message(&standard, "id-2")])
        .await;
    let running = Running::start(table.sqs_relay(&sqs));
    table.until_sent().await;
    running.stop().await;

    let by_body: BTreeMap<String, _> = fifo
        .take_all()
        .await
        .into_iter()
        .map(|message| (message.body.clone().unwrap(), message))
        .collect();
    let in_standard = standard.take_all().await;
    assert_eq!((by_body.len(), in_standard.len()), (2, 1));
    let group = |body: &str| {
        let attributes = by_body[body].attributes.as_ref().unwrap();
        ["MessageGroupId", "MessageDeduplicationId"].map(|name| attributes[&name.into()].clone())
    };
    assert_eq!(group(r#"{"grüße":1}"#), ["customer-1", "id-1"]);
    assert_eq!(
        group("alone"),
        ["id-of-the-one-alone", "id-of-the-one-alone"]
    );
    for (message, id) in [
        (&by_body[r#"{"grüße":1}"#], "id-1"),
        (&in_standard[0], "id-2"),
    ] {
        assert_eq!(message.body.as_deref(), Some(r#"{"grüße":1}"#));
        let attributes = message.message_attributes.as_ref().unwrap();
        assert_eq!(attributes.len(), 3);
        assert_eq!(attributes["type"].string_value(), Some("shipped"));
        assert_eq!(
            attributes["bytes"].binary_value().unwrap().as_ref(),
            b"\xff\0"
        );
        assert_eq!(attributes[ID_HEADER].string_value(), Some(id));
    }
}

/// Each message is in the queue once, whatever happened to its batch: an entry that failed is sent
/// again, alone or with others, and those beside it are not.
#[tokio::test]
async fn messages_travel_in_batches_and_fail_without_their_neighbours() {
    const COUNT: u32 = 100;
    let sqs = Sqs::shared().await;
    let table = Table::new().await;
    let queue = sqs.new_queue("outbox").await;
    let proxy = SqsProxy::before(&sqs).await;
    let failing = |code, senders_fault| Fault::FailEntries {
        at: vec![0, 3],
        code,
        senders_fault,
    };
    proxy.next(1, SEND, failing("InternalError", false));
    proxy.next(1, SEND, failing("InvalidMessageContents", true));
    proxy.next(1, SEND, Fault::Deny("BatchRequestTooLong"));
    proxy.next(1, SEND, Fault::Unavailable);
    table
        .write(
            numbers(COUNT)
                .into_iter()
                .map(|body| OutboxMessage::new(queue.name(), body)),
        )
        .await;
    let running = Running::start(table.sqs_relay(&proxy.sqs()));
    table.until_sent().await;
    let failures =
        ["unconfirmed", "refused"].map(|class| running.watched.get("outbox_failures", class));
    running.stop().await;
    assert_eq!(bodies(&queue).await, numbers(COUNT));
    assert_eq!(proxy.faults_met(), 4);
    // Two entries of the first answer, and the ten of the server that was unavailable; two of the
    // second answer.
    assert_eq!(failures, [12, 2]);
    // The batch that was refused as a whole was sent again one by one, and 14 messages were
    // repeated.
    assert_eq!(proxy.entries(SEND), u64::from(COUNT) + 10 + 14);
    let calls = proxy.calls(SEND);
    assert!(calls < 40, "{calls} calls for {COUNT} messages");
}

/// The connection ends after SQS has taken the batch: what is sent again has the same deduplication
/// ids.
// invariant: outbox-order
#[tokio::test]
async fn a_fifo_queues_lost_answer_repeats_nothing_and_keeps_order() {
    const COUNT: u32 = 30;
    let sqs = Sqs::shared().await;
    let table = Table::new().await;
    let queue = sqs.new_fifo_queue("outbox").await;
    let proxy = SqsProxy::before(&sqs).await;
    proxy.next(4, SEND, Fault::LoseReply);
    let message =
        |key: &'static str, body: &String| OutboxMessage::new(queue.name(), body.clone()).key(key);
    let each = numbers(COUNT);
    table
        .write(
            each.iter()
                .flat_map(|body| ["a", "b"].map(|key| message(key, body))),
        )
        .await;
    let running = Running::start(table.sqs_relay(&proxy.sqs()));
    table.until_sent().await;
    running.stop().await;
    assert_eq!(proxy.faults_met(), 4);
    let mut seen: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for message in queue.take_all().await {
        let group = message.attributes.unwrap()[&"MessageGroupId".into()].clone();
        seen.entry(group).or_default().push(message.body.unwrap());
    }
    assert_eq!(
        seen,
        [("a".to_owned(), each.clone()), ("b".to_owned(), each)].into()
    );
}

// invariant: outbox-refused
#[tokio::test]
async fn what_a_queue_does_not_take_holds_back_only_its_key() {
    // Unlike ElasticMQ, moto has limits of its queues.
    let moto = Moto::shared().await;
    let table = Table::new().await;
    let sqs = moto.sqs();
    let small = [(QueueAttributeName::MaximumMessageSize, "2048")];
    let queue = sqs.new_fifo_queue_with("outbox", &small).await;
    let message = |key: &str, body: &str| {
        OutboxMessage::new(queue.name(), body.to_owned()).key(key.to_owned())
    };
    let large = message("a", &"x".repeat(4_096)).id("the-large-one");
    let missing = OutboxMessage::new("outbox-no-such-queue", "{}")
        .key("a")
        .id("the-missing-one");
    table
        .write([
            message("a", "1"),
            large,
            message("a", "2"),
            missing,
            message("b", "3"),
        ])
        .await;
    let running = Running::start(table.sqs_relay(sqs));
    until("tries that are refused", LIMIT, async || {
        match running.watched.get("outbox_failures", "refused") {
            4.. => Ok(()),
            failures => Err(format!("{failures} tries were refused")),
        }
    })
    .await;
    table.write([message("b", "4")]).await;
    table.until_unsent(3).await;
    assert_eq!(bodies(&queue).await, ["1", "3", "4"]);
    // The limit is read again: nothing has to be restarted after it was raised.
    queue
        .set_attribute(QueueAttributeName::MaximumMessageSize, "8192")
        .await;
    table.until_unsent(1).await;
    table.remove("the-missing-one").await;
    running.stop().await;
    let rest: BTreeSet<usize> = bodies(&queue).await.iter().map(String::len).collect();
    assert_eq!(rest, [1, 4_096].into());
}
