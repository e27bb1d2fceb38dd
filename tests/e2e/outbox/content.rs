//! What is published, by every kind of transaction.

use std::collections::BTreeMap;
use std::time::Duration;

use deadpool_postgres::{Manager, Pool};
use oncegate::core::record::Token;
use oncegate::outbox::{
    HeldBack, ID_HEADER, OutboxBacklog, OutboxMessage, OutboxStore, ReadLimits,
};
use oncegate::postgres::PostgresStore;
use rdkafka::Message as _;
use rdkafka::message::Headers as _;
use sqlx::{Connection as _, PgConnection};

use crate::world::{Running, World, header};

// invariant: outbox-rollback
#[tokio::test]
async fn every_kind_of_transaction_publishes_only_what_it_commits() {
    let world = World::new().await;
    let message = |key: &str| OutboxMessage::new(&world.topic, key.to_owned()).key(key.to_owned());

    let mut client = world.postgres.connection().await;
    let mut transaction = client.transaction().await.unwrap();
    world
        .outbox
        .publish(&mut transaction, message("tokio-postgres"))
        .await
        .unwrap();
    transaction.commit().await.unwrap();
    let mut transaction = client.transaction().await.unwrap();
    world
        .outbox
        .publish(&mut transaction, message("rolled back"))
        .await
        .unwrap();
    transaction.rollback().await.unwrap();

    let manager = Manager::new(world.postgres.url().parse().unwrap(), tokio_postgres::NoTls);
    let mut pooled = Pool::builder(manager).build().unwrap().get().await.unwrap();
    let mut transaction = pooled.transaction().await.unwrap();
    world
        .outbox
        .publish(&mut transaction, message("deadpool"))
        .await
        .unwrap();
    transaction.commit().await.unwrap();
    let mut transaction = pooled.transaction().await.unwrap();
    world
        .outbox
        .publish(&mut transaction, message("dropped"))
        .await
        .unwrap();
    drop(transaction);

    let mut connection = PgConnection::connect(world.postgres.url()).await.unwrap();
    let mut transaction = connection.begin().await.unwrap();
    world
        .outbox
        .publish(&mut transaction, message("sqlx"))
        .await
        .unwrap();
    transaction.commit().await.unwrap();
    let mut transaction = connection.begin().await.unwrap();
    world
        .outbox
        .publish(&mut transaction, message("rolled back"))
        .await
        .unwrap();
    transaction.rollback().await.unwrap();

    let running = Running::start(world.relay());
    world.until_sent().await;
    running.stop().await;
    let published = world.published().await;
    let mut keys: Vec<&[u8]> = published
        .iter()
        .map(|message| message.key().unwrap())
        .collect();
    keys.sort_unstable();
    assert_eq!(keys, [b"deadpool".as_slice(), b"sqlx", b"tokio-postgres"]);
}

#[tokio::test]
async fn payload_key_headers_and_id_arrive_in_the_keys_partition() {
    let world = World::new().await;
    let payload = b"\0\xff not UTF-8".as_slice();
    let whole = OutboxMessage::new(&world.topic, payload)
        .key(b"\xfe\0key".as_slice())
        .header("type", "shipped")
        .header("type", b"\xff".as_slice())
        .id("id-of-the-whole");
    let tombstone = OutboxMessage::tombstone(&world.topic)
        .key("gone")
        .id("id-of-the-tombstone");
    let bare = OutboxMessage::new(&world.topic, "").id("id-of-the-bare");
    world.write([whole, tombstone, bare]).await;
    let running = Running::start(world.relay());
    world.until_sent().await;
    running.stop().await;

    let published = world.published().await;
    let by_id: BTreeMap<&[u8], _> = published
        .iter()
        .map(|message| (header(message, ID_HEADER).unwrap(), message))
        .collect();
    assert_eq!(by_id.len(), 3);
    let whole = by_id[b"id-of-the-whole".as_slice()];
    assert_eq!(
        (whole.payload(), whole.key()),
        (Some(payload), Some(b"\xfe\0key".as_slice()))
    );
    let headers: Vec<_> = whole
        .headers()
        .unwrap()
        .iter()
        .map(|header| (header.key, header.value.unwrap()))
        .collect();
    let expected: [(&str, &[u8]); 3] = [
        ("type", b"shipped"),
        ("type", b"\xff"),
        (ID_HEADER, b"id-of-the-whole"),
    ];
    assert_eq!(headers, expected);
    let tombstone = by_id[b"id-of-the-tombstone".as_slice()];
    assert_eq!(
        (tombstone.payload(), tombstone.key()),
        (None, Some(b"gone".as_slice()))
    );
    let bare = by_id[b"id-of-the-bare".as_slice()];
    assert_eq!((bare.payload(), bare.key()), (Some(b"".as_slice()), None));
    // The partition that the usual partitioner gives this key.
    assert_eq!(
        tombstone.partition(),
        partition_of(b"gone", crate::world::PARTITIONS)
    );
}

