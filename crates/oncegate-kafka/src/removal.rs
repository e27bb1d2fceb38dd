//! Removes topics and consumer groups, for tools that have made them.

use std::time::Duration;

use rdkafka::admin::{AdminClient, AdminOptions};
use rdkafka::client::DefaultClientContext;
use rdkafka::types::RDKafkaErrorCode;

use super::{settings, tokens};
use oncegate_runtime::source::SourceError;

/// Time limit of a request.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(15);
/// How long the brokers may take to remove all partitions.
const REMOVAL_TIMEOUT: Duration = Duration::from_secs(10);

/// Removes topics and consumer groups of the cluster at `brokers`, with properties of librdkafka as for
/// [`KafkaSource::property`](super::KafkaSource::property). Those that do not exist count as removed.
///
/// All messages of the topics and all committed offsets of the groups are lost.
///
/// # Errors
/// When no broker answers, or one of them is refused: a group that still has members, for example. The error names it;
/// others may have been removed. Also when the properties log in with tokens (`OAUTHBEARER`), with which the client library
/// cannot send such requests; nothing was sent then.
pub async fn remove_topics(
    brokers: &str,
    topics: &[String],
    groups: &[String],
    properties: &[(String, String)],
) -> Result<(), SourceError> {
    let config = settings::client(brokers, properties)?;
    let tool = "kafka-topics.sh --delete --topic NAME --command-config FILE";
    tokens::refuse_changes(properties, &format!("{tool} --bootstrap-server {brokers}"))?;
    let admin: AdminClient<DefaultClientContext> = config.create().map_err(settings::unusable)?;
    let options = || {
        AdminOptions::new().request_timeout(Some(REQUEST_TIMEOUT)).operation_timeout(Some(REMOVAL_TIMEOUT))
    };
    let unanswered = |error| {
        let what = format!(
            "no Kafka broker at {brokers} has answered the request to remove topics within {REQUEST_TIMEOUT:?}"
        );
        SourceError::caused(what, error)
    };
    let mut answers = Vec::new();
    if !topics.is_empty() {
        let names: Vec<&str> = topics.iter().map(String::as_str).collect();
        answers.extend(admin.delete_topics(&names, &options()).await.map_err(unanswered)?);
    }
    // The brokers of some versions take one group in a request.
    for group in groups {
        let options = AdminOptions::new().request_timeout(Some(REQUEST_TIMEOUT));
        answers.extend(admin.delete_groups(&[group], &options).await.map_err(unanswered)?);
    }
    for answer in answers {
        match answer {
            Ok(_)
            | Err((_, RDKafkaErrorCode::UnknownTopicOrPartition | RDKafkaErrorCode::GroupIdNotFound)) => {}
            Err((name, code)) => {
                return Err(SourceError::caused(format!("{name} was not removed"), code));
            }
        }
    }
    Ok(())
}
