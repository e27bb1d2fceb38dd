//! Publishes the messages of an outbox.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

use async_trait::async_trait;
use aws_sdk_sqs::Client;
use oncegate_outbox::{OutboxMessage, PublishError, Publisher};
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::OnceCell;

use super::outgoing::Outgoing;
use super::queue_writer::QueueWriter;
use super::settings::Connection;

/// The most queues that are kept open. With more, all are found again.
const QUEUES_MOST: usize = 1_000;

/// Publishes an outbox to SQS queues, for a [`Relay`](oncegate_outbox::Relay).
///
/// A message's topic is the name or the URL of its queue. Its payload is the body, and its headers
/// are message attributes, with the id in `outbox-id`; of several headers with one name the last
/// one, and none of SQS's own (`AWS.…`). A message counts as published when SQS has confirmed it.
/// Messages that wait at the same time are sent together, ten at most.
///
/// | | FIFO queue | standard queue |
/// |---|---|---|
/// | order | of the messages with one key: it is their `MessageGroupId` | none |
/// | a repeat | has the same `MessageDeduplicationId`, the id: SQS drops it within five minutes | arrives |
///
/// After five minutes a FIFO queue takes repeats, too: the next consumer's key is
/// `Key::header("outbox-id")` in any case.
///
/// SQS takes less than Kafka. The relay reports a message as refused, with what to change, when its
/// payload is empty, no text, or larger than the queue's `MaximumMessageSize`; when it has more
/// than nine headers, or one with an empty value; and for a FIFO queue when its key or id is not 1
/// to 128 ASCII letters, digits and punctuation marks.
///
/// It needs the rights `sqs:GetQueueUrl` (for a name), `sqs:GetQueueAttributes` and
/// `sqs:SendMessage`, and `kms:GenerateDataKey` and `kms:Decrypt` for a queue with a KMS key.
///
/// ```no_run
/// # #[cfg(feature = "postgres")]
/// # async fn example() -> Result<(), oncegate::BoxError> {
/// use oncegate::outbox::Relay;
/// use oncegate::postgres::PostgresStore;
/// use oncegate::shutdown_signal;
/// use oncegate::sqs::SqsPublisher;
///
/// let outbox = PostgresStore::connect("postgres://localhost/shop").await?.outbox("shop")?;
/// Relay::new(outbox, SqsPublisher::new()).run_until(shutdown_signal()).await?;
/// # Ok(())
/// # }
/// ```
#[derive(Default)]
pub struct SqsPublisher {
    connection: Connection,
    queues: Mutex<HashMap<String, Arc<OpenedQueue>>>,
}

/// A queue after the first call has found it, or the error that all calls get which have waited for
/// that.
type OpenedQueue = OnceCell<Result<QueueWriter, PublishError>>;

impl SqsPublisher {
    /// Creates a publisher. Credentials, region and endpoint come from the AWS SDK's default chain,
    /// and for a queue that is given by its URL from the URL.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Creates a publisher that uses this client.
    #[must_use]
    pub fn from_client(client: Client) -> Self {
        Self {
            connection: Connection {
                client: Some(client),
                ..Connection::default()
            },
            ..Self::default()
        }
    }

    /// Sets the region; by default that of the environment or profile, or else of the queue's URL.
    #[must_use]
    pub fn region(mut self, region: impl Into<String>) -> Self {
        self.connection.region = Some(region.into());
        self
    }

    /// Sets the endpoint of SQS; by default the region's endpoint, or the host of a queue URL that
    /// is not at AWS.
    #[must_use]
    pub fn endpoint_url(mut self, url: impl Into<String>) -> Self {
        self.connection.endpoint_url = Some(url.into());
        self
    }

    fn queues(&self) -> MutexGuard<'_, HashMap<String, Arc<OpenedQueue>>> {
        self.queues.lock()
    }

    fn queue(&self, name: &str) -> Arc<OpenedQueue> {
        let mut queues = self.queues();
        if queues.len() == QUEUES_MOST && !queues.contains_key(name) {
            queues.clear();
        }
        Arc::clone(queues.entry(name.to_owned()).or_default())
    }

    /// Finds the queue again for the next message: it may have been changed.
    fn forget(&self, name: &str, opened: &Arc<OpenedQueue>) {
        let mut queues = self.queues();
        if queues
            .get(name)
            .is_some_and(|known| Arc::ptr_eq(known, opened))
        {
            queues.remove(name);
        }
    }
}

#[async_trait]
impl Publisher for SqsPublisher {
    async fn publish(&self, message: &OutboxMessage) -> Result<(), PublishError> {
        let name = message.topic();
        let queue = self.queue(name);
        let opened = queue
            .get_or_init(|| async {
                QueueWriter::open(self.connection.client(name).await, name).await
            })
            .await;
        match opened {
            Ok(writer) => {
                let published = match Outgoing::of(message, writer.queue()) {
                    Ok(outgoing) => writer.write(outgoing).await,
                    Err(why) => Err(PublishError::Refused(why)),
                };
                if let Err(PublishError::Refused(_) | PublishError::TopicRefused(_)) = &published {
                    self.forget(name, &queue);
                }
                published
            }
            Err(error) => {
                self.forget(name, &queue);
                Err(error.clone())
            }
        }
    }
}

impl fmt::Debug for SqsPublisher {
    /// Does not show the client, because it has credentials.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Connection {
            region,
            endpoint_url,
            ..
        } = &self.connection;
        f.debug_struct("SqsPublisher")
            .field("region", region)
            .field("endpoint_url", endpoint_url)
            .finish_non_exhaustive()
    }
}
