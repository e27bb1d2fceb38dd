//! An outbox in PostgreSQL, a topic or a queue, and relays between them.

use std::collections::BTreeMap;
use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

use oncegate::kafka::KafkaPublisher;
use oncegate::outbox::{OutboxMessage, OutboxStore, Relay, RelayError};
use oncegate::postgres::{PostgresOutbox, PostgresStore};
use oncegate_testkit::process::bound_to_parent;
use oncegate_testkit::{Kafka, Postgres, Process, Watched, unique, until};
use rdkafka::Message as _;
use rdkafka::message::{Headers as _, OwnedMessage};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

/// How long a fact may take on a busy machine.
pub(crate) const LIMIT: Duration = Duration::from_secs(240);

/// The partitions of the topic.
pub(crate) const PARTITIONS: i32 = 3;

/// An outbox in a database of its own.
pub(crate) struct Table {
    pub(crate) postgres: Postgres,
    pub(crate) outbox: PostgresOutbox,
}

impl Table {
    pub(crate) async fn new() -> Self {
        let postgres = Postgres::shared().await.database().await;
        // A disk that is busy with the writes of others is no outage.
        let store = PostgresStore::builder(postgres.url())
            .response_timeout(LIMIT)
            .connect()
            .await
            .unwrap();
        store.create_schema().await.unwrap();
        let outbox = store.outbox(&unique("outbox")).unwrap();
        Self { postgres, outbox }
    }

    /// A relay process, to the Kafka or the SQS server at this address.
    pub(crate) fn relay_process(&self, broker: &str) -> Process {
        let mut command = bound_to_parent(env!("CARGO_BIN_EXE_relay"), "KILL");
        command.args([self.postgres.url(), broker, self.outbox.name()]);
        Process::spawn("relay", command)
    }

    /// Writes messages in one transaction, and commits it.
    pub(crate) async fn write(&self, messages: impl IntoIterator<Item = OutboxMessage>) {
        let mut client = self.postgres.connection().await;
        let mut transaction = client.transaction().await.unwrap();
        for message in messages {
            self.outbox
                .publish(&mut transaction, message)
                .await
                .unwrap();
        }
        transaction.commit().await.unwrap();
    }

    pub(crate) async fn unsent(&self) -> u64 {
        self.outbox.status().await.unwrap().unsent
    }

    /// Waits until everything that was written is marked as sent.
    pub(crate) async fn until_sent(&self) {
        self.until_unsent(0).await;
    }

    /// Waits until so many messages are not sent.
    pub(crate) async fn until_unsent(&self, count: u64) {
        // A busy server may not answer in time.
        until(
            &format!("{count} messages to wait"),
            LIMIT,
            async || match self.outbox.status().await {
                Ok(status) if status.unsent == count => Ok(()),
                other => Err(format!("{other:?}")),
            },
        )
        .await;
    }

    /// Takes a message away, as an operator does with one that is refused.
    pub(crate) async fn remove(&self, id: &str) {
        let client = self.postgres.connection().await;
        assert_eq!(
            client
                .execute("DELETE FROM oncegate_outbox WHERE id = $1", &[&id])
                .await
                .unwrap(),
            1
        );
    }
}

/// An outbox, and the topic that it is published to.
pub(crate) struct World {
    pub(crate) table: Table,
    pub(crate) kafka: Kafka,
    pub(crate) topic: String,
}

impl Deref for World {
    type Target = Table;

    fn deref(&self) -> &Table {
        &self.table
    }
}

impl World {
    /// On the shared Kafka, in a database of its own.
    pub(crate) async fn new() -> Self {
        Self::on(Kafka::shared().await).await
    }

    /// On this Kafka, in a database of its own.
    pub(crate) async fn on(kafka: Kafka) -> Self {
        let topic = kafka.new_topic("outbox", PARTITIONS).await;
        Self::to(kafka, topic).await
    }

    /// To this topic, from a database of its own.
    pub(crate) async fn to(kafka: Kafka, topic: String) -> Self {
        Self {
            table: Table::new().await,
            kafka,
            topic,
        }
    }

    /// A relay with a short lease.
    pub(crate) fn relay(&self) -> Relay {
        let publisher = KafkaPublisher::new(self.kafka.bootstrap());
        Relay::new(self.outbox.clone(), publisher).lease(Duration::from_secs(2))
    }

    /// A message with the number of its key in its payload.
    pub(crate) fn message(&self, key: &str, number: u32) -> OutboxMessage {
        OutboxMessage::new(&self.topic, number.to_string()).key(key.to_owned())
    }

    /// What is in the topic.
    pub(crate) async fn published(&self) -> Vec<OwnedMessage> {
        self.kafka.read_all(&self.topic).await
    }

    /// Checks that each of these numbers is in the topic for each key, and that the first copies
    /// are in order.
    pub(crate) async fn assert_complete_and_in_order(&self, keys: &[String], numbers: u32) {
        let firsts = firsts(&self.published().await);
        let expected: Vec<u32> = (0..numbers).collect();
        assert_eq!(firsts.len(), keys.len(), "keys in the topic");
        for key in keys {
            assert_eq!(
                firsts.get(key),
                Some(&expected),
                "the first copies of {key}"
            );
        }
    }
}

/// The numbers of each key in the order of their first copies.
pub(crate) fn firsts(published: &[OwnedMessage]) -> BTreeMap<String, Vec<u32>> {
    let mut firsts: BTreeMap<String, Vec<u32>> = BTreeMap::new();
    for message in published {
        let key = String::from_utf8(message.key().unwrap().to_vec()).unwrap();
        let number: u32 = std::str::from_utf8(message.payload().unwrap())
            .unwrap()
            .parse()
            .unwrap();
        let seen = firsts.entry(key).or_default();
        if !seen.contains(&number) {
            seen.push(number);
        }
    }
    firsts
}

/// The value of a header.
pub(crate) fn header<'m>(message: &'m OwnedMessage, name: &str) -> Option<&'m [u8]> {
    message
        .headers()?
        .iter()
        .find(|header| header.key == name)?
        .value
}

/// A relay that runs in a task, and its events.
pub(crate) struct Running {
    pub(crate) watched: Arc<Watched>,
    task: JoinHandle<Result<(), RelayError>>,
    stop: CancellationToken,
}

impl Running {
    pub(crate) fn start(relay: Relay) -> Self {
        let watched = Watched::new();
        let stop = CancellationToken::new();
        let relay = relay.observer(Arc::clone(&watched) as _);
        let task = tokio::spawn(relay.run_until(stop.clone().cancelled_owned()));
        Self {
            watched,
            task,
            stop,
        }
    }

    /// Stops it, as SIGTERM does.
    pub(crate) async fn stop(self) {
        self.stop.cancel();
        tokio::time::timeout(LIMIT, self.task)
            .await
            .expect("it stops")
            .unwrap()
            .unwrap();
    }

    /// Drops it where it is, as a kill does: it gives no lead away.
    pub(crate) async fn kill(self) {
        self.task.abort();
        assert!(self.task.await.unwrap_err().is_cancelled());
    }
}
