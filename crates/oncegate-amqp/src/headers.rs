//! The names of headers, and their conversion from and to an AMQP table.

use std::collections::BTreeMap;

use bytes::Bytes;
use lapin::types::{AMQPValue, FieldTable, LongString, ShortString};
use oncegate_runtime::message::Header;

use super::nested;

/// The header with the reason of a dead letter, for people.
pub(crate) const REASON: &str = "oncegate-reason";
/// The header with the origin of a dead letter, for programs.
pub(crate) const ORIGIN: &str = "oncegate-origin";

/// The header of a copy that replaces a message which its queue was about to drop.
pub(crate) const AGAIN: &str = "oncegate-again";
/// The header of a dead letter with the properties of a message that has unreadable ones.
pub(crate) const PROPERTIES: &str = "oncegate-properties";

/// The prefix of headers from the delivery and from its properties. A sender's headers of such
/// names are dropped.
pub(crate) const PREFIX: &str = "AMQP.";
/// The exchange that the message was published to; empty for the default exchange.
pub(crate) const EXCHANGE: &str = "AMQP.exchange";
pub(crate) const ROUTING_KEY: &str = "AMQP.routing-key";
/// `true` when the broker may have delivered the message before.
pub(crate) const REDELIVERED: &str = "AMQP.redelivered";
pub(crate) const MESSAGE_ID: &str = "AMQP.message-id";
pub(crate) const CORRELATION_ID: &str = "AMQP.correlation-id";
pub(crate) const REPLY_TO: &str = "AMQP.reply-to";
pub(crate) const TYPE: &str = "AMQP.type";
pub(crate) const APP_ID: &str = "AMQP.app-id";
pub(crate) const USER_ID: &str = "AMQP.user-id";
pub(crate) const EXPIRATION: &str = "AMQP.expiration";
pub(crate) const PRIORITY: &str = "AMQP.priority";
/// The names of the headers and properties that are missing, because they are not UTF-8 or nested
/// too deeply.
pub(crate) const UNREADABLE: &str = "AMQP.unreadable";
/// All properties of such a message, as the broker has sent them.
pub(crate) const RAW: &str = "AMQP.raw-properties";
/// The types of headers that are not strings, as a JSON object.
pub(crate) const TYPES: &str = "AMQP.header-types";
/// The names of headers that had no room in the dead letter.
pub(crate) const LEFT_OUT: &str = "AMQP.headers-left-out";
/// The properties that have the same names as headers elsewhere.
pub(crate) const CONTENT_TYPE: &str = "content-type";
pub(crate) const CONTENT_ENCODING: &str = "content-encoding";

/// Headers that the broker acts on: written into a message, they would send copies of it to other
/// queues.
const ROUTING: [&str; 2] = ["CC", "BCC"];
/// Headers that the broker writes.
const OF_THE_BROKER: [&str; 3] = ["x-death", "x-delivery-count", "x-acquired-count"];
/// Beginnings of further such names.
const OF_THE_BROKER_BEGIN: [&str; 3] = ["x-first-death-", "x-last-death-", "x-received-from"];
/// Headers of ours.
const OURS: [&str; 4] = [REASON, ORIGIN, AGAIN, PROPERTIES];

/// Creates a header.
pub(crate) fn text(name: &str, value: impl Into<Bytes>) -> Header {
    Header {
        name: name.into(),
        value: Some(value.into()),
    }
}

/// Returns whether the broker sends a message with this header to other queues as well.
pub(crate) fn is_routing(name: &str) -> bool {
    ROUTING.contains(&name)
}

/// Returns whether the broker writes this header.
pub(crate) fn is_of_the_broker(name: &str) -> bool {
    OF_THE_BROKER.contains(&name)
        || OF_THE_BROKER_BEGIN
            .iter()
            .any(|begin| name.starts_with(begin))
}

/// Returns whether a header belongs to its sender, and so to a dead letter.
pub(crate) fn is_senders(name: &str) -> bool {
    !is_routing(name)
        && !is_of_the_broker(name)
        && !name.starts_with(PREFIX)
        && !OURS.contains(&name)
}

