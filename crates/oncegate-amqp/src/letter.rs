//! The format of a dead letter as an AMQP message, and what is left out when its headers are too
//! large.

use bytes::Bytes;
use lapin::BasicProperties;
use lapin::types::{AMQPValue, FieldTable, LongString, ShortString};
use oncegate_core::reason::one_line;
use oncegate_runtime::dead_letters::{DeadLetter, millis_since_1970, time_of};
use oncegate_runtime::message::{Header, Message, Origin};
use serde::{Deserialize, Serialize};

use super::headers::{
    self, APP_ID, CONTENT_ENCODING, CONTENT_TYPE, CORRELATION_ID, EXCHANGE, EXPIRATION, LEFT_OUT,
    MESSAGE_ID, ORIGIN, PREFIX, PRIORITY, PROPERTIES, RAW, REASON, REDELIVERED, REPLY_TO,
    ROUTING_KEY, TYPE, UNREADABLE, USER_ID, is_senders, last, short, text,
};

/// The longest `oncegate-reason`, in bytes.
const REASON_MAX_BYTES: usize = 1024;
/// The `delivery_mode` of a message that is stored on disk.
pub(crate) const PERSISTENT: u8 = 2;
/// Bytes of a message's properties besides its headers, at most: nine short strings and some
/// numbers.
pub(crate) const PROPERTIES_BYTES: usize = 3_072;
/// Bytes of a header besides its name and value: two lengths and the type.
const HEADER_BYTES: usize = 6;

/// A message that can be published.
#[derive(Debug)]
pub(crate) struct Outgoing {
    pub(crate) properties: BasicProperties,
    pub(crate) body: Bytes,
    /// The names of the message's headers that did not fit.
    pub(crate) left_out: Vec<String>,
}

/// The origin of a dead letter.
#[derive(Debug, Default, Deserialize, Serialize)]
#[serde(default)]
struct Provenance {
    /// The id of the dead letter: equal for its copies.
    id: String,
    route: String,
    origin: String,
    scope: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    key: Option<String>,
    cause: String,
    attempts: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    first_failed_at_ms: Option<u64>,
    failed_at_ms: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    timestamp_ms: Option<i64>,
    /// The exchange that the message was published to.
    exchange: String,
    routing_key: String,
    /// Properties that the broker would check, or act on.
    #[serde(skip_serializing_if = "Option::is_none")]
    user_id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    expiration: Option<String>,
    /// `true` when the message had no payload, as a tombstone of Kafka has none.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    tombstone: bool,
    /// The names of the message's headers that were dropped because they did not fit.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    left_out: Vec<String>,
}

impl Outgoing {
    /// Makes a dead letter: payload, headers and properties unchanged, and two headers with its
    /// reason and origin. The largest headers of the message are left out until all of them fit
    /// into `limit` bytes.
    pub(crate) fn letter(letter: &DeadLetter, limit: usize) -> Self {
        let message = &letter.message;
        let cause = letter.cause.as_str();
        let reason = format!("{cause}: {}", one_line(&letter.reason));
        let reason = cut(&reason, REASON_MAX_BYTES);
        let mut provenance = Provenance {
            id: letter.id(),
            route: message.route().to_owned(),
            origin: message.origin().to_string(),
            scope: letter.scope.clone(),
            key: letter.key.clone(),
            cause: cause.to_owned(),
            attempts: letter.attempts,
            first_failed_at_ms: letter.first_failed_at.map(millis_since_1970),
            failed_at_ms: millis_since_1970(letter.failed_at),
            timestamp_ms: message.timestamp_ms(),
            exchange: word(message, EXCHANGE).unwrap_or_default().to_owned(),
            routing_key: word(message, ROUTING_KEY).unwrap_or_default().to_owned(),
            user_id: word(message, USER_ID).map(str::to_owned),
            expiration: word(message, EXPIRATION).map(str::to_owned),
            tombstone: message.is_tombstone(),
            left_out: word(message, UNREADABLE)
                .map(|names| names.split(", ").map(str::to_owned).collect())
                .unwrap_or_default(),
        };
        let mut table = headers::write(message.headers());
        if let Some(properties) = message.header(RAW) {
            let properties = AMQPValue::ByteArray(properties.to_vec().into());
            table.insert(PROPERTIES.into(), properties);
        }
        table.insert(REASON.into(), AMQPValue::LongString(reason.into()));
        loop {
            // The origin has only text and numbers, so it can always be serialized.
            let origin = serde_json::to_string(&provenance).unwrap_or_default();
            table.insert(
                ORIGIN.into(),
                AMQPValue::LongString(LongString::from(origin)),
            );
            if size(&table) <= limit.saturating_sub(PROPERTIES_BYTES) {
                break;
            }
            let Some((without, name)) = without_largest(&table) else {
                break;
            };
            table = without;
            provenance.left_out.push(name);
        }
        let properties = properties(message).with_headers(table);
        Self {
            properties,
            body: message.payload_bytes().unwrap_or_default(),
            left_out: provenance.left_out,
        }
    }

