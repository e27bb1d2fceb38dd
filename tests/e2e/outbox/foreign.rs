//! Rows that other programs have written.

use oncegate::outbox::OutboxStore as _;
use oncegate_testkit::until;
use rdkafka::Message as _;

use crate::world::{LIMIT, Running, World, header};

/// The columns of a row, without the name of its outbox, and what it is.
const ROWS: &[(&str, &str, bool)] = &[
    (
        "id, topic, header_names, header_values",
        "'null name', $topic, ARRAY[NULL]::text[], ARRAY['x'::bytea]",
        false,
    ),
    (
        "id, topic, header_names, header_values",
        "'more names', $topic, ARRAY['a', 'b'], ARRAY['x'::bytea]",
        false,
    ),
    (
        "id, topic, header_names, header_values",
        "'two dimensions', $topic, ARRAY[ARRAY['a'], ARRAY['b']], ARRAY['x'::bytea, 'y']",
        false,
    ),
    (
        "id, topic, header_names, header_values",
        "'own id', $topic, ARRAY['outbox-id'], ARRAY['x'::bytea]",
        false,
    ),
    ("id, topic", "'', $topic", false),
    ("id, topic", "repeat('x', 129), $topic", false),
    ("topic", "''", false),
    ("topic, key, payload", "$topic, 'O-1', 'defaults'", true),
    (
        "id, topic, header_names, header_values",
        "'null value', $topic, ARRAY['a'], ARRAY[NULL]::bytea[]",
        true,
    ),
];

impl World {
    fn row(&self, number: usize) -> String {
        let (columns, values, _) = ROWS.get(number).unwrap();
        let values = values.replace("$topic", &format!("'{}'", self.topic));
        let outbox = self.outbox.name();
        format!("INSERT INTO oncegate_outbox (outbox, {columns}) VALUES ('{outbox}', {values})")
    }
}

// invariant: outbox-foreign-row
#[tokio::test]
async fn a_row_that_is_no_message_is_refused_when_it_is_written() {
    let world = World::new().await;
    let client = world.postgres.connection().await;
    for (number, (_, values, is_message)) in ROWS.iter().enumerate() {
        let written = client.batch_execute(&world.row(number)).await;
        assert_eq!(written.is_ok(), *is_message, "{values}: {written:?}");
    }
    let running = Running::start(world.relay());
    world.until_sent().await;
    running.stop().await;
    let published = world.published().await;
    assert_eq!(published.len(), 2);
    for message in &published {
        assert!(header(message, "outbox-id").is_some_and(|id| !id.is_empty()));
    }
}

// invariant: outbox-foreign-row
#[tokio::test]
async fn a_row_that_is_no_message_holds_up_no_other() {
    let world = World::new().await;
    let client = world.postgres.connection().await;
    // The table of an earlier release.
    client
        .batch_execute("ALTER TABLE oncegate_outbox DROP CONSTRAINT oncegate_outbox_message")
        .await
        .unwrap();
    for number in 0..ROWS.len() {
        client.batch_execute(&world.row(number)).await.unwrap();
    }
    world
        .write([world.message("a", 0), world.message("b", 0)])
        .await;
    let bad = ROWS.iter().filter(|(_, _, is_message)| !is_message).count() as u64;
    let running = Running::start(world.relay());
    world.until_unsent(bad).await;
    until("each of them to be refused", LIMIT, async || match running
        .watched
        .get("outbox_failures", "refused")
    {
        refused if refused >= bad => Ok(()),
        refused => Err(format!("{refused} were refused")),
    })
    .await;
    running.stop().await;
    let published = world.published().await;
    assert_eq!(published.len() as u64, ROWS.len() as u64 - bad + 2);
    assert!(
        published
            .iter()
            .any(|message| message.payload() == Some(b"defaults"))
    );
    assert_eq!(world.outbox.status().await.unwrap().malformed, bad);
    // The next migration adds the condition, whatever the table has.
    let store = oncegate::postgres::PostgresStore::connect(world.postgres.url())
        .await
        .unwrap();
    store.create_schema().await.unwrap();
    assert!(store.schema_change().await.unwrap().sql.is_empty());
    assert!(client.batch_execute(&world.row(0)).await.is_err());
    assert_eq!(
        world.outbox.status().await.unwrap().unsent,
        bad,
        "it has removed nothing"
    );
}
