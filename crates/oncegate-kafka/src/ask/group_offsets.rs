//! Asks for the committed offsets of a consumer group, without joining it.

use std::collections::BTreeMap;
use std::time::Duration;

use rdkafka::TopicPartitionList;
use rdkafka::topic_partition_list::Offset;

use super::topics;
use crate::client::inquiry::{self, InquiryClient};
use crate::client::settings;
use oncegate_runtime::source::SourceError;

/// Time limit of one request to the brokers.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);

/// Returns the offsets that a consumer group has committed for a topic of the cluster at `brokers`,
/// by partition, with properties of librdkafka as for
/// [`KafkaSource::property`](crate::KafkaSource::property). A partition without a commit is left
/// out. It does not join the group.
///
/// # Errors
/// When no broker answers, the topic does not exist, a property is not valid, or the group may not
/// be read.
pub async fn committed_offsets(
    brokers: &str,
    group: &str,
    topic: &str,
    properties: &[(String, String)],
) -> Result<BTreeMap<i32, i64>, SourceError> {
    settings::check_topic(topic)?;
    let mut config = settings::client(brokers, properties)?;
    config
        .set("group.id", group)
        .set("enable.auto.commit", "false");
    let brokers = brokers.to_owned();
    let topic = topic.to_owned();
    let asking = tokio::task::spawn_blocking(move || {
        let client = inquiry::client(config)?;
        of_client(&client, &brokers, &topic)
    });
    asking
        .await
        .map_err(|error| SourceError::caused("the Kafka client has panicked", error))?
}

/// The offsets that the client's group has committed for the topic.
pub(crate) fn of_client(
    client: &InquiryClient,
    brokers: &str,
    topic: &str,
) -> Result<BTreeMap<i32, i64>, SourceError> {
    topics::check(client, brokers, &[topic.to_owned()], ANSWER_TIMEOUT)?;
    let mut asked = TopicPartitionList::new();
    for partition in topics::partitions(client, brokers, topic, ANSWER_TIMEOUT)? {
        asked.add_partition(topic, partition);
    }
    let found = inquiry::committed_offsets(client, &asked, ANSWER_TIMEOUT)?.map_err(|error| {
        SourceError::caused(
            format!("the offsets of the group for {topic} cannot be read"),
            error,
        )
    })?;
    Ok(found
        .elements()
        .iter()
        .filter_map(|element| match element.offset() {
            Offset::Offset(offset) => Some((element.partition(), offset)),
            _ => None,
        })
        .collect())
}
