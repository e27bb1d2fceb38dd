//! Dead letters to an SQS queue.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use async_trait::async_trait;
use aws_sdk_sqs::Client;
use aws_sdk_sqs::error::BuildError;
use aws_sdk_sqs::primitives::Blob;
use aws_sdk_sqs::types::MessageAttributeValue;
use tracing::warn;

use super::api::CallError;
use super::convert::GROUP_HEADER;
use super::letter::{Letter, Value};
use super::queue::{self, Queue};
use super::settings::{Connection, name};
use crate::dead_letters::{DeadLetter, DeadLetters};
use crate::failure::BoxError;
use crate::message::{Message, Origin};

/// What a message may have in bytes when the queue does not say.
const MESSAGE_MAX_BYTES: usize = 256 * 1024;
/// The longest group that SQS takes, in bytes.
const GROUP_MAX_BYTES: usize = 128;

/// A queue that keeps the messages that were given up: their bodies and attributes untouched, and two attributes
/// that say where they came from and why they are here (see [`sqs`](super)).
///
/// A letter counts as sent when SQS has confirmed it. A letter that would be too large for the queue keeps the body
/// and the attributes, and loses of ours what does not fit; the log has it.
pub struct SqsDeadLetters {
    connection: Connection,
    queue: String,
    /// The queue that a source consumes, which must not be ours.
    consumed: Option<String>,
    open: Mutex<Option<Arc<Open>>>,
}

#[derive(Debug)]
struct Open {
    client: Client,
    queue: Queue,
}

impl SqsDeadLetters {
    /// Dead letters to the queue of this name or URL, reached in the AWS SDK's usual ways.
    ///
    /// [`SqsSource::dead_letters`](super::SqsSource::dead_letters) reaches it as the source reaches its own.
    pub fn new(queue: impl Into<String>) -> Self {
        Self::with(Connection::default(), queue.into())
    }

    /// The same with a client of one's own.
    pub fn from_client(client: Client, queue: impl Into<String>) -> Self {
        Self::with(Connection { client: Some(client), ..Connection::default() }, queue.into())
    }

    pub(crate) fn with(connection: Connection, queue: String) -> Self {
        Self { connection, queue, consumed: None, open: Mutex::default() }
    }

    pub(crate) fn beside(mut self, consumed: String) -> Self {
        self.consumed = Some(consumed);
        self
    }

    /// The region; by default that of the environment or profile, or else of the queue's URL.
    #[must_use]
    pub fn region(mut self, region: impl Into<String>) -> Self {
        self.connection.region = Some(region.into());
        self
    }

    /// Where SQS is; by default the region's endpoint, or the host of a queue's URL that is not at AWS.
    #[must_use]
    pub fn endpoint_url(mut self, url: impl Into<String>) -> Self {
        self.connection.endpoint_url = Some(url.into());
        self
    }

    fn refuse_loop(&self, consumed: &str) -> Result<(), BoxError> {
        if consumed == name(&self.queue) {
            return Err(format!(
                "the dead letters' queue {consumed} is consumed by the same consumer: every letter would come \
                 back as a message"
            )
            .into());
        }
        Ok(())
    }
}

#[async_trait]
impl DeadLetters for SqsDeadLetters {
    /// Checks that the queue exists, and that no source consumes it.
    async fn open(&self) -> Result<(), BoxError> {
        if let Some(consumed) = &self.consumed {
            self.refuse_loop(consumed)?;
        }
        let client = self.connection.client(&self.queue).await;
        let queue = queue::find(&client, &self.queue).await?;
        let open = Arc::new(Open { client, queue });
        *self.open.lock().unwrap_or_else(PoisonError::into_inner) = Some(open);
        Ok(())
    }

    async fn send(&self, letter: &DeadLetter) -> Result<(), BoxError> {
        if let Origin::Queue { queue, .. } = letter.message.origin() {
            self.refuse_loop(queue)?;
        }
        let open = self.open.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let open = open.ok_or("the dead letters have not been opened")?;
        let limit = open.queue.max_message_bytes.unwrap_or(MESSAGE_MAX_BYTES);
        let written = Letter::of(letter).fit(limit).map_err(|bytes| {
            format!(
                "the message has {bytes} bytes with its attributes, and the dead letters' queue {} takes {limit}: \
                 raise its `MaximumMessageSize`",
                self.queue
            )
        })?;
        if written.shortened {
            warn!(origin = %letter.message.origin(), cause = letter.cause.as_str(), reason = letter.reason, "the dead letter has no room for all of its reason and origin");
        }
        let mut call = open.client.send_message().queue_url(&open.queue.url).message_body(written.body);
        for (name, (data_type, value)) in written.attributes {
            call = call.message_attributes(name, attribute(data_type, value)?);
        }
        if open.queue.fifo {
            // Each letter is a message of its own: one that comes a second time must not be dropped as a copy.
            let once = format!("{:032x}", rand::random::<u128>());
            call = call.message_group_id(group(&letter.message)).message_deduplication_id(once);
        }
        call.send()
            .await
            .map_err(|error| format!("dead letter to {}: {}", self.queue, CallError::of(&error)))?;
        Ok(())
    }
}

/// An attribute as SQS takes it.
pub(crate) fn attribute(data_type: String, value: Value) -> Result<MessageAttributeValue, BuildError> {
    let attribute = MessageAttributeValue::builder().data_type(data_type);
    let attribute = match value {
        Value::Text(text) => attribute.string_value(text),
        Value::Bytes(bytes) => attribute.binary_value(Blob::new(bytes)),
    };
    attribute.build()
}

/// The message's own group, or one for all of its route.
pub(crate) fn group(message: &Message) -> String {
    let own = message.header(GROUP_HEADER).and_then(|group| std::str::from_utf8(group).ok());
    let allowed = |c: char| c.is_ascii_graphic();
    let group: String = own.unwrap_or(message.route()).chars().filter(|c| allowed(*c)).collect();
    let group = group.get(..group.len().min(GROUP_MAX_BYTES)).unwrap_or_default();
    if group.is_empty() { "oncegate".to_owned() } else { group.to_owned() }
}

impl fmt::Debug for SqsDeadLetters {
    /// Shows no client: it knows credentials.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SqsDeadLetters").field("queue", &self.queue).finish_non_exhaustive()
    }
}
