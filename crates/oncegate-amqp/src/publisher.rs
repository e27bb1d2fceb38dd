//! Publishes messages to queues, each confirmed by the broker.

use std::sync::Arc;
use std::time::Duration;

use lapin::options::{BasicPublishOptions, ConfirmSelectOptions};
use lapin::{BasicProperties, Channel, Confirmation};
use tokio::sync::Mutex;
use tokio::time::sleep;
use tracing::warn;

use super::connect::{BrokerConnection, call, channel, check_queue, close, connect};
use super::error::{AmqpError, Asked};
use super::headers::short;
use super::letter::{self, Outgoing, PROPERTIES_BYTES};
use super::settings::Connection;

/// The size of a frame when the broker sets no limit, in bytes.
const FRAME_DEFAULT: usize = 131_072;
/// The interval at which a connection is asked whether it is blocked.
const BLOCKED_INTERVAL: Duration = Duration::from_millis(50);
/// Bytes of a frame besides its content.
const FRAME_OVERHEAD: usize = 64;

/// A connection that publishes, opened when it is needed, and again after it was lost.
///
/// The source has another one: while the broker is short of memory or disk, it stops reading from
/// connections that publish, and acks must not wait for that.
#[derive(Debug)]
pub(crate) struct Publisher {
    settings: Connection,
    name: String,
    open: Mutex<Option<Arc<Link>>>,
}

#[derive(Debug)]
struct Link {
    connection: BrokerConnection,
    channel: Channel,
}

impl Publisher {
    pub(crate) fn new(settings: Connection, name: String) -> Self {
        Self {
            settings,
            name,
            open: Mutex::default(),
        }
    }

    /// Checks that the queue exists and that messages may be published to it. It writes nothing.
    pub(crate) async fn check(&self, queue: &str) -> Result<(), AmqpError> {
        let link = self.link().await?;
        // The broker closes a channel after an error: this one is not used for anything else.
        let probe = channel(&link.connection).await?;
        check_queue(&probe, queue).await?;
        call(
            Asked::Publish(queue),
            probe.confirm_select(ConfirmSelectOptions::default()),
        )
        .await?;
        // No queue has such a name, so the message reaches none. The right is checked before.
        let nowhere = format!("oncegate-check-{:032x}", rand::random::<u128>());
        let asked = Asked::Publish(queue);
        let published = publish(&probe, asked, &nowhere, &[], BasicProperties::default());
        let published = tokio::select! {
            published = published => published,
            // The consumer starts all the same: what it acknowledges may end the alarm.
            () = link.until_blocked() => {
                warn!(queue, "{}; the right to write dead letters is not checked", AmqpError::blocked());
                return Ok(());
            }
        };
        match published {
            Ok(()) | Err(Unpublished::NoQueue | Unpublished::NotStored) => Ok(()),
            Err(Unpublished::Failed(error)) => Err(error),
        }
    }

    /// Returns the first number of the broker's version, if there is a connection that has told it.
    pub(crate) async fn major_version(&self) -> Option<u32> {
        let open = self.open.lock().await;
        open.as_ref()?.connection.seen.major_version()
    }

    /// Returns how many bytes the headers and properties of a message may have.
    pub(crate) async fn header_limit(&self) -> Result<usize, AmqpError> {
        let frame = self.link().await?.connection.configuration().frame_max();
        let frame = usize::try_from(frame).unwrap_or(FRAME_DEFAULT);
        Ok(if frame == 0 { FRAME_DEFAULT } else { frame }.saturating_sub(FRAME_OVERHEAD))
    }

