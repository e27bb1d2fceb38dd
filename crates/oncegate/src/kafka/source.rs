//! `KafkaSource`: topics of a Kafka cluster as a source.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use rdkafka::config::ClientConfig;
use tokio::sync::oneshot;

use super::buffer::{Buffer, End};
use super::convert::Routes;
use super::dead_letters::KafkaDeadLetters;
use super::member::Member;
use super::settings::{self, Property, Start};
use super::{ack_handle, annotations, membership, status};
use crate::health::SourceStatus;
use crate::observe::Observer;
use crate::source::{CommitAnnotation, Delivery, Source, SourceError};

/// Topics of a Kafka cluster, consumed as a member of a group.
///
/// Offsets are committed only behind messages that were acknowledged, whatever order they finish in: a
/// commit stands at the first unfinished message. When a partition is taken away, nothing of it starts any
/// more, what has started gets time to end, and its position is committed before it is let go.
///
/// ```no_run
/// use std::time::Duration;
/// use oncegate::kafka::KafkaSource;
///
/// let source = KafkaSource::new("localhost:9092", "billing", ["orders"])
///     .commit_interval(Duration::from_millis(500))
///     .property("client.rack", "eu-1a");
/// ```
pub struct KafkaSource {
    settings: Settings,
    /// What is kept with each commit.
    annotation: Mutex<Option<CommitAnnotation>>,
    open: Mutex<Option<Open>>,
    member: Mutex<Option<Arc<Member>>>,
}

#[derive(Clone)]
pub(super) struct Settings {
    pub(super) brokers: String,
    group: String,
    static_member: Option<String>,
    pub(super) topics: Vec<String>,
    properties: Vec<Property>,
    pub(super) start: Start,
    pub(super) commit_interval: Duration,
    drain_timeout: Duration,
    pub(super) open_timeout: Duration,
    buffered_messages: usize,
    buffered_bytes: usize,
    pub(super) unfinished_messages: usize,
    pub(super) routes: Routes,
}

/// What `close` waits for.
struct Open {
    left: oneshot::Receiver<Result<(), String>>,
    gone: oneshot::Receiver<()>,
}

/// A commit inside a revoke may take this long, and never more than a quarter of `max.poll.interval.ms`.
const COMMIT_PATIENCE_MAX: Duration = Duration::from_secs(10);

impl KafkaSource {
    /// A member of `group` that consumes `topics` from the cluster at `brokers` (`"host:port,host:port"`).
    ///
    /// Nothing is connected or checked before [`open`](Source::open).
    pub fn new(
        brokers: impl Into<String>,
        group: impl Into<String>,
        topics: impl IntoIterator<Item = impl Into<String>>,
    ) -> Self {
        let settings = Settings {
            brokers: brokers.into(),
            group: group.into(),
            static_member: None,
            topics: topics.into_iter().map(Into::into).collect(),
            properties: Vec::new(),
            start: Start::Beginning,
            commit_interval: Duration::from_secs(1),
            drain_timeout: Duration::from_secs(10),
            open_timeout: Duration::from_secs(10),
            buffered_messages: 10_000,
            buffered_bytes: 32 << 20,
            unfinished_messages: 100_000,
            routes: Routes::Topics,
        };
        Self { settings, annotation: Mutex::default(), open: Mutex::default(), member: Mutex::default() }
    }

    /// How often finished offsets are committed; default 1 s. A crash delivers again what was finished since.
    #[must_use]
    pub fn commit_interval(mut self, interval: Duration) -> Self {
        self.settings.commit_interval = interval;
        self
    }

    /// How long a revoke waits for messages whose handlers have started; default 10 s, at most half of
    /// `max.poll.interval.ms`. The group waits meanwhile; a handler that takes longer goes on, and its
    /// message is delivered again to the partition's next owner.
    #[must_use]
    pub fn drain_timeout(mut self, timeout: Duration) -> Self {
        self.settings.drain_timeout = timeout;
        self
    }

    /// How long opening waits for the brokers; default 10 s.
    #[must_use]
    pub fn open_timeout(mut self, timeout: Duration) -> Self {
        self.settings.open_timeout = timeout;
        self
    }

    /// Makes this a static member of the group, by an `id` that no other member has: a restart within the session's
    /// timeout gets the same partitions back, and the group does not rebalance. In return nobody else gets them
    /// during that time, and closing does not give them away.
    ///
    /// Not set by default. A second process with the same id takes the first one's place; the first one then
    /// stops with an error that says so. In the new protocol the second one waits for the first one's end instead,
    /// for 90 s at the most. An id is 1 to 249 letters, digits, dots, underscores or dashes.
    #[must_use]
    pub fn static_member(mut self, id: impl Into<String>) -> Self {
        self.settings.static_member = Some(id.into());
        self
    }

