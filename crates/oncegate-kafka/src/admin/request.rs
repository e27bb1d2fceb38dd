//! Requests of administration: what is asked, and what is answered.

use std::collections::BTreeMap;
use std::time::Duration;

use async_trait::async_trait;
use rdkafka::error::RDKafkaErrorCode;

use oncegate_runtime::failure::BoxError;
use oncegate_runtime::source::SourceError;

/// Time limit of a request that creates or removes something.
pub(super) const CHANGE_TIMEOUT: Duration = Duration::from_secs(15);

/// Time limit of the brokers for creating or removing all partitions. The answer comes then.
pub(super) const BROKERS_TIMEOUT: Duration = Duration::from_secs(10);

/// Time limit of a request for the settings of a topic.
pub(super) const SETTINGS_TIMEOUT: Duration = Duration::from_secs(10);

/// The outcome for one topic or group: its name, and the brokers' error if there was one.
pub(crate) type Outcome = (String, Result<(), RDKafkaErrorCode>);

/// The settings of a topic by their names; of those without a value, an empty one.
pub(crate) type TopicSettings = BTreeMap<String, String>;

/// The brokers' answers about topics, by their names.
pub(crate) type Described = BTreeMap<String, Result<TopicSettings, RDKafkaErrorCode>>;

/// Sends requests of administration to one cluster. Each has a time limit, and can be repeated.
///
/// The error of a request means that no broker has answered it, or that the login was refused.
#[async_trait]
pub(crate) trait Admin: Send {
    /// Creates topics; returns the outcome of each, in the order of `plans`.
    async fn create_topics(&mut self, plans: &[TopicPlan]) -> Result<Vec<Outcome>, SourceError>;

    /// Removes topics; returns the outcome of each.
    async fn remove_topics(&mut self, topics: &[String]) -> Result<Vec<Outcome>, SourceError>;

    /// Removes a consumer group.
    async fn remove_group(&mut self, group: &str) -> Result<Outcome, SourceError>;

    /// Returns the settings of each topic, at least those that this crate looks at, or the brokers'
    /// error, by its name.
    async fn settings(&mut self, topics: &[&str]) -> Result<Described, SourceError>;
}

pub(crate) const MIN_INSYNC_REPLICAS: &str = "min.insync.replicas";
pub(crate) const RETENTION: &str = "retention.ms";
pub(crate) const CLEANUP: &str = "cleanup.policy";
pub(crate) const MAX_MESSAGE_BYTES: &str = "max.message.bytes";

/// The settings of a topic that are looked at.
#[cfg(any(feature = "oauth", feature = "msk-iam"))]
pub(crate) const SETTINGS: [&str; 4] = [MIN_INSYNC_REPLICAS, RETENTION, CLEANUP, MAX_MESSAGE_BYTES];

/// The number that stands for a broker's default.
const BROKER_DEFAULT: i16 = -1;

/// A topic to create. What is not set has the brokers' default.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TopicPlan {
    name: String,
    partitions: Option<u16>,
    replication_factor: Option<u16>,
    max_message_bytes: Option<u64>,
}

impl TopicPlan {
    /// A topic of this name.
    pub fn new(name: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            partitions: None,
            replication_factor: None,
            max_message_bytes: None,
        }
    }

    /// The number of partitions; by default `num.partitions` of the brokers.
    #[must_use]
    pub fn partitions(mut self, partitions: u16) -> Self {
        self.partitions = Some(partitions);
        self
    }

    /// The number of replicas of each partition; by default `default.replication.factor` of the
    /// brokers.
    #[must_use]
    pub fn replication_factor(mut self, replicas: u16) -> Self {
        self.replication_factor = Some(replicas);
        self
    }

    /// The largest message in bytes (`max.message.bytes`); by default `message.max.bytes` of the
    /// brokers.
    #[must_use]
    pub fn max_message_bytes(mut self, bytes: u64) -> Self {
        self.max_message_bytes = Some(bytes);
        self
    }

    /// The name of the topic.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The settings of the topic that are not the brokers'.
    pub(crate) fn settings(&self) -> Option<(&'static str, String)> {
        self.max_message_bytes
            .map(|bytes| (MAX_MESSAGE_BYTES, bytes.to_string()))
    }

    /// The number of partitions as the brokers are asked for it.
    pub(crate) fn partition_number(&self) -> i32 {
        self.partitions.map_or(BROKER_DEFAULT.into(), i32::from)
    }

    /// The number of replicas as the brokers are asked for it; one that is too large for the
    /// protocol is for them as well.
    pub(crate) fn replica_number(&self) -> i16 {
        self.replication_factor.map_or(BROKER_DEFAULT, |given| {
            i16::try_from(given).unwrap_or(i16::MAX)
        })
    }
}

/// The error of a request to do `what` that no broker has answered.
pub(super) fn unanswered(
    brokers: &str,
    what: &str,
    limit: Duration,
    error: impl Into<BoxError>,
) -> SourceError {
    let text =
        format!("no Kafka broker at {brokers} has answered the request to {what} within {limit:?}");
    SourceError::caused(text, error)
}
