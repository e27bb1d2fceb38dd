//! `KafkaSource`: consumes topics of a Kafka cluster.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::oneshot;

use crate::ask::rights;
use crate::ask::topics;
use crate::client::convert::Routes;
use crate::client::inquiry;
use crate::client::inquiry::InquiryClient;
use crate::client::producer;
use crate::client::properties::Properties;
use crate::client::settings::{self, Settings, Start};
use crate::group::buffer::{Buffer, End, Fetched};
use crate::group::member::Member;
use crate::partitions::fetch_limits::Totals;
use crate::produce::dead_letters::KafkaDeadLetters;
use oncegate_runtime::observe::Observer;
use oncegate_runtime::source::{CommitAnnotation, SourceError};

/// A source that consumes topics of a Kafka cluster as a member of a consumer group.
///
/// An offset is committed only when every message before it is acknowledged, in whatever order
/// messages finish: the committed offset is that of the first unfinished message. When a partition
/// is revoked, no further handler starts for it, running handlers get time to finish, and the
/// position is committed before the partition is given up.
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
    pub(crate) settings: Settings,
    /// The metadata to store with each commit.
    pub(super) annotation: Mutex<Option<CommitAnnotation>>,
    pub(super) running: Mutex<Option<RunningMember>>,
    pub(super) member: Mutex<Option<Arc<Member>>>,
    /// The messages that the source and its retry topics have received and not finished.
    pub(super) totals: Arc<Totals>,
}

/// The ends of the member's thread that `close` waits for.
pub(super) struct RunningMember {
    pub(super) left: oneshot::Receiver<Result<(), String>>,
    pub(super) gone: oneshot::Receiver<()>,
}

/// Time limit of the commit in a revoke. A quarter of `max.poll.interval.ms` applies if that is
/// shorter.
const COMMIT_PATIENCE_MAX: Duration = Duration::from_secs(10);

impl KafkaSource {
    /// 10 seconds.
    pub const DEFAULT_OPEN_TIMEOUT: Duration = settings::OPEN_TIMEOUT;

