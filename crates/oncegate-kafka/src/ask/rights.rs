//! Finds out which rights the brokers do not grant, before a message needs them.
//!
//! The protocol has no question for that which this client can send. So each right is tried with a
//! request that the brokers authorize first, and then refuse for another reason. Nothing is
//! written.
//!
//! | right | request | refused because |
//! |---|---|---|
//! | DESCRIBE on a topic | its metadata | |
//! | DESCRIBE on the group | its committed offsets | |
//! | READ on the group and the topics | a commit for a partition with a number that no topic reaches | there is no such partition |
//! | WRITE on a topic | a message that two replicas must confirm (`acks=2`) | only 0, 1 and all are allowed |

use std::fmt;
use std::time::Duration;

use rdkafka::TopicPartitionList;
use rdkafka::config::ClientConfig;
use rdkafka::consumer::{CommitMode, Consumer as _};
use rdkafka::error::RDKafkaErrorCode;
use rdkafka::producer::{FutureProducer, FutureRecord};
use rdkafka::topic_partition_list::Offset;

use crate::client::inquiry::{self, Coordinator, InquiryClient};
use crate::client::producer::{self, ProducerContext};
use crate::client::settings::{self, Property};
use crate::client::tokens::Tokens;
use oncegate_runtime::source::SourceError;

/// Time limit of a request. A broker that takes longer is not waited for: the first use shows
/// whether the right is there.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);

/// Time limit of the message that is refused. It includes the connection.
const WRITE_TIMEOUT_MS: &str = "10000";

/// The number of a partition that no topic has.
const NO_PARTITION: i32 = i32::MAX;

/// A right that a consumer needs and the brokers do not grant.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct MissingRight {
    /// The operation by Kafka's name: `READ`, `WRITE`, `DESCRIBE`, `DESCRIBE_CONFIGS` or
    /// `IDEMPOTENT_WRITE`.
    pub operation: &'static str,
    /// The resource that it concerns.
    pub resource: Resource,
}

/// The resource that a right concerns.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Resource {
    /// A topic, by its name.
    Topic(String),
    /// A consumer group, by its name.
    Group(String),
    /// The cluster.
    Cluster,
}

impl MissingRight {
    /// A right on a topic.
    pub fn on_topic(operation: &'static str, topic: &str) -> Self {
        Self {
            operation,
            resource: Resource::Topic(topic.to_owned()),
        }
    }

    fn group(operation: &'static str, group: &str) -> Self {
        Self {
            operation,
            resource: Resource::Group(group.to_owned()),
        }
    }

    /// Returns the command that grants the right, for an administrator. The name of the user is
    /// left open.
    pub fn grant(&self, brokers: &str) -> String {
        let on = match &self.resource {
            Resource::Topic(name) => format!("--topic {name}"),
            Resource::Group(name) => format!("--group {name}"),
            Resource::Cluster => "--cluster".to_owned(),
        };
        let operation = self.operation.replace('_', "");
        format!(
            "kafka-acls.sh --bootstrap-server {brokers} --add --allow-principal User:NAME --operation {operation} {on}"
        )
    }
}

impl fmt::Display for MissingRight {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            operation,
            resource,
        } = self;
        match resource {
            Resource::Topic(name) => write!(f, "{operation} on topic {name}"),
            Resource::Group(name) => write!(f, "{operation} on group {name}"),
            Resource::Cluster => write!(f, "{operation} on the cluster"),
        }
    }
}

/// The group and the topics that a consumer uses in a cluster.
#[derive(Clone, Copy, Debug, Default)]
#[non_exhaustive]
pub struct Needs<'a> {
    /// The consumer group.
    pub group: Option<&'a str>,
    /// The topics that it reads.
    pub read: &'a [String],
    /// The topics to which it writes: its dead letters, its retries.
    pub write: &'a [String],
}

impl<'a> Needs<'a> {
    /// A member of `group` that reads these topics and writes to those.
    pub fn new(group: Option<&'a str>, read: &'a [String], write: &'a [String]) -> Self {
        Self { group, read, write }
    }
}

/// Returns the rights that a consumer needs in the cluster at `brokers` and does not have. Writes
/// nothing.
///
/// The topics must exist, and this user must see them: [`describe_topics`](crate::describe_topics)
/// tells. The properties are those of librdkafka, as for
/// [`KafkaSource::property`](crate::KafkaSource::property).
///
/// # Errors
/// When no broker answers, or a property is not valid.
pub async fn missing_rights(
    brokers: &str,
    needs: Needs<'_>,
    properties: &[Property],
) -> Result<Vec<MissingRight>, SourceError> {
    let mut config = settings::client(brokers, properties)?;
    let group = needs.group.map(str::to_owned);
    let read = needs.read.to_vec();
    if let Some(group) = &group {
        config.set("group.id", group);
    }
    let asking = tokio::task::spawn_blocking(move || {
        let client = inquiry::offsets_client(config)?;
        match group {
            Some(group) => to_consume(&client, &group, &read, ANSWER_TIMEOUT),
            None => Ok(Vec::new()),
        }
    });
    let asked = asking.await;
    let mut missing =
        asked.map_err(|error| SourceError::caused("the Kafka client has panicked", error))??;
    let connection = properties
        .iter()
        .filter(|(name, _)| producer::is_connection(name))
        .cloned();
    missing.extend(to_write(brokers, needs.write, &connection.collect::<Vec<_>>()).await?);
    Ok(missing)
}

