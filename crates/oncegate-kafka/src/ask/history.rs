//! Topics of which a group has committed nothing, although they have messages: all of them run.

use std::time::Duration;

use rdkafka::TopicPartitionList;
use rdkafka::consumer::Consumer as _;
use rdkafka::error::KafkaError;
use rdkafka::topic_partition_list::Offset;

use super::topics;
use crate::client::inquiry::{self, InquiryClient};
use crate::client::settings::Settings;
use crate::client::source_settings::StartAt;
use oncegate_runtime::source::SourceError;

/// Time limit of each request to the brokers.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

/// Returns a sentence for each topic that the group begins with its first message, although there
/// are messages: another consumer may have handled them.
///
/// # Errors
/// When the brokers do not answer, or refuse.
pub(crate) fn of(settings: &Settings, client: &InquiryClient) -> Result<Vec<String>, SourceError> {
    if settings.source.from != StartAt::Beginning {
        return Ok(Vec::new());
    }
    let counts = inquiry::of_each(&settings.topics, |topic| {
        unread(client, &settings.brokers, topic)
    })?;
    let fresh = settings.topics.iter().zip(counts);
    Ok(fresh
        .filter(|(_, messages)| *messages > 0)
        .map(|(topic, messages)| {
            let group = &settings.group;
            format!(
                "the group {group:?} has committed nothing in {topic}: it begins with the first of {messages} messages, \
                 and all of them run; if another consumer has handled them, stop now and set group, or from = \"end\""
            )
        })
        .collect())
}

/// Returns how many offsets the topic has if the group has committed none of it; 0 otherwise.
fn unread(client: &InquiryClient, brokers: &str, topic: &str) -> Result<u64, SourceError> {
    let partitions = topics::partitions(client, brokers, topic, ANSWER_TIMEOUT)?;
    count(client, topic, &partitions)?.map_err(|error| {
        SourceError::caused(format!("the offsets of {topic} cannot be read"), error)
    })
}

fn count(
    client: &InquiryClient,
    topic: &str,
    partitions: &[i32],
) -> Result<Result<u64, KafkaError>, SourceError> {
    let mut asked = TopicPartitionList::with_capacity(partitions.len());
    for partition in partitions {
        asked.add_partition(topic, *partition);
    }
    let committed = inquiry::committed_offsets(client, &asked, ANSWER_TIMEOUT)?;
    Ok(committed.and_then(|committed| {
        if offsets(&committed).is_empty() {
            // In the protocol, the beginning and the end are special timestamps.
            let first = sum_at(client, topic, partitions, Offset::Beginning)?;
            let end = sum_at(client, topic, partitions, Offset::End)?;
            Ok(u64::try_from(end - first).unwrap_or(0))
        } else {
            Ok(0)
        }
    }))
}

/// Returns the sum of the first or the last offsets of these partitions.
fn sum_at(
    client: &InquiryClient,
    topic: &str,
    partitions: &[i32],
    which: Offset,
) -> Result<i64, KafkaError> {
    let asked = list(topic, partitions, which)?;
    let found = client.offsets_for_times(asked, ANSWER_TIMEOUT)?;
    Ok(offsets(&found).into_iter().sum())
}

fn offsets(found: &TopicPartitionList) -> Vec<i64> {
    let elements = found.elements();
    elements
        .iter()
        .filter_map(|element| match element.offset() {
            Offset::Offset(offset) => Some(offset),
            _ => None,
        })
        .collect()
}

fn list(topic: &str, partitions: &[i32], offset: Offset) -> Result<TopicPartitionList, KafkaError> {
    let mut list = TopicPartitionList::with_capacity(partitions.len());
    for partition in partitions {
        list.add_partition(topic, *partition).set_offset(offset)?;
    }
    Ok(list)
}
