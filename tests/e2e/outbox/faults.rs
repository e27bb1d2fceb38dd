//! A broker that is away, a message that it refuses, a database that goes away, and what is kept.

use std::time::Duration;

use oncegate::kafka::KafkaPublisher;
use oncegate::outbox::{OutboxMessage, OutboxStore as _, Relay};
use oncegate::postgres::PostgresStore;
use oncegate_testkit::{Kafka, KafkaBroker, unique, until};

use crate::world::{LIMIT, Running, World, firsts};

const KEYS: u32 = 5;

fn keys() -> Vec<String> {
    (0..KEYS).map(|key| format!("customer-{key}")).collect()
}

impl World {
    async fn write_for_all(&self, numbers: std::ops::Range<u32>) {
        for number in numbers {
            self.write(keys().iter().map(|key| self.message(key, number)))
                .await;
        }
    }
}

// invariant: outbox-order
#[tokio::test]
async fn in_a_broker_outage_messages_wait_and_then_leave_in_order() {
    let mut broker = KafkaBroker::start().await;
    let world = World::on((*broker).clone()).await;
    let publisher = KafkaPublisher::new(world.kafka.bootstrap())
        // The shortest times, so that the outage lasts for several tries.
        .property("delivery.timeout.ms", "1500")
        .property("request.timeout.ms", "1000");
    let relay = Relay::new(world.outbox.clone(), publisher)
        .batch(10)
        .lease(Duration::from_secs(2));
    let running = Running::start(relay);
    world.write_for_all(0..10).await;
    world.until_sent().await;
    broker.kill();
    world.write_for_all(10..40).await;
    until("tries that fail", LIMIT, async || {
        match running.watched.get("outbox_failures", "unconfirmed") {
            6.. => Ok(()),
            failures => Err(format!("{failures} tries have failed")),
        }
    })
    .await;
    let status = world.outbox.status().await.unwrap();
    assert_eq!(
        status.unsent,
        u64::from(KEYS) * 30,
        "something counts as sent that no broker has"
    );
    assert!(status.oldest_unsent.is_some());
    // A relay that a busy machine has held up leads again with its next try.
    until("a relay that leads", LIMIT, async || {
        match world.outbox.status().await.unwrap() {
            status if status.led => Ok(()),
            status => Err(format!("{status:?}")),
        }
    })
    .await;
    broker.start_again().await;
    world.until_sent().await;
    running.stop().await;
    world.assert_complete_and_in_order(&keys(), 40).await;
}

// invariant: outbox-refused
#[tokio::test]
async fn a_refused_message_holds_back_its_key_and_nothing_else() {
    let kafka = Kafka::shared().await;
    let topic = unique("outbox-small");
    kafka
        .create_topic_with(&topic, &[("max.message.bytes", "20000")])
        .await;
    let world = World::to(kafka, topic).await;
    // Random, so that compression makes it no smaller.
    let large: Vec<u8> = std::iter::repeat_with(|| fastrand::u8(..))
        .take(40_000)
        .collect();
    let large = OutboxMessage::new(&world.topic, large);
    let id = large.message_id().to_owned();
    world
        .write([
            world.message("a", 0),
            large.key("a"),
            world.message("a", 1),
            world.message("b", 0),
        ])
        .await;
    let running = Running::start(world.relay());
    until("tries of the large one", LIMIT, async || {
        match running.watched.get("outbox_failures", "refused") {
            3.. => Ok(()),
            failures => Err(format!("{failures} tries were refused")),
        }
    })
    .await;
    world.write([world.message("b", 1)]).await;
    world.until_unsent(2).await;
    let seen = firsts(&world.published().await);
    assert_eq!(
        seen.get("a"),
        Some(&vec![0]),
        "a message has overtaken the one before it"
    );
    assert_eq!(seen.get("b"), Some(&vec![0, 1]), "another key waits");
    world.remove(&id).await;
    world.until_sent().await;
    running.stop().await;
    assert_eq!(firsts(&world.published().await).get("a"), Some(&vec![0, 1]));
}

#[tokio::test]
async fn a_relay_continues_when_its_sessions_were_ended() {
    let world = World::new().await;
    let url = world.postgres.url();
    let separator = if url.contains('?') { '&' } else { '?' };
    let store = PostgresStore::connect(&format!("{url}{separator}application_name=relay"))
        .await
        .unwrap();
    let outbox = store.outbox(world.outbox.name()).unwrap();
    let relay = Relay::new(outbox, KafkaPublisher::new(world.kafka.bootstrap()))
        .lease(Duration::from_secs(2));
    let running = Running::start(relay);
    let client = world.postgres.connection().await;
    let mut ended = 0;
    for round in 0..5 {
        world.write_for_all(round * 10..(round + 1) * 10).await;
        let end = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity \
                   WHERE datname = current_database() AND application_name = 'relay'";
        ended += client.query_one(end, &[]).await.unwrap().get::<_, i64>(0);
    }
    assert!(ended > 0, "no session was ended");
    world.until_sent().await;
    running.stop().await;
    world.assert_complete_and_in_order(&keys(), 50).await;
}

#[tokio::test]
async fn what_was_sent_is_kept_for_its_retention_and_then_removed() {
    let world = World::new().await;
    let running = Running::start(world.relay().batch(10));
    world.write_for_all(0..20).await;
    world.until_sent().await;
    running.stop().await;
    assert_eq!(
        world.outbox.status().await.unwrap().sent,
        100,
        "a day is not over"
    );
    world.write_for_all(20..21).await;
    let running = Running::start(world.relay().batch(10).retention(Duration::ZERO));
    running.watched.until("outbox_purged", 105).await;
    let status = world.outbox.status().await.unwrap();
    assert_eq!((status.unsent, status.sent), (0, 0));
    running.stop().await;
}

#[tokio::test]
async fn a_purge_removes_no_more_than_it_may_and_nothing_unsent() {
    let world = World::new().await;
    world.write_for_all(0..4).await;
    assert_eq!(world.outbox.purge(Duration::ZERO, 100).await.unwrap(), 0);
    let running = Running::start(world.relay());
    world.until_sent().await;
    running.stop().await;
    world.write_for_all(4..5).await;
    assert_eq!(
        world
            .outbox
            .purge(Duration::from_secs(3_600), 100)
            .await
            .unwrap(),
        0
    );
    assert_eq!(world.outbox.purge(Duration::ZERO, 7).await.unwrap(), 7);
    assert_eq!(world.outbox.purge(Duration::ZERO, 100).await.unwrap(), 13);
    assert_eq!(
        (
            world.unsent().await,
            world.outbox.status().await.unwrap().sent
        ),
        (5, 0)
    );
}

#[tokio::test]
async fn a_relay_without_tables_names_the_command_that_makes_them() {
    let postgres = oncegate_testkit::Postgres::shared().await.database().await;
    let outbox = PostgresStore::connect(postgres.url())
        .await
        .unwrap()
        .outbox("shop")
        .unwrap();
    let relay = Relay::new(outbox, KafkaPublisher::new("localhost:1"));
    let error = relay
        .run_until(std::future::pending())
        .await
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("shop") && error.contains("oncegate migrate"),
        "{error}"
    );
}
