//! Converts deliveries to messages.

use std::sync::Arc;

use bytes::Bytes;
use lapin::BasicProperties;
use lapin::message::Delivery;
use lapin::types::ShortString;
use oncegate_runtime::message::{Broker, Header, Message, Origin};
use serde_json::Value;

use super::again::{self, Again, First};
use super::frames::Unreadable;
use super::headers::{
    self, AGAIN, APP_ID, CONTENT_ENCODING, CONTENT_TYPE, CORRELATION_ID, EXCHANGE, EXPIRATION,
    MESSAGE_ID, ORIGIN, PRIORITY, RAW, REDELIVERED, REPLY_TO, ROUTING_KEY, TYPE, UNREADABLE,
    USER_ID, text,
};

/// RabbitMQ, as its messages name it.
static BROKER: Broker = Broker {
    name: "amqp",
    system: "rabbitmq",
};

/// The longest route that a header may have, in bytes; a longer one is not ours.
const ROUTE_MAX_BYTES: usize = 255;

/// Stands between the queue's name and the delivery's in the origin of a message without an id.
const DELIVERY: &str = ", delivery ";

/// Returns the queue that an origin of ours names.
pub(crate) fn queue_of(origin: &Origin) -> Option<&str> {
    match origin {
        Origin::Queue { queue, .. } => Some(queue),
        Origin::Other(words) => Some(words.strip_prefix("queue ")?.rsplit_once(DELIVERY)?.0),
        _ => None,
    }
}

/// The `type` that RabbitMQ gives to a message of an AMQP 1.0 publisher whose body is not plain
/// bytes.
const AMQP_1_0: &str = "amqp-1.0";
/// The beginning of such a body: a described section.
const SECTION: [u8; 2] = [0x00, 0x53];
/// The form that is expected in its place.
const PLAIN_BODY: &str = "a body of bytes, and not an AMQP 1.0 value or sequence: its publisher has to send a data section";

/// Reads the messages of one queue.
#[derive(Clone, Debug)]
pub(crate) struct Reader {
    pub(crate) queue: Arc<str>,
    pub(crate) routes_from_headers: bool,
    /// The user that consumes the queue, if the login names one.
    pub(crate) user: Option<Arc<str>>,
}

impl Reader {
    /// Converts a delivery of the channel with this name, which no other channel has.
    pub(crate) fn read(
        &self,
        delivery: Delivery,
        unreadable: Option<Unreadable>,
        channel: &str,
    ) -> Message {
        let Delivery {
            delivery_tag,
            exchange,
            routing_key,
            redelivered,
            properties,
            data,
            ..
        } = delivery;
        let again = again::read(&properties);
        let came_back = redelivered || again.is_some() || again::returns(&properties) > 0;
        let renewed = again.and_then(|again| self.first(again, &exchange, &properties));
        let user = match &renewed {
            Some(renewed) => renewed.user_id.as_deref(),
            None => properties.user_id().as_ref().map(ShortString::as_str),
        };
        let mut headers = properties
            .headers()
            .as_ref()
            .map(headers::read)
            .unwrap_or_default();
        headers.retain(|header| &*header.name != AGAIN);
        of_properties(&properties, user, &mut headers);
        let first = origin_header(&headers);
        let told = first.as_ref().filter(|_| self.routes_from_headers);
        let address = told.and_then(first_address).or_else(|| {
            let renewed = renewed.as_ref()?;
            Some((renewed.exchange.as_str(), renewed.routing_key.as_str()))
        });
        let (exchange, routing_key) = address.unwrap_or((exchange.as_str(), routing_key.as_str()));
        headers.push(text(EXCHANGE, exchange.to_owned()));
        headers.push(text(ROUTING_KEY, routing_key.to_owned()));
        headers.push(text(REDELIVERED, redelivered.to_string()));
        if let Some(unreadable) = unreadable {
            leave_out(unreadable, &mut headers);
        }

        let route = told
            .and_then(first_route)
            .unwrap_or_else(|| Arc::clone(&self.queue));
        let letter_of = first.as_ref().and_then(letter_of);
        let has_id = headers::last(&headers, MESSAGE_ID).is_some();
        let origin = self.origin(&properties, has_id, delivery_tag, channel);
        let is_section = properties
            .kind()
            .as_ref()
            .is_some_and(|kind| kind.as_str() == AMQP_1_0)
            && data.starts_with(&SECTION);
        let message = Message::new(route, origin, Some(Bytes::from(data)));
        let mut message = message.with_broker(&BROKER).with_headers(headers);
        // The property has seconds.
        let millis = properties
            .timestamp()
            .and_then(|seconds| i64::try_from(seconds).ok()?.checked_mul(1_000));
        if let Some(millis) = millis {
            message = message.with_timestamp_ms(millis);
        }
        if let Some(scope) = letter_of {
            message = message.with_dead_letter_of(scope);
        }
        if came_back {
            message = message.with_redelivery();
        }
        if is_section {
            message = message.with_defect(PLAIN_BODY);
        }
        message
    }

