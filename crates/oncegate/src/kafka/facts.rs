//! Describes topics of a cluster, to check a configuration before it runs.

use std::time::Duration;

use rdkafka::admin::{AdminClient, AdminOptions, ConfigResource, ResourceSpecifier};
use rdkafka::client::DefaultClientContext;
use rdkafka::consumer::{BaseConsumer, Consumer};

use super::settings;
use crate::source::SourceError;

/// Time limit of one request to the brokers.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);

/// The description of a topic by its cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct TopicFacts {
    /// Its name.
    pub name: String,
    /// How many partitions it has; 0 if the topic does not exist.
    pub partitions: usize,
    /// The replication factor: the smallest one of all partitions.
    pub replicas: usize,
    /// How many replicas must have a message before it counts as written (`min.insync.replicas`).
    pub min_insync_replicas: Option<usize>,
    /// How long messages are kept (`retention.ms`); `None` means forever.
    pub retention: Option<Duration>,
    /// Whether the last message of each key is kept forever (`cleanup.policy` has `compact`).
    pub compacted: bool,
    /// The largest message in bytes (`max.message.bytes`).
    pub max_message_bytes: Option<u64>,
    /// Why its settings are not known, for example because the right to describe them is missing.
    pub settings_unknown: Option<String>,
}

/// Describes topics of the cluster at `brokers`, with properties of librdkafka as for
/// [`KafkaSource::property`](super::KafkaSource::property). Changes and creates nothing.
///
/// # Errors
/// When no broker answers, or a property is not valid.
pub async fn describe_topics(
    brokers: &str,
    topics: &[String],
    properties: &[(String, String)],
) -> Result<Vec<TopicFacts>, SourceError> {
    topics.iter().try_for_each(|topic| settings::check_topic(topic))?;
    let mut config = settings::client(brokers, properties)?;
    let admin: AdminClient<DefaultClientContext> = config.create().map_err(settings::unusable)?;
    // A consumer that requests a topic's metadata does not create it, even if the brokers allow that.
    config.set("group.id", "oncegate-asks").set("allow.auto.create.topics", "false");
    let (names, at) = (topics.to_vec(), brokers.to_owned());
    let asking = tokio::task::spawn_blocking(move || {
        let client: BaseConsumer = config.create().map_err(settings::unusable)?;
        names.into_iter().map(|name| layout(&client, &at, name)).collect::<Result<Vec<_>, _>>()
    });
    let asked = asking.await;
    let mut facts = asked.map_err(|error| SourceError::caused("the Kafka client has panicked", error))??;
    for fact in facts.iter_mut().filter(|fact| fact.partitions > 0) {
        let options = AdminOptions::new().request_timeout(Some(ANSWER_TIMEOUT));
        let resource = [ResourceSpecifier::Topic(&fact.name)];
        let answer = admin.describe_configs(&resource, &options).await;
        match answer.map(|mut resources| resources.pop()) {
            Ok(Some(Ok(resource))) => fact.read(&resource),
            Ok(Some(Err(code))) => fact.settings_unknown = Some(code.to_string()),
            Ok(None) => fact.settings_unknown = Some("the broker returned no settings".to_owned()),
            Err(error) => fact.settings_unknown = Some(error.to_string()),
        }
    }
    Ok(facts)
}

fn layout(client: &BaseConsumer, brokers: &str, name: String) -> Result<TopicFacts, SourceError> {
    let metadata = client.fetch_metadata(Some(&name), ANSWER_TIMEOUT).map_err(|error| {
        SourceError::caused(format!("no Kafka broker answers at {brokers} within {ANSWER_TIMEOUT:?}"), error)
    })?;
    let found = metadata.topics().iter().find(|topic| topic.name() == name && topic.error().is_none());
    let partitions = found.map(rdkafka::metadata::MetadataTopic::partitions).unwrap_or_default();
    let replicas = partitions.iter().map(|partition| partition.replicas().len()).min().unwrap_or(0);
    Ok(TopicFacts {
        partitions: partitions.len(),
        name,
        replicas,
        min_insync_replicas: None,
        retention: None,
        compacted: false,
        max_message_bytes: None,
        settings_unknown: None,
    })
}

impl TopicFacts {
    fn read(&mut self, resource: &ConfigResource) {
        let value = |name: &str| {
            let entry = resource.entries.iter().find(|entry| entry.name == name);
            entry.and_then(|entry| entry.value.clone()).unwrap_or_default()
        };
        self.min_insync_replicas = value("min.insync.replicas").parse().ok();
        // -1 means forever.
        self.retention = value("retention.ms").parse().ok().map(Duration::from_millis);
        self.compacted = value("cleanup.policy").contains("compact");
        if !value("cleanup.policy").contains("delete") {
            self.retention = None;
        }
        self.max_message_bytes = value("max.message.bytes").parse().ok();
    }
}
