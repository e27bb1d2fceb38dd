//! An outbox in an SQLite file, and a relay from it to Kafka.

use std::time::Duration;

use oncegate::core::record::Token;
use oncegate::kafka::KafkaPublisher;
use oncegate::outbox::{HeldBack, ID_HEADER, OutboxMessage, OutboxStore as _, ReadLimits, Relay};
use oncegate::sqlite::{SqliteOutbox, SqliteStore};
use oncegate_testkit::{Kafka, until};
use rdkafka::Message as _;

use crate::world::{LIMIT, Running, firsts, header};

/// Writes 60 shipments and their messages. Every second transaction is rolled back, and its message
/// written again by the next.
fn ship(connection: &mut rusqlite::Connection, outbox: &SqliteOutbox, topic: &str) {
    for number in 0..60_u32 {
        let transaction = connection.transaction().unwrap();
        transaction
            .execute("INSERT INTO shipments VALUES (?1)", [number])
            .unwrap();
        let message = OutboxMessage::new(topic, (number / 2).to_string())
            .key("a")
            .header("type", "shipped");
        outbox.publish(&transaction, &message).unwrap();
        if number % 2 == 0 {
            transaction.rollback().unwrap();
        } else {
            transaction.commit().unwrap();
        }
    }
}

async fn until_sent(outbox: &SqliteOutbox) {
    until("the outbox to be empty", LIMIT, async || {
        match outbox.status().await.unwrap().unsent {
            0 => Ok(()),
            unsent => Err(format!("{unsent} messages are not sent")),
        }
    })
    .await;
}

// invariant: outbox-rollback
#[tokio::test]
async fn a_file_publishes_its_commits_and_keeps_them_for_a_retention() {
    let kafka = Kafka::shared().await;
    let topic = kafka.new_topic("outbox-sqlite", 2).await;
    let folder = tempfile::tempdir().unwrap();
    let store = SqliteStore::open(folder.path().join("shop.db"))
        .await
        .unwrap();
    let outbox = store.outbox("shop").await.unwrap();
    let mut connection = store.open_connection().unwrap();
    connection
        .execute_batch("CREATE TABLE shipments (number INTEGER)")
        .unwrap();
    let relay = || {
        Relay::new(outbox.clone(), KafkaPublisher::new(kafka.bootstrap()))
            .lease(Duration::from_secs(1))
    };
    let first = Running::start(relay());
    ship(&mut connection, &outbox, &topic);
    until_sent(&outbox).await;
    first.kill().await;
    let transaction = connection.transaction().unwrap();
    outbox
        .publish(
            &transaction,
            &OutboxMessage::tombstone(&topic).id("the tombstone"),
        )
        .unwrap();
    transaction.commit().unwrap();
    let second = Running::start(relay().retention(Duration::ZERO));
    until_sent(&outbox).await;
    until("the purge", LIMIT, async || {
        match outbox.status().await.unwrap().sent {
            0 => Ok(()),
            sent => Err(format!("{sent} messages are kept")),
        }
    })
    .await;
    second.stop().await;
    assert!(!outbox.status().await.unwrap().led);

    let published = kafka.read_all(&topic).await;
    let (tombstones, shipped): (Vec<_>, Vec<_>) = published
        .into_iter()
        .partition(|message| message.payload().is_none());
    assert_eq!(firsts(&shipped).get("a"), Some(&(0..30).collect()));
    assert!(
        shipped
            .iter()
            .all(|message| header(message, "type") == Some(b"shipped"))
    );
    assert_eq!(tombstones.len(), 1);
    assert_eq!(
        header(&tombstones[0], ID_HEADER),
        Some(b"the tombstone".as_slice())
    );
}

// invariant: clock-goes-back
#[tokio::test]
async fn a_clock_that_goes_back_extends_no_dead_relays_file_lead() {
    let folder = tempfile::tempdir().unwrap();
    let store = SqliteStore::open(folder.path().join("shop.db"))
        .await
        .unwrap();
    let outbox = store.outbox("shop").await.unwrap();
    let one = Token::from_bits(1);
    let other = Token::from_bits(2);
    let lease = Duration::from_secs(2);
    let hour = Duration::from_secs(3_600);
    let connection = store.open_connection().unwrap();
    // To the row this is the same as a clock that goes back.
    let goes_back = "UPDATE oncegate_outbox_leaders SET leads_until_ms = leads_until_ms + 3600000";
    assert!(outbox.lead(one, lease).await.unwrap());
    connection.execute(goes_back, []).unwrap();
    assert!(
        !outbox.lead(other, hour).await.unwrap(),
        "a relay that runs loses its lead"
    );
    assert!(outbox.lead(one, lease).await.unwrap());
    connection.execute(goes_back, []).unwrap();
    until("the lead of the dead relay to be over", LIMIT, async || {
        if outbox.lead(other, hour).await.unwrap() {
            Ok(())
        } else {
            Err("it is led".to_owned())
        }
    })
    .await;
    assert!(!outbox.lead(one, lease).await.unwrap());
}

// invariant: outbox-leader
#[tokio::test]
async fn a_file_has_one_leader_and_reads_up_to_its_limits() {
    let folder = tempfile::tempdir().unwrap();
    let store = SqliteStore::open(folder.path().join("shop.db"))
        .await
        .unwrap();
    let outbox = store.outbox("shop").await.unwrap();
    let one = Token::from_bits(1);
    let other = Token::from_bits(2);
    let long = Duration::from_secs(3_600);
    assert!(outbox.lead(one, long).await.unwrap() && outbox.lead(one, long).await.unwrap());
    assert!(!outbox.lead(other, long).await.unwrap());
    outbox.resign(other).await.unwrap();
    assert!(outbox.status().await.unwrap().led);
    outbox.resign(one).await.unwrap();
    assert!(outbox.lead(other, long).await.unwrap());

    let connection = store.open_connection().unwrap();
    for (bytes, key) in [(1_000, "a"), (10, "b"), (10, "a"), (10, "c")] {
        outbox
            .publish(
                &connection,
                &OutboxMessage::new("t", vec![b'x'; bytes]).key(key),
            )
            .unwrap();
    }
    let lengths = async |held: &HeldBack, messages, bytes| -> Vec<usize> {
        let read = outbox
            .read(held, ReadLimits { messages, bytes })
            .await
            .unwrap();
        read.iter()
            .map(|unsent| unsent.message.payload().unwrap().len())
            .collect()
    };
    let none = HeldBack::default();
    assert_eq!(lengths(&none, 10, 1 << 20).await, [1_000, 10, 10, 10]);
    assert_eq!(lengths(&none, 2, 1 << 20).await, [1_000, 10]);
    assert_eq!(lengths(&none, 10, 1).await, [1_000]);
    let held = HeldBack {
        keys: vec![("t".into(), "a".into())],
        ..HeldBack::default()
    };
    assert_eq!(lengths(&held, 10, 1 << 20).await, [10, 10]);
    let held = HeldBack {
        topics: vec!["t".into()],
        ..HeldBack::default()
    };
    assert_eq!(lengths(&held, 10, 1 << 20).await, [0; 0]);
    let counts = [
        outbox.backlog(3).await.unwrap(),
        outbox.backlog(10).await.unwrap(),
    ];
    assert_eq!(
        counts.map(|backlog| (backlog.messages, backlog.oldest.is_some())),
        [(3, true), (4, true)]
    );
    assert!(store.outbox("no spaces").await.is_err());
}
