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
use super::letter::{Letter, Value, Written};
use super::queue::{self, Queue, QueueError};
use super::settings::{Connection, name};
use crate::dead_letters::{DeadLetter, DeadLetters};
use crate::failure::BoxError;
use crate::message::{Message, Origin};
use crate::source::SourceError;

/// The longest group that SQS takes, in bytes.
const GROUP_MAX_BYTES: usize = 128;

/// A queue that keeps the messages that were given up: their bodies and attributes untouched, and two attributes
/// that say where they came from and why they are here (see [`sqs`](super)).
///
/// A letter counts as sent when SQS has confirmed it. A letter that would be too large for the queue keeps the body
/// and the attributes, and loses of ours what does not fit. If the attributes do not fit either, the largest of them are left
/// out, and `oncegate-origin` has their names. The log has each case. The queue's limit is read again before anything is
/// left out, so that one that was raised counts at once.
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

    /// Looks at the queue as [`open`](DeadLetters::open) does, and says what will surprise somebody, with its remedy: that it
    /// takes less than the queue that is consumed. Writes nothing.
    ///
    /// # Errors
    /// When the queue cannot be used: it does not exist, cannot be reached, or a right is missing.
    pub async fn check_queue(&self) -> Result<Vec<String>, SourceError> {
        let open = self.find().await?;
        Ok(self.warning(&open).await.into_iter().collect())
    }

    /// The queue's name.
    pub fn queue(&self) -> &str {
        name(&self.queue)
    }

    async fn find(&self) -> Result<Open, QueueError> {
        let client = self.connection.client(&self.queue).await;
        let queue = queue::find(&client, &self.queue).await?;
        Ok(Open { client, queue })
    }

    /// What is wrong with the limits. A consumed queue that cannot be asked is its source's to tell.
    async fn warning(&self, open: &Open) -> Option<String> {
        let consumed = self.consumed.as_ref()?;
        let client = self.connection.client(consumed).await;
        let consumed = queue::find(&client, consumed).await.ok()?;
        open.queue.letters_warning(&consumed)
    }

    /// Reads the queue's attributes again: its limit may be another one by now. Without an answer, what was known stays.
    async fn read_again(&self, open: &Arc<Open>) -> Arc<Open> {
        let Ok(queue) = queue::find(&open.client, &self.queue).await else { return Arc::clone(open) };
        let open = Arc::new(Open { client: open.client.clone(), queue });
        *self.open.lock().unwrap_or_else(PoisonError::into_inner) = Some(Arc::clone(&open));
        open
    }

    /// The letter as the queue takes it.
    async fn fit(&self, letter: &DeadLetter, open: &mut Arc<Open>) -> Result<Written, BoxError> {
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
                "the message has {bytes} bytes without its attributes, and the dead letters' queue {} takes {limit}: raise \
                 its `MaximumMessageSize`, which is read again before the next try",
                self.queue
            )
        })?;
        let (origin, cause) = (letter.message.origin(), letter.cause.as_str());
        if !written.left_out.is_empty() {
            let left_out = &written.left_out;
            warn!(%origin, cause, limit, ?left_out, "the dead letter has no room for these attributes of its message; raise the queue's `MaximumMessageSize`");
        } else if written.shortened {
            warn!(%origin, cause, reason = letter.reason, "the dead letter has no room for all of its reason and origin");
        }
        Ok(written)
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
    /// Checks that the queue exists, and that no source consumes it; says when it takes less than the queue that is consumed.
    async fn open(&self) -> Result<(), BoxError> {
        if let Some(consumed) = &self.consumed {
            self.refuse_loop(name(consumed))?;
        }
        let open = self.find().await.map_err(SourceError::from)?;
        if let Some(warning) = self.warning(&open).await {
            warn!(queue = self.queue(), "{warning}");
        }
        *self.open.lock().unwrap_or_else(PoisonError::into_inner) = Some(Arc::new(open));
        Ok(())
    }

    async fn send(&self, letter: &DeadLetter) -> Result<(), BoxError> {
        if let Origin::Queue { queue, .. } = letter.message.origin() {
            self.refuse_loop(queue)?;
        }
        let open = self.open.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let mut open = open.ok_or("the dead letters have not been opened")?;
        let written = self.fit(letter, &mut open).await?;
        let mut call = open.client.send_message().queue_url(&open.queue.url).message_body(written.body);
        for (name, (data_type, value)) in written.attributes {
            call = call.message_attributes(name, attribute(data_type, value)?);
        }
        if open.queue.fifo {
            // Each letter is a message of its own: one that comes a second time must not be dropped as a copy.
            let once = format!("{:032x}", rand::random::<u128>());
            call = call.message_group_id(group(&letter.message)).message_deduplication_id(once);
        }
        let Err(error) = call.send().await.map_err(|error| CallError::of(&error)) else { return Ok(()) };
        if !error.is_passing() {
            // It may be the limit, which was lowered.
            self.read_again(&open).await;
        }
        Err(format!("dead letter to {}: {error}", self.queue).into())
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
