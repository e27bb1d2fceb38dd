//! `oncegate outbox`: the relay to real brokers, from PostgreSQL and from an SQLite file.

use std::path::Path;
use std::process::{Command, Output};

use oncegate::outbox::OutboxMessage;
use oncegate::postgres::PostgresStore;
use oncegate::sqlite::SqliteStore;
use oncegate_testkit::{Kafka, Postgres, Process, Sqs, process, until};
use rdkafka::Message as _;

use super::{LIMIT, program};

fn command(arguments: &[&str]) -> Command {
    let mut command = process::bound_to_parent(program(), "KILL");
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("ONCEGATE_")) {
        command.env_remove(name);
    }
    // For queues: a local server checks no credentials.
    command
        .env("AWS_ACCESS_KEY_ID", "test")
        .env("AWS_SECRET_ACCESS_KEY", "test");
    command.arg("outbox").args(arguments);
    command
}

fn answer(arguments: &[&str]) -> Output {
    command(arguments).output().unwrap()
}

fn status(store: &str, more: &[&str]) -> (Option<i32>, String) {
    let answered = answer(
        &[
            &["status", "--store", store, "--outbox", "shop", "--json"],
            more,
        ]
        .concat(),
    );
    (
        answered.status.code(),
        String::from_utf8(answered.stdout).unwrap(),
    )
}

async fn until_sent(store: &str) {
    until("the outbox to be empty", LIMIT, async || {
        match status(store, &[]).1 {
            answer if answer.contains("\"unsent\": 0") => Ok(()),
            answer => Err(answer),
        }
    })
    .await;
}

/// Runs the relay until the outbox is empty, ends it by SIGTERM, and returns what it has printed.
async fn relay(store: &str, folder: &Path, flags: &[&str]) -> String {
    let printed = folder.join("printed");
    let mut relay = command(&[&["relay", "--json"], flags].concat());
    relay.stdout(std::fs::File::create(&printed).unwrap());
    let mut relay = Process::spawn("oncegate outbox relay", relay);
    until_sent(store).await;
    relay.signal("TERM");
    assert_eq!(relay.end_within(LIMIT).await.code(), Some(0));
    std::fs::read_to_string(printed).unwrap()
}

async fn payloads(kafka: &Kafka, topic: &str) -> Vec<String> {
    let published = kafka.read_all(topic).await;
    published
        .iter()
        .map(|message| String::from_utf8(message.payload().unwrap().to_vec()).unwrap())
        .collect()
}

#[tokio::test]
async fn the_relay_publishes_from_postgres_and_stops_at_a_signal() {
    let kafka = Kafka::shared().await;
    let postgres = Postgres::shared().await.database().await;
    let topic = kafka.new_topic("outbox-cli", 1).await;
    let folder = tempfile::tempdir().unwrap();
    let mut migrate = process::bound_to_parent(program(), "KILL");
    let migrated = migrate
        .args(["migrate", "--yes", "--store", postgres.url()])
        .output()
        .unwrap();
    assert!(
        migrated.status.success()
            && String::from_utf8_lossy(&migrated.stdout).contains("oncegate_outbox")
    );
    let outbox = PostgresStore::connect(postgres.url())
        .await
        .unwrap()
        .outbox("shop")
        .unwrap();
    let mut client = postgres.connection().await;
    let mut transaction = client.transaction().await.unwrap();
    for number in 0..5 {
        let message = OutboxMessage::new(&topic, number.to_string()).key("a");
        outbox.publish(&mut transaction, message).await.unwrap();
    }
    transaction.commit().await.unwrap();
    let (code, waiting) = status(postgres.url(), &["--older-than", "1ms"]);
    assert_eq!(code, Some(1), "{waiting}");
    assert!(
        waiting.contains("\"unsent\": 5") && waiting.contains("\"led\": false"),
        "{waiting}"
    );

    let flags = [
        "--outbox",
        "shop",
        "--brokers",
        kafka.bootstrap(),
        "--store",
        postgres.url(),
    ];
    let printed = relay(postgres.url(), folder.path(), &flags).await;
    assert!(
        printed.contains("oncegate.outbox_relay/1") && printed.contains("\"published\": 5"),
        "{printed}"
    );
    assert_eq!(payloads(&kafka, &topic).await, ["0", "1", "2", "3", "4"]);
    let (code, sent) = status(postgres.url(), &["--older-than", "1ms"]);
    assert_eq!(code, Some(0), "{sent}");
    assert!(
        sent.contains("\"sent\": 5") && sent.contains("\"led\": false"),
        "the lead was given away: {sent}"
    );
}

