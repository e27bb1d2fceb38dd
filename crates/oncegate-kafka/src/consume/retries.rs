//! Retry topics: messages with a retry that is far off wait there, and hold up no other message
//! meanwhile.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use futures_util::future::{join_all, select_all};
use parking_lot::Mutex;

use super::retry_headers;
use super::retry_tier::RetryTier;
use super::source::KafkaSource;
use crate::ask::rights;
use crate::client::producer::DurableProducer;
use crate::client::properties::Properties;
use crate::client::settings;
use crate::produce::dead_letters::KafkaDeadLetters;

use oncegate_runtime::failure::BoxError;
use oncegate_runtime::health::SourceStatus;
use oncegate_runtime::message::Message;
use oncegate_runtime::observe::Observer;
use oncegate_runtime::source::{
    CommitAnnotation, Delivery, RetryQueue, Source, SourceError, StreamOrigin, Supply, Terms,
};

/// The longest wait in a topic: a day. The topic's retention must be longer than its wait.
const WAIT_MOST: Duration = Duration::from_secs(86_400);

/// A [`KafkaSource`] with retry topics; see [`KafkaSource::retry_topics`].
pub struct KafkaRetries {
    main: KafkaSource,
    tiers: Vec<RetryTier>,
    queue: Arc<RetryTopics>,
    /// The index of the receive that is polled first; all take turns.
    turn: AtomicUsize,
}

/// The retry topics by their waits, and the producer that writes to them.
struct RetryTopics {
    brokers: String,
    properties: Properties,
    beyond: Duration,
    /// Topics by wait, the shortest first.
    tiers: Vec<(Duration, String)>,
    producer: Mutex<Option<Arc<DurableProducer>>>,
}

impl KafkaSource {
    /// Makes retries that are later than [`beyond`](KafkaRetries::beyond) wait in these topics.
    ///
    /// Each topic is given with how long a message waits there. So a dependency that is down holds
    /// up neither other messages nor the committed offset.
    ///
    /// A message goes to the topic with the shortest wait that is long enough. If no topic's wait
    /// is long enough, it waits in its lane, as without retry topics. It is acknowledged once the
    /// topic has it durably. After its wait it is delivered again with its payload, key, headers,
    /// route, origin, timestamp and first failure. It never waits for longer than that from when it
    /// is received, even if the clock of the process that wrote it is ahead. Of each partition
    /// about 64 messages, its first ones, wait in memory. Other messages overtake it, so the
    /// consumer must be [`Ordering::Unordered`](oncegate_runtime::Ordering::Unordered) or accept
    /// [that](oncegate_runtime::Consumer::overtaking_retries).
    ///
    /// Each topic must exist, keep its messages for longer than they wait, and have no other
    /// writer. Each is consumed in a group of its own, named `GROUP.TOPIC`. A message there has the
    /// headers of a [dead letter](crate) for the route, the origin and the first failure, and
    /// `oncegate-due`, the time when it is due, in milliseconds since 1970.
    ///
    /// ```no_run
    /// use std::time::Duration;
    /// use oncegate::kafka::KafkaSource;
    ///
    /// let source = KafkaSource::new("localhost:9092", "billing", ["orders"]).retry_topics([
    ///     (Duration::from_secs(30), "orders.retry.30s"),
    ///     (Duration::from_secs(600), "orders.retry.10m"),
    /// ]);
    /// ```
    #[must_use]
    pub fn retry_topics(
        self,
        topics: impl IntoIterator<Item = (Duration, impl Into<String>)>,
    ) -> KafkaRetries {
        let mut topics: Vec<(Duration, String)> = topics
            .into_iter()
            .map(|(wait, topic)| (wait, topic.into()))
            .collect();
        topics.sort_unstable();
        let (brokers, properties) = self.connection();
        let queue = RetryTopics {
            brokers: brokers.to_owned(),
            properties,
            beyond: KafkaRetries::DEFAULT_BEYOND,
            tiers: topics.clone(),
            producer: Mutex::default(),
        };
        let tiers = topics
            .iter()
            .map(|(wait, topic)| RetryTier::new(topic.clone(), self.sister(topic), *wait))
            .collect();
        KafkaRetries {
            main: self,
            tiers,
            queue: Arc::new(queue),
            turn: AtomicUsize::new(0),
        }
    }
}