/// Converts a table to headers, by name, followed by the types of those that are not strings.
pub(crate) fn read(table: &FieldTable) -> Vec<Header> {
    let mut headers = Vec::new();
    let mut types = BTreeMap::new();
    for (name, value) in table {
        let name = name.as_str();
        if name.starts_with(PREFIX) {
            continue;
        }
        let (value, kind) = match value {
            AMQPValue::LongString(value) => (Some(Bytes::copy_from_slice(value.as_bytes())), None),
            AMQPValue::ShortString(value) => (Some(value.as_str().to_owned().into()), None),
            AMQPValue::ByteArray(value) => (
                Some(Bytes::copy_from_slice(value.as_slice())),
                Some("bytes"),
            ),
            AMQPValue::Void => (None, Some("null")),
            AMQPValue::Boolean(value) => (Some(value.to_string().into()), Some("bool")),
            AMQPValue::ShortShortInt(value) => (Some(value.to_string().into()), Some("int")),
            AMQPValue::ShortShortUInt(value) => (Some(value.to_string().into()), Some("int")),
            AMQPValue::ShortInt(value) => (Some(value.to_string().into()), Some("int")),
            AMQPValue::ShortUInt(value) => (Some(value.to_string().into()), Some("int")),
            AMQPValue::LongInt(value) => (Some(value.to_string().into()), Some("int")),
            AMQPValue::LongUInt(value) => (Some(value.to_string().into()), Some("int")),
            AMQPValue::LongLongInt(value) => (Some(value.to_string().into()), Some("int")),
            AMQPValue::Timestamp(value) => (Some(value.to_string().into()), Some("timestamp")),
            AMQPValue::Float(value) => (Some(value.to_string().into()), Some("double")),
            AMQPValue::Double(value) => (Some(value.to_string().into()), Some("double")),
            AMQPValue::FieldArray(_) | AMQPValue::FieldTable(_) | AMQPValue::DecimalValue(_) => {
                types.insert(name.to_owned(), nested::kind(value));
                (Some(nested::json(value).to_string().into()), None)
            }
        };
        if let Some(kind) = kind {
            types.insert(name.to_owned(), kind.to_owned());
        }
        headers.push(Header {
            name: name.into(),
            value,
        });
    }
    if !types.is_empty()
        && let Ok(types) = serde_json::to_string(&types)
    {
        headers.push(text(TYPES, types));
    }
    headers
}

/// Converts the sender's headers to a table. Of several with one name, a table has the last.
pub(crate) fn write(headers: &[Header]) -> FieldTable {
    let types = last(headers, TYPES).and_then(|types| serde_json::from_slice(types).ok());
    let types: BTreeMap<String, String> = types.unwrap_or_default();
    let mut table = FieldTable::default();
    for header in headers.iter().filter(|header| is_senders(&header.name)) {
        if [CONTENT_TYPE, CONTENT_ENCODING].contains(&&*header.name) {
            continue;
        }
        // A table's names are short strings. A longer name cannot have come from one.
        let Some(name) = short(&header.name) else {
            continue;
        };
        let kind = types.get(&*header.name).map(String::as_str);
        table.insert(name, value(header.value.as_deref(), kind));
    }
    table
}

fn value(bytes: Option<&[u8]>, kind: Option<&str>) -> AMQPValue {
    let Some(bytes) = bytes else {
        return AMQPValue::Void;
    };
    let text = std::str::from_utf8(bytes).unwrap_or_default();
    let typed = match kind {
        Some("bytes") => Some(AMQPValue::ByteArray(bytes.to_vec().into())),
        Some("bool") => text.parse().ok().map(AMQPValue::Boolean),
        Some("int") => text.parse().ok().map(AMQPValue::LongLongInt),
        Some("timestamp") => text.parse().ok().map(AMQPValue::Timestamp),
        Some(kind) if nested::is_kind(kind) => nested::value(kind, bytes),
        Some("double") => text.parse().ok().map(AMQPValue::Double),
        _ => None,
    };
    typed.unwrap_or_else(|| AMQPValue::LongString(LongString::from(bytes)))
}

/// Returns the value of the last header of this name.
pub(crate) fn last<'a>(headers: &'a [Header], name: &str) -> Option<&'a [u8]> {
    headers
        .iter()
        .rev()
        .find(|header| &*header.name == name)?
        .value
        .as_deref()
}

/// Returns the text as a short string; `None` when it has more than 255 bytes.
pub(crate) fn short(text: &str) -> Option<ShortString> {
    ShortString::try_new(text).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_keep_their_types_through_a_dead_letter() {
        let mut table = FieldTable::default();
        table.insert("text".into(), AMQPValue::LongString("a".into()));
        table.insert("count".into(), AMQPValue::LongLongInt(-7));
        table.insert("flag".into(), AMQPValue::Boolean(true));
        table.insert("none".into(), AMQPValue::Void);
        table.insert("bytes".into(), AMQPValue::ByteArray(vec![0, 255].into()));
        let mut inner = FieldTable::default();
        inner.insert(
            "list".into(),
            AMQPValue::FieldArray(vec![AMQPValue::ShortInt(1)].into()),
        );
        table.insert("table".into(), AMQPValue::FieldTable(inner));
        let headers = read(&table);
        assert_eq!(last(&headers, "count"), Some(&b"-7"[..]));
        assert_eq!(last(&headers, "table"), Some(&br#"{"list":[1]}"#[..]));
        assert_eq!(write(&headers), table);
    }

    #[test]
    fn headers_that_the_broker_acts_on_are_not_written() {
        let names = [
            "CC",
            "x-death",
            "x-first-death-queue",
            "x-delivery-count",
            "x-acquired-count",
            EXCHANGE,
            REASON,
            ORIGIN,
        ];
        let headers: Vec<Header> = names.iter().map(|name| text(name, "x")).collect();
        assert_eq!(write(&headers), FieldTable::default());
    }
}
