//! Describes topics of a cluster, to check a configuration before it runs.

use std::collections::BTreeSet;
use std::error::Error as _;
use std::time::Duration;

use rdkafka::error::RDKafkaErrorCode;
use rdkafka::types::RDKafkaRespErr;

use crate::admin::{
    self, CLEANUP, Described, MAX_MESSAGE_BYTES, MIN_INSYNC_REPLICAS, RETENTION, TopicSettings,
};
use crate::client::inquiry::{self, TopicLayout};
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
    let there: BTreeSet<&str> = facts
        .iter()
        .filter(|fact| fact.partitions > 0)
        .map(|fact| fact.name.as_str())
        .collect();
    if there.is_empty() {
        return Ok(facts);
    }
    let there: Vec<&str> = there.into_iter().collect();
    let answers = match admin::of(brokers, properties) {
        Ok(mut admin) => admin.settings(&there).await,
        Err(error) => Err(error),
    };
    for fact in facts.iter_mut().filter(|fact| fact.partitions > 0) {
        fact.take(&answers);
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
        let layouts = inquiry::layouts(&client, &names, ANSWER_TIMEOUT, |error| {
            SourceError::caused(
                format!("no Kafka broker answers at {at} within {ANSWER_TIMEOUT:?}"),
                error,
            )
        })?;
        Ok(names
            .into_iter()
            .zip(layouts)
            .map(|(name, layout)| TopicFacts::of(name, layout))
            .collect())
    });
    let asked = asking.await;
    asked.map_err(|error| SourceError::caused("the Kafka client has panicked", error))?
}

impl TopicFacts {
    /// The facts without the settings.
    fn of(name: String, layout: Option<TopicLayout>) -> Self {
        let denied = RDKafkaRespErr::RD_KAFKA_RESP_ERR_TOPIC_AUTHORIZATION_FAILED;
        let error = layout.as_ref().and_then(|layout| layout.error);
        let layout = layout.filter(|layout| layout.error.is_none());
        Self {
            partitions: layout.as_ref().map_or(0, |layout| layout.partitions.len()),
            hidden: error == Some(denied),
            name,
            replicas: layout.map_or(0, |layout| layout.replicas),
            min_insync_replicas: None,
            retention: None,
            compacted: false,
            max_message_bytes: None,
            settings_hidden: false,
            settings_unknown: None,
        }
    }

    /// Takes the answer about its settings. Without them, the other facts still hold.
    fn take(&mut self, answers: &Result<Described, SourceError>) {
        let unknown = match answers.as_ref().map(|answers| answers.get(&self.name)) {
            Ok(Some(Ok(settings))) => return self.read(settings),
            Ok(Some(Err(RDKafkaErrorCode::TopicAuthorizationFailed))) => {
                self.settings_hidden = true;
                "the brokers do not show them to this user".to_owned()
            }
            Ok(Some(Err(code))) => code.to_string(),
            Ok(None) => "the brokers' answer says nothing about them".to_owned(),
            Err(error) => {
                let cause = error.source().map(|cause| format!(": {cause}"));
                format!("{error}{}", cause.unwrap_or_default())
            }
        };
        self.settings_unknown = Some(unknown);
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
