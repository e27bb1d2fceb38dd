//! Writes dead letters to an SQS queue.

use std::fmt;
use std::sync::Arc;

use async_trait::async_trait;
use aws_sdk_sqs::Client;
use aws_sdk_sqs::error::BuildError;
use aws_sdk_sqs::primitives::Blob;
use aws_sdk_sqs::types::MessageAttributeValue;
use parking_lot::Mutex;
use tracing::warn;

use super::api::CallError;
use super::headers::GROUP_HEADER;
use super::letter::{Letter, Value, Written};
use super::queue::{self, Queue};
use super::queue_error::QueueError;
use super::settings::{Connection, name};
use oncegate_runtime::dead_letters::{DeadLetter, DeadLetters};
use oncegate_runtime::failure::BoxError;
use oncegate_runtime::message::{Message, Origin};
use oncegate_runtime::source::SourceError;

/// The longest message group id that SQS accepts, in bytes.
pub(crate) const GROUP_MAX_BYTES: usize = 128;

/// Writes dead letters to a queue: body and attributes unchanged, and two attributes with their
/// origin and cause (see [`sqs`](super)).
///
/// A dead letter counts as written when SQS has confirmed it. If it is too large for the queue, it
/// keeps the body and the message's attributes, and those of oncegate are shortened. If the
/// message's attributes do not fit either, the largest are left out, and `oncegate-origin` has
/// their names. Each case is logged. The queue's limit is read again before anything is left out,
/// so that a raised limit applies at once.
pub struct SqsDeadLetters {
    connection: Connection,
    queue: String,
    /// The queue that a source consumes. Our queue must be a different one.
    consumed: Option<String>,
    open: Mutex<Option<Arc<DeadLetterQueue>>>,
}

#[derive(Debug)]
struct DeadLetterQueue {
    client: Client,
    queue: Queue,
}

impl SqsDeadLetters {
    /// Creates dead letters that write to the queue with this name or URL. Credentials, region and
    /// endpoint come from the AWS SDK's default chain.
    ///
    /// [`SqsSource::dead_letters`](super::SqsSource::dead_letters) uses the connection of the
    /// source.
    pub fn new(queue: impl Into<String>) -> Self {
        Self::with(Connection::default(), queue.into())
    }

    /// Creates dead letters that use this client.
    pub fn from_client(client: Client, queue: impl Into<String>) -> Self {
        Self::with(
            Connection {
                client: Some(client),
                ..Connection::default()
            },
            queue.into(),
        )
    }

    pub(crate) fn with(connection: Connection, queue: String) -> Self {
        Self {
            connection,
            queue,
            consumed: None,
            open: Mutex::default(),
        }
    }

    pub(crate) fn beside(mut self, consumed: String) -> Self {
        self.consumed = Some(consumed);
        self
    }

    /// Checks the queue as [`open`](DeadLetters::open) does, without writing.
    ///
    /// Returns a warning, with what to change, when the queue's `MaximumMessageSize` is too small
    /// for the messages of the consumed queue.
    ///
    /// # Errors
    /// When the queue cannot be used: it does not exist, cannot be reached, or a right is missing.
    pub async fn check_queue(&self) -> Result<Vec<String>, SourceError> {
        let open = self.find().await?;
        Ok(self.warning(&open).await.into_iter().collect())
    }

    /// Returns the queue's name.
    pub fn queue(&self) -> &str {
        name(&self.queue)
    }

    async fn find(&self) -> Result<DeadLetterQueue, QueueError> {
        let client = self.connection.client(&self.queue).await;
        let queue = queue::find(&client, &self.queue).await?;
        Ok(DeadLetterQueue { client, queue })
    }

    /// Returns a warning about the size limits. Its source reports a consumed queue that does not
    /// answer.
    async fn warning(&self, open: &DeadLetterQueue) -> Option<String> {
        let consumed = self.consumed.as_ref()?;
        let client = self.connection.client(consumed).await;
        let consumed = queue::find(&client, consumed).await.ok()?;
        open.queue.letters_warning(&consumed)
    }

    /// Reads the queue's attributes again, because its limit may have changed. Without an answer,
    /// the old ones stay.
    async fn read_again(&self, open: &Arc<DeadLetterQueue>) -> Arc<DeadLetterQueue> {
        let Ok(queue) = queue::find(&open.client, &self.queue).await else {
            return Arc::clone(open);
        };
        let open = Arc::new(DeadLetterQueue {
            client: open.client.clone(),
            queue,
        });
        *self.open.lock() = Some(Arc::clone(&open));
        open
    }