    /// Creates a member of `group` that consumes `topics` from the cluster at `brokers`
    /// (`"host:port,host:port"`).
    ///
    /// It does not connect and checks nothing before
    /// [`open`](oncegate_runtime::source::Source::open).
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
            properties: Properties::default(),
            start: Start::Beginning,
            commit_interval: Duration::from_secs(1),
            drain_timeout: Duration::from_secs(10),
            open_timeout: Self::DEFAULT_OPEN_TIMEOUT,
            buffered_messages: 10_000,
            buffered_bytes: 32 << 20,
            unfinished_messages: 100_000,
            routes: Routes::Topics,
            keeps_positions: false,
        };
        Self::with(settings, Arc::default())
    }

    fn with(settings: Settings, totals: Arc<Totals>) -> Self {
        Self {
            settings,
            annotation: Mutex::default(),
            running: Mutex::default(),
            member: Mutex::default(),
            totals,
        }
    }

    /// Interval between commits of finished offsets; default 1 s, from 10 ms to a day. After a
    /// crash, messages finished since the last commit are delivered again.
    #[must_use]
    pub fn commit_interval(mut self, interval: Duration) -> Self {
        self.settings.commit_interval = interval;
        self
    }

    /// Time limit for a revoke to wait for running handlers; default 10 s, at most half of
    /// `max.poll.interval.ms`.
    ///
    /// The rebalance of the group waits meanwhile. A handler that takes longer continues, and its
    /// message is delivered again to the partition's next owner.
    #[must_use]
    pub fn drain_timeout(mut self, timeout: Duration) -> Self {
        self.settings.drain_timeout = timeout;
        self
    }

    /// Time limit for one attempt to open, in which the brokers must answer; default 10 s, at most
    /// a day. A starting consumer tries again, see
    /// [`Consumer::start_patience`](oncegate_runtime::Consumer::start_patience).
    #[must_use]
    pub fn open_timeout(mut self, timeout: Duration) -> Self {
        self.settings.open_timeout = timeout;
        self
    }

    /// Makes this consumer a static member of the group, with an `id` that no other member has.
    ///
    /// A restart within the session timeout gets the same partitions back, and the group does not
    /// rebalance. During that time no other member gets the partitions, and closing the source does
    /// not release them.
    ///
    /// Not set by default. A second process with the same id replaces the first one, which then
    /// stops with an error that names `static_member`. In the new protocol the second process
    /// instead waits until the first one has ended, at most 90 s. An id is 1 to 249 letters,
    /// digits, dots, underscores or dashes.
    #[must_use]
    pub fn static_member(mut self, id: impl Into<String>) -> Self {
        self.settings.static_member = Some(id.into());
        self
    }

    /// Limit on messages that wait to be received, in addition to librdkafka's own queue; default
    /// 10,000.
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

    /// Limit on messages of a partition received from the first unfinished one on, itself included;
    /// default 100,000.
    ///
    /// It bounds how many messages are delivered again after a crash, and the memory for their
    /// offsets (16 bytes each). A partition over the limit is paused until it is down to half of
    /// it. All partitions of the source and its retry topics together may have ten times as many:
    /// beyond that, those with more than an equal share are paused.
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
    /// It skips the existing messages, also when its committed offsets have expired. The position
    /// is committed at once, for all partitions of the topic, before any message is received: later
    /// messages are never skipped, even if the process ends before the first message is finished. A
    /// partition that the topic gains later begins with its first message.
    #[must_use]
    pub fn from_end(mut self) -> Self {
        self.settings.start = Start::End;
        self
    }

    /// Takes each message's route from its header `oncegate-route`, if present, instead of its
    /// topic.
    ///
    /// Use it to consume a dead-letter topic or redriven messages: such a message keeps its first
    /// route, and so its key. Use it only for topics that no other service writes to, because a
    /// service that copies all headers would give its own messages the wrong route.
    #[must_use]
    pub fn routes_from_headers(mut self) -> Self {
        self.settings.routes = Routes::Headers;
        self
    }

    /// Continues at the committed positions when a topic's id changes; by default the topic is then
    /// read from its beginning.
    ///
    /// A topic that was deleted and recreated has another id, and positions in the deleted topic
    /// mean nothing in the new one. Set this if the brokers' address is switched to another cluster
    /// that has the same messages at the same offsets, under topics with ids of their own. Messages
    /// of a topic that was really recreated are then skipped, up to the old position.
    #[must_use]
    pub fn keep_positions_of_recreated_topics(mut self) -> Self {
        self.settings.keeps_positions = true;
        self
    }

    /// Sets a property of librdkafka, such as `security.protocol`.
    ///
    /// Opening fails with the name of any property that would break oncegate's guarantees. Values
    /// appear in no log and no error.
    #[must_use]
    pub fn property(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.settings.properties.set(name, value);
        self
    }

    /// Sets a property of librdkafka to the content of a file, such as `sasl.password`, without a
    /// line feed at its end.
    ///
    /// The file is read again when it changes, and so are the files that `ssl.certificate.location`
    /// and its like name. Once the brokers accept the new content, running handlers finish, and
    /// another client with it joins the group in place of this one, and so for dead letters and
    /// retry topics. Until then, the former content is used.
    #[must_use]
    pub fn property_file(mut self, name: impl Into<String>, path: impl Into<PathBuf>) -> Self {
        self.settings.properties.set_file(name, path);
        self
    }

    /// Returns whether a password or token would be sent to another machine in plain text; opening
    /// warns about it.
    pub fn shows_login(&self) -> bool {
        settings::shows_login(&self.settings.brokers, &self.settings.properties.unread())
    }

    /// Checks everything that needs no broker: names, limits, and properties that would break
    /// oncegate's guarantees.
    ///
    /// # Errors
    /// Names the first wrong setting. [`open`](oncegate_runtime::source::Source::open) returns the
    /// same error.
    pub fn check(&self) -> Result<(), SourceError> {
        self.settings.check()
    }

    /// Checks that the topics exist and that this user may consume them, as
    /// [`open`](oncegate_runtime::source::Source::open) does, without joining the group.
    ///
    /// # Errors
    /// When a setting is wrong, a topic does not exist, a right is missing, or no broker answers.
    /// The text about a missing right has the command that grants it.
    pub async fn check_topics(&self) -> Result<(), SourceError> {
        let (config, _) = self.settings.config()?;
        let settings = self.settings.clone();
        let asking = tokio::task::spawn_blocking(move || {
            let client = inquiry::offsets_client(config)?;
            settings.check_cluster(&client)
        });
        asking
            .await
            .map_err(|panic| SourceError::caused("the topics could not be checked", panic))?
    }

    /// Returns dead letters that write to `topic` in the same cluster, with the same connection
    /// properties.
    pub fn dead_letters(&self, topic: impl Into<String>) -> KafkaDeadLetters {
        KafkaDeadLetters::new(self.settings.brokers.clone(), topic)
            .open_timeout(self.settings.open_timeout)
            .beside(self.settings.topics.clone(), &self.settings.properties)
    }

    /// Returns a source for `topic` with the same settings, its own group and small buffers. One
    /// limit on unfinished messages applies to both.
    pub(crate) fn sister(&self, topic: &str) -> Self {
        const BUFFERED_MESSAGES: usize = 256;
        const BUFFERED_BYTES: usize = 1 << 20;
        let mut settings = self.settings.clone();
        settings.group = format!("{}.{topic}", settings.group);
        settings.topics = vec![topic.to_owned()];
        settings.start = Start::Beginning;
        settings.buffered_messages = BUFFERED_MESSAGES;
        settings.buffered_bytes = BUFFERED_BYTES;
        let small = [
            ("queued.min.messages", "256"),
            ("queued.max.messages.kbytes", "1024"),
        ];
        small
            .into_iter()
            .for_each(|(name, value)| settings.properties.set(name, value));
        settings.routes = Routes::Topics;
        Self::with(settings, Arc::clone(&self.totals))
    }

    /// Returns the brokers and the properties that another client of the same cluster needs as
    /// well.
    pub(crate) fn connection(&self) -> (&str, Properties) {
        (
            &self.settings.brokers,
            self.settings.properties.only(producer::is_connection),
        )
    }

    /// Returns the topics that the source consumes.
    pub fn topics(&self) -> impl Iterator<Item = &str> {
        self.settings.topics.iter().map(String::as_str)
    }

    /// Waits for fetched messages, and returns at least one and at most `most`; `None` when there
    /// will be no more.
    pub(crate) async fn fetch(&self, most: usize) -> Result<Option<Vec<Fetched>>, SourceError> {
        match self.member()?.buffer.take(most).await {
            Ok(fetched) => Ok(Some(fetched)),
            Err(End::Closed) => Ok(None),
            Err(End::Failed(why)) => Err(SourceError::new(why)),
        }
    }

    /// Returns whether the source has been opened.
    pub(crate) fn is_open(&self) -> bool {
        self.member().is_ok()
    }

    pub(super) fn member(&self) -> Result<Arc<Member>, SourceError> {
        let member = self.member.lock();
        member
            .clone()
            .ok_or_else(|| SourceError::new("the Kafka source has not been opened"))
    }
}