impl KafkaRetries {
    /// 10 seconds.
    pub const DEFAULT_BEYOND: Duration = Duration::from_secs(10);

    /// Sets the wait up to which retries stay in their lanes: 10 s by default.
    #[must_use]
    pub fn beyond(mut self, limit: Duration) -> Self {
        if let Some(queue) = Arc::get_mut(&mut self.queue) {
            queue.beyond = limit;
        }
        self
    }

    /// Returns dead letters that write to `topic` in the same cluster, with the same connection
    /// properties.
    pub fn dead_letters(&self, topic: impl Into<String>) -> KafkaDeadLetters {
        let consumed = self
            .main
            .topics()
            .chain(self.tiers.iter().map(|tier| &*tier.topic));
        self.main.dead_letters(topic).beside(
            consumed.map(str::to_owned).collect(),
            &Properties::default(),
        )
    }

    /// As [`KafkaSource::shows_login`].
    pub fn shows_login(&self) -> bool {
        self.main.shows_login()
    }

    /// Checks everything that needs no broker; opening does so as well.
    ///
    /// # Errors
    /// Names what is wrong, and what to change.
    pub fn check(&self) -> Result<(), SourceError> {
        self.main.check()?;
        let mut topics: Vec<&str> = self.main.topics().collect();
        for (wait, topic) in &self.queue.tiers {
            settings::check_topic(topic)?;
            if topics.contains(&&**topic) {
                return Err(SourceError::new(format!(
                    "the retry topic {topic} is already consumed by the same source: give each wait a topic of its own"
                )));
            }
            if *wait < self.queue.beyond || *wait > WAIT_MOST {
                return Err(SourceError::new(format!(
                    "messages wait for {wait:?} in {topic}; it must be between `beyond` ({:?}) and a day",
                    self.queue.beyond
                )));
            }
            topics.push(topic);
        }
        Ok(())
    }

    /// Checks that all topics exist, as [`open`](Source::open) does, without joining a group.
    ///
    /// # Errors
    /// When a setting is wrong, a topic does not exist, or no broker answers.
    pub async fn check_topics(&self) -> Result<(), SourceError> {
        self.check()?;
        for source in self.sources() {
            source.check_topics().await?;
        }
        self.queue.check_rights().await
    }

    /// Returns a sentence for each topic of the main source of which the group has committed
    /// nothing, as [`KafkaSource::history`] does.
    ///
    /// # Errors
    /// When a setting is wrong, or the brokers do not answer or refuse.
    pub async fn history(&self) -> Result<Vec<String>, SourceError> {
        self.main.history().await
    }

    fn sources(&self) -> impl Iterator<Item = &KafkaSource> {
        std::iter::once(&self.main).chain(self.tiers.iter().map(|tier| &tier.source))
    }
}

#[async_trait]
impl Source for KafkaRetries {
    fn agree(&self, terms: &Terms) -> Supply {
        self.main.agree(terms)
    }

    async fn commit_annotations(&self) -> Result<Vec<String>, SourceError> {
        self.main.commit_annotations().await
    }

    fn annotate_commits(&self, annotation: CommitAnnotation) {
        self.main.annotate_commits(annotation);
    }

    async fn streams(&self) -> Result<Vec<StreamOrigin>, SourceError> {
        self.main.streams().await
    }

