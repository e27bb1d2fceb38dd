//! `KafkaSource`: consumes topics of a Kafka cluster.

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

/// A source that consumes topics of a Kafka cluster as a member of a consumer group.
///
/// An offset is committed only when every message before it is acknowledged, in whatever order messages finish: the
/// committed offset is that of the first unfinished message. When a partition is revoked, no further handler starts for
/// it, running handlers get time to finish, and the position is committed before the partition is given up.
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
    /// The metadata to store with each commit.
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

/// The tasks that `close` waits for.
struct Open {
    left: oneshot::Receiver<Result<(), String>>,
    gone: oneshot::Receiver<()>,
}

/// Time limit of the commit in a revoke. A quarter of `max.poll.interval.ms` applies if that is shorter.
const COMMIT_PATIENCE_MAX: Duration = Duration::from_secs(10);

impl KafkaSource {
    /// Creates a member of `group` that consumes `topics` from the cluster at `brokers` (`"host:port,host:port"`).
    ///
    /// It does not connect and checks nothing before [`open`](Source::open).
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

    /// Interval between commits of finished offsets; default 1 s. After a crash, messages finished since the last
    /// commit are delivered again.
    #[must_use]
    pub fn commit_interval(mut self, interval: Duration) -> Self {
        self.settings.commit_interval = interval;
        self
    }

    /// Time limit for a revoke to wait for running handlers; default 10 s, at most half of `max.poll.interval.ms`.
    ///
    /// The rebalance of the group waits meanwhile. A handler that takes longer continues, and its message is delivered
    /// again to the partition's next owner.
    #[must_use]
    pub fn drain_timeout(mut self, timeout: Duration) -> Self {
        self.settings.drain_timeout = timeout;
        self
    }

    /// Time limit for opening to wait for the brokers; default 10 s.
    #[must_use]
    pub fn open_timeout(mut self, timeout: Duration) -> Self {
        self.settings.open_timeout = timeout;
        self
    }

    /// Makes this consumer a static member of the group, with an `id` that no other member has.
    ///
    /// A restart within the session timeout gets the same partitions back, and the group does not rebalance. During
    /// that time no other member gets the partitions, and closing the source does not release them.
    ///
    /// Not set by default. A second process with the same id replaces the first one, which then stops with an error
    /// that names `static_member`. In the new protocol the second process instead waits until the first one has
    /// ended, at most 90 s. An id is 1 to 249 letters, digits, dots, underscores or dashes.
    #[must_use]
    pub fn static_member(mut self, id: impl Into<String>) -> Self {
        self.settings.static_member = Some(id.into());
        self
    }

    /// Limit on messages that wait to be received, in addition to librdkafka's own queue; default 10,000.
    #[must_use]
    pub fn buffered_messages(mut self, messages: usize) -> Self {
        self.settings.buffered_messages = messages;
        self
    }

    /// Limit on the bytes of messages that wait to be received; default 32 MiB.
    ///
    /// The buffer may exceed it by 1 MiB and one message. The limit of librdkafka's own queue is
    /// `queued.max.messages.kbytes`, 16 MiB here.
    #[must_use]
    pub fn buffered_bytes(mut self, bytes: usize) -> Self {
        self.settings.buffered_bytes = bytes;
        self
    }

    /// Limit on messages of a partition received from the first unfinished one on, itself included; default 100,000.
    ///
    /// It bounds how many messages are delivered again after a crash. A partition over the limit is paused until it is
    /// down to half of it.
    #[must_use]
    pub fn unfinished_messages(mut self, messages: usize) -> Self {
        self.settings.unfinished_messages = messages;
        self
    }

    /// Makes a group without committed offsets begin with the oldest message. The default.
    #[must_use]
    pub fn from_beginning(mut self) -> Self {
        self.settings.start = Start::Beginning;
        self
    }

    /// Makes a group without committed offsets of a topic begin at the topic's end.
    ///
    /// It skips the existing messages, also when its committed offsets have expired. The position is committed at once,
    /// for all partitions of the topic, before any message is received: later messages are never skipped, even if the
    /// process ends before the first message is finished. A partition that the topic gains later begins with its first
    /// message.
    #[must_use]
    pub fn from_end(mut self) -> Self {
        self.settings.start = Start::End;
        self
    }

