//! The port behind which every broker stands.

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;

use crate::consumer::Consumer;
use crate::failure::BoxError;
use crate::gate::Gate;
use crate::health::SourceStatus;
use crate::message::Message;
use crate::observe::Observer;

/// A stream of messages from a broker. It knows nothing of keys, stores or handlers.
///
/// A source hands out deliveries and takes back acks; what it has handed out and not got back is its
/// broker's to deliver again. It bounds what it holds, and keeps its session with the broker alive
/// whether or not anybody receives.
#[async_trait]
pub trait Source: Send + Sync + fmt::Debug {
    /// Learns how its consumer will treat messages, and says when it wants to be asked for them. Called once,
    /// before `open`.
    ///
    /// Unless overridden it wants nothing to be known, and messages may wait for their handlers.
    fn agree(&self, terms: &Terms) -> Supply {
        _ = terms;
        Supply::Ahead
    }

    /// What earlier commits of this source's consumer group were annotated with, by
    /// [`annotate_commits`](Self::annotate_commits) of any process. Asked before `open`. Nothing, unless overridden:
    /// few brokers keep a text with a position.
    ///
    /// # Errors
    /// When the broker cannot be reached.
    async fn commit_annotations(&self) -> Result<Vec<String>, SourceError> {
        Ok(Vec::new())
    }

    /// Keeps what `annotation` returns with every position that is committed from now on, for
    /// [`commit_annotations`](Self::commit_annotations) of later processes. Called once, before `open`. Does nothing
    /// unless overridden.
    fn annotate_commits(&self, annotation: CommitAnnotation) {
        _ = annotation;
    }

    /// Connects and begins to fetch. Called before the first `receive`: once, and again only after an error that
    /// [`is_away`](SourceError::is_away).
    ///
    /// # Errors
    /// When the broker cannot be reached or the settings would break the promise; the error names the setting.
    async fn open(&self, observer: Arc<dyn Observer>) -> Result<(), SourceError>;

    /// Waits for deliveries and returns at least one and at most `most`; `None` when there will be no more.
    ///
    /// Dropping the future loses nothing. It is dropped, and asked again for more, when there is more room.
    ///
    /// # Errors
    /// When the source cannot go on; what the source can mend by itself, it mends.
    async fn receive(&self, most: usize) -> Result<Option<Vec<Delivery>>, SourceError>;

    /// Nothing more will be received, though handlers still run: what nobody has taken may go to others. Called
    /// before `close`. Does nothing unless overridden.
    fn stop_receiving(&self) {}

    /// Where messages wait whose retry is far off, and from where this source delivers them again. Nowhere, unless
    /// overridden: they wait where they are. Asked once, before `open`.
    fn retry_queue(&self) -> Option<Arc<dyn RetryQueue>> {
        None
    }

    /// What it does now: where it stands in each partition, and whether its broker's client is alive. Asked at any time
    /// between `open` and `close`; it must answer at once, and from memory. Says nothing unless overridden.
    fn status(&self) -> SourceStatus {
        SourceStatus::default()
    }

    /// Acknowledges what is left to acknowledge and leaves, within `deadline`.
    ///
    /// # Errors
    /// When the last acknowledgements did not reach the broker: their messages will be delivered again.
    async fn close(&self, deadline: Duration) -> Result<(), SourceError>;
}

/// A shared source is a source.
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

/// A text to keep with committed positions, as it is at each commit.
#[derive(Clone)]
pub struct CommitAnnotation(Arc<dyn Fn() -> String + Send + Sync>);

impl CommitAnnotation {
    /// The text is what `text` returns at each commit, at most [`MAX_BYTES`](Self::MAX_BYTES). It is called from the
    /// source's threads and must not wait for anything.
    pub fn new(text: impl Fn() -> String + Send + Sync + 'static) -> Self {
        Self(Arc::new(text))
    }

    /// The longest text, as brokers limit it by default (`offset.metadata.max.bytes` of Kafka): 4,096 bytes.
    pub const MAX_BYTES: usize = 4_096;

    /// The text now.
    pub fn text(&self) -> String {
        (self.0)()
    }
}

impl fmt::Debug for CommitAnnotation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("CommitAnnotation").field(&self.text()).finish()
    }
}

