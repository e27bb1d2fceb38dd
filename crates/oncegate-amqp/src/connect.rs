//! Connections to the broker, and calls with a time limit.

use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

use lapin::options::{BasicConsumeOptions, QueueDeclareOptions};
use lapin::types::{AMQPValue, FieldTable};
use lapin::{Channel, ConnectionProperties};
use tokio::time::timeout;

use super::error::{AmqpError, Asked, CONSUMER_PRIORITY};
use super::frames::SeenFrames;
use super::headers::short;
use super::settings::Connection;
use super::transport;

/// Time limit of a connection with its login.
const CONNECT_LIMIT: Duration = Duration::from_secs(15);
/// Time limit of one call to the broker.
pub(crate) const CALL_LIMIT: Duration = Duration::from_secs(15);
/// Time limit for leaving the broker.
const CLOSE_LIMIT: Duration = Duration::from_secs(3);
/// The code of AMQP for a close without an error.
const SUCCESS: u16 = 200;

/// A connection, and what was noted about its frames.
#[derive(Debug)]
pub(crate) struct BrokerConnection {
    client: lapin::Connection,
    pub(crate) seen: Arc<SeenFrames>,
}

impl Deref for BrokerConnection {
    type Target = lapin::Connection;

    fn deref(&self) -> &lapin::Connection {
        &self.client
    }
}

/// Opens a connection. It ends for good when it is lost: the callers open another one.
pub(crate) async fn connect(
    settings: &Connection,
    name: &str,
) -> Result<BrokerConnection, AmqpError> {
    let uri = settings.uri_with_password()?;
    #[cfg(feature = "tls")]
    oncegate_tls::choose_cryptography();
    let user = uri.authority.userinfo.username.clone();
    let vhost = uri.vhost.clone();
    let asked = Asked::Connection {
        user: &user,
        vhost: &vhost,
    };
    let properties = ConnectionProperties::default().with_connection_name(name.into());
    let tls = settings.login.read_files()?;
    let seen = Arc::<SeenFrames>::default();
    let connecting = transport::connect(uri, properties, tls, Arc::clone(&seen));
    let connected = timeout(CONNECT_LIMIT, connecting).await;
    let connected = connected.map_err(|_| AmqpError::unanswered(asked))?;
    let client = connected.map_err(|error| AmqpError::of(asked, &error))?;
    Ok(BrokerConnection { client, seen })
}

/// Opens a channel of the connection.
pub(crate) async fn channel(connection: &lapin::Connection) -> Result<Channel, AmqpError> {
    call(Asked::Channel, connection.create_channel()).await
}

/// Awaits the answer to a call, within [`CALL_LIMIT`].
pub(crate) async fn call<T>(
    asked: Asked<'_>,
    answer: impl Future<Output = lapin::Result<T>>,
) -> Result<T, AmqpError> {
    let answered = timeout(CALL_LIMIT, answer)
        .await
        .map_err(|_| AmqpError::unanswered(asked))?;
    answered.map_err(|error| AmqpError::of(asked, &error))
}

/// Checks that the queue exists, and returns how many messages wait in it. If it does not, the
/// channel is closed.
pub(crate) async fn check_queue(channel: &Channel, queue: &str) -> Result<u32, AmqpError> {
    let asked = Asked::Queue(queue);
    let Some(name) = short(queue) else {
        return Err(AmqpError::new("the queue's name is too long"));
    };
    let options = QueueDeclareOptions::default().passive();
    let found = call(
        asked,
        channel.queue_declare(name, options, FieldTable::default()),
    )
    .await?;
    Ok(found.message_count())
}

/// Checks that the queue exists and that this user may consume it, and takes no message: the broker
/// looks at the right, and then refuses the consumer, whose priority is no number. The channel is
/// closed then.
pub(crate) async fn check_consume(channel: &Channel, queue: &str) -> Result<(), AmqpError> {
    check_queue(channel, queue).await?;
    let Some(name) = short(queue) else {
        return Err(AmqpError::new("the queue's name is too long"));
    };
    let mut arguments = FieldTable::default();
    arguments.insert(
        CONSUMER_PRIORITY.into(),
        AMQPValue::LongString("none".into()),
    );
    let options = BasicConsumeOptions::default();
    let consumer = channel.basic_consume(name, "".into(), options, arguments);
    match call(Asked::Messages(queue), consumer).await {
        Err(error) if error.is_no_priority() => Ok(()),
        tried => tried.map(drop),
    }
}

/// Closes a channel, so that the broker has read everything that was sent by it. `false` when it
/// did not answer.
pub(crate) async fn close_channel(channel: &Channel, limit: Duration) -> bool {
    timeout(limit, channel.close(SUCCESS, "OK".into()))
        .await
        .is_ok_and(|closed| closed.is_ok())
}

/// Closes a connection. Without an answer it is dropped.
pub(crate) async fn close(connection: &lapin::Connection) {
    _ = timeout(CLOSE_LIMIT, connection.close(SUCCESS, "OK".into())).await;
}
