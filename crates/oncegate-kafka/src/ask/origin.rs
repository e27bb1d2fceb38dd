//! Reads which cluster topics are of.

use std::time::Duration;

use rdkafka::config::ClientConfig;
use rdkafka::error::KafkaError;

use crate::client::inquiry;
use crate::client::trouble::is_refusal;
use oncegate_runtime::source::{SourceError, StreamOrigin};

/// Returns the topics with their cluster; none if its brokers have no id.
pub(crate) fn read(
    config: &ClientConfig,
    topics: &[String],
    timeout: Duration,
) -> Result<Vec<StreamOrigin>, SourceError> {
    let Some(first) = topics.first() else {
        return Ok(Vec::new());
    };
    let client = inquiry::client(config.clone())?;
    let Some(id) = inquiry::cluster_id(&client, first, timeout, failed)? else {
        return Ok(Vec::new());
    };
    let streams = topics.iter().map(|topic| StreamOrigin {
        route: Some(topic.clone()),
        broker: format!("Kafka cluster {id}"),
    });
    Ok(streams.collect())
}

fn failed(error: KafkaError) -> SourceError {
    let is_refusal = is_refusal(&error);
    let failed = SourceError::caused(
        "the id of the Kafka cluster could not be read: check that the brokers are reachable and that the user has the \
         right DESCRIBE on the topics",
        error,
    );
    if is_refusal { failed } else { failed.away() }
}
