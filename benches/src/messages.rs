//! What is sent through: JSON of 200 bytes, as an order system might produce it.

use bytes::Bytes;
use oncegate::{Key, Message, Origin};

/// The size of every payload.
pub(crate) const PAYLOAD_BYTES: usize = 200;

/// The route of every message, and the topic's logical name.
pub(crate) const ROUTE: &str = "orders";

/// The `n`th payload. Its order is its own; a thousand orders in turn have a customer each.
pub(crate) fn payload(n: usize) -> Bytes {
    let customer = n % 1_000;
    let mut json = format!(
        r#"{{"order_id":"A-{n:012}","customer":{{"id":{customer},"country":"SE"}},"amount":"{}.50","currency":"EUR","items":[{{"sku":"K-{customer:06}","count":2}}],"sent_at":1767225600,"note":""#,
        n % 500
    );
    while json.len() < PAYLOAD_BYTES - 2 {
        json.push('.');
    }
    json.push_str("\"}");
    json.into()
}

/// Two fields, one of them nested.
pub(crate) fn key() -> Key {
    Key::json(["order_id", "customer.id"])
}

/// The broker's key of the `n`th message: one in a thousand.
pub(crate) fn broker_key(n: usize) -> Bytes {
    format!("customer-{:03}", n % 1_000).into()
}

/// The first `count` messages, as a source without a broker would deliver them; no two are the same.
pub(crate) fn messages(count: usize) -> Vec<Message> {
    messages_over(count, count)
}

/// So many messages over so many idempotency keys, which come in turns.
pub(crate) fn messages_over(count: usize, keys: usize) -> Vec<Message> {
    (0..count).map(|n| message(n % keys)).collect()
}

/// The `n`th message.
pub(crate) fn message(n: usize) -> Message {
    Message::new(ROUTE, Origin::Other("memory".into()), Some(payload(n))).with_key(broker_key(n))
}

/// A scope that nobody has used, short enough for the smallest store key.
pub(crate) fn fresh_scope() -> String {
    format!("b{:06x}", fastrand::u32(..1 << 24))
}
