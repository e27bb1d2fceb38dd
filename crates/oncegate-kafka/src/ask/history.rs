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
    let parts = topics::partitions_of(client, &settings.brokers, &settings.topics, ANSWER_TIMEOUT)?;
    let topics: Vec<Topic<'_>> = settings
        .topics
        .iter()
        .map(String::as_str)
        .zip(parts)
        .collect();
    Ok(unread(client, &topics)?
        .into_iter()
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

/// A topic with its partitions.
type Topic<'a> = (&'a str, Vec<i32>);

/// Returns the topics of which the group has committed nothing, and how many offsets each has. The
/// brokers are asked about all of them at once.
fn unread<'a>(
    client: &InquiryClient,
    topics: &[Topic<'a>],
) -> Result<Vec<(&'a str, i64)>, SourceError> {
    let mut asked = TopicPartitionList::new();
    for (topic, partitions) in topics {
        for partition in partitions {
            asked.add_partition(topic, *partition);
        }
    }
    let committed = inquiry::committed_offsets(client, &asked, ANSWER_TIMEOUT)?.map_err(failed)?;
    let fresh: Vec<&Topic<'a>> = topics
        .iter()
        .filter(|(topic, _)| offsets(&committed, topic).next().is_none())
        .collect();
    if fresh.is_empty() {
        return Ok(Vec::new());
    }
    // In the protocol, the beginning and the end are special timestamps.
    let first = all_at(client, &fresh, Offset::Beginning).map_err(failed)?;
    let end = all_at(client, &fresh, Offset::End).map_err(failed)?;
    let counts = fresh.into_iter().map(|(topic, _)| {
        let messages = offsets(&end, topic).sum::<i64>() - offsets(&first, topic).sum::<i64>();
        (*topic, messages)
    });
    Ok(counts.collect())
}

fn failed(error: KafkaError) -> SourceError {
    SourceError::caused("the offsets of the topics cannot be read", error)
}

/// Returns the first or the last offsets of these topics.
fn all_at(
    client: &InquiryClient,
    topics: &[&Topic<'_>],
    which: Offset,
) -> Result<TopicPartitionList, KafkaError> {
    let mut asked = TopicPartitionList::new();
    for (topic, partitions) in topics {
        for partition in partitions {
            asked.add_partition(topic, *partition).set_offset(which)?;
        }
    }
    client.offsets_for_times(asked, ANSWER_TIMEOUT)
}

/// Returns the offsets of a topic's partitions that have one.
fn offsets(found: &TopicPartitionList, topic: &str) -> impl Iterator<Item = i64> {
    let elements = found.elements_for_topic(topic);
    let offsets: Vec<i64> = elements
        .iter()
        .filter_map(|element| match element.offset() {
            Offset::Offset(offset) => Some(offset),
            _ => None,
        })
        .collect();
    offsets.into_iter()
}