/// How a consumer treats messages, as far as a broker's own settings must fit to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Terms {
    /// How many attempts a message gets before it is given up.
    pub max_attempts: u32,
    /// The longest lease of the consumer's gates.
    pub lease: Duration,
    /// How long each of its gates keeps a completed record, at least.
    pub retention: Duration,
    /// How long handlers and source may go on after a stop.
    pub stop_deadline: Duration,
    /// The longest time that one of its gates lets a handler run.
    pub max_run: Duration,
}

impl Default for Terms {
    /// A consumer's and a gate's defaults.
    fn default() -> Self {
        Self {
            max_attempts: Consumer::DEFAULT_MAX_ATTEMPTS,
            lease: Gate::DEFAULT_LEASE,
            retention: Gate::DEFAULT_RETENTION,
            stop_deadline: Consumer::DEFAULT_STOP_DEADLINE,
            max_run: Gate::DEFAULT_MAX_RUN,
        }
    }
}

/// When a source may be asked for messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Supply {
    /// Before their handlers are free: the broker does not mind how long they wait.
    Ahead,
    /// For as many as can run at once, and none while the store is away: the broker counts deliveries, and
    /// gives them to somebody else after a while.
    OnDemand,
}

/// A message and the broker's claim ack_handle for it.
#[derive(Debug)]
pub struct Delivery {
    /// The message.
    pub message: Message,
    /// How to tell the broker what became of it.
    pub ack_handle: Arc<dyn AckHandle>,
}

/// The broker's side of one delivery. A ack_handle that is dropped without an ack acknowledges nothing.
pub trait AckHandle: Send + Sync + fmt::Debug {
    /// Called before an attempt. `false`: the delivery is no longer ours, drop it.
    ///
    /// While an attempt runs the source holds back, for a bounded time, from giving the delivery away.
    fn start(&self) -> bool;

    /// The message is finished for good. To be called only behind a durable COMPLETED or dead letter, and
    /// before `stop`.
    fn ack(&self);

    /// Called after the attempt that `start` allowed, whatever became of it.
    fn stop(&self);

    /// The attempt has failed, and another one may follow after `delay`. `true`: the broker has the message
    /// again and delivers it after that, here or elsewhere; drop the delivery. `false`, unless overridden: keep
    /// it, and try again in its place.
    fn nack_after(&self, delay: Duration) -> bool {
        _ = delay;
        false
    }

    /// Resolves when the broker takes the delivery away although its handler runs, which is cancelled then.
    /// `None`, unless overridden: this broker waits.
    fn lost(&self) -> Option<Pin<Box<dyn Future<Output = ()> + Send + '_>>> {
        None
    }
}

/// A durable place where messages wait for a retry that is far off, so that they hold up nothing meanwhile.
#[async_trait]
pub trait RetryQueue: Send + Sync + fmt::Debug {
    /// How long a message would wait there that must wait for `wait` at least. `None`: it waits where it is.
    fn wait(&self, wait: Duration) -> Option<Duration>;

    /// Keeps the message, with its payload, key, headers, route, origin and
    /// [first failure](Message::first_failed_at), and delivers it again after `wait`, which is a
    /// time that [`wait`](Self::wait) has named. Returns only when it is durable: the message is acknowledged after that.
    ///
    /// # Errors
    /// When it may not be durable. The message waits where it is then; it may come twice, but never not at all.
    async fn send(&self, message: &Message, wait: Duration) -> Result<(), BoxError>;
}

/// Why a source cannot go on.
#[derive(Debug, thiserror::Error)]
#[error("{what}")]
pub struct SourceError {
    what: String,
    #[source]
    source: Option<BoxError>,
    is_away: bool,
}

impl SourceError {
    /// In words that name what to change.
    pub fn new(what: impl Into<String>) -> Self {
        Self { what: what.into(), source: None, is_away: false }
    }

    /// The same with its cause.
    pub fn caused(what: impl Into<String>, source: impl Into<BoxError>) -> Self {
        Self { what: what.into(), source: Some(source.into()), is_away: false }
    }

    /// The same, of a server that is away: [`open`](Source::open) may be called again, and succeeds once the server answers.
    /// A consumer that starts waits for it, see [`Consumer::start_patience`].
    #[must_use]
    pub fn away(mut self) -> Self {
        self.is_away = true;
        self
    }

    /// Whether its server is away, and may come back.
    pub fn is_away(&self) -> bool {
        self.is_away
    }
}
