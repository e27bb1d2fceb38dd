//! A copy of a message that its queue is about to drop.
//!
//! A quorum queue counts how often a message came back, and drops it at its `delivery-limit`. It
//! counts everything that was in the prefetch of a process that ended, so innocent messages reach
//! the limit too. A copy at the end of the queue begins at zero; the record of its key keeps the
//! attempts, and answers the copy if the first delivery was done all the same.

use std::time::Duration;

use bytes::Bytes;
use lapin::BasicProperties;
use lapin::message::Delivery;
use lapin::types::{AMQPValue, FieldTable, LongString, ShortString};
use serde::{Deserialize, Serialize};

use super::headers::{AGAIN, is_of_the_broker, is_routing, short};
use super::letter::{Outgoing, PERSISTENT};

/// The header by which a quorum queue says how often a message came back.
const DELIVERY_COUNT: &str = "x-delivery-count";
/// The limit of quorum queues from RabbitMQ 4 on, unless they say another one.
const DEFAULT_LIMIT: i64 = 20;
/// The default of `consumer_timeout`.
const CONSUMER_TIMEOUT: Duration = Duration::from_secs(30 * 60);
/// The shortest `consumer_timeout` that is believed.
const TIMEOUT_LEAST: Duration = Duration::from_secs(1);

/// The limits of the broker for messages that come back, or that are held for long.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BrokerLimits {
    /// The number of returns from which on a message is sent again.
    renew_from: i64,
    /// The time after which the broker takes a delivery away.
    timeout: Duration,
}

impl BrokerLimits {
    /// Returns the limits of a queue with this `delivery-limit` and `consumer-timeout`, as far as
    /// they are known. In an order, a message is sent again only when the broker would drop it,
    /// because its copy comes last.
    pub(crate) fn new(limit: Option<i64>, timeout: Option<Duration>, in_order: bool) -> Self {
        let limit = limit.unwrap_or(DEFAULT_LIMIT);
        let renew_from = if in_order { limit } else { limit / 2 };
        Self {
            renew_from: renew_from.max(1),
            timeout: timeout.unwrap_or(CONSUMER_TIMEOUT).max(TIMEOUT_LEAST),
        }
    }

    /// Notes after which time the broker has taken a delivery away.
    pub(crate) fn learn(&mut self, timeout: Duration) {
        self.timeout = self.timeout.min(timeout.max(TIMEOUT_LEAST));
    }

    /// Returns the longest time that a delivery is held.
    pub(crate) fn hold_most(&self) -> Duration {
        self.timeout / 2
    }

    /// Returns whether a message is to be sent again before it runs.
    pub(crate) fn is_near(&self, returns: i64) -> bool {
        returns >= self.renew_from
    }
}

/// The notes of a copy about its message.
#[derive(Debug, Default, Deserialize, Serialize, PartialEq, Eq)]
pub(crate) struct Again {
    /// The number of times that the message came back before.
    returns: i64,
    /// The first exchange and routing key, and who sent the message, if the copy has others.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) first: Option<First>,
}

/// The way that a message has come.
#[derive(Debug, Deserialize, Serialize, PartialEq, Eq)]
pub(crate) struct First {
    pub(crate) exchange: String,
    pub(crate) routing_key: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) user_id: Option<String>,
}

/// Returns how often the message came back, as the broker counts it.
pub(crate) fn returns(properties: &BasicProperties) -> i64 {
    let count = properties
        .headers()
        .as_ref()
        .and_then(|table| table.inner().get(DELIVERY_COUNT));
    match count {
        Some(AMQPValue::LongLongInt(count)) => *count,
        Some(AMQPValue::LongInt(count)) => i64::from(*count),
        Some(AMQPValue::LongUInt(count)) => i64::from(*count),
        _ => 0,
    }
}

/// Returns what a copy of ours says; `None` for every other message.
pub(crate) fn read(properties: &BasicProperties) -> Option<Again> {
    let table = properties.headers().as_ref()?;
    match table.inner().get(AGAIN)? {
        AMQPValue::LongString(text) => serde_json::from_slice(text.as_bytes()).ok(),
        _ => None,
    }
}

