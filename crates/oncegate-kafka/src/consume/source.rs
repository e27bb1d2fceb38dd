//! `KafkaSource`: consumes topics of a Kafka cluster.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::oneshot;

use crate::ask::history;
use crate::ask::rights;
use crate::ask::topics;
use crate::client::inquiry;
use crate::client::inquiry::InquiryClient;
use crate::client::producer;
use crate::client::properties::Properties;
use crate::client::settings::{self, Settings};
use crate::client::source_settings::{KafkaSettings, StartAt};
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
    pub const DEFAULT_OPEN_TIMEOUT: Duration = KafkaSettings::DEFAULT.open_timeout;

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
            topics: topics.into_iter().map(Into::into).collect(),
            properties: Properties::default(),
            source: KafkaSettings::DEFAULT,
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

    /// Sets all settings but the cluster, the group, the topics and properties, such as those of a
    /// file.
    #[must_use]
    pub fn settings(mut self, settings: KafkaSettings) -> Self {
        self.settings.source = settings;
        self
    }

    /// Sets the [interval between commits](KafkaSettings::commit_interval): 1 s by default.
    #[must_use]
    pub fn commit_interval(mut self, interval: Duration) -> Self {
        self.settings.source.commit_interval = interval;
        self
    }

    /// Sets the [time that a revoke waits](KafkaSettings::drain_timeout) for running handlers: 10 s
    /// by default.
    #[must_use]
    pub fn drain_timeout(mut self, timeout: Duration) -> Self {
        self.settings.source.drain_timeout = timeout;
        self
    }

    /// Sets the [time limit of one attempt to open](KafkaSettings::open_timeout): 10 s by default.
    /// A starting consumer tries again, see
    /// [`Consumer::start_patience`](oncegate_runtime::Consumer::start_patience).
    #[must_use]
    pub fn open_timeout(mut self, timeout: Duration) -> Self {
        self.settings.source.open_timeout = timeout;
        self
    }

    /// Makes this consumer a [static member](KafkaSettings::static_member) of the group, with an
    /// `id` that no other member has. Not set by default.
    #[must_use]
    pub fn static_member(mut self, id: impl Into<String>) -> Self {
        self.settings.source.static_member = Some(id.into());
        self
    }

    /// Sets the [number of messages](KafkaSettings::buffered_messages) that wait to be received:
    /// 10,000 by default.
    #[must_use]
    pub fn buffered_messages(mut self, messages: usize) -> Self {
        self.settings.source.buffered_messages = messages;
        self
    }

    /// Sets the [bytes of messages](KafkaSettings::buffered_bytes) that wait to be received: 32 MiB
    /// by default.
    #[must_use]
    pub fn buffered_bytes(mut self, bytes: usize) -> Self {
        self.settings.source.buffered_bytes = bytes;
        self
    }

    /// Sets the [number of messages of a partition](KafkaSettings::unfinished_messages) that may be
    /// received from the first unfinished one on, itself included: 100,000 by default.
    #[must_use]
    pub fn unfinished_messages(mut self, messages: usize) -> Self {
        self.settings.source.unfinished_messages = messages;
        self
    }

    /// Makes a group without committed offsets begin with the oldest message. The default.
    #[must_use]
    pub fn from_beginning(mut self) -> Self {
        self.settings.source.from = StartAt::Beginning;
        self
    }

    /// Makes a group without committed offsets of a topic begin at the [topic's end](StartAt::End).
    #[must_use]
    pub fn from_end(mut self) -> Self {
        self.settings.source.from = StartAt::End;
        self
    }

    /// Takes each message's route [from its header](KafkaSettings::routes_from_headers)
    /// `oncegate-route`, if present, instead of its topic.
    #[must_use]
    pub fn routes_from_headers(mut self) -> Self {
        self.settings.source.routes_from_headers = true;
        self
    }

    /// Continues at the committed positions [when a topic's id
    /// changes](KafkaSettings::keep_positions_of_recreated_topics); by default the topic is then
    /// read from its beginning.
    #[must_use]
    pub fn keep_positions_of_recreated_topics(mut self) -> Self {
        self.settings.source.keep_positions_of_recreated_topics = true;
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

    /// Returns a sentence for each topic of which the group has committed nothing, although it has
    /// messages: if this source [begins with the first message](Self::from_beginning), all of them
    /// run. Opening warns with the same sentences.
    ///
    /// # Errors
    /// When a setting is wrong, or the brokers do not answer or refuse.
    pub async fn history(&self) -> Result<Vec<String>, SourceError> {
        let (config, _) = self.settings.config()?;
        let settings = self.settings.clone();
        let asking = tokio::task::spawn_blocking(move || {
            let client = inquiry::offsets_client(config)?;
            history::of(&settings, &client)
        });
        asking
            .await
            .map_err(|panic| SourceError::caused("the group could not be asked about", panic))?
    }

    /// Returns dead letters that write to `topic` in the same cluster, with the same connection
    /// properties.
    pub fn dead_letters(&self, topic: impl Into<String>) -> KafkaDeadLetters {
        KafkaDeadLetters::new(self.settings.brokers.clone(), topic)
            .open_timeout(self.settings.source.open_timeout)
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
        settings.source.from = StartAt::Beginning;
        settings.source.buffered_messages = BUFFERED_MESSAGES;
        settings.source.buffered_bytes = BUFFERED_BYTES;
        let small = [
            ("queued.min.messages", "256"),
            ("queued.max.messages.kbytes", "1024"),
        ];
        small
            .into_iter()
            .for_each(|(name, value)| settings.properties.set(name, value));
        settings.source.routes_from_headers = false;
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
            source,
            ..
        } = self;
        let timeout = source.open_timeout;
        topics::check(client, brokers, topics, timeout)?;
        rights::refuse(
            brokers,
            &rights::to_consume(client, group, topics, timeout)?,
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
        let buffer = Buffer::new(self.source.buffered_messages, self.source.buffered_bytes)
            .map_err(|error| {
                SourceError::caused(
                    "no socket for the wake-ups of the receiver (ulimit -n)",
                    error,
                )
            })?;
        Ok(Member::new(
            totals,
            observer,
            buffer,
            self.source.from,
            self.source.drain_timeout,
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
            .field("settings", &self.settings.source)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
#[path = "source_tests.rs"]
mod tests;