    /// Makes a dead-lettered message as it is sent back to a queue, with its first route, exchange
    /// and routing key if the queue does not say them. The error says why it cannot be sent.
    pub(crate) fn redriven(
        message: &Message,
        route: Option<&str>,
        queue: &str,
    ) -> Result<Self, String> {
        if let Some(names) = message.header(LEFT_OUT) {
            let names = String::from_utf8_lossy(names);
            return Err(format!(
                "its dead letter is without {names}, which had no room or are not UTF-8: send the message again by hand"
            ));
        }
        let Some(body) = message.payload_bytes() else {
            return Err("it has no payload, which a queue cannot say".to_owned());
        };
        let mut table = headers::write(message.headers());
        let exchange = word(message, EXCHANGE).unwrap_or_default();
        let routing_key = word(message, ROUTING_KEY).unwrap_or_default();
        let route = route.filter(|route| *route != queue);
        if route.is_some() || !exchange.is_empty() {
            let origin = serde_json::json!({
                "route": route.unwrap_or(queue), "exchange": exchange, "routing_key": routing_key
            });
            table.insert(
                ORIGIN.into(),
                AMQPValue::LongString(LongString::from(origin.to_string())),
            );
        }
        Ok(Self {
            properties: properties(message).with_headers(table),
            body,
            left_out: Vec::new(),
        })
    }
}

/// Decodes a dead letter that oncegate wrote; `None` for other messages.
pub(crate) fn read(kept: &Message) -> Option<DeadLetter> {
    let provenance: Provenance = serde_json::from_slice(last(kept.headers(), ORIGIN)?).ok()?;
    let payload = kept.payload_bytes().filter(|_| !provenance.tombstone);
    let mut message = Message::new(
        provenance.route.as_str(),
        Origin::parse(&provenance.origin),
        payload,
    )
    .with_headers(own_headers(kept, &provenance));
    if let Some(timestamp_ms) = provenance.timestamp_ms {
        message = message.with_timestamp_ms(timestamp_ms);
    }
    let reason = kept
        .header(REASON)
        .map(String::from_utf8_lossy)
        .unwrap_or_default();
    let prefix = format!("{}: ", provenance.cause);
    Some(DeadLetter {
        message,
        scope: provenance.scope,
        key: provenance.key,
        cause: provenance.cause.parse().ok()?,
        reason: reason.strip_prefix(&prefix).unwrap_or(&reason).to_owned(),
        attempts: provenance.attempts,
        first_failed_at: provenance.first_failed_at_ms.and_then(time_of),
        failed_at: time_of(provenance.failed_at_ms)?,
    })
}

/// Returns the id of a dead letter of ours.
pub(crate) fn id(kept: &Message) -> Option<String> {
    let provenance: Provenance = serde_json::from_slice(last(kept.headers(), ORIGIN)?).ok()?;
    Some(provenance.id).filter(|id| !id.is_empty())
}

