//! Relays that are killed while transactions write.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use fastrand::Rng;
use oncegate::kafka::KafkaSource;
use oncegate::outbox::{ID_HEADER, OutboxMessage};
use oncegate::{Attempt, Consumer, Failure, Gate, Handler, Key, MemoryStore, Message};
use oncegate_testkit::{unique, until};
use tokio_util::sync::CancellationToken;

use crate::world::{LIMIT, Running, Table, World};

pub(crate) const KILLS: u64 = 10;
const KEYS: usize = 8;

/// The numbers that the consumer's handler has seen, by key, in their order.
pub(crate) type Seen = Arc<Mutex<BTreeMap<String, Vec<u32>>>>;

impl World {
    async fn published_count(&self) -> i64 {
        self.kafka.end_offsets(&self.topic).await.values().sum()
    }

    /// Consumes behind a gate whose key is the id of each message.
    fn consumer(&self, seen: &Seen, stop: &CancellationToken) -> tokio::task::JoinHandle<()> {
        let source = KafkaSource::new(
            self.kafka.bootstrap(),
            unique("outbox"),
            [self.topic.clone()],
        );
        let gate = Gate::new("notices", Key::header(ID_HEADER), MemoryStore::new());
        let consumer =
            Consumer::new(source, gate, handler(seen)).run_until(stop.clone().cancelled_owned());
        tokio::spawn(async move { consumer.await.unwrap() })
    }
}

/// A handler that remembers the numbers that it has seen, by their keys.
pub(crate) fn handler(seen: &Seen) -> impl Handler<Output = ()> + 'static {
    let seen = Arc::clone(seen);
    move |message: Message, _: Attempt| {
        let seen = Arc::clone(&seen);
        async move {
            let key = String::from_utf8(message.key().unwrap_or_default().to_vec())?;
            let number: u32 = std::str::from_utf8(message.payload())?.parse()?;
            seen.lock().unwrap().entry(key).or_default().push(number);
            Ok::<(), Failure>(())
        }
    }
}

/// How many messages were seen.
pub(crate) fn count(seen: &Seen) -> usize {
    seen.lock().unwrap().values().map(Vec::len).sum()
}

/// The numbers that each key must have been seen with.
pub(crate) fn expected(committed: &BTreeMap<String, u32>) -> BTreeMap<String, Vec<u32>> {
    committed
        .iter()
        .map(|(key, count)| (key.clone(), (0..*count).collect()))
        .collect()
}

/// Waits until everything that was committed was seen.
pub(crate) async fn until_seen(seen: &Seen, committed: &BTreeMap<String, u32>) {
    let all = committed.values().sum::<u32>() as usize;
    until(
        "the consumer to see everything",
        LIMIT,
        async || match count(seen) {
            seen if seen >= all => Ok(()),
            seen => Err(format!("it has seen {seen} of {all}")),
        },
    )
    .await;
}

/// Writes until it is told to stop: each transaction has a message or two of random keys, and every
/// fourth is rolled back. Returns how many messages of each key were committed.
pub(crate) async fn write_until(
    table: &Table,
    topic: &str,
    stop: &AtomicBool,
    mut rng: Rng,
) -> BTreeMap<String, u32> {
    let mut client = table.postgres.connection().await;
    let mut committed: BTreeMap<String, u32> = BTreeMap::new();
    while !stop.load(SeqCst) {
        let mut next = committed.clone();
        let mut transaction = client.transaction().await.unwrap();
        for _ in 0..rng.u32(1..=2) {
            let key = format!("customer-{}", rng.usize(..KEYS));
            let number = next.entry(key.clone()).or_default();
            let message = OutboxMessage::new(topic, number.to_string()).key(key);
            table
                .outbox
                .publish(&mut transaction, message)
                .await
                .unwrap();
            *number += 1;
        }
        if rng.u32(..4) == 0 {
            transaction.rollback().await.unwrap();
        } else {
            transaction.commit().await.unwrap();
            committed = next;
        }
    }
    committed
}

// invariant: outbox-exactly-once
// invariant: outbox-order
#[tokio::test]
async fn after_ten_kills_each_commit_is_consumed_once_and_in_order() {
    let seed = fastrand::u64(..);
    println!("seed: {seed}");
    let mut rng = Rng::with_seed(seed);
    let world = Arc::new(World::new().await);
    let seen = Seen::default();
    let stop_consumer = CancellationToken::new();
    let stop_writer = Arc::new(AtomicBool::new(false));
    let consumer = world.consumer(&seen, &stop_consumer);
    let writer = tokio::spawn({
        let world = Arc::clone(&world);
        let stop = Arc::clone(&stop_writer);
        let rng = rng.fork();
        async move { write_until(&world, &world.topic, &stop, rng).await }
    });
    for kill in 0..KILLS {
        let before = world.published_count().await;
        let more = rng.i64(1..60);
        let mut relay = world.relay_process(world.kafka.bootstrap());
        until(
            &format!("relay {kill} to publish {more} messages"),
            LIMIT,
            async || {
                let published = world.published_count().await - before;
                if published >= more {
                    Ok(())
                } else {
                    Err(format!("it has published {published}"))
                }
            },
        )
        .await;
        relay.kill();
    }
    let mut relay = world.relay_process(world.kafka.bootstrap());
    stop_writer.store(true, SeqCst);
    let committed = writer.await.unwrap();
    world.until_sent().await;
    until_seen(&seen, &committed).await;
    relay.signal("TERM");
    assert!(relay.end_within(LIMIT).await.success());
    stop_consumer.cancel();
    consumer.await.unwrap();
    assert_eq!(
        *seen.lock().unwrap(),
        expected(&committed),
        "each once, in order, and nothing of a rollback"
    );
}

/// A relay that stops gives the lead away, so that the next one does not wait for the end of a
/// lease.
// invariant: outbox-leader
#[tokio::test]
async fn of_two_relays_one_leads_until_it_is_killed_or_stopped() {
    let world = World::new().await;
    // Long enough for a busy machine to renew it in time.
    let relay = || world.relay().lease(Duration::from_secs(15));
    let first = Running::start(relay());
    first.watched.until("outbox_leader_changes", 1).await;
    let second = Running::start(relay());
    for number in 0..40 {
        world.write([world.message("a", number)]).await;
    }
    world.until_sent().await;
    assert_eq!(
        second.watched.get("outbox_published", ""),
        0,
        "two relays lead"
    );
    assert_eq!(
        (
            first.watched.get("outbox_published", ""),
            world.published_count().await
        ),
        (40, 40)
    );
    first.kill().await;
    for number in 40..80 {
        world.write([world.message("a", number)]).await;
    }
    world.until_sent().await;
    assert_eq!(second.watched.get("outbox_published", ""), 40);
    assert_eq!(second.watched.get("outbox_leader_changes", "took"), 1);

    second.stop().await;

    // So long that only a lead that was given away can be taken within the limit.
    for _ in 0..2 {
        let next = Running::start(world.relay().lease(Duration::from_secs(3_600)));
        next.watched.until("outbox_leader_changes", 1).await;
        next.stop().await;
    }
    world
        .assert_complete_and_in_order(&["a".to_owned()], 80)
        .await;
}
