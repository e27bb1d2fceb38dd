//! The trait that every broker implements.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;

use crate::failure::BoxError;
use crate::health::SourceStatus;
use crate::message::Message;
use crate::observe::Observer;

mod wrapper;

pub use wrapper::SourceWrapper;

/// A stream of messages from a broker. It knows nothing of keys, stores or handlers.
///
/// A source returns deliveries and takes acks; the broker delivers a message again if it is not
/// acknowledged. A source bounds what it holds, and keeps its session with the broker alive whether
/// or not `receive` is called.
#[async_trait]
pub trait Source: Send + Sync + fmt::Debug {
    /// Takes the consumer's terms, and returns when the source may be asked for messages. Called
    /// once, before `open`.
    ///
    /// The default ignores the terms, and returns that messages may wait for their handlers.
    fn agree(&self, terms: &Terms) -> Supply {
        _ = terms;
        Supply::Ahead
    }

    /// Returns the metadata of earlier commits of this source's consumer group, set with
    /// [`annotate_commits`](Self::annotate_commits) by any process. Called before `open`. The
    /// default returns none, because few brokers store metadata with a position.
    ///
    /// # Errors
    /// When the broker cannot be reached.
    async fn commit_annotations(&self) -> Result<Vec<String>, SourceError> {
        Ok(Vec::new())
    }

    /// Stores the text of `annotation` with every position committed from now on, for
    /// [`commit_annotations`](Self::commit_annotations) of later processes. Called once, before
    /// `open`. The default does nothing.
    fn annotate_commits(&self, annotation: CommitAnnotation) {
        _ = annotation;
    }

    /// Returns the streams that this source reads, with their broker: two brokers may have topics
    /// of one name. Called before `open`. The default returns none, for a source whose broker has
    /// no identity.
    ///
    /// # Errors
    /// When the broker cannot be reached.
    async fn streams(&self) -> Result<Vec<StreamOrigin>, SourceError> {
        Ok(Vec::new())
    }

    /// Connects and begins to fetch. Called before the first `receive`: once, and again only after
    /// an error that [`is_away`](SourceError::is_away).
    ///
    /// # Errors
    /// When the broker cannot be reached, or a setting would break oncegate's guarantees; the error
    /// names the setting.
    async fn open(&self, observer: Arc<dyn Observer>) -> Result<(), SourceError>;

    /// Waits for deliveries and returns at least one and at most `most`; `None` when there will be
    /// no more.
    ///
    /// Dropping the future loses nothing. The consumer drops it, and calls it again with a larger
    /// `most`, when it has more room.
    ///
    /// # Errors
    /// When the source cannot continue. It recovers from temporary errors by itself.
    async fn receive(&self, most: usize) -> Result<Option<Vec<Delivery>>, SourceError>;

    /// Ends receiving while handlers still run: messages that were not received may go to other
    /// consumers. Called before `close`. The default does nothing.
    fn stop_receiving(&self) {}

    /// Returns the queue where messages wait for a retry that is far off, and from which this
    /// source delivers them again. The default is none: they wait in the consumer. Called once,
    /// before `open`.
    fn retry_queue(&self) -> Option<Arc<dyn RetryQueue>> {
        None
    }

    /// Returns the source's progress in each partition, and whether the broker's client is alive.
    ///
    /// Called at any time between `open` and `close`; it must return at once, from memory. The
    /// default is an empty status.
    fn status(&self) -> SourceStatus {
        SourceStatus::default()
    }

    /// Sends the remaining acknowledgements and leaves the broker, within `deadline`.
    ///
    /// # Errors
    /// When the last acknowledgements did not reach the broker: their messages will be delivered
    /// again.
    async fn close(&self, deadline: Duration) -> Result<(), SourceError>;
}

/// A shared source, which forwards to the source.
#[async_trait]
impl<S: Source + ?Sized> Source for Arc<S> {
    fn agree(&self, terms: &Terms) -> Supply {
        (**self).agree(terms)
    }

    async fn commit_annotations(&self) -> Result<Vec<String>, SourceError> {
        (**self).commit_annotations().await
    }

    fn annotate_commits(&self, annotation: CommitAnnotation) {
        (**self).annotate_commits(annotation);
    }

    async fn streams(&self) -> Result<Vec<StreamOrigin>, SourceError> {
        (**self).streams().await
    }

    async fn open(&self, observer: Arc<dyn Observer>) -> Result<(), SourceError> {
        (**self).open(observer).await
    }

    async fn receive(&self, most: usize) -> Result<Option<Vec<Delivery>>, SourceError> {
        (**self).receive(most).await
    }

    fn stop_receiving(&self) {
        (**self).stop_receiving();
    }

    fn retry_queue(&self) -> Option<Arc<dyn RetryQueue>> {
        (**self).retry_queue()
    }

    fn status(&self) -> SourceStatus {
        (**self).status()
    }

    async fn close(&self, deadline: Duration) -> Result<(), SourceError> {
        (**self).close(deadline).await
    }
}

/// A stream of messages and the broker that it is at.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StreamOrigin {
    /// The route of its messages; `None` when they have several that the source does not know.
    pub route: Option<String>,
    /// The broker in words, without a secret, that no other one has: `Kafka cluster
    /// 4L6g3nShT-eMCtK--X86sw`. It is the same by each address of the broker.
    pub broker: String,
}

/// A text to store with committed positions, computed at each commit.
#[derive(Clone)]
pub struct CommitAnnotation(Arc<dyn Fn() -> String + Send + Sync>);