/// The partition of a key by Java's murmur2, which most clients use.
pub(crate) fn partition_of(key: &[u8], partitions: i32) -> i32 {
    const M: u32 = 0x5bd1_e995;
    let mut h = 0x9747_b28c ^ key.len() as u32;
    let (chunks, rest) = key.as_chunks::<4>();
    for chunk in chunks {
        let mut k = u32::from_le_bytes(*chunk).wrapping_mul(M);
        k = (k ^ (k >> 24)).wrapping_mul(M);
        h = h.wrapping_mul(M) ^ k;
    }
    if !rest.is_empty() {
        let tail = rest
            .iter()
            .rev()
            .fold(0, |tail, byte| tail << 8 | u32::from(*byte));
        h = (h ^ tail).wrapping_mul(M);
    }
    h = (h ^ (h >> 13)).wrapping_mul(M);
    h ^= h >> 15;
    ((h & 0x7fff_ffff) % partitions as u32) as i32
}

#[tokio::test]
async fn a_read_obeys_its_limits_and_leaves_out_what_is_held_back() {
    let world = World::new().await;
    let sized = |bytes: usize, key: &str| {
        OutboxMessage::new(&world.topic, vec![b'x'; bytes]).key(key.to_owned())
    };
    world
        .write([
            sized(1_000, "a"),
            sized(10, "b"),
            sized(10, "a"),
            sized(10, "c"),
        ])
        .await;
    let none = HeldBack::default();
    let lengths = async |held: &HeldBack, messages, bytes| -> Vec<usize> {
        let read = world
            .outbox
            .read(held, ReadLimits { messages, bytes })
            .await
            .unwrap();
        read.iter()
            .map(|unsent| unsent.message.payload().unwrap().len())
            .collect()
    };
    assert_eq!(lengths(&none, 10, 1 << 20).await, [1_000, 10, 10, 10]);
    assert_eq!(lengths(&none, 2, 1 << 20).await, [1_000, 10]);
    assert_eq!(
        lengths(&none, 10, 1).await,
        [1_000],
        "a large message is read alone"
    );
    assert_eq!(lengths(&none, 10, 1_005).await, [1_000, 10]);
    let held = HeldBack {
        keys: vec![(world.topic.as_str().into(), "a".into())],
        ..HeldBack::default()
    };
    assert_eq!(lengths(&held, 10, 1 << 20).await, [10, 10]);
    let held = HeldBack {
        topics: vec![world.topic.as_str().into()],
        ..HeldBack::default()
    };
    assert_eq!(lengths(&held, 10, 1 << 20).await, [0; 0]);
    let all = world
        .outbox
        .read(
            &none,
            ReadLimits {
                messages: 10,
                bytes: 1 << 20,
            },
        )
        .await
        .unwrap();
    let held = HeldBack {
        sequences: vec![all[0].sequence],
        ..HeldBack::default()
    };
    assert_eq!(lengths(&held, 10, 1 << 20).await, [10, 10, 10]);
    world
        .outbox
        .mark_sent(vec![all[0].sequence, all[1].sequence])
        .await
        .unwrap();
    assert_eq!(lengths(&none, 10, 1 << 20).await, [10, 10]);
}

// invariant: outbox-order
#[tokio::test]
async fn behind_messages_that_are_passed_over_their_keys_wait() {
    let world = World::new().await;
    let file = tempfile::tempdir().unwrap();
    let store = oncegate::sqlite::SqliteStore::open(file.path().join("outbox.db"))
        .await
        .unwrap();
    let in_file = store.outbox(world.outbox.name()).await.unwrap();
    let keyless = OutboxMessage::new(&world.topic, "none");
    let mut messages: Vec<OutboxMessage> = ["a", "b", "a", "c", "b", "d"]
        .map(|key| OutboxMessage::new(&world.topic, key).key(key))
        .into();
    messages.insert(2, keyless.clone());
    messages.push(keyless);
    world.write(messages.clone()).await;
    let connection = store.open_connection().unwrap();
    for message in &messages {
        in_file.publish(&connection, message).unwrap();
    }
    let outboxes: [&dyn OutboxStore; 2] = [&world.outbox, &in_file];
    for outbox in outboxes {
        let most = ReadLimits {
            messages: 100,
            bytes: 1 << 20,
        };
        let all = outbox.read(&HeldBack::default(), most).await.unwrap();
        let up_to = HeldBack {
            up_to: Some(all[1].sequence),
            ..HeldBack::default()
        };
        // The messages of the first key are sent, so nothing of it is passed over any more.
        outbox.mark_sent(vec![all[0].sequence]).await.unwrap();
        let behind = outbox.read(&up_to, most).await.unwrap();
        let texts: Vec<&[u8]> = behind
            .iter()
            .map(|unsent| &**unsent.message.payload().unwrap())
            .collect();
        assert_eq!(
            texts,
            [&b"none"[..], b"a", b"c", b"d", b"none"],
            "{outbox:?}"
        );
    }
}