/// Returns the sender's headers and properties, with the exchange and routing key of the first
/// delivery.
fn own_headers(kept: &Message, provenance: &Provenance) -> Vec<Header> {
    let mut headers: Vec<Header> = kept
        .headers()
        .iter()
        .filter(|header| is_of_the_message(&header.name))
        .cloned()
        .collect();
    headers.push(text(EXCHANGE, provenance.exchange.clone()));
    headers.push(text(ROUTING_KEY, provenance.routing_key.clone()));
    for (name, value) in [
        (USER_ID, &provenance.user_id),
        (EXPIRATION, &provenance.expiration),
    ] {
        if let Some(value) = value {
            headers.push(text(name, value.clone()));
        }
    }
    if !provenance.left_out.is_empty() {
        headers.push(text(LEFT_OUT, provenance.left_out.join(", ")));
    }
    headers
}

/// Returns whether the header is one of the dead-lettered message, not of the dead letter.
fn is_of_the_message(name: &str) -> bool {
    const OF_THE_LETTER: [&str; 3] = [EXCHANGE, ROUTING_KEY, REDELIVERED];
    is_senders(name) || (name.starts_with(PREFIX) && !OF_THE_LETTER.contains(&name))
}

/// Returns the message's own properties, with storage on disk. They have no `expiration`, by which
/// the broker would drop the message, and no `user_id`, which must be the sender's own.
fn properties(message: &Message) -> BasicProperties {
    let mut properties = BasicProperties::default().with_delivery_mode(PERSISTENT);
    type Setter = fn(BasicProperties, ShortString) -> BasicProperties;
    let setters: [(&str, Setter); 7] = [
        (CONTENT_TYPE, BasicProperties::with_content_type),
        (CONTENT_ENCODING, BasicProperties::with_content_encoding),
        (MESSAGE_ID, BasicProperties::with_message_id),
        (CORRELATION_ID, BasicProperties::with_correlation_id),
        (REPLY_TO, BasicProperties::with_reply_to),
        (TYPE, BasicProperties::with_type),
        (APP_ID, BasicProperties::with_app_id),
    ];
    for (name, set) in setters {
        if let Some(value) = word(message, name).and_then(short) {
            properties = set(properties, value);
        }
    }
    if let Some(priority) = word(message, PRIORITY).and_then(|priority| priority.parse().ok()) {
        properties = properties.with_priority(priority);
    }
    // The property has seconds.
    if let Some(seconds) = message
        .timestamp_ms()
        .and_then(|millis| u64::try_from(millis / 1_000).ok())
    {
        properties = properties.with_timestamp(seconds);
    }
    properties
}

fn word<'a>(message: &'a Message, name: &str) -> Option<&'a str> {
    std::str::from_utf8(last(message.headers(), name)?).ok()
}

/// Returns the table without its largest header that is not ours, and that header's name.
fn without_largest(table: &FieldTable) -> Option<(FieldTable, String)> {
    let foreign = table
        .into_iter()
        .filter(|(name, _)| ![REASON, ORIGIN].contains(&name.as_str()));
    let (largest, _) = foreign.max_by_key(|(_, value)| value_size(value))?;
    let mut without = FieldTable::default();
    for (name, value) in table {
        if name != largest {
            without.insert(name.clone(), value.clone());
        }
    }
    Some((without, largest.as_str().to_owned()))
}

/// Returns the size of a table in a frame, in bytes; of nested values, an estimate that is not too
/// small.
pub(crate) fn size(table: &FieldTable) -> usize {
    table
        .into_iter()
        .map(|(name, value)| name.as_str().len() + HEADER_BYTES + value_size(value))
        .sum()
}

fn value_size(value: &AMQPValue) -> usize {
    match value {
        AMQPValue::LongString(text) => text.as_bytes().len(),
        AMQPValue::ShortString(text) => text.as_str().len(),
        AMQPValue::ByteArray(bytes) => bytes.len(),
        AMQPValue::FieldTable(table) => size(table),
        AMQPValue::FieldArray(values) => values
            .as_slice()
            .iter()
            .map(|value| HEADER_BYTES + value_size(value))
            .sum(),
        _ => size_of::<u64>(),
    }
}