/// The error of a consumer without these rights; `Ok` if there are none.
pub(crate) fn refuse(brokers: &str, missing: &[MissingRight]) -> Result<(), SourceError> {
    if missing.is_empty() {
        return Ok(());
    }
    let rights: Vec<String> = missing.iter().map(ToString::to_string).collect();
    let grants: Vec<String> = missing.iter().map(|right| right.grant(brokers)).collect();
    Err(SourceError::new(format!(
        "Kafka at {brokers} does not grant this user {}; grant it: {}",
        rights.join(", "),
        grants.join("; ")
    )))
}

/// Returns the missing rights of a member of `group` that reads these topics. The client's group
/// must be `group`.
///
/// A group coordinator that does not answer is no missing right: the member waits for it when it
/// joins.
pub(crate) fn to_consume(
    client: &InquiryClient,
    group: &str,
    topics: &[String],
    timeout: Duration,
) -> Result<Vec<MissingRight>, SourceError> {
    match inquiry::coordinator(client, &nowhere(topics)?, timeout)? {
        Coordinator::Answers => {}
        Coordinator::Denies => return Ok(vec![MissingRight::group("READ", group)]),
        Coordinator::Away => return Ok(Vec::new()),
    }
    let refusals = inquiry::of_each(topics, |topic| {
        let refused = client
            .commit(&nowhere(&[topic.to_owned()])?, CommitMode::Sync)
            .err();
        Ok(refused.and_then(|error| error.rdkafka_error_code()))
    })?;
    let mut missing = Vec::new();
    for (topic, refusal) in topics.iter().zip(refusals) {
        match refusal {
            Some(RDKafkaErrorCode::GroupAuthorizationFailed) => {
                return Ok(vec![MissingRight::group("READ", group)]);
            }
            Some(RDKafkaErrorCode::TopicAuthorizationFailed) => {
                missing.push(MissingRight::on_topic("READ", topic));
            }
            other => tracing::debug!(
                topic,
                ?other,
                "a commit for no partition is refused, as it should be"
            ),
        }
    }
    Ok(missing)
}

/// Offsets for a partition that these topics do not have.
fn nowhere(topics: &[String]) -> Result<TopicPartitionList, SourceError> {
    let mut list = TopicPartitionList::new();
    for topic in topics {
        let added = list
            .add_partition(topic, NO_PARTITION)
            .set_offset(Offset::Offset(0));
        added.map_err(|error| {
            SourceError::caused(
                format!("the rights on topic {topic} cannot be tried"),
                error,
            )
        })?;
    }
    Ok(list)
}

/// Returns the missing rights to write to these topics, with a producer's properties.
///
/// Brokers that do not answer in time are no missing right: what is sent later is retried.
pub(crate) async fn to_write(
    brokers: &str,
    topics: &[String],
    connection: &[Property],
) -> Result<Vec<MissingRight>, SourceError> {
    let mut missing = Vec::new();
    if topics.is_empty() {
        return Ok(missing);
    }
    let mut config = ClientConfig::new();
    config.extend(connection.iter().cloned());
    // The brokers allow 0, 1 and all.
    config
        .set("bootstrap.servers", brokers)
        .set("enable.idempotence", "false")
        .set("acks", "2");
    config.set("message.timeout.ms", WRITE_TIMEOUT_MS);
    let context = ProducerContext::new(Tokens::take(&mut config)?);
    let producer: FutureProducer<ProducerContext> = config
        .create_with_context(context)
        .map_err(settings::unusable)?;
    // All are sent before the first answer is awaited.
    let sent: Vec<_> = topics
        .iter()
        .map(|topic| {
            let record =
                FutureRecord::<[u8], [u8]>::to(topic).payload(b"oncegate: may this user write?");
            (
                topic,
                producer.send_result(record).map_err(|(error, _)| error),
            )
        })
        .collect();
    for (topic, sent) in sent {
        let report = match sent {
            Ok(report) => report
                .await
                .ok()
                .and_then(Result::err)
                .map(|(error, _)| error),
            Err(error) => Some(error),
        };
        if report.and_then(|error| error.rdkafka_error_code())
            == Some(RDKafkaErrorCode::TopicAuthorizationFailed)
        {
            missing.push(MissingRight::on_topic("WRITE", topic));
        }
    }
    // A client that is dropped waits for its threads. A panic there concerns no message.
    _ = tokio::task::spawn_blocking(move || drop(producer)).await;
    Ok(missing)
}