    async fn open(&self, observer: Arc<dyn Observer>) -> Result<(), SourceError> {
        self.check()?;
        let producer = DurableProducer::new(&self.queue.brokers, self.queue.properties.clone())?;
        *self.queue.producer.lock() = Some(Arc::new(producer));
        // After an error the consumer calls this again: some may be open already.
        for source in self.sources().filter(|source| !source.is_open()) {
            source.open(Arc::clone(&observer)).await?;
        }
        // The topics exist, so this creates none.
        self.queue.check_rights().await
    }

    async fn receive(&self, most: usize) -> Result<Option<Vec<Delivery>>, SourceError> {
        let mut receives = vec![self.main.receive(most)];
        receives.extend(
            self.tiers
                .iter()
                .map(|tier| Box::pin(tier.receive(most)) as _),
        );
        // The first one in a fixed order could starve the others.
        let turn = self.turn.fetch_add(1, Relaxed) % receives.len();
        receives.rotate_left(turn);
        // Dropping the other futures loses nothing.
        let (received, ..) = select_all(receives).await;
        received
    }

    fn stop_receiving(&self) {
        self.sources().for_each(Source::stop_receiving);
    }

    fn retry_queue(&self) -> Option<Arc<dyn RetryQueue>> {
        Some(Arc::clone(&self.queue) as _)
    }

    fn status(&self) -> SourceStatus {
        let mut status = self.main.status();
        for tier in &self.tiers {
            let of_tier = tier.source.status();
            status.polled_ago = status.polled_ago.max(of_tier.polled_ago);
            status.disconnected_for = status.disconnected_for.max(of_tier.disconnected_for);
            status.others_connect |= of_tier.others_connect;
            status
                .failures
                .extend(of_tier.failures.into_iter().map(|mut failure| {
                    failure.error = format!("retry topic {}: {}", tier.topic, failure.error);
                    failure
                }));
            status.partitions.extend(of_tier.partitions);
        }
        status
    }

    async fn close(&self, deadline: Duration) -> Result<(), SourceError> {
        let closed = join_all(self.sources().map(|source| source.close(deadline))).await;
        closed.into_iter().collect()
    }
}

impl RetryTopics {
    /// Checks that this user may write to the topics.
    async fn check_rights(&self) -> Result<(), SourceError> {
        let topics: Vec<String> = self.tiers.iter().map(|(_, topic)| topic.clone()).collect();
        rights::refuse(
            &self.brokers,
            &rights::to_write(&self.brokers, &topics, &self.properties.read()?).await?,
        )
    }
}

#[async_trait]
impl RetryQueue for RetryTopics {
    fn wait(&self, wait: Duration) -> Option<Duration> {
        let tier = self
            .tiers
            .iter()
            .find(|(of_tier, _)| *of_tier >= wait)
            .filter(|_| wait > self.beyond)?;
        Some(tier.0)
    }

    async fn send(&self, message: &Message, wait: Duration) -> Result<(), BoxError> {
        let producer = self.producer.lock().clone();
        let producer = producer.ok_or("the retry topics have not been opened")?;
        let tier = self.tiers.iter().find(|(of_tier, _)| *of_tier == wait);
        let (_, topic) = tier.ok_or_else(|| format!("no retry topic has a wait of {wait:?}"))?;
        let headers = retry_headers::headers(message, SystemTime::now() + wait);
        let sent = producer.send(topic, message.into(), headers).await;
        sent.map_err(|error| {
            let why = producer.explain(&error);
            format!("message could not be written to retry topic {topic}: {why}").into()
        })
    }
}

impl fmt::Debug for KafkaRetries {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KafkaRetries")
            .field("main", &self.main)
            .field("queue", &self.queue)
            .finish()
    }
}

impl fmt::Debug for RetryTopics {
    /// Shows no property values, because they may be passwords.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            brokers,
            beyond,
            tiers,
            ..
        } = self;
        f.debug_struct("RetryTopics")
            .field("brokers", brokers)
            .field("beyond", beyond)
            .field("tiers", tiers)
            .finish()
    }
}
