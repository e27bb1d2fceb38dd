//! Reads and redrives the dead letters of a queue.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use aws_sdk_sqs::Client;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;

use super::api::CallError;
use super::dead_letters::attribute;
use super::headers::{GROUP_HEADER, SOURCE_ARN_HEADER, TYPES_HEADER, text};
use super::letter::{self, Provenance, Redriven};
use super::queue::{self, Queue};
use super::settings::{Connection, name};
use super::{ORIGIN_ATTRIBUTE, REASON_ATTRIBUTE, SqsSource};
use oncegate_runtime::dead_letter_reader::{DeadLetterReader, Disposition, StoredDeadLetter};
use oncegate_runtime::dead_letters::{DeadLetter, time_of};
use oncegate_runtime::failure::BoxError;
use oncegate_runtime::message::{Header, Message, Origin};
use oncegate_runtime::observe::Counters;
use oncegate_runtime::source::{AckHandle, Delivery, Source as _, SourceError};

/// The visibility timeout of received messages; also how long they stay hidden after the process is
/// killed.
const VISIBILITY: Duration = Duration::from_secs(60);
/// The time that a receive waits for messages.
const WAIT: Duration = Duration::from_secs(2);
/// After this long without a message, the queue counts as empty.
const QUIET: Duration = Duration::from_secs(6);
/// The number of messages that are requested at a time.
const RECEIVE_MOST: usize = 100;
/// The most dead letters that are held; the rest of a longer queue is read the next time.
const HELD_MOST: usize = 100_000;
/// Time limit for returning and deleting messages at the end.
const CLOSE_LIMIT: Duration = Duration::from_secs(60);

/// Reads the visible dead letters of a queue.
///
/// A queue cannot be read without receiving. That hides its messages until the reader is closed,
/// and uses up one receive of each. Dead letters whose message was sent are deleted, and the others
/// become visible again. A FIFO queue delivers nothing after a dead letter of the same group that
/// was not sent.
pub struct SqsDeadLetterReader {
    connection: Connection,
    queue: String,
    most: usize,
    open: Option<ReaderConnection>,
}

struct ReaderConnection {
    source: SqsSource,
    client: Client,
    /// Ack handles of messages that are received and not settled, by id.
    held: HashMap<Arc<str>, Arc<dyn AckHandle>>,
    seen: usize,
    destinations: tokio::sync::Mutex<BTreeMap<String, Queue>>,
}

impl SqsDeadLetterReader {
    /// Creates a reader for the queue with this name or URL. Credentials, region and endpoint come
    /// from the AWS SDK's default chain.
    pub fn new(queue: impl Into<String>) -> Self {
        Self::with(Connection::default(), queue.into())
    }

    /// Creates a reader that uses this client.
    pub fn from_client(client: Client, queue: impl Into<String>) -> Self {
        Self::with(
            Connection {
                client: Some(client),
                ..Connection::default()
            },
            queue.into(),
        )
    }

    fn with(connection: Connection, queue: String) -> Self {
        Self {
            connection,
            queue,
            most: HELD_MOST,
            open: None,
        }
    }

    /// Sets the region; by default that of the environment or profile, or else of the queue's URL.
    #[must_use]
    pub fn region(mut self, region: impl Into<String>) -> Self {
        self.connection.region = Some(region.into());
        self
    }

    /// Sets the endpoint of SQS, such as `http://127.0.0.1:9324`; by default as for
    /// [`SqsSource::endpoint_url`].
    #[must_use]
    pub fn endpoint_url(mut self, url: impl Into<String>) -> Self {
        self.connection.endpoint_url = Some(url.into());
        self
    }

    /// Sets the most dead letters to receive: 100,000 by default, which is also the limit.
    #[must_use]
    pub fn most(mut self, most: usize) -> Self {
        self.most = most.min(HELD_MOST);
        self
    }

    fn opened(&self) -> Result<&ReaderConnection, SourceError> {
        self.open
            .as_ref()
            .ok_or_else(|| SourceError::new("the dead-letter reader has not been opened"))
    }
}