    /// Publishes to the queue. Returns only when the broker has confirmed that the message is
    /// stored there.
    pub(crate) async fn publish(&self, queue: &str, message: Outgoing) -> Result<(), AmqpError> {
        let link = self.link().await?;
        let asked = Asked::Publish(queue);
        match publish(
            &link.channel,
            asked,
            queue,
            &message.body,
            message.properties,
        )
        .await
        {
            Ok(()) => Ok(()),
            Err(Unpublished::NoQueue) => Err(AmqpError::no_queue(queue)),
            Err(Unpublished::NotStored) => Err(AmqpError::away(format!(
                "the broker has not stored the message in the queue `{queue}`: the queue is full (`x-overflow`), or its \
                 leader is not there"
            ))),
            Err(Unpublished::Failed(error)) => {
                let is_blocked = link.connection.status().blocked();
                self.forget(&link).await;
                Err(if is_blocked {
                    AmqpError::blocked()
                } else {
                    error
                })
            }
        }
    }

    /// Publishes a copy of a message to its queue, unless its headers have no room in a frame.
    pub(crate) async fn publish_again(
        &self,
        queue: &str,
        message: Outgoing,
    ) -> Result<(), AmqpError> {
        let size = message
            .properties
            .headers()
            .as_ref()
            .map_or(0, letter::size);
        if size + PROPERTIES_BYTES > self.header_limit().await? {
            return Err(AmqpError::new("its headers have no room in a frame"));
        }
        self.publish(queue, message).await
    }

    pub(crate) async fn close(&self) {
        if let Some(link) = self.open.lock().await.take() {
            close(&link.connection).await;
        }
    }

    /// Returns the connection, opened again if it is lost. Several callers wait for one connection.
    async fn link(&self) -> Result<Arc<Link>, AmqpError> {
        let mut open = self.open.lock().await;
        if let Some(link) = open.as_ref().filter(|link| link.lives()) {
            return Ok(Arc::clone(link));
        }
        let connection = connect(&self.settings, &self.name).await?;
        let channel = channel(&connection).await?;
        call(
            Asked::Channel,
            channel.confirm_select(ConfirmSelectOptions::default()),
        )
        .await?;
        let link = Arc::new(Link {
            connection,
            channel,
        });
        *open = Some(Arc::clone(&link));
        Ok(link)
    }

    /// Drops a connection that has failed, unless another caller has opened the next one. Its other
    /// calls fail, and are repeated by their callers.
    async fn forget(&self, failed: &Arc<Link>) {
        let mut open = self.open.lock().await;
        if open.as_ref().is_some_and(|link| Arc::ptr_eq(link, failed)) {
            *open = None;
            drop(open);
            close(&failed.connection).await;
        }
    }
}

impl Link {
    /// Resolves when the broker has said that it reads nothing from this connection.
    async fn until_blocked(&self) {
        while !self.connection.status().blocked() {
            sleep(BLOCKED_INTERVAL).await;
        }
    }

    fn lives(&self) -> bool {
        self.connection.status().connected() && self.channel.status().connected()
    }
}

/// The reason that a message is not stored.
enum Unpublished {
    /// No queue has the name.
    NoQueue,
    /// The queue has not taken the message.
    NotStored,
    Failed(AmqpError),
}

impl From<AmqpError> for Unpublished {
    fn from(error: AmqpError) -> Self {
        Self::Failed(error)
    }
}

/// Publishes through the default exchange, which routes by the queue's name.
async fn publish(
    channel: &Channel,
    asked: Asked<'_>,
    queue: &str,
    body: &[u8],
    properties: BasicProperties,
) -> Result<(), Unpublished> {
    let Some(name) = short(queue) else {
        return Err(AmqpError::new("the queue's name is too long").into());
    };
    // Without `mandatory` the broker confirms a message that it has dropped, because no queue has
    // the name.
    let options = BasicPublishOptions {
        mandatory: true,
        ..BasicPublishOptions::default()
    };
    let confirmed = async {
        channel
            .basic_publish("".into(), name, options, body, properties)
            .await?
            .await
    };
    match call(asked, confirmed).await? {
        Confirmation::Ack(None) => Ok(()),
        Confirmation::Ack(Some(_)) | Confirmation::Nack(Some(_)) => Err(Unpublished::NoQueue),
        Confirmation::Nack(None) => Err(Unpublished::NotStored),
        Confirmation::NotRequested => {
            Err(AmqpError::new("the channel does not confirm what is published").into())
        }
    }
}