/// Returns the beginning of a text, cut between characters.
fn cut(text: &str, most_bytes: usize) -> &str {
    text.get(..text.floor_char_boundary(most_bytes))
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use oncegate_runtime::dead_letters::DeadLetterCause;
    use std::time::{Duration, UNIX_EPOCH};

    fn letter(headers: Vec<Header>) -> DeadLetter {
        let origin = Origin::Queue {
            queue: "orders".into(),
            id: "m1".into(),
        };
        let message = Message::new("orders", origin, Some(Bytes::from_static(b"\x00\xff")));
        DeadLetter {
            message: message.with_headers(headers).with_timestamp_ms(12_345),
            scope: "billing".to_owned(),
            key: Some("k".to_owned()),
            cause: DeadLetterCause::Permanent,
            reason: "no such\naccount".to_owned(),
            attempts: 3,
            first_failed_at: None,
            failed_at: UNIX_EPOCH + Duration::from_secs(9),
        }
    }

    /// The message as the broker delivers it.
    fn delivered(outgoing: &Outgoing) -> Message {
        let mut delivery = lapin::message::Delivery::mock(
            1,
            "".into(),
            "orders.dead".into(),
            false,
            outgoing.body.to_vec(),
        );
        delivery.properties = outgoing.properties.clone();
        let reader = super::super::convert::Reader {
            queue: "orders.dead".into(),
            routes_from_headers: false,
            user: None,
        };
        reader.read(delivery, None, "c")
    }

    #[test]
    fn a_dead_letter_comes_back_as_its_message() {
        let headers = vec![
            text("tenant", "a"),
            text(EXCHANGE, "shop"),
            text(ROUTING_KEY, "orders.new"),
            text(REDELIVERED, "true"),
            text(CONTENT_TYPE, "application/json"),
            text(USER_ID, "someone"),
            text(EXPIRATION, "100"),
            text("x-delivery-count", "4"),
        ];
        let written = Outgoing::letter(&letter(headers), usize::MAX);
        assert_eq!(*written.properties.delivery_mode(), Some(PERSISTENT));
        assert_eq!(
            *written.properties.expiration(),
            None,
            "the broker would drop it"
        );
        assert_eq!(
            *written.properties.user_id(),
            None,
            "the broker would refuse it"
        );
        let kept = delivered(&written);
        assert_eq!(
            kept.header(REASON),
            Some(&b"permanent: no such account"[..])
        );
        let back = read(&kept).unwrap();
        assert_eq!(
            (back.cause, back.attempts, &*back.reason),
            (DeadLetterCause::Permanent, 3, "no such account")
        );
        assert_eq!(id(&kept), Some(back.id()));
        let message = &back.message;
        assert_eq!(
            (message.payload(), message.timestamp_ms()),
            (&b"\x00\xff"[..], Some(12_345))
        );
        for (name, value) in [
            ("tenant", "a"),
            (EXCHANGE, "shop"),
            (ROUTING_KEY, "orders.new"),
            (USER_ID, "someone"),
        ] {
            assert_eq!(word(message, name), Some(value), "{name}");
        }
        assert_eq!(
            (
                message.header("x-delivery-count"),
                message.header(REDELIVERED)
            ),
            (None, None)
        );
        let redriven = Outgoing::redriven(message, Some("orders"), "orders").unwrap();
        assert_eq!(
            redriven
                .properties
                .content_type()
                .as_ref()
                .map(ShortString::as_str),
            Some("application/json")
        );
        let again = delivered(&redriven);
        let origin: serde_json::Value =
            serde_json::from_slice(again.header(ORIGIN).unwrap()).unwrap();
        assert_eq!(origin["routing_key"], "orders.new");
        assert_eq!(again.dead_letter_of(), None, "it is a message again");
    }

    #[test]
    fn headers_that_do_not_fit_are_named_and_not_redriven() {
        let headers = vec![text("small", "1"), text("large", "x".repeat(9_000))];
        let written = Outgoing::letter(&letter(headers), 8_192);
        assert_eq!(written.left_out, ["large"]);
        let back = read(&delivered(&written)).unwrap();
        assert_eq!(back.message.header("small"), Some(&b"1"[..]));
        let error = Outgoing::redriven(&back.message, None, "orders").unwrap_err();
        assert!(error.contains("large"), "{error}");
    }
}