impl CommitAnnotation {
    /// Creates an annotation whose text is what `text` returns at each commit, at most
    /// [`MAX_BYTES`](Self::MAX_BYTES). The source's threads call it, so it must not wait for
    /// anything.
    pub fn new(text: impl Fn() -> String + Send + Sync + 'static) -> Self {
        Self(Arc::new(text))
    }

    /// The longest text: 4,096 bytes, the default limit of brokers (`offset.metadata.max.bytes` of
    /// Kafka).
    pub const MAX_BYTES: usize = 4_096;

    /// Returns the current text.
    pub fn text(&self) -> String {
        (self.0)()
    }
}

impl fmt::Debug for CommitAnnotation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("CommitAnnotation")
            .field(&self.text())
            .finish()
    }
}

/// The consumer's settings that a broker's settings must match.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Terms {
    /// The number of attempts that a message gets before it becomes a dead letter.
    pub max_attempts: u32,
    /// The longest lease of the consumer's gates.
    pub lease: Duration,
    /// The shortest time that one of its gates keeps a completed record.
    pub retention: Duration,
    /// The time for which handlers and source may continue after a stop.
    pub stop_deadline: Duration,
    /// The longest time that one of its gates allows a handler to run.
    pub max_run: Duration,
}

/// The times at which a source may be asked for messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Supply {
    /// Receives before handlers are free: the broker does not limit how long messages wait.
    Ahead,
    /// Receives only what can run at once, and nothing while the store is unavailable: the broker
    /// counts deliveries, and delivers messages to other consumers after a while.
    OnDemand,
}

/// A message and its ack handle.
#[derive(Debug)]
pub struct Delivery {
    /// The message.
    pub message: Message,
    /// Acknowledges or returns the message.
    pub ack_handle: Arc<dyn AckHandle>,
}

/// Acknowledges one delivery at its broker. An ack handle that is dropped without an ack
/// acknowledges nothing.
pub trait AckHandle: Send + Sync + fmt::Debug {
    /// Begins an attempt. `false` when the delivery is no longer ours and must be dropped.
    ///
    /// While an attempt runs, the source delays giving the delivery to another consumer, for a
    /// limited time.
    fn start(&self) -> bool;

    /// Returns whether the delivery still is this consumer's, as far as the source knows. It must
    /// return at once, from memory.
    ///
    /// The consumer asks right before a handler begins. One that has begun is not stopped when its
    /// delivery is lost: it ends under its lease, and its result is recorded. The consumer asks
    /// about once a second for each message that waits, too, and drops those that are not: a
    /// message that is delivered again would wait behind them. The default is `true`:
    /// [`start`](Self::start) finds out.
    fn is_ours(&self) -> bool {
        true
    }

    /// Returns the number of an order that the source keeps by itself: its deliveries with the same
    /// number run one after another, as they were received, whatever the consumer's
    /// [`Ordering`](crate::Ordering) is. The default is `None`: by that.
    fn order(&self) -> Option<u64> {
        None
    }

    /// Acknowledges the message. Call it only after a durable COMPLETED or dead letter, and before
    /// `stop`.
    fn ack(&self);

    /// Ends the attempt that `start` began, whatever its outcome.
    fn stop(&self);

    /// Returns the message to the broker after a failed attempt, for another one after `delay`.
    ///
    /// `true` when the broker has the message again and will deliver it after `delay`, here or
    /// elsewhere; drop the delivery. `false`, the default, when the broker cannot do that; keep the
    /// delivery, and retry in place.
    fn nack_after(&self, delay: Duration) -> bool {
        _ = delay;
        false
    }
}

/// A durable queue where messages wait for a retry that is far off, so that they hold up no other
/// message meanwhile.
#[async_trait]
pub trait RetryQueue: Send + Sync + fmt::Debug {
    /// Returns how long a message that must wait at least `wait` would wait in the queue. `None`
    /// when it must wait in the consumer.
    fn wait(&self, wait: Duration) -> Option<Duration>;

    /// Stores the message, with its payload, key, headers, route, origin and [first
    /// failure](Message::first_failed_at), and delivers it again after `wait`, a value returned by
    /// [`wait`](Self::wait). Returns only when the message is durable, because it is acknowledged
    /// right after.
    ///
    /// # Errors
    /// When it may not be durable. The message then waits in the consumer; it may be delivered
    /// twice, but is never lost.
    async fn send(&self, message: &Message, wait: Duration) -> Result<(), BoxError>;
}

/// The reason why a source cannot continue.
#[derive(Debug, thiserror::Error)]
#[error("{what}")]
pub struct SourceError {
    what: String,
    #[source]
    source: Option<BoxError>,
    is_away: bool,
}

impl SourceError {
    /// Creates an error. `what` says what failed and what to change.
    pub fn new(what: impl Into<String>) -> Self {
        Self {
            what: what.into(),
            source: None,
            is_away: false,
        }
    }

    /// Creates an error with its cause.
    pub fn caused(what: impl Into<String>, source: impl Into<BoxError>) -> Self {
        Self {
            what: what.into(),
            source: Some(source.into()),
            is_away: false,
        }
    }

    /// Marks the error as caused by an unreachable server: [`open`](Source::open) may be called
    /// again, and succeeds once the server answers. A starting consumer waits for it, see
    /// [`Consumer::start_patience`](crate::Consumer::start_patience).
    #[must_use]
    pub fn away(mut self) -> Self {
        self.is_away = true;
        self
    }

    /// Returns whether the server is unreachable, and may come back.
    pub fn is_away(&self) -> bool {
        self.is_away
    }
}