/// Makes the copy. `None` when it would not be the same: then the message is left as it is.
///
/// The broker lets a message say its sender only if that is true. So a copy with the consumer's own
/// user is known to come from this consumer, or from another one with its rights, and only such a
/// copy is believed what its first exchange was.
pub(crate) fn copy(delivery: &Delivery, queue: &str, user: Option<&str>) -> Option<Outgoing> {
    let properties = &delivery.properties;
    let earlier = read(properties);
    let mut table = FieldTable::default();
    for (name, value) in properties.headers().iter().flatten() {
        // With these, the broker would send it to other queues as well.
        if is_routing(name.as_str()) {
            return None;
        }
        if !is_of_the_broker(name.as_str()) {
            table.insert(name.clone(), value.clone());
        }
    }
    let again = Again {
        returns: returns(properties) + earlier.as_ref().map_or(0, |again| again.returns),
        first: earlier
            .and_then(|again| again.first)
            .or_else(|| first_of(delivery, queue)),
    };
    let mut copied = properties.clone().with_delivery_mode(PERSISTENT);
    if again.first.is_some() {
        copied = copied.with_user_id(short(user?)?);
    }
    // It has only text and numbers, so it can always be serialized.
    let text = LongString::from(serde_json::to_string(&again).unwrap_or_default());
    table.insert(AGAIN.into(), AMQPValue::LongString(text));
    Some(Outgoing {
        properties: copied.with_headers(table),
        body: Bytes::copy_from_slice(&delivery.data),
        left_out: Vec::new(),
    })
}

/// Returns the way that the message has come, if a copy's would be another one.
fn first_of(delivery: &Delivery, queue: &str) -> Option<First> {
    let user_id = delivery.properties.user_id().as_ref();
    let is_same = delivery.exchange.as_str().is_empty()
        && delivery.routing_key.as_str() == queue
        && user_id.is_none();
    (!is_same).then(|| First {
        exchange: delivery.exchange.to_string(),
        routing_key: delivery.routing_key.to_string(),
        user_id: user_id.map(ShortString::to_string),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn delivery(exchange: &str, returns: i64, user: Option<&str>) -> Delivery {
        let mut delivery =
            Delivery::mock(7, exchange.into(), "orders".into(), true, b"{}".to_vec());
        let mut table = FieldTable::default();
        table.insert(DELIVERY_COUNT.into(), AMQPValue::LongLongInt(returns));
        table.insert("tenant".into(), AMQPValue::LongString("a".into()));
        let mut properties = BasicProperties::default()
            .with_headers(table)
            .with_message_id("m1".into());
        if let Some(user) = user {
            properties = properties.with_user_id(user.into());
        }
        delivery.properties = properties;
        delivery
    }

    /// The copy, as the broker delivers it.
    fn delivered(outgoing: Outgoing) -> Delivery {
        let mut delivery = Delivery::mock(8, "".into(), "orders".into(), false, b"{}".to_vec());
        delivery.properties = outgoing.properties;
        delivery
    }

    #[test]
    fn a_copy_begins_at_zero_and_keeps_where_the_message_came_from() {
        let plain = copy(&delivery("", 10, None), "orders", Some("shop")).unwrap();
        assert_eq!(*plain.properties.user_id(), None);
        assert_eq!(returns(&plain.properties), 0);
        assert_eq!(read(&plain.properties).unwrap().first, None);
        let table = plain.properties.headers().as_ref().unwrap();
        assert!(table.contains_key("tenant"));

        let first = copy(&delivery("shop", 10, Some("till")), "orders", Some("me")).unwrap();
        let second = copy(&delivered(first), "orders", Some("me")).unwrap();
        assert_eq!(
            second
                .properties
                .user_id()
                .as_ref()
                .map(ShortString::as_str),
            Some("me")
        );
        let again = read(&second.properties).unwrap();
        let first = again.first.unwrap();
        assert_eq!((again.returns, first.exchange.as_str()), (10, "shop"));
        assert_eq!(first.user_id.as_deref(), Some("till"));
    }

    #[test]
    fn what_a_copy_could_not_say_is_not_copied() {
        // Without a user of its own, nothing would vouch for the first exchange.
        assert!(copy(&delivery("shop", 10, None), "orders", None).is_none());
        let mut routed = delivery("", 10, None);
        let mut table = FieldTable::default();
        table.insert("CC".into(), AMQPValue::FieldArray(Vec::new().into()));
        routed.properties = BasicProperties::default().with_headers(table);
        assert!(copy(&routed, "orders", Some("me")).is_none());
    }

    #[test]
    fn a_message_is_sent_again_long_before_it_is_dropped() {
        for (limit, in_order, near, far) in [
            (None, false, 10, 9),
            (Some(3), false, 1, 0),
            (Some(50), false, 25, 24),
            (None, true, 20, 19),
        ] {
            let limits = BrokerLimits::new(limit, None, in_order);
            assert!(limits.is_near(near) && !limits.is_near(far), "{limit:?}");
        }
        let mut limits = BrokerLimits::new(None, None, false);
        limits.learn(Duration::from_secs(5));
        assert_eq!(limits.hold_most(), Duration::from_millis(2_500));
    }
}