    /// Returns the dead letter in a form that fits into the queue.
    async fn fit(
        &self,
        letter: &DeadLetter,
        open: &mut Arc<DeadLetterQueue>,
    ) -> Result<Written, BoxError> {
        let written = Letter::of(letter).fit(open.queue.limit());
        if let Ok(written) = written
            && !written.shortened
            && written.left_out.is_empty()
        {
            return Ok(written);
        }
        *open = self.read_again(open).await;
        let limit = open.queue.limit();
        let written = Letter::of(letter).fit(limit).map_err(|bytes| {
            format!(
                "the message has {bytes} bytes without its attributes, and the dead-letter queue {} takes {limit}: raise \
                 its `MaximumMessageSize`, which is read again before the next attempt",
                self.queue
            )
        })?;
        let origin = letter.message.origin();
        let cause = letter.cause.as_str();
        if !written.left_out.is_empty() {
            let left_out = &written.left_out;
            warn!(
                %origin, cause, limit, ?left_out,
                "the dead letter has no room for these attributes of its message; raise the queue's `MaximumMessageSize`"
            );
        } else if written.shortened {
            warn!(
                %origin, cause, reason = letter.reason,
                "the dead letter has no room for all of its reason and origin; raise the queue's `MaximumMessageSize`"
            );
        }
        Ok(written)
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

    fn refuse_loop(&self, consumed: &str) -> Result<(), BoxError> {
        if consumed == name(&self.queue) {
            return Err(format!(
                "the dead-letter queue {consumed} is consumed by the same consumer: every dead letter would \
                 come back as a message; use another queue"
            )
            .into());
        }
        Ok(())
    }
}

#[async_trait]
impl DeadLetters for SqsDeadLetters {
    /// Checks that the queue exists and that no source consumes it; logs a warning when its size
    /// limit is too small.
    async fn open(&self) -> Result<(), BoxError> {
        if let Some(consumed) = &self.consumed {
            self.refuse_loop(name(consumed))?;
        }
        let open = self.find().await.map_err(SourceError::from)?;
        if let Some(warning) = self.warning(&open).await {
            warn!(queue = self.queue(), "{warning}");
        }
        *self.open.lock() = Some(Arc::new(open));
        Ok(())
    }

    async fn send(&self, letter: &DeadLetter) -> Result<(), BoxError> {
        if let Origin::Queue { queue, .. } = letter.message.origin() {
            self.refuse_loop(queue)?;
        }
        let open = self.open.lock().clone();
        let mut open = open.ok_or("the dead-letter queue has not been opened")?;
        let written = self.fit(letter, &mut open).await?;
        let mut call = open
            .client
            .send_message()
            .queue_url(&open.queue.url)
            .message_body(written.body);
        for (name, (data_type, value)) in written.attributes {
            call = call.message_attributes(name, attribute(data_type, value)?);
        }
        if open.queue.fifo {
            // Each dead letter is a message of its own: SQS must not drop a second one as a
            // duplicate.
            let once = format!("{:032x}", rand::random::<u128>());
            call = call
                .message_group_id(group(&letter.message))
                .message_deduplication_id(once);
        }
        let Err(error) = call.send().await.map_err(|error| CallError::of(&error)) else {
            return Ok(());
        };
        if !error.is_passing() {
            // The cause may be a lowered limit.
            self.read_again(&open).await;
        }
        Err(format!(
            "dead letter could not be written to queue {}: {error}",
            self.queue
        )
        .into())
    }
}

/// Converts an attribute to SQS's type.
pub(crate) fn attribute(
    data_type: String,
    value: Value,
) -> Result<MessageAttributeValue, BuildError> {
    let attribute = MessageAttributeValue::builder().data_type(data_type);
    let attribute = match value {
        Value::Text(text) => attribute.string_value(text),
        Value::Bytes(bytes) => attribute.binary_value(Blob::new(bytes)),
    };
    attribute.build()
}

/// Returns the message's own group, or one for its whole route.
pub(crate) fn group(message: &Message) -> String {
    let own = message
        .header(GROUP_HEADER)
        .and_then(|group| std::str::from_utf8(group).ok());
    let group: String = own
        .unwrap_or(message.route())
        .chars()
        .filter(char::is_ascii_graphic)
        .collect();
    let group = group
        .get(..group.len().min(GROUP_MAX_BYTES))
        .unwrap_or_default();
    if group.is_empty() {
        "oncegate".to_owned()
    } else {
        group.to_owned()
    }
}

impl fmt::Debug for SqsDeadLetters {
    /// Does not show the client, because it has credentials.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SqsDeadLetters")
            .field("queue", &self.queue)
            .finish_non_exhaustive()
    }
}