    /// How many messages may wait to be received, beside librdkafka's own queue; default 10,000.
    #[must_use]
    pub fn buffered_messages(mut self, messages: usize) -> Self {
        self.settings.buffered_messages = messages;
        self
    }

    /// How many bytes of messages may wait to be received; default 32 MiB. It may be exceeded by 1 MiB and one
    /// message. librdkafka's own queue has its limit in `queued.max.messages.kbytes`, 16 MiB here.
    #[must_use]
    pub fn buffered_bytes(mut self, bytes: usize) -> Self {
        self.settings.buffered_bytes = bytes;
        self
    }

    /// How many messages of a partition may have been received beyond the first unfinished one, itself
    /// included; default 100,000. It bounds what a crash delivers again. A partition over it is paused until
    /// half of it is left.
    #[must_use]
    pub fn unfinished_messages(mut self, messages: usize) -> Self {
        self.settings.unfinished_messages = messages;
        self
    }

    /// A group that has committed nothing begins with the oldest message. The default.
    #[must_use]
    pub fn from_beginning(mut self) -> Self {
        self.settings.start = Start::Beginning;
        self
    }

    /// A group that has committed nothing of a topic begins with messages that come from now on. It skips what is
    /// there already, also when its committed offsets have expired.
    ///
    /// Where that is gets committed at once, for all partitions of the topic, before anything is received: what comes
    /// after that is never skipped, whatever ends before the first message is finished. A partition that the topic
    /// gains later begins with its first message.
    #[must_use]
    pub fn from_end(mut self) -> Self {
        self.settings.start = Start::End;
        self
    }

    /// Takes each message's route from its header `oncegate-route`, where it has one, instead of its topic.
    ///
    /// For topics of dead letters that are consumed, or produced again: such a message keeps its first route,
    /// and so its key. Only for topics to which nobody else writes, because a service that copies all headers
    /// would give its own messages a foreign route.
    #[must_use]
    pub fn routes_from_headers(mut self) -> Self {
        self.settings.routes = Routes::Headers;
        self
    }

    /// Sets a property of librdkafka, such as `security.protocol`. What would break the promise is refused by
    /// name when the source opens. Values appear in no log and no error.
    #[must_use]
    pub fn property(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.settings.properties.push((name.into(), value.into()));
        self
    }

    /// Checks everything that needs no broker: names, limits, and properties that would break the promise.
    ///
    /// # Errors
    /// The first setting that is wrong, by its name. [`open`](Source::open) says the same.
    pub fn check(&self) -> Result<(), SourceError> {
        self.settings.check().map(drop)
    }

    /// Dead letters to `topic` in the same cluster, with the same connection properties.
    pub fn dead_letters(&self, topic: impl Into<String>) -> KafkaDeadLetters {
        KafkaDeadLetters::new(self.settings.brokers.clone(), topic)
            .beside(self.settings.topics.clone(), &self.settings.properties)
    }

    /// A member of another group with the same settings, which consumes `topic` and holds little of it.
    pub(super) fn sister(&self, topic: &str) -> Self {
        const BUFFERED_MESSAGES: usize = 256;
        const BUFFERED_BYTES: usize = 1 << 20;
        let mut settings = self.settings.clone();
        settings.group = format!("{}.{topic}", settings.group);
        settings.topics = vec![topic.to_owned()];
        settings.start = Start::Beginning;
        (settings.buffered_messages, settings.buffered_bytes) = (BUFFERED_MESSAGES, BUFFERED_BYTES);
        let small = [("queued.min.messages", "256"), ("queued.max.messages.kbytes", "1024")];
        settings.properties.extend(small.map(|(name, value)| (name.to_owned(), value.to_owned())));
        settings.routes = Routes::Topics;
        Self { settings, annotation: Mutex::default(), open: Mutex::default(), member: Mutex::default() }
    }

    /// The brokers, and the properties that another client beside it needs as well.
    pub(super) fn connection(&self) -> (&str, &[Property]) {
        (&self.settings.brokers, &self.settings.properties)
    }

    /// The topics that it consumes.
    pub fn topics(&self) -> impl Iterator<Item = &str> {
        self.settings.topics.iter().map(String::as_str)
    }

    fn member(&self) -> Result<Arc<Member>, SourceError> {
        let member = self.member.lock().unwrap_or_else(PoisonError::into_inner);
        member.clone().ok_or_else(|| SourceError::new("the Kafka source has not been opened"))
    }
}

impl Settings {
    /// Every check that needs no broker.
    fn check(&self) -> Result<ClientConfig, SourceError> {
        if self.topics.is_empty() {
            return Err(SourceError::new("no topics are named"));
        }
        for topic in &self.topics {
            settings::check_topic(topic)?;
        }
        let max_poll_interval = settings::max_poll_interval(&self.properties);
        if self.drain_timeout > max_poll_interval / 2 {
            return Err(SourceError::new(format!(
                "drain_timeout is {:?}, more than half of max.poll.interval.ms ({max_poll_interval:?}): \
                 a slow handler would cost the membership",
                self.drain_timeout
            )));
        }
        let mut config = settings::consumer(&self.brokers, &self.group, self.start, &self.properties)?;
        if let Some(id) = &self.static_member {
            settings::check_name("static_member", id)?;
            config.set("group.instance.id", id);
        }
        Ok(config)
    }

