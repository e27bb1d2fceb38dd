//! Removes topics and consumer groups, for tools that have made them.

use rdkafka::error::RDKafkaErrorCode;

use crate::admin;
use oncegate_runtime::source::SourceError;

/// Removes topics and consumer groups of the cluster at `brokers`, with properties of librdkafka as
/// for [`KafkaSource::property`](crate::KafkaSource::property). Those that do not exist count as
/// removed.
///
/// All messages of the topics and all committed offsets of the groups are lost.
///
/// # Errors
/// When no broker answers, or one of them is refused: a group that still has members, for example.
/// The error names it; others may have been removed.
pub async fn remove_topics(
    brokers: &str,
    topics: &[String],
    groups: &[String],
    properties: &[(String, String)],
) -> Result<(), SourceError> {
    let mut admin = admin::of(brokers, properties)?;
    let mut outcomes = Vec::new();
    if !topics.is_empty() {
        outcomes.extend(admin.remove_topics(topics).await?);
    }
    // The brokers of some versions take one group in a request.
    for group in groups {
        outcomes.push(admin.remove_group(group).await?);
    }
    for (name, outcome) in outcomes {
        match outcome {
            Ok(())
            | Err(RDKafkaErrorCode::UnknownTopicOrPartition | RDKafkaErrorCode::GroupIdNotFound) => {
            }
            Err(code) => return Err(SourceError::caused(format!("{name} was not removed"), code)),
        }
    }
    Ok(())
}
