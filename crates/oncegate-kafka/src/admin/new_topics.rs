//! Creates topics, for an operator who sets up a consumer.

use std::time::Duration;

use rdkafka::error::RDKafkaErrorCode;
use tokio::time::{Instant, sleep};

use super::facts;
use crate::admin::{self, TopicPlan};
use crate::client::settings::{self, Property};
use oncegate_runtime::source::SourceError;

/// Time limit for a broker to learn of the topics that were created.
const KNOWN_WITHIN: Duration = Duration::from_secs(10);

/// The pause before it is asked again.
const ASK_AGAIN: Duration = Duration::from_millis(100);

/// The outcome of a [`TopicPlan`].
#[derive(Debug)]
#[non_exhaustive]
pub enum TopicCreation {
    /// The topic was created.
    Created,
    /// There was a topic of this name already. It was not changed.
    Existed,
    /// The brokers refused it: the number of replicas is larger than that of the brokers, for
    /// example.
    Refused(SourceError),
}

impl TopicCreation {
    fn of(name: &str, outcome: Result<(), RDKafkaErrorCode>) -> Self {
        match outcome {
            Ok(()) => Self::Created,
            Err(RDKafkaErrorCode::TopicAlreadyExists) => Self::Existed,
            Err(code) => Self::Refused(SourceError::caused(
                format!("topic {name} was not created"),
                code,
            )),
        }
    }
}

/// Creates topics in the cluster at `brokers`, with properties of librdkafka as for
/// [`KafkaSource::property`](crate::KafkaSource::property). Returns the outcome of each, in the
/// order of `plans`. When a call is repeated, topics that were created before have
/// [existed](TopicCreation::Existed).
///
/// It returns when one broker knows the created topics, or after 10 s: brokers learn of them after
/// the controller has answered, and say until then that they do not exist.
///
/// Without plans, no broker is asked, and only the properties are checked.
///
/// # Errors
/// When no broker answers, or a name or a property is not valid. Some of the topics may have been
/// created.
pub async fn create_topics(
    brokers: &str,
    plans: &[TopicPlan],
    properties: &[(String, String)],
) -> Result<Vec<TopicCreation>, SourceError> {
    plans
        .iter()
        .try_for_each(|plan| settings::check_topic(plan.name()))?;
    let mut admin = admin::of(brokers, properties)?;
    if plans.is_empty() {
        return Ok(Vec::new());
    }
    let outcomes = admin.create_topics(plans).await?;
    let created = outcomes.iter().filter(|(_, outcome)| outcome.is_ok());
    until_known(
        brokers,
        created.map(|(name, _)| name.clone()).collect(),
        properties,
    )
    .await;
    Ok(outcomes
        .into_iter()
        .map(|(name, outcome)| TopicCreation::of(&name, outcome))
        .collect())
}

/// Waits until a broker knows these topics, or says why it does not tell.
async fn until_known(brokers: &str, mut unknown: Vec<String>, properties: &[Property]) {
    let deadline = Instant::now() + KNOWN_WITHIN;
    while !unknown.is_empty() {
        let found = match facts::layouts(brokers, &unknown, properties).await {
            Ok(found) => found,
            Err(error) => {
                return tracing::debug!(%error, "no broker says whether it knows the created topics");
            }
        };
        let absent = found
            .into_iter()
            .filter(|topic| topic.partitions == 0 && !topic.hidden);
        unknown = absent.map(|topic| topic.name).collect();
        if unknown.is_empty() {
            return;
        }
        if Instant::now() >= deadline {
            return tracing::warn!(topics = ?unknown, "created topics are not known to the broker that was asked");
        }
        sleep(ASK_AGAIN).await;
    }
}
