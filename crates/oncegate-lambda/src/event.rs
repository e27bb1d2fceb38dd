//! The events of Lambda's event source mappings, and their answers for single messages.

use std::collections::BTreeMap;
use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use oncegate_runtime::message::{Broker, Header, Message, Origin};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::EventError;

static SQS: Broker = Broker {
    name: "sqs",
    system: "aws_sqs",
};
static KAFKA: Broker = Broker {
    name: "kafka",
    system: "kafka",
};
static KINESIS: Broker = Broker {
    name: "kinesis",
    system: "aws_kinesis",
};

/// The messages of one invocation.
#[derive(Debug)]
pub(crate) struct Batch {
    source: Source,
    /// In the order of the event.
    pub(crate) items: Vec<Item>,
}

/// A message, and the place of it in its batch.
#[derive(Debug)]
pub(crate) struct Item {
    pub(crate) message: Message,
    /// The messages with the same lane are handled one after another; `None` for one of its own.
    pub(crate) lane: Option<String>,
    identifier: Value,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Source {
    Queue,
    Kafka,
    Kinesis,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct SqsRecord {
    message_id: String,
    body: String,
    #[serde(default)]
    attributes: BTreeMap<String, String>,
    #[serde(default)]
    message_attributes: BTreeMap<String, SqsAttribute>,
    #[serde(rename = "eventSourceARN")]
    arn: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct SqsAttribute {
    string_value: Option<String>,
    binary_value: Option<String>,
}

#[derive(Deserialize)]
struct KinesisRecord {
    kinesis: KinesisData,
    #[serde(rename = "eventSourceARN")]
    arn: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct KinesisData {
    partition_key: String,
    sequence_number: String,
    data: String,
    #[serde(default)]
    approximate_arrival_timestamp: Option<f64>,
}

#[derive(Deserialize)]
struct KafkaRecord {
    topic: String,
    partition: i32,
    offset: i64,
    timestamp: Option<i64>,
    key: Option<String>,
    value: Option<String>,
    #[serde(default)]
    headers: Vec<BTreeMap<String, Option<Vec<i16>>>>,
}

impl Batch {
    /// Reads an event of SQS, Kafka (MSK or of one's own) or Kinesis.
    ///
    /// # Errors
    /// When it is of another source, or lacks a field.
    pub(crate) fn read(event: &Value) -> Result<Self, EventError> {
        let records = event.get("Records").and_then(Value::as_array);
        let source = event
            .get("eventSource")
            .or_else(|| records?.first()?.get("eventSource"))
            .and_then(Value::as_str)
            .unwrap_or_default();
        let records = records.map(Vec::as_slice).unwrap_or_default();
        let (source, items) = match source {
            "aws:sqs" => (Source::Queue, read_all(records, of_sqs)?),
            "aws:kinesis" => (Source::Kinesis, read_all(records, of_kinesis)?),
            "aws:kafka" | "SelfManagedKafka" => {
                let partitions = event.get("records").and_then(Value::as_object);
                let partitions = partitions.ok_or_else(|| EventError::lacking("records"))?;
                let mut items = Vec::new();
                for (name, records) in partitions {
                    let records = records.as_array().map(Vec::as_slice).unwrap_or_default();
                    items.extend(read_all(records, |record| of_kafka(name, record))?);
                }
                (Source::Kafka, items)
            }
            other => return Err(EventError::unknown(other)),
        };
        Ok(Self { source, items })
    }

    /// The answer that names the messages at these places, in ascending order, as failed.
    ///
    /// In a stream, Lambda delivers everything from the first failure on again: of Kinesis that is
    /// the first place, of Kafka the first one of each partition.
    pub(crate) fn answer(&self, failed: &[usize]) -> Value {
        let failed = failed.iter().filter_map(|place| self.items.get(*place));
        let mut identifiers: Vec<&Value> = Vec::new();
        let mut lanes: Vec<&Option<String>> = Vec::new();
        for item in failed {
            let is_covered = match self.source {
                Source::Queue => false,
                Source::Kinesis => !lanes.is_empty(),
                Source::Kafka => lanes.contains(&&item.lane),
            };
            if !is_covered {
                lanes.push(&item.lane);
                identifiers.push(&item.identifier);
            }
        }
        let failures: Vec<Value> = identifiers
            .into_iter()
            .map(|identifier| json!({ "itemIdentifier": identifier }))
            .collect();
        json!({ "batchItemFailures": failures })
    }
}

fn read_all<'v, T: Deserialize<'v>>(
    records: &'v [Value],
    read: impl Fn(T) -> Result<Item, EventError>,
) -> Result<Vec<Item>, EventError> {
    records
        .iter()
        .map(|record| read(T::deserialize(record).map_err(EventError::malformed)?))
        .collect()
}

fn of_sqs(record: SqsRecord) -> Result<Item, EventError> {
    if record.message_id.is_empty() {
        return Err(EventError::lacking("messageId"));
    }
    let queue: Arc<str> = last_part(&record.arn, ':').into();
    let group = record.attributes.get("MessageGroupId").cloned();
    // Standard queues may have groups too, which are no order.
    let group = group.filter(|_| queue.ends_with(".fifo"));
    let origin = Origin::Queue {
        queue: Arc::clone(&queue),
        id: record.message_id.as_str().into(),
    };
    let mut headers = Vec::new();
    for (name, attribute) in record.message_attributes {
        // SQS reserves such names for itself.
        if name.to_ascii_lowercase().starts_with("aws.") {
            continue;
        }
        let binary = attribute.binary_value.as_deref().map(decoded).transpose()?;
        headers.push(Header {
            name: name.into(),
            value: attribute.string_value.map(Bytes::from).or(binary),
        });
    }
    let sent_ms = number(&record.attributes, "SentTimestamp");
    let receives = number(&record.attributes, "ApproximateReceiveCount").unwrap_or(1);
    headers.extend(record.attributes.into_iter().map(|(name, value)| Header {
        name: format!("AWS.{name}").into(),
        value: Some(value.into()),
    }));
    let mut message = Message::new(queue, origin, Some(record.body.into()))
        .with_broker(&SQS)
        .with_headers(headers);
    if let Some(group) = &group {
        message = message.with_key(group.clone());
    }
    if let Some(sent_ms) = sent_ms {
        message = message.with_timestamp_ms(sent_ms);
    }
    if receives > 1 {
        message = message.with_redelivery();
    }
    Ok(Item {
        message,
        lane: group,
        identifier: record.message_id.into(),
    })
}

fn of_kinesis(record: KinesisRecord) -> Result<Item, EventError> {
    let KinesisRecord { kinesis, arn } = record;
    if kinesis.sequence_number.is_empty() {
        return Err(EventError::lacking("sequenceNumber"));
    }
    let stream: Arc<str> = last_part(&arn, '/').into();
    let origin = Origin::Queue {
        queue: Arc::clone(&stream),
        id: kinesis.sequence_number.as_str().into(),
    };
    let mut message = Message::new(stream, origin, Some(decoded(&kinesis.data)?))
        .with_broker(&KINESIS)
        .with_key(kinesis.partition_key.clone());
    if let Some(seconds) = kinesis.approximate_arrival_timestamp {
        #[expect(
            clippy::cast_possible_truncation,
            reason = "milliseconds since 1970 are far below 2^63, and a cast saturates"
        )]
        let millis = (seconds * 1_000.0) as i64;
        message = message.with_timestamp_ms(millis);
    }
    Ok(Item {
        message,
        lane: Some(kinesis.partition_key),
        identifier: kinesis.sequence_number.into(),
    })
}

fn of_kafka(partition: &str, record: KafkaRecord) -> Result<Item, EventError> {
    let origin = Origin::Kafka {
        topic: record.topic.as_str().into(),
        partition: record.partition,
        offset: record.offset,
    };
    let value = record.value.as_deref().map(decoded).transpose()?;
    let mut headers = Vec::new();
    for (name, value) in record.headers.into_iter().flatten() {
        // Java's bytes have a sign.
        let bytes = value.map(|bytes| bytes.into_iter().map(|byte| byte.to_le_bytes()[0]));
        headers.push(Header {
            name: name.into(),
            value: bytes.map(|bytes| bytes.collect::<Vec<u8>>().into()),
        });
    }
    let mut message = Message::new(record.topic, origin, value)
        .with_broker(&KAFKA)
        .with_headers(headers);
    if let Some(key) = &record.key {
        message = message.with_key(decoded(key)?);
    }
    if let Some(timestamp_ms) = record.timestamp {
        message = message.with_timestamp_ms(timestamp_ms);
    }
    Ok(Item {
        message,
        lane: Some(partition.to_owned()),
        identifier: json!({ "partition": partition, "offset": record.offset }),
    })
}

fn decoded(text: &str) -> Result<Bytes, EventError> {
    let bytes = STANDARD.decode(text);
    bytes
        .map(Bytes::from)
        .map_err(|_| EventError::lacking("base64 in its data"))
}

fn number(attributes: &BTreeMap<String, String>, name: &str) -> Option<i64> {
    attributes.get(name)?.parse().ok()
}

fn last_part(text: &str, separator: char) -> &str {
    text.rsplit(separator).next().unwrap_or(text)
}