#[async_trait]
impl DeadLetterReader for SqsDeadLetterReader {
    async fn open(&mut self) -> Result<(), SourceError> {
        let client = self.connection.client(&self.queue).await;
        let source = SqsSource::from_client(client.clone(), self.queue.as_str());
        let source = source.visibility(VISIBILITY).wait(WAIT);
        source.open(Arc::new(Counters::default())).await?;
        self.open = Some(ReaderConnection {
            source,
            client,
            held: HashMap::new(),
            seen: 0,
            destinations: tokio::sync::Mutex::default(),
        });
        Ok(())
    }

    async fn next_batch(&mut self) -> Result<Option<Vec<StoredDeadLetter>>, SourceError> {
        let most = self.most;
        let Some(open) = self.open.as_mut() else {
            return Err(SourceError::new(
                "the dead-letter reader has not been opened",
            ));
        };
        let room = most.saturating_sub(open.seen);
        if room == 0 {
            return Ok(None);
        }
        // A timeout loses nothing: messages that arrive later are returned with the rest.
        let received =
            tokio::time::timeout(QUIET, open.source.receive(room.min(RECEIVE_MOST))).await;
        let Ok(received) = received else {
            return Ok(None);
        };
        let Some(deliveries) = received? else {
            return Ok(None);
        };
        open.seen += deliveries.len();
        let mut letters = Vec::with_capacity(deliveries.len());
        for Delivery {
            message,
            ack_handle,
        } in deliveries
        {
            let stored = StoredDeadLetter::of(message, read);
            if let Origin::Queue { id, .. } = &stored.place {
                open.held.insert(Arc::clone(id), ack_handle);
            }
            letters.push(stored);
        }
        Ok(Some(letters))
    }

    fn destination(&self, stored: &StoredDeadLetter, to: Option<&str>) -> Result<String, String> {
        let message = stored.message();
        let queue = match (to, message.origin(), stored.letter()) {
            (Some(to), ..) => to,
            (None, Origin::Queue { queue, .. }, Some(_)) => queue,
            (None, origin, Some(_)) => {
                return Err(format!(
                    "its origin is {origin}, which is not a queue: name a queue"
                ));
            }
            (None, _, None) => {
                moved_from(message).ok_or_else(|| "it has no origin: name a queue".to_owned())?
            }
        };
        if name(queue) == name(&self.queue) {
            return Err(format!(
                "{queue} is the dead-letter queue itself: name another queue"
            ));
        }
        redriven(stored, queue).map(|_| queue.to_owned())
    }

    async fn send(&self, stored: &StoredDeadLetter, destination: &str) -> Result<(), BoxError> {
        let open = self.opened()?;
        let queue = {
            let mut known = open.destinations.lock().await;
            match known.get(destination) {
                Some(queue) => queue.clone(),
                None => {
                    let found = queue::find(&open.client, destination).await?;
                    known.insert(destination.to_owned(), found.clone());
                    found
                }
            }
        };
        let Redriven { body, attributes } = redriven(stored, destination)?;
        let mut call = open
            .client
            .send_message()
            .queue_url(&queue.url)
            .message_body(body);
        for (name, (data_type, value)) in attributes {
            call = call.message_attributes(name, attribute(data_type, value)?);
        }
        if queue.fifo {
            // A message that is sent again because the first answer was lost keeps its
            // deduplication id.
            let once = match &stored.place {
                Origin::Queue { id, .. } => id.to_string(),
                place => place.to_string(),
            };
            let group = super::dead_letters::group(stored.message());
            call = call.message_group_id(group).message_deduplication_id(once);
        }
        let sent = call.send().await;
        sent.map_err(|error| {
            format!(
                "{} to {destination}: {}",
                stored.place,
                CallError::of(&error)
            )
        })?;
        Ok(())
    }

    fn settle(&mut self, stored: &StoredDeadLetter, settled: Disposition) {
        let Origin::Queue { id, .. } = &stored.place else {
            return;
        };
        let Some(open) = self.open.as_mut() else {
            return;
        };
        // Dead letters that stay are held until the end. Otherwise the queue would deliver them
        // again at once.
        if settled == Disposition::Sent
            && let Some(ack_handle) = open.held.remove(id)
        {
            ack_handle.ack();
        }
    }

    /// Does nothing: the queue's thread deletes settled messages, and a message that is not deleted
    /// is delivered again.
    async fn save(&mut self) -> Result<(), SourceError> {
        Ok(())
    }