#[tokio::test]
async fn a_configuration_may_have_outboxes_alone() {
    let kafka = Kafka::shared().await;
    let topic = kafka.new_topic("outbox-cli", 1).await;
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("shop.db").display().to_string();
    let store = SqliteStore::open(&file).await.unwrap();
    let outbox = store.outbox("shop").await.unwrap();
    outbox
        .publish(
            &store.open_connection().unwrap(),
            &OutboxMessage::new(&topic, "{}"),
        )
        .unwrap();
    let config = folder.path().join("oncegate.toml");
    let text = format!(
        "[store]\nurl = \"sqlite:{file}\"\n\n[outbox.shop]\nretention = \"1h\"\n\
         kafka = {{ brokers = \"{}\", properties = {{ \"client.id\" = \"shop\" }} }}\n",
        kafka.bootstrap()
    );
    std::fs::write(&config, text).unwrap();
    let config = config.display().to_string();
    let mut check = process::bound_to_parent(program(), "KILL");
    let checked = check
        .args(["check", "--explain", "--config", &config])
        .output()
        .unwrap();
    let explained = String::from_utf8_lossy(&checked.stdout).into_owned();
    assert!(checked.status.success(), "{explained}");
    assert!(
        explained.contains("outbox.shop.retention = \"1h\"")
            && explained.contains("outbox.shop.batch = 500"),
        "{explained}"
    );
    let printed = relay(&file, folder.path(), &["--config", &config]).await;
    assert!(printed.contains("\"published\": 1"), "{printed}");
    assert_eq!(payloads(&kafka, &topic).await, ["{}"]);
}

#[tokio::test]
async fn a_configuration_may_send_to_queues() {
    let sqs = Sqs::shared().await;
    let queue = sqs.new_fifo_queue("outbox-cli").await;
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("shop.db").display().to_string();
    let store = SqliteStore::open(&file).await.unwrap();
    let outbox = store.outbox("shop").await.unwrap();
    for number in 0..3 {
        let message = OutboxMessage::new(queue.name(), number.to_string()).key("a");
        outbox
            .publish(&store.open_connection().unwrap(), &message)
            .unwrap();
    }
    let config = folder.path().join("oncegate.toml");
    let text = format!(
        "[store]\nurl = \"sqlite:{file}\"\n\n[outbox.shop]\nsqs = {{ region = \"us-east-1\" }}\n"
    );
    std::fs::write(&config, text).unwrap();
    let config = config.display().to_string();
    let printed = relay(
        &file,
        folder.path(),
        &["--config", &config, "--endpoint-url", sqs.endpoint()],
    )
    .await;
    assert!(printed.contains("\"published\": 3"), "{printed}");
    let bodies: Vec<String> = queue
        .take_all()
        .await
        .into_iter()
        .map(|message| message.body.unwrap())
        .collect();
    assert_eq!(bodies, ["0", "1", "2"]);
}

#[test]
fn mistakes_are_reported_before_anything_is_sent() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("shop.db").display().to_string();
    let shop = ["--store", "sqlite:x.db", "--outbox", "shop"];
    let kafka = ["--brokers", "localhost:1"];
    let in_redis = ["--store", "redis://localhost", "--outbox", "shop"];
    let with_spaces = ["--store", "sqlite:x.db", "--outbox", "no spaces"];
    let in_file = ["--store", &file, "--outbox", "shop"];
    for (flags, named) in [
        (shop[..2].to_vec(), "[outbox.shop]"),
        ([&shop[..], &["--lease", "1s"]].concat(), "brokers"),
        ([&in_redis[..], &kafka].concat(), "SQLite"),
        ([&with_spaces[..], &kafka].concat(), "no spaces"),
        (
            [&shop[..], &kafka, &["--property", "acks=1"]].concat(),
            "acks",
        ),
        ([&in_file[..], &kafka].concat(), "must_exist"),
        (
            [&shop[..], &kafka, &["--region", "r"]].concat(),
            "both `kafka` and `sqs`",
        ),
        (
            [&shop[..], &["--endpoint-url", "localhost:1"]].concat(),
            "http://",
        ),
    ] {
        let answered = answer(&[&["relay"], &flags[..]].concat());
        let said = String::from_utf8_lossy(&answered.stderr);
        assert_eq!(answered.status.code(), Some(78), "{flags:?}: {said}");
        assert!(said.contains(named), "{flags:?}: {said}");
    }
}