    /// Returns the first way of a message that was sent again, if the copy is known to be of a
    /// consumer with this one's user.
    fn first(
        &self,
        again: Again,
        exchange: &ShortString,
        properties: &BasicProperties,
    ) -> Option<First> {
        let sender = properties.user_id().as_ref().map(ShortString::as_str);
        let is_of_ours = sender.is_some() && sender == self.user.as_deref();
        again
            .first
            .filter(|_| is_of_ours && exchange.as_str().is_empty())
    }

    /// Names the delivery. Without a `message_id` no two deliveries of one message have a name in
    /// common, and no key can be made of the message's id: a key of the delivery's number would be
    /// new for every delivery.
    fn origin(
        &self,
        properties: &BasicProperties,
        has_id: bool,
        tag: u64,
        channel: &str,
    ) -> Origin {
        match properties
            .message_id()
            .as_ref()
            .map(ShortString::as_str)
            .filter(|id| has_id && !id.is_empty())
        {
            Some(id) => Origin::Queue {
                queue: Arc::clone(&self.queue),
                id: id.into(),
            },
            None => Origin::Other(
                format!("queue {}{DELIVERY}{tag} of channel {channel}", self.queue).into(),
            ),
        }
    }
}

/// Removes what the client could not read as it was, and says so.
fn leave_out(unreadable: Unreadable, headers: &mut Vec<Header>) {
    // The names of headers were changed in the same way.
    let names: Vec<String> = unreadable
        .names
        .iter()
        .map(|name| name.replace('\u{FFFD}', "\u{1A}"))
        .collect();
    headers.retain(|header| {
        let is_left_out = names.iter().any(|name| **name == *header.name);
        !is_left_out && !header.name.contains('\u{1A}')
    });
    headers.push(text(UNREADABLE, unreadable.names.join(", ")));
    headers.push(text(RAW, unreadable.properties));
}

/// Appends the properties as headers.
fn of_properties(properties: &BasicProperties, user: Option<&str>, headers: &mut Vec<Header>) {
    let texts = [
        (CONTENT_TYPE, properties.content_type()),
        (CONTENT_ENCODING, properties.content_encoding()),
        (MESSAGE_ID, properties.message_id()),
        (CORRELATION_ID, properties.correlation_id()),
        (REPLY_TO, properties.reply_to()),
        (TYPE, properties.kind()),
        (APP_ID, properties.app_id()),
        (EXPIRATION, properties.expiration()),
    ];
    for (name, value) in texts {
        if let Some(value) = value {
            headers.push(text(name, value.as_str().to_owned()));
        }
    }
    if let Some(user) = user {
        headers.push(text(USER_ID, user.to_owned()));
    }
    if let Some(priority) = properties.priority() {
        headers.push(text(PRIORITY, priority.to_string()));
    }
}

/// Returns the first route of a message that was a dead letter.
fn first_route(origin: &Value) -> Option<Arc<str>> {
    let route = origin.get("route")?.as_str()?;
    (!route.is_empty() && route.len() <= ROUTE_MAX_BYTES).then(|| Arc::from(route))
}

/// Returns the exchange and the routing key that such a message was published with.
fn first_address(origin: &Value) -> Option<(&str, &str)> {
    Some((
        origin.get("exchange")?.as_str()?,
        origin.get("routing_key")?.as_str()?,
    ))
}

/// Returns the scope that has written the message as a dead letter. A message that a redrive of
/// ours has sent has no id.
fn letter_of(origin: &Value) -> Option<Arc<str>> {
    let id = origin.get("id")?.as_str()?;
    let scope = origin.get("scope")?.as_str()?;
    (!id.is_empty()).then(|| Arc::from(scope))
}

