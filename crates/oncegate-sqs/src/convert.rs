//! Converts SQS messages to ours.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use aws_sdk_sqs::types::{MessageAttributeValue, MessageSystemAttributeName};
use bytes::Bytes;

use super::headers::{SYSTEM_PREFIX, TYPES_HEADER, is_system, text};
use super::held::MessageId;
use super::source_settings::Body;
use super::{ORIGIN_ATTRIBUTE, sns};
use oncegate_runtime::message::{Broker, Header, Message, Origin};

/// SQS, as its messages name it.
static BROKER: Broker = Broker {
    name: "sqs",
    system: "aws_sqs",
};

/// The longest route that an attribute may have, in bytes; a longer one is not ours.
const ROUTE_MAX_BYTES: usize = 249;

/// Reads the messages of one queue.
#[derive(Debug)]
pub(crate) struct Reader {
    pub(crate) queue: Arc<str>,
    pub(crate) fifo: bool,
    pub(crate) body: Body,
    pub(crate) routes_from_attributes: bool,
    /// The number of receives of a message that the redrive policy allows.
    pub(crate) max_receives: Option<u32>,
}

/// A converted message.
#[derive(Debug)]
pub(crate) struct Read {
    pub(crate) message: Message,
    pub(crate) id: MessageId,
    pub(crate) handle: Arc<str>,
    /// The group of a FIFO queue.
    pub(crate) group: Option<String>,
    /// `true` if the redrive policy will move the message before another receive.
    pub(crate) last_receive: bool,
}

impl Reader {
    /// Converts a message. `None` when it lacks a field that every message has; such a message
    /// cannot be handled.
    pub(crate) fn read(&self, raw: aws_sdk_sqs::types::Message) -> Option<Read> {
        let id = MessageId::from(raw.message_id?);
        let handle = Arc::from(raw.receipt_handle?);
        let system = raw.attributes.unwrap_or_default();
        let sent_ms = number(&system, MessageSystemAttributeName::SentTimestamp);
        let receives =
            number(&system, MessageSystemAttributeName::ApproximateReceiveCount).unwrap_or(1);
        let group = system
            .get(&MessageSystemAttributeName::MessageGroupId)
            .filter(|_| self.fifo)
            .cloned();

        let mut headers = Vec::new();
        attributes(raw.message_attributes.unwrap_or_default(), &mut headers);
        let origin = Origin::Queue {
            queue: Arc::clone(&self.queue),
            id: Arc::clone(&id),
        };
        let route = self
            .routes_from_attributes
            .then(|| route(&headers))
            .flatten();
        let letter_of = letter_of(&headers);
        let body = Bytes::from(raw.body.unwrap_or_default());
        let (payload, defect) = match self.body {
            Body::Raw => (body, None),
            Body::Sns => match sns::unwrap(&body, &mut headers) {
                Ok(payload) => (payload, None),
                Err(expected) => (body, Some(expected)),
            },
        };
        // A sender's attribute with such a name was removed, so these headers are the queue's own.
        headers.extend(
            system
                .into_iter()
                .map(|(name, value)| text(&format!("{SYSTEM_PREFIX}{name}"), value)),
        );

        let route = route.unwrap_or_else(|| Arc::clone(&self.queue));
        let message = Message::new(route, origin, Some(payload));
        let mut message = message.with_broker(&BROKER).with_headers(headers);
        if let Some(group) = &group {
            message = message.with_key(group.clone());
        }
        if let Some(sent_ms) = sent_ms {
            message = message.with_timestamp_ms(sent_ms);
        }
        if let Some(scope) = letter_of {
            message = message.with_dead_letter_of(scope);
        }
        if let Some(expected) = defect {
            message = message.with_defect(expected);
        }
        let last_receive = self
            .max_receives
            .is_some_and(|most| receives >= i64::from(most));
        Some(Read {
            message,
            id,
            handle,
            group,
            last_receive,
        })
    }
}

fn number(
    system: &HashMap<MessageSystemAttributeName, String>,
    name: MessageSystemAttributeName,
) -> Option<i64> {
    system.get(&name).and_then(|value| value.parse().ok())
}

/// Returns the sender's attributes as headers, by name, and their types.
fn attributes(
    attributes: impl IntoIterator<Item = (String, MessageAttributeValue)>,
    headers: &mut Vec<Header>,
) {
    let sorted: BTreeMap<String, MessageAttributeValue> = attributes.into_iter().collect();
    let mut types = BTreeMap::new();
    for (name, attribute) in sorted {
        if is_system(&name) {
            continue;
        }
        if attribute.data_type != "String" {
            types.insert(name.clone(), attribute.data_type);
        }
        let binary = attribute
            .binary_value
            .map(|blob| Bytes::from(blob.into_inner()));
        let value = attribute.string_value.map(Bytes::from).or(binary);
        headers.push(Header {
            name: name.into(),
            value,
        });
    }
    if !types.is_empty()
        && let Ok(types) = serde_json::to_string(&types)
    {
        headers.push(text(TYPES_HEADER, types));
    }
}

/// Returns the first route of a message that was a dead letter.
fn route(headers: &[Header]) -> Option<Arc<str>> {
    let origin = origin_attribute(headers)?;
    let route = origin.get("route")?.as_str()?;
    (!route.is_empty() && route.len() <= ROUTE_MAX_BYTES).then(|| Arc::from(route))
}

/// Returns the scope that has written the message as a dead letter. A message that a redrive of
/// ours has sent has no id.
fn letter_of(headers: &[Header]) -> Option<Arc<str>> {
    let origin = origin_attribute(headers)?;
    let id = origin.get("id")?.as_str()?;
    let scope = origin.get("scope")?.as_str()?;
    (!id.is_empty()).then(|| Arc::from(scope))
}

fn origin_attribute(headers: &[Header]) -> Option<serde_json::Value> {
    let origin = headers
        .iter()
        .rev()
        .find(|header| &*header.name == ORIGIN_ATTRIBUTE)?;
    serde_json::from_slice(origin.value.as_deref()?).ok()
}

#[cfg(test)]
#[path = "convert_tests.rs"]
mod tests;
