//! Describes topics of a cluster, to check a configuration before it runs.

use std::error::Error as _;
use std::time::Duration;

use rdkafka::error::RDKafkaErrorCode;
use rdkafka::types::RDKafkaRespErr;

use crate::admin::{
    self, Admin, CLEANUP, MAX_MESSAGE_BYTES, MIN_INSYNC_REPLICAS, RETENTION, TopicSettings,
};
use crate::client::inquiry::{self, InquiryClient};
use crate::client::settings::{self, Property};
use oncegate_runtime::source::SourceError;

/// Time limit of one request to the brokers.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);

/// The description of a topic by its cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct TopicFacts {
    /// The name.
    pub name: String,
    /// The number of partitions; 0 if the topic does not exist, or is hidden.
    pub partitions: usize,
    /// `true` if this user may not see it: the right DESCRIBE is missing.
    pub hidden: bool,
    /// The replication factor: the smallest one of all partitions.
    pub replicas: usize,
    /// The number of replicas that must have a message before it counts as written
    /// (`min.insync.replicas`).
    pub min_insync_replicas: Option<usize>,
    /// The time for which messages are kept (`retention.ms`); `None` means forever.
    pub retention: Option<Duration>,
    /// `true` if the last message of each key is kept forever (`cleanup.policy` has `compact`).
    pub compacted: bool,
    /// The largest message in bytes (`max.message.bytes`).
    pub max_message_bytes: Option<u64>,
    /// `true` if this user may not see its settings: the right DESCRIBE_CONFIGS is missing.
    pub settings_hidden: bool,
    /// The reason for which its settings are not known: the right to describe them is missing, for
    /// example.
    pub settings_unknown: Option<String>,
}

/// Describes topics of the cluster at `brokers`, with properties of librdkafka as for
/// [`KafkaSource::property`](crate::KafkaSource::property). Changes and creates nothing.
///
/// # Errors
/// When no broker answers, or a property is not valid.
pub async fn describe_topics(
    brokers: &str,
    topics: &[String],
    properties: &[(String, String)],
) -> Result<Vec<TopicFacts>, SourceError> {
    topics
        .iter()
        .try_for_each(|topic| settings::check_topic(topic))?;
    let mut facts = layouts(brokers, topics, properties).await?;
    let mut admin = admin::of(brokers, properties);
    for fact in facts.iter_mut().filter(|fact| fact.partitions > 0) {
        match &mut admin {
            Ok(admin) => fact.ask(admin.as_mut()).await,
            Err(error) => fact.settings_unknown = Some(error.to_string()),
        }
    }
    Ok(facts)
}

/// Describes topics without their settings, as one broker knows them.
pub(crate) async fn layouts(
    brokers: &str,
    topics: &[String],
    properties: &[Property],
) -> Result<Vec<TopicFacts>, SourceError> {
    let mut config = settings::client(brokers, properties)?;
    // A consumer that requests a topic's metadata does not create it, even if the brokers allow
    // that.
    config
        .set("group.id", "oncegate-asks")
        .set("allow.auto.create.topics", "false");
    let names = topics.to_vec();
    let at = brokers.to_owned();
    let asking = tokio::task::spawn_blocking(move || {
        let client = inquiry::client(config)?;
        inquiry::of_each(&names, |name| layout(&client, &at, name.to_owned()))
    });
    let asked = asking.await;
    asked.map_err(|error| SourceError::caused("the Kafka client has panicked", error))?
}

fn layout(client: &InquiryClient, brokers: &str, name: String) -> Result<TopicFacts, SourceError> {
    let metadata = inquiry::metadata(client, &name, ANSWER_TIMEOUT, |error| {
        SourceError::caused(
            format!("no Kafka broker answers at {brokers} within {ANSWER_TIMEOUT:?}"),
            error,
        )
    })?;
    let found = metadata
        .topics()
        .iter()
        .find(|topic| topic.name() == name && topic.error().is_none());
    let partitions = found
        .map(rdkafka::metadata::MetadataTopic::partitions)
        .unwrap_or_default();
    let replicas = partitions
        .iter()
        .map(|partition| partition.replicas().len())
        .min()
        .unwrap_or(0);
    let denied = RDKafkaRespErr::RD_KAFKA_RESP_ERR_TOPIC_AUTHORIZATION_FAILED;
    let hidden = metadata
        .topics()
        .iter()
        .any(|topic| topic.name() == name && topic.error() == Some(denied));
    Ok(TopicFacts {
        partitions: partitions.len(),
        hidden,
        name,
        replicas,
        min_insync_replicas: None,
        retention: None,
        compacted: false,
        max_message_bytes: None,
        settings_hidden: false,
        settings_unknown: None,
    })
}

impl TopicFacts {
    /// Asks for the settings. Without an answer, the other facts still hold.
    async fn ask(&mut self, admin: &mut dyn Admin) {
        match admin.settings(&self.name).await {
            Ok(Ok(settings)) => self.read(&settings),
            Ok(Err(RDKafkaErrorCode::TopicAuthorizationFailed)) => {
                self.settings_hidden = true;
                self.settings_unknown =
                    Some("the brokers do not show them to this user".to_owned());
            }
            Ok(Err(code)) => self.settings_unknown = Some(code.to_string()),
            Err(error) => {
                let cause = error
                    .source()
                    .map(|cause| format!(": {cause}"))
                    .unwrap_or_default();
                self.settings_unknown = Some(format!("{error}{cause}"));
            }
        }
    }

    fn read(&mut self, settings: &TopicSettings) {
        self.min_insync_replicas = value(settings, MIN_INSYNC_REPLICAS).parse().ok();
        // -1 means forever.
        self.retention = value(settings, RETENTION)
            .parse()
            .ok()
            .map(Duration::from_millis);
        let cleanup = value(settings, CLEANUP);
        self.compacted = cleanup.contains("compact");
        // Without `delete`, no message is removed because of its age.
        if !cleanup.contains("delete") {
            self.retention = None;
        }
        self.max_message_bytes = value(settings, MAX_MESSAGE_BYTES).parse().ok();
    }
}

fn value<'a>(settings: &'a TopicSettings, name: &str) -> &'a str {
    settings.get(name).map(String::as_str).unwrap_or_default()
}
