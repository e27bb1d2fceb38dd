//! Reads what commits of a consumer group were annotated with.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use rdkafka::TopicPartitionList;
use rdkafka::config::ClientConfig;
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::error::{KafkaError, RDKafkaErrorCode};

use crate::source::SourceError;

/// How long the brokers may take to answer one question.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);

/// The annotations of the group's commits of these topics, each once. It joins no group.
pub(super) fn read(config: &ClientConfig, topics: &[String]) -> Result<Vec<String>, SourceError> {
    let failed = |error: KafkaError| {
        let is_refusal = is_refusal(&error);
        let failed = SourceError::caused(
            "the offsets that the consumer group has committed could not be read: are the brokers reachable, and has the \
             user the rights DESCRIBE on the topics and the group?",
            error,
        );
        if is_refusal { failed } else { failed.away() }
    };
    let consumer: BaseConsumer = config.create().map_err(failed)?;
    let mut partitions = TopicPartitionList::new();
    for topic in topics {
        let metadata = consumer.fetch_metadata(Some(topic), ANSWER_TIMEOUT).map_err(failed)?;
        for described in metadata.topics() {
            for partition in described.partitions() {
                partitions.add_partition(described.name(), partition.id());
            }
        }
    }
    if partitions.count() == 0 {
        return Ok(Vec::new());
    }
    let committed = consumer.committed_offsets(partitions, ANSWER_TIMEOUT).map_err(failed)?;
    let mut annotations: Vec<String> = Vec::new();
    for partition in committed.elements() {
        // The client panics at a text that is not UTF-8: such a one is not ours.
        let read = catch_unwind(AssertUnwindSafe(|| partition.metadata().to_owned()));
        let Ok(annotation) = read else { continue };
        if !annotation.is_empty() && !annotations.contains(&annotation) {
            annotations.push(annotation);
        }
    }
    Ok(annotations)
}

/// Whether the brokers answer, and will answer the same again.
fn is_refusal(error: &KafkaError) -> bool {
    use RDKafkaErrorCode::{
        Authentication, ClusterAuthorizationFailed, GroupAuthorizationFailed, InvalidGroupId,
        SaslAuthenticationFailed, TopicAuthorizationFailed, UnsupportedSASLMechanism,
    };
    let refusals = [
        Authentication,
        ClusterAuthorizationFailed,
        GroupAuthorizationFailed,
        InvalidGroupId,
        SaslAuthenticationFailed,
        TopicAuthorizationFailed,
        UnsupportedSASLMechanism,
    ];
    matches!(error, KafkaError::ClientCreation(_) | KafkaError::ClientConfig(..))
        || error.rdkafka_error_code().is_some_and(|code| refusals.contains(&code))
}