fn origin_header(headers: &[Header]) -> Option<Value> {
    serde_json::from_slice(headers::last(headers, ORIGIN)?).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use lapin::types::{AMQPValue, FieldTable};
    use oncegate_core::key::KeySource as _;

    fn delivery(properties: BasicProperties) -> Delivery {
        let mut delivery = Delivery::mock(7, "".into(), "orders".into(), true, b"{}".to_vec());
        delivery.properties = properties;
        delivery
    }

    fn reader() -> Reader {
        Reader {
            queue: "orders".into(),
            routes_from_headers: false,
            user: Some("me".into()),
        }
    }

    #[test]
    fn a_message_has_its_properties_and_what_the_broker_says() {
        let mut table = FieldTable::default();
        table.insert("x-delivery-count".into(), AMQPValue::LongLongInt(3));
        // A sender cannot say this for the broker.
        table.insert(
            "AMQP.redelivered".into(),
            AMQPValue::LongString("false".into()),
        );
        let properties = BasicProperties::default()
            .with_headers(table)
            .with_timestamp(12);
        let properties = properties
            .with_content_type("application/json".into())
            .with_message_id("m1".into());
        let message = reader().read(delivery(properties), None, "c");
        assert_eq!(message.origin().to_string(), "orders#m1");
        assert_eq!(
            (message.route(), message.timestamp_ms()),
            ("orders", Some(12_000))
        );
        assert_eq!(
            message.header("content-type"),
            Some(&b"application/json"[..])
        );
        assert_eq!(message.header("x-delivery-count"), Some(&b"3"[..]));
        assert_eq!(message.header(REDELIVERED), Some(&b"true"[..]));
        assert_eq!(
            message
                .headers()
                .iter()
                .filter(|header| &*header.name == REDELIVERED)
                .count(),
            1
        );
    }

    #[test]
    fn a_message_without_an_id_makes_no_key_of_its_id() {
        let message = reader().read(delivery(BasicProperties::default()), None, "c");
        assert_eq!(
            message.message_id(),
            None,
            "a delivery's number is new each time"
        );
        assert_eq!(
            message.origin().to_string(),
            "queue orders, delivery 7 of channel c"
        );
        assert_eq!(queue_of(message.origin()), Some("orders"));
    }

    #[test]
    fn a_redriven_message_keeps_where_it_was_published_to() {
        let mut table = FieldTable::default();
        let origin = r#"{"route":"payments","exchange":"shop","routing_key":"paid"}"#;
        table.insert(ORIGIN.into(), AMQPValue::LongString(origin.into()));
        let redriven = || delivery(BasicProperties::default().with_headers(table.clone()));
        let told = Reader {
            routes_from_headers: true,
            ..reader()
        }
        .read(redriven(), None, "c");
        assert_eq!(told.route(), "payments");
        assert_eq!(told.header(EXCHANGE), Some(&b"shop"[..]));
        assert_eq!(told.header(ROUTING_KEY), Some(&b"paid"[..]));
        // A sender cannot say it to a source that does not ask for it.
        let message = reader().read(redriven(), None, "c");
        assert_eq!(
            (message.route(), message.header(EXCHANGE)),
            ("orders", Some(&b""[..]))
        );
    }

    #[test]
    fn only_a_copy_of_this_user_is_believed_its_first_exchange() {
        for (user, exchange) in [("me", "shop"), ("other", "")] {
            let mut table = FieldTable::default();
            let again = r#"{"returns":10,"first":{"exchange":"shop","routing_key":"paid"}}"#;
            table.insert(AGAIN.into(), AMQPValue::LongString(again.into()));
            let properties = BasicProperties::default().with_headers(table);
            let message = reader().read(delivery(properties.with_user_id(user.into())), None, "c");
            assert_eq!(message.header(EXCHANGE), Some(exchange.as_bytes()));
            assert_eq!(message.header(AGAIN), None, "it is not the sender's");
            assert!(message.is_redelivered());
            assert_eq!(message.header(USER_ID).is_some(), user == "other");
        }
    }

    #[test]
    fn what_is_not_readable_is_left_out_and_makes_no_key() {
        let mut table = FieldTable::default();
        table.insert("caf\u{1A}".into(), AMQPValue::LongString("1".into()));
        table.insert("tenant".into(), AMQPValue::LongString("a".into()));
        let properties = BasicProperties::default()
            .with_headers(table)
            .with_message_id("m\u{1A}".into());
        let unreadable = Unreadable {
            names: vec!["caf\u{FFFD}".to_owned(), MESSAGE_ID.to_owned()],
            properties: Bytes::from_static(b"raw"),
        };
        let message = reader().read(delivery(properties), Some(unreadable), "c");
        assert_eq!(message.message_id(), None);
        assert_eq!(message.header(MESSAGE_ID), None);
        assert_eq!(message.header("caf\u{1A}"), None);
        assert_eq!(message.header("tenant"), Some(&b"a"[..]));
        assert_eq!(message.header(RAW), Some(&b"raw"[..]));
    }

    #[test]
    fn a_value_of_amqp_1_0_is_named() {
        let properties = BasicProperties::default().with_type(AMQP_1_0.into());
        let mut value = delivery(properties);
        value.data = b"\x00\x53\x77\xa1\x02{}".to_vec();
        let message = reader().read(value, None, "c");
        assert!(
            message
                .defect()
                .is_some_and(|defect| defect.contains("AMQP 1.0"))
        );
    }
}
