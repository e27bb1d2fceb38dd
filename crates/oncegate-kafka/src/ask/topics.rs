//! Checks whether brokers answer and topics exist.

use std::time::{Duration, Instant};

use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::types::RDKafkaRespErr;

use super::rights::{self, MissingRight};
use crate::client::inquiry::{self, InquiryClient, TopicLayout};
use crate::client::trouble::is_refusal;
use oncegate_runtime::source::SourceError;

/// The time for which a topic may be missing, because not every broker knows a topic that was just
/// created.
const NEW_TOPIC_PATIENCE: Duration = Duration::from_secs(3);

/// Interval between two checks for such a topic.
const LOOK_AGAIN: Duration = Duration::from_millis(100);

/// Checks that every topic exists; the error names those that do not, and is marked as
/// [away](SourceError::away) when no broker answers. Blocks for at most `timeout`.
pub(crate) fn check(
    client: &InquiryClient,
    brokers: &str,
    topics: &[String],
    timeout: Duration,
) -> Result<(), SourceError> {
    let begun = Instant::now();
    let patience = NEW_TOPIC_PATIENCE.min(timeout);
    loop {
        let left = timeout.saturating_sub(begun.elapsed()).max(LOOK_AGAIN);
        let found = partitions_of(client, brokers, topics, left)?;
        let missing = topics
            .iter()
            .zip(&found)
            .filter(|(_, partitions)| partitions.is_empty());
        let missing: Vec<&str> = missing.map(|(topic, _)| topic.as_str()).collect();
        if missing.is_empty() {
            return Ok(());
        }
        if begun.elapsed() >= patience {
            let missing = missing.join(", ");
            return Err(SourceError::new(format!(
                "Kafka at {brokers} has no topic {missing}"
            )));
        }
        drop(client.poll(LOOK_AGAIN));
    }
}

/// Returns the numbers of the topic's partitions; none when the topic does not exist.
pub(crate) fn partitions(
    client: &InquiryClient,
    brokers: &str,
    topic: &str,
    timeout: Duration,
) -> Result<Vec<i32>, SourceError> {
    let found = partitions_of(client, brokers, &[topic.to_owned()], timeout)?;
    Ok(found.into_iter().flatten().collect())
}

/// Returns the numbers of each topic's partitions; none when the topic does not exist.
pub(crate) fn partitions_of(
    client: &InquiryClient,
    brokers: &str,
    topics: &[String],
    timeout: Duration,
) -> Result<Vec<Vec<i32>>, SourceError> {
    let layouts = inquiry::layouts(client, topics, timeout, |error| {
        unreachable(brokers, timeout, error)
    })?;
    topics
        .iter()
        .zip(layouts)
        .map(|(topic, layout)| described(layout, brokers, topic))
        .collect()
}

/// Returns the numbers of the partitions that the brokers describe; none when the topic does not
/// exist.
pub(crate) fn described(
    layout: Option<TopicLayout>,
    brokers: &str,
    topic: &str,
) -> Result<Vec<i32>, SourceError> {
    let Some(layout) = layout else {
        return Ok(Vec::new());
    };
    match layout.error {
        None | Some(RDKafkaRespErr::RD_KAFKA_RESP_ERR_LEADER_NOT_AVAILABLE) => {}
        Some(
            RDKafkaRespErr::RD_KAFKA_RESP_ERR_UNKNOWN_TOPIC_OR_PART
            | RDKafkaRespErr::RD_KAFKA_RESP_ERR__UNKNOWN_TOPIC,
        ) => return Ok(Vec::new()),
        Some(RDKafkaRespErr::RD_KAFKA_RESP_ERR_TOPIC_AUTHORIZATION_FAILED) => {
            rights::refuse(brokers, &[MissingRight::on_topic("DESCRIBE", topic)])?;
            return Ok(Vec::new());
        }
        Some(code) => {
            let error = KafkaError::MetadataFetch(RDKafkaErrorCode::from(code));
            return Err(SourceError::caused(
                format!("Kafka at {brokers} denies access to topic {topic}"),
                error,
            ));
        }
    }
    Ok(layout.partitions)
}

/// The error of brokers that do not answer.
pub(crate) fn unreachable(brokers: &str, timeout: Duration, error: KafkaError) -> SourceError {
    let is_refusal = is_refusal(&error);
    let failed = SourceError::caused(
        format!(
            "no Kafka broker answers at {brokers} within {timeout:.1?}: \
             check the address, security.protocol and the credentials (of tokens: sasl.oauthbearer.client.id, \
             sasl.oauthbearer.scope)"
        ),
        error,
    );
    if is_refusal { failed } else { failed.away() }
}
