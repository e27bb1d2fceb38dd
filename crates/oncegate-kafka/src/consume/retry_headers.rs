//! The headers of a message in a retry topic.

use std::sync::Arc;
use std::time::SystemTime;

use rdkafka::message::{Header, OwnedHeaders};

use crate::client::headers::{FIRST_FAILED_HEADER, PREFIX, ROUTE_HEADER};
use crate::produce::dead_letters;
use oncegate_runtime::dead_letters::{millis_since_1970, time_of};
use oncegate_runtime::message::{Message, Origin};

/// The header with the time at which the message is due, in milliseconds since 1970.
pub(crate) const DUE_HEADER: &str = "oncegate-due";
const TOPIC_HEADER: &str = "oncegate-origin-topic";
const PARTITION_HEADER: &str = "oncegate-origin-partition";
const OFFSET_HEADER: &str = "oncegate-origin-offset";
const TIMESTAMP_HEADER: &str = "oncegate-origin-timestamp";

/// Returns the message's own headers, and those needed to restore it when it is due.
pub(crate) fn headers(message: &Message, due: SystemTime) -> OwnedHeaders {
    let mut ours = vec![
        (DUE_HEADER, millis_since_1970(due).to_string()),
        (ROUTE_HEADER, message.route().to_owned()),
    ];
    if let Origin::Kafka {
        topic,
        partition,
        offset,
    } = message.origin()
    {
        ours.extend([
            (TOPIC_HEADER, topic.to_string()),
            (PARTITION_HEADER, partition.to_string()),
            (OFFSET_HEADER, offset.to_string()),
        ]);
    }
    ours.extend(
        message
            .timestamp_ms()
            .map(|timestamp_ms| (TIMESTAMP_HEADER, timestamp_ms.to_string())),
    );
    let first_failed_ms = message.first_failed_at().map(millis_since_1970);
    ours.extend(first_failed_ms.map(|millis| (FIRST_FAILED_HEADER, millis.to_string())));
    ours.into_iter().fold(
        dead_letters::own_headers(message),
        |headers, (name, value)| {
            headers.insert(Header {
                key: name,
                value: Some(value.as_bytes()),
            })
        },
    )
}

/// Restores the message as it was before it waited, and returns when it is due. A message from
/// another writer is due at once (`None`), and stays unchanged.
pub(crate) fn restore(message: &mut Message) -> Option<SystemTime> {
    let due = number(message, DUE_HEADER).and_then(time_of)?;
    let route: Arc<str> = text(message, ROUTE_HEADER)
        .unwrap_or_else(|| message.route())
        .into();
    let origin = first_origin(message).unwrap_or_else(|| message.origin().clone());
    let mut restored = Message::new(route, origin, message.payload_bytes());
    if let Some(key) = message.key_bytes() {
        restored = restored.with_key(key);
    }
    if let Some(timestamp_ms) = number(message, TIMESTAMP_HEADER).or(message.timestamp_ms()) {
        restored = restored.with_timestamp_ms(timestamp_ms);
    }
    if let Some(first) = number(message, FIRST_FAILED_HEADER).and_then(time_of) {
        restored = restored.with_first_failed_at(first);
    }
    let headers = message
        .headers()
        .iter()
        .filter(|header| !header.name.starts_with(PREFIX))
        .cloned()
        .collect();
    *message = restored.with_headers(headers);
    Some(due)
}

fn first_origin(message: &Message) -> Option<Origin> {
    Some(Origin::Kafka {
        topic: text(message, TOPIC_HEADER)?.into(),
        partition: number(message, PARTITION_HEADER)?,
        offset: number(message, OFFSET_HEADER)?,
    })
}

fn text<'a>(message: &'a Message, header: &str) -> Option<&'a str> {
    std::str::from_utf8(message.header(header)?).ok()
}

fn number<T: std::str::FromStr>(message: &Message, header: &str) -> Option<T> {
    text(message, header)?.parse().ok()
}
