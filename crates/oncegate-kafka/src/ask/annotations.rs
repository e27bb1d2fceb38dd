//! Reads the metadata of a consumer group's commits.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use rdkafka::TopicPartitionList;
use rdkafka::config::ClientConfig;
use rdkafka::error::KafkaError;

use crate::client::inquiry;
use crate::client::trouble::is_refusal;
use oncegate_runtime::source::SourceError;

/// Returns the metadata of the group's commits of these topics, without duplicates. It joins no
/// group. Each request may take `timeout`.
pub(crate) fn read(
    config: &ClientConfig,
    topics: &[String],
    timeout: Duration,
) -> Result<Vec<String>, SourceError> {
    let consumer = inquiry::offsets_client(config.clone())?;
    let mut partitions = TopicPartitionList::new();
    let described = inquiry::layouts(&consumer, topics, timeout, failed)?;
    for (topic, layout) in topics.iter().zip(described) {
        for number in layout.into_iter().flat_map(|layout| layout.partitions) {
            partitions.add_partition(topic, number);
        }
    }
    if partitions.count() == 0 {
        return Ok(Vec::new());
    }
    let committed = inquiry::committed_offsets(&consumer, &partitions, timeout)?.map_err(failed)?;
    let mut annotations: Vec<String> = Vec::new();
    for partition in committed.elements() {
        // The client panics on text that is not UTF-8. Such metadata is not ours.
        let read = catch_unwind(AssertUnwindSafe(|| partition.metadata().to_owned()));
        let Ok(annotation) = read else { continue };
        if !annotation.is_empty() && !annotations.contains(&annotation) {
            annotations.push(annotation);
        }
    }
    Ok(annotations)
}

fn failed(error: KafkaError) -> SourceError {
    let is_refusal = is_refusal(&error);
    let failed = SourceError::caused(
        "the committed offsets of the consumer group could not be read: check that the brokers are reachable and \
         that the user has the right DESCRIBE on the topics and the group",
        error,
    );
    if is_refusal { failed } else { failed.away() }
}