impl Settings {
    /// Checks that the topics exist, and that this user may read them as a member of the group.
    pub(crate) fn check_cluster(&self, client: &InquiryClient) -> Result<(), SourceError> {
        let Self {
            brokers,
            group,
            topics,
            open_timeout,
            ..
        } = self;
        topics::check(client, brokers, topics, *open_timeout)?;
        rights::refuse(
            brokers,
            &rights::to_consume(client, group, topics, *open_timeout)?,
        )
    }

    pub(crate) fn member(
        &self,
        totals: Arc<Totals>,
        observer: Arc<dyn Observer>,
        annotation: Option<CommitAnnotation>,
    ) -> Result<Member, SourceError> {
        let patience =
            (settings::max_poll_interval(&self.properties.unread()) / 4).min(COMMIT_PATIENCE_MAX);
        let buffer = Buffer::new(self.buffered_messages, self.buffered_bytes).map_err(|error| {
            SourceError::caused(
                "no socket for the wake-ups of the receiver (ulimit -n)",
                error,
            )
        })?;
        Ok(Member::new(
            totals,
            observer,
            buffer,
            self.start,
            self.drain_timeout,
            patience,
            annotation,
        ))
    }
}

impl fmt::Debug for KafkaSource {
    /// Shows no property values, because they may be passwords.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KafkaSource")
            .field("brokers", &self.settings.brokers)
            .field("group", &self.settings.group)
            .field("topics", &self.settings.topics)
            .field("keeps_positions", &self.settings.keeps_positions)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
#[path = "source_tests.rs"]
mod tests;
