//! A queue of RabbitMQ: messages in and out, and what is left in it.

use std::time::{Duration, Instant};

use lapin::message::Delivery;
use lapin::options::{
    BasicAckOptions, BasicGetOptions, BasicPublishOptions, ConfirmSelectOptions,
    QueueDeclareOptions,
};
use lapin::types::FieldTable;
use lapin::{BasicProperties, Channel, Confirmation, Connection, ConnectionProperties};

/// The longest wait for a queue to become as a test wants it.
const WAIT_LIMIT: Duration = Duration::from_secs(120);

/// Interval at which a queue is looked at while a test waits for it.
const WAIT_INTERVAL: Duration = Duration::from_millis(30);

/// How many confirmations [`RabbitQueue::send`] awaits at once.
const CONFIRMED_AT_ONCE: usize = 500;

/// The `delivery_mode` of a message that is stored on disk.
const PERSISTENT: u8 = 2;

/// The kinds of queues.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QueueKind {
    /// On one node.
    Classic,
    /// Replicated; it counts deliveries.
    Quorum,
    /// A log whose messages stay.
    Stream,
}

impl QueueKind {
    /// The value of `x-queue-type`.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Classic => "classic",
            Self::Quorum => "quorum",
            Self::Stream => "stream",
        }
    }
}

/// A queue of a server.
#[derive(Clone, Debug)]
pub struct RabbitQueue {
    uri: String,
    name: String,
}

impl RabbitQueue {
    /// A queue that another program has made.
    #[must_use]
    pub fn of(uri: String, name: String) -> Self {
        Self { uri, name }
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Publishes persistent messages with these bodies, each with a new id, and waits until they
    /// are confirmed.
    ///
    /// # Panics
    /// When the server does not store one.
    pub async fn send(&self, bodies: impl IntoIterator<Item = String, IntoIter: Send> + Send) {
        let messages = bodies.into_iter().map(|body| {
            let id = format!("{:016x}", fastrand::u64(..));
            (
                BasicProperties::default().with_message_id(id.as_str().into()),
                body.into_bytes(),
            )
        });
        self.send_with(messages).await;
    }

    /// The same for bodies with properties.
    ///
    /// # Panics
    /// As [`RabbitQueue::send`].
    pub async fn send_with(
        &self,
        messages: impl IntoIterator<Item = (BasicProperties, Vec<u8>), IntoIter: Send> + Send,
    ) {
        let (connection, channel) = self.connect().await;
        channel
            .confirm_select(ConfirmSelectOptions::default())
            .await
            .expect("it confirms");
        let options = BasicPublishOptions {
            mandatory: true,
            ..BasicPublishOptions::default()
        };
        let mut unconfirmed = Vec::new();
        for (properties, body) in messages {
            let properties = properties.with_delivery_mode(PERSISTENT);
            let name = self.name.as_str().into();
            let sent = channel
                .basic_publish("".into(), name, options, &body, properties)
                .await;
            unconfirmed.push(sent.expect("the server takes it"));
            if unconfirmed.len() == CONFIRMED_AT_ONCE {
                confirm(&mut unconfirmed).await;
            }
        }
        confirm(&mut unconfirmed).await;
        close(&connection).await;
    }

    /// How many messages wait in it, those not counted that a consumer has.
    ///
    /// # Panics
    /// When the server does not answer, or the queue is not there.
    pub async fn ready(&self) -> u32 {
        let (connection, channel) = self.connect().await;
        let ready = self.count(&channel).await;
        close(&connection).await;
        ready
    }

    /// Waits until so many messages wait in it.
    ///
    /// # Panics
    /// When that takes longer than two minutes.
    pub async fn until_ready(&self, wanted: u32) {
        let (connection, channel) = self.connect().await;
        let deadline = Instant::now() + WAIT_LIMIT;
        loop {
            let ready = self.count(&channel).await;
            if ready == wanted {
                break;
            }
            assert!(
                Instant::now() < deadline,
                "{} has {ready} messages, not {wanted}",
                self.name
            );
            tokio::time::sleep(WAIT_INTERVAL).await;
        }
        close(&connection).await;
    }

    /// Takes the messages that wait in it, for good.
    ///
    /// # Panics
    /// When the server does not answer.
    pub async fn take(&self) -> Vec<Delivery> {
        let (connection, channel) = self.connect().await;
        let mut taken = Vec::new();
        while let Some(message) = self.get(&channel).await {
            let acked = channel
                .basic_ack(message.delivery_tag, BasicAckOptions::default())
                .await;
            acked.expect("the server takes the ack");
            taken.push(message);
        }
        close(&connection).await;
        taken
    }

    async fn get(&self, channel: &Channel) -> Option<Delivery> {
        let got = channel
            .basic_get(self.name.as_str().into(), BasicGetOptions::default())
            .await;
        got.expect("the server answers")
            .map(|message| message.delivery)
    }

    async fn count(&self, channel: &Channel) -> u32 {
        let passive = QueueDeclareOptions::default().passive();
        let found = channel
            .queue_declare(self.name.as_str().into(), passive, FieldTable::default())
            .await;
        found.expect("the queue is there").message_count()
    }

    async fn connect(&self) -> (Connection, Channel) {
        let connection = Connection::connect(&self.uri, ConnectionProperties::default()).await;
        let connection =
            connection.unwrap_or_else(|error| panic!("cannot connect to RabbitMQ: {error}"));
        let channel = connection
            .create_channel()
            .await
            .expect("it opens channels");
        (connection, channel)
    }
}

async fn confirm(unconfirmed: &mut Vec<lapin::PublisherConfirm>) {
    for sent in unconfirmed.drain(..) {
        let confirmed = sent.await.expect("the server confirms it");
        assert!(
            matches!(confirmed, Confirmation::Ack(None)),
            "it is not stored: {confirmed:?}"
        );
    }
}

async fn close(connection: &Connection) {
    connection.close(200, "OK".into()).await.expect("it closes");
}