    fn member(&self, observer: Arc<dyn Observer>, annotation: Option<CommitAnnotation>) -> Member {
        let patience = (settings::max_poll_interval(&self.properties) / 4).min(COMMIT_PATIENCE_MAX);
        let buffer = Buffer::new(self.buffered_messages, self.buffered_bytes);
        Member::new(observer, buffer, self.start, self.drain_timeout, patience, annotation)
    }
}

#[async_trait]
impl Source for KafkaSource {
    async fn commit_annotations(&self) -> Result<Vec<String>, SourceError> {
        let (config, topics) = (self.settings.check()?, self.settings.topics.clone());
        let read = tokio::task::spawn_blocking(move || annotations::read(&config, &topics));
        read.await.map_err(|panic| SourceError::caused("the committed offsets could not be read", panic))?
    }

    fn annotate_commits(&self, annotation: CommitAnnotation) {
        *self.annotation.lock().unwrap_or_else(PoisonError::into_inner) = Some(annotation);
    }

    async fn open(&self, observer: Arc<dyn Observer>) -> Result<(), SourceError> {
        let config = self.settings.check()?;
        if self.member().is_ok() {
            return Err(SourceError::new(
                "the Kafka source is open already; a second one is a second member",
            ));
        }
        let annotation = self.annotation.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let member = Arc::new(self.settings.member(observer, annotation));
        let (opened, opening) = oneshot::channel();
        let (left, leaving) = oneshot::channel();
        let (gone, going) = oneshot::channel();
        let (settings, shared) = (self.settings.clone(), Arc::clone(&member));
        let body = move || {
            membership::run(&settings, &config, &shared, opened, left);
            let _ = gone.send(());
        };
        let thread = std::thread::Builder::new().name("oncegate-poll".to_owned());
        thread.spawn(body).map_err(|error| SourceError::caused("no thread for the Kafka consumer", error))?;
        let opening = opening.await;
        opening.unwrap_or_else(|_| Err(SourceError::new("the Kafka consumer ended while opening")))?;
        *self.member.lock().unwrap_or_else(PoisonError::into_inner) = Some(member);
        *self.open.lock().unwrap_or_else(PoisonError::into_inner) = Some(Open { left: leaving, gone: going });
        Ok(())
    }

    async fn receive(&self, most: usize) -> Result<Option<Vec<Delivery>>, SourceError> {
        match self.member()?.buffer.take(most).await {
            Ok(fetched) => Ok(Some(fetched.into_iter().map(ack_handle::delivery).collect())),
            Err(End::Closed) => Ok(None),
            Err(End::Failed(why)) => Err(SourceError::new(why)),
        }
    }

    fn status(&self) -> SourceStatus {
        let status = self.member().map(|member| status::of(&member)).unwrap_or_default();
        SourceStatus { group: Some(self.settings.group.clone()), ..status }
    }

    async fn close(&self, deadline: Duration) -> Result<(), SourceError> {
        let Some(open) = self.open.lock().unwrap_or_else(PoisonError::into_inner).take() else {
            return Ok(());
        };
        let member = self.member()?;
        let by = Instant::now() + deadline;
        member.buffer.end(End::Closed);
        member.leave(by);
        let left = tokio::time::timeout_at(by.into(), open.left).await;
        let left = left
            .unwrap_or_else(|_| Ok(Err("the handlers and the last commit did not end in time".to_owned())));
        let left = left.unwrap_or_else(|_| Err("the poll thread has ended".to_owned()));
        // Dropping a consumer may hang for ever inside the client; everything that matters is done by then.
        if left.is_ok() && tokio::time::timeout_at(by.into(), open.gone).await.is_err() {
            tracing::warn!("the Kafka client still closes its connections; leaving it to that");
        }
        left.map_err(|why| {
            SourceError::new(format!(
                "the last offsets may not be committed, their messages will be delivered again: {why}"
            ))
        })
    }
}

impl Drop for KafkaSource {
    /// Leaves as `close` does, but nobody waits for it.
    fn drop(&mut self) {
        if let Some(member) = self.member.lock().unwrap_or_else(PoisonError::into_inner).take() {
            member.leave(Instant::now() + member.drain_timeout + member.commit_patience);
        }
    }
}

impl fmt::Debug for KafkaSource {
    /// Shows no property values: they hold passwords.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KafkaSource")
            .field("brokers", &self.settings.brokers)
            .field("group", &self.settings.group)
            .field("topics", &self.settings.topics)
            .finish_non_exhaustive()
    }
}