    async fn close(&mut self) -> Result<(), SourceError> {
        let Some(open) = self.open.take() else {
            return Ok(());
        };
        // An ack handle that is dropped without an ack returns its message.
        drop(open.held);
        open.source.close(CLOSE_LIMIT).await
    }
}

impl fmt::Debug for SqsDeadLetterReader {
    /// Does not show the client, because it has credentials.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SqsDeadLetterReader")
            .field("queue", &self.queue)
            .finish_non_exhaustive()
    }
}

/// Returns the name of the queue from which a redrive policy has moved the message.
fn moved_from(message: &Message) -> Option<&str> {
    std::str::from_utf8(message.header(SOURCE_ARN_HEADER)?)
        .ok()?
        .rsplit(':')
        .next()
}

/// The header with the names of attributes that did not fit into the dead letter.
const LEFT_OUT_HEADER: &str = "AWS.AttributesLeftOut";

/// Returns the message with its first route. A message that oncegate did not write gets its route
/// from the queue.
fn redriven(stored: &StoredDeadLetter, destination: &str) -> Result<Redriven, String> {
    if let Some(names) = stored.message().header(LEFT_OUT_HEADER) {
        let names = String::from_utf8_lossy(names);
        return Err(format!(
            "its dead letter had no room for its attributes {names}: send the message again by hand"
        ));
    }
    let route = stored.letter().map(|letter| letter.message.route());
    Redriven::of(stored.message(), route, name(destination))
}

/// Decodes a dead letter that oncegate wrote; `None` for other messages.
fn read(kept: &Message) -> Option<DeadLetter> {
    let provenance: Provenance = serde_json::from_slice(kept.header(ORIGIN_ATTRIBUTE)?).ok()?;
    let payload = match provenance.encoding.as_deref() {
        None => kept.payload_bytes(),
        Some("null") => None,
        Some("empty") => Some(Bytes::new()),
        Some("base64") => Some(STANDARD.decode(kept.payload()).ok()?.into()),
        Some(_) => return None,
    };
    let headers = own_headers(kept, &provenance);
    let mut message = Message::new(
        provenance.route.as_str(),
        Origin::parse(&provenance.origin),
        payload,
    )
    .with_headers(headers);
    if let Some(group) = provenance.group {
        message = message.with_key(group);
    }
    if let Some(timestamp_ms) = provenance.timestamp_ms {
        message = message.with_timestamp_ms(timestamp_ms);
    }
    let reason = kept
        .header(REASON_ATTRIBUTE)
        .map(String::from_utf8_lossy)
        .unwrap_or_default();
    let prefix = format!("{}: ", provenance.cause);
    Some(DeadLetter {
        message,
        scope: provenance.scope,
        key: provenance.key,
        cause: provenance.cause.parse().ok()?,
        reason: reason.strip_prefix(&prefix).unwrap_or(&reason).to_owned(),
        attempts: provenance.attempts,
        first_failed_at: provenance.first_failed_at_ms.and_then(time_of),
        failed_at: time_of(provenance.failed_at_ms)?,
    })
}

/// Returns the sender's attributes with their types, including those stored in `oncegate-origin`,
/// and the group.
fn own_headers(kept: &Message, provenance: &Provenance) -> Vec<Header> {
    let mut headers: Vec<Header> = kept
        .headers()
        .iter()
        .filter(|header| !letter::is_ours(&header.name))
        .cloned()
        .collect();
    let mut types = letter::types(kept);
    for (name, attribute) in &provenance.attributes {
        let value = if attribute.r#type.starts_with(letter::BINARY) {
            STANDARD.decode(&attribute.value).unwrap_or_default()
        } else {
            attribute.value.clone().into_bytes()
        };
        if attribute.r#type != letter::STRING {
            types.insert(name.clone(), attribute.r#type.clone());
        }
        headers.push(text(name, value));
    }
    if !types.is_empty()
        && let Ok(types) = serde_json::to_string(&types)
    {
        headers.push(text(TYPES_HEADER, types));
    }
    if !provenance.left_out.is_empty() {
        headers.push(text(LEFT_OUT_HEADER, provenance.left_out.join(", ")));
    }
    if let Some(group) = &provenance.group {
        headers.push(text(GROUP_HEADER, group.clone()));
    }
    headers
}
