//! Creates topics, for an operator who sets up a consumer.

use std::time::Duration;

use rdkafka::admin::{AdminClient, AdminOptions, NewTopic, TopicReplication};
use rdkafka::client::DefaultClientContext;
use rdkafka::types::RDKafkaErrorCode;

use super::{settings, tokens};
use oncegate_runtime::source::SourceError;

/// Time limit of the request.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(15);
/// How long the brokers may take to make all partitions known.
const CREATION_TIMEOUT: Duration = Duration::from_secs(10);
/// The number that stands for a broker's default.
const BROKER_DEFAULT: i32 = -1;

/// A topic to create. What is not set has the brokers' default.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TopicPlan {
    name: String,
    partitions: Option<u16>,
    replication_factor: Option<u16>,
}

impl TopicPlan {
    /// A topic of this name.
    pub fn new(name: impl Into<String>) -> Self {
        Self { name: name.into(), partitions: None, replication_factor: None }
    }

    /// The number of partitions; by default `num.partitions` of the brokers.
    #[must_use]
    pub fn partitions(mut self, partitions: u16) -> Self {
        self.partitions = Some(partitions);
        self
    }

    /// The number of replicas of each partition; by default `default.replication.factor` of the brokers.
    #[must_use]
    pub fn replication_factor(mut self, replicas: u16) -> Self {
        self.replication_factor = Some(replicas);
        self
    }

    /// The name of the topic.
    pub fn name(&self) -> &str {
        &self.name
    }
}

/// What became of a [`TopicPlan`].
#[derive(Debug)]
#[non_exhaustive]
pub enum TopicCreation {
    /// The topic was created.
    Created,
    /// There was a topic of this name already. It was not changed.
    Existed,
    /// The brokers refused it: the number of replicas is larger than that of the brokers, for example.
    Refused(SourceError),
}

/// Creates topics in the cluster at `brokers`, with properties of librdkafka as for
/// [`KafkaSource::property`](super::KafkaSource::property). Returns what became of each, in the order of `plans`. When a
/// call is repeated, topics that were created before have [existed](TopicCreation::Existed).
///
/// Without plans, no broker is asked, and only the properties are checked.
///
/// # Errors
/// When no broker answers, or a name or a property is not valid. Some of the topics may have been created. Also when the
/// properties log in with tokens (`OAUTHBEARER`), with which the client library cannot send such requests; nothing was sent then.
pub async fn create_topics(
    brokers: &str,
    plans: &[TopicPlan],
    properties: &[(String, String)],
) -> Result<Vec<TopicCreation>, SourceError> {
    plans.iter().try_for_each(|plan| settings::check_topic(&plan.name))?;
    let config = settings::client(brokers, properties)?;
    let tool = "kafka-topics.sh --create --topic NAME --command-config FILE";
    tokens::refuse_changes(properties, &format!("{tool} --bootstrap-server {brokers}"))?;
    if plans.is_empty() {
        return Ok(Vec::new());
    }
    let admin: AdminClient<DefaultClientContext> = config.create().map_err(settings::unusable)?;
    let number = |given: Option<u16>| given.map_or(BROKER_DEFAULT, i32::from);
    let topics: Vec<NewTopic<'_>> = plans
        .iter()
        .map(|plan| {
            let replicas = TopicReplication::Fixed(number(plan.replication_factor));
            NewTopic::new(&plan.name, number(plan.partitions), replicas)
        })
        .collect();
    let options =
        AdminOptions::new().request_timeout(Some(REQUEST_TIMEOUT)).operation_timeout(Some(CREATION_TIMEOUT));
    let answers = admin.create_topics(&topics, &options).await.map_err(|error| {
        SourceError::caused(
            format!("no Kafka broker at {brokers} has answered the request to create topics within {REQUEST_TIMEOUT:?}"),
            error,
        )
    })?;
    let creation = |answer| match answer {
        Ok(_) => TopicCreation::Created,
        Err((_, RDKafkaErrorCode::TopicAlreadyExists)) => TopicCreation::Existed,
        Err((name, code)) => {
            TopicCreation::Refused(SourceError::caused(format!("topic {name} was not created"), code))
        }
    };
    Ok(answers.into_iter().map(creation).collect())
}