    /// Takes each message's route from its header `oncegate-route`, if present, instead of its topic.
    ///
    /// Use it to consume a dead-letter topic or redriven messages: such a message keeps its first route, and so its
    /// key. Use it only for topics that no other service writes to, because a service that copies all headers would
    /// give its own messages the wrong route.
    #[must_use]
    pub fn routes_from_headers(mut self) -> Self {
        self.settings.routes = Routes::Headers;
        self
    }

    /// Sets a property of librdkafka, such as `security.protocol`.
    ///
    /// Opening fails with the name of any property that would break oncegate's guarantees. Values appear in no log
    /// and no error.
    #[must_use]
    pub fn property(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.settings.properties.push((name.into(), value.into()));
        self
    }

    /// Checks everything that needs no broker: names, limits, and properties that would break oncegate's guarantees.
    ///
    /// # Errors
    /// Names the first wrong setting. [`open`](Source::open) returns the same error.
    pub fn check(&self) -> Result<(), SourceError> {
        self.settings.check().map(drop)
    }

    /// Returns dead letters that write to `topic` in the same cluster, with the same connection properties.
    pub fn dead_letters(&self, topic: impl Into<String>) -> KafkaDeadLetters {
        KafkaDeadLetters::new(self.settings.brokers.clone(), topic)
            .beside(self.settings.topics.clone(), &self.settings.properties)
    }

    /// Returns a source for `topic` with the same settings, its own group and small buffers.
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

    /// Returns the brokers and the properties that another client of the same cluster needs as well.
    pub(super) fn connection(&self) -> (&str, &[Property]) {
        (&self.settings.brokers, &self.settings.properties)
    }

    /// Returns the topics that the source consumes.
    pub fn topics(&self) -> impl Iterator<Item = &str> {
        self.settings.topics.iter().map(String::as_str)
    }

    fn member(&self) -> Result<Arc<Member>, SourceError> {
        let member = self.member.lock().unwrap_or_else(PoisonError::into_inner);
        member.clone().ok_or_else(|| SourceError::new("the Kafka source has not been opened"))
    }
}

impl Settings {
    /// Runs every check that needs no broker.
    fn check(&self) -> Result<ClientConfig, SourceError> {
        if self.topics.is_empty() {
            return Err(SourceError::new("no topic is given; name at least one"));
        }
        for topic in &self.topics {
            settings::check_topic(topic)?;
        }
        let max_poll_interval = settings::max_poll_interval(&self.properties);
        if self.drain_timeout > max_poll_interval / 2 {
            return Err(SourceError::new(format!(
                "drain_timeout is {:?}, more than half of max.poll.interval.ms ({max_poll_interval:?}): \
                 a slow handler could make the group remove this member",
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
                "the Kafka source is already open; create a second source for a second member",
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
        thread
            .spawn(body)
            .map_err(|error| SourceError::caused("cannot start the thread of the Kafka consumer", error))?;
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
        let left = left.unwrap_or_else(|_| {
            Ok(Err("the handlers and the last commit did not finish in time".to_owned()))
        });
        let left = left.unwrap_or_else(|_| Err("the poll thread has ended".to_owned()));
        // Dropping a consumer may hang forever inside the client; everything that matters is done by then.
        if left.is_ok() && tokio::time::timeout_at(by.into(), open.gone).await.is_err() {
            tracing::warn!(
                "the Kafka client is still closing its connections; not waiting for it any longer"
            );
        }
        left.map_err(|why| {
            SourceError::new(format!(
                "the last offsets may not be committed, and their messages will be delivered again: {why}"
            ))
        })
    }
}

impl Drop for KafkaSource {
    /// Leaves the group as `close` does, without waiting for the end.
    fn drop(&mut self) {
        if let Some(member) = self.member.lock().unwrap_or_else(PoisonError::into_inner).take() {
            member.leave(Instant::now() + member.drain_timeout + member.commit_patience);
        }
    }
}

impl fmt::Debug for KafkaSource {
    /// Shows no property values, because they may be passwords.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KafkaSource")
            .field("brokers", &self.settings.brokers)
            .field("group", &self.settings.group)
            .field("topics", &self.settings.topics)
            .finish_non_exhaustive()
    }
}