// invariant: outbox-leader
#[tokio::test]
async fn one_relay_leads_until_it_resigns_or_its_lease_is_over() {
    let world = World::new().await;
    let outbox = &world.outbox;
    let one = Token::from_bits(1);
    let other = Token::from_bits(2);
    let long = Duration::from_secs(3_600);
    assert!(outbox.lead(one, long).await.unwrap());
    assert!(!outbox.lead(other, long).await.unwrap(), "two lead");
    assert!(outbox.lead(one, long).await.unwrap(), "it renews its lease");
    outbox.resign(other).await.unwrap();
    assert!(
        outbox.status().await.unwrap().led,
        "another relay has ended the lead"
    );
    outbox.resign(one).await.unwrap();
    assert!(!outbox.status().await.unwrap().led);
    assert!(outbox.lead(other, Duration::from_millis(1)).await.unwrap());
    oncegate_testkit::until("the lease to be over", crate::world::LIMIT, async || {
        if outbox.lead(one, long).await.unwrap() {
            Ok(())
        } else {
            Err("it is led".to_owned())
        }
    })
    .await;
    assert!(!outbox.lead(other, long).await.unwrap());
}

// invariant: clock-goes-back
#[tokio::test]
async fn a_clock_that_goes_back_extends_no_dead_relays_lead() {
    let world = World::new().await;
    let outbox = &world.outbox;
    let one = Token::from_bits(1);
    let other = Token::from_bits(2);
    let lease = Duration::from_secs(2);
    let hour = Duration::from_secs(3_600);
    let client = world.postgres.connection().await;
    // To the row this is the same as a clock that goes back.
    let goes_back = "UPDATE oncegate_outbox_leaders SET leads_until_ms = leads_until_ms + 3600000";
    assert!(outbox.lead(one, lease).await.unwrap());
    client.batch_execute(goes_back).await.unwrap();
    assert!(
        !outbox.lead(other, hour).await.unwrap(),
        "a relay that runs loses its lead"
    );
    assert!(outbox.lead(one, lease).await.unwrap());
    client.batch_execute(goes_back).await.unwrap();
    oncegate_testkit::until(
        "the lead of the dead relay to be over",
        crate::world::LIMIT,
        async || {
            if outbox.lead(other, hour).await.unwrap() {
                Ok(())
            } else {
                Err("it is led".to_owned())
            }
        },
    )
    .await;
    assert!(!outbox.lead(one, lease).await.unwrap());
}

/// A message of another outbox of the database is not this relay's.
#[tokio::test]
async fn outboxes_of_one_database_are_kept_apart() {
    let world = World::new().await;
    world.write([world.message("a", 0)]).await;
    let builder =
        PostgresStore::builder(world.postgres.url()).response_timeout(crate::world::LIMIT);
    let store = builder.connect().await.unwrap();
    let other = store.outbox("other").unwrap();
    assert_eq!(
        (other.status().await.unwrap().unsent, world.unsent().await),
        (0, 1)
    );
    assert!(
        other
            .lead(Token::from_bits(1), Duration::from_secs(60))
            .await
            .unwrap()
    );
    assert!(!world.outbox.status().await.unwrap().led);
    assert!(store.outbox("no spaces").is_err());
}

/// The age grows while nothing is measured again, so that it is never too low.
// invariant: outbox-backlog
#[tokio::test]
async fn a_relay_that_does_not_lead_shows_what_waits() {
    let world = World::new().await;
    assert_eq!(
        world.outbox.backlog(10).await.unwrap(),
        OutboxBacklog::default()
    );
    for number in 0..5 {
        world.write([world.message("a", number)]).await;
    }
    let most_two = world.outbox.backlog(2).await.unwrap();
    assert_eq!(most_two.messages, 2, "more than asked for was counted");
    // Another relay leads, and publishes nothing.
    let stalled = Token::from_bits(1);
    assert!(
        world
            .outbox
            .lead(stalled, Duration::from_secs(3_600))
            .await
            .unwrap()
    );
    let relay = world.relay();
    let monitor = relay.monitor();
    assert_eq!(
        (monitor.backlog(), monitor.outbox()),
        (None, world.outbox.name())
    );
    let running = Running::start(relay);
    let until = async |messages| {
        oncegate_testkit::until("a measurement", crate::world::LIMIT, async || match monitor
            .backlog()
        {
            Some(backlog) if backlog.messages == messages => Ok(backlog),
            backlog => Err(format!("{backlog:?}")),
        })
        .await
    };
    let oldest = until(5).await.oldest.expect("the age of the oldest");
    assert!(
        oldest >= most_two.oldest.unwrap(),
        "{oldest:?} is less than before"
    );
    assert!(
        monitor.backlog().unwrap().oldest.unwrap() > oldest,
        "it does not grow"
    );
    world.outbox.resign(stalled).await.unwrap();
    world.until_sent().await;
    assert_eq!(until(0).await.oldest, None);
    running.stop().await;
    assert_eq!(
        monitor.backlog(),
        None,
        "a relay that has ended shows nothing"
    );
}
