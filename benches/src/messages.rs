//! The messages of the benchmarks: JSON payloads of 200 bytes, as an order system might produce
//! them.

use bytes::Bytes;
use oncegate::{Key, Message, Origin};

/// The size of every payload.
pub(crate) const PAYLOAD_BYTES: usize = 200;

/// The route of every message, and the topic's logical name.
pub(crate) const ROUTE: &str = "orders";

/// The `n`th payload. Its order id is unique; the customers repeat after a thousand orders.
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

/// A key of two fields, one of them nested.
pub(crate) fn key() -> Key {
    Key::json(["order_id", "customer.id"])
}

/// The broker's key of the `n`th message: one of a thousand keys.
pub(crate) fn broker_key(n: usize) -> Bytes {
    format!("customer-{:03}", n % 1_000).into()
}

/// The first `count` messages, as a source without a broker delivers them. All are different.
pub(crate) fn messages(count: usize) -> Vec<Message> {
    messages_over(count, count)
}

/// `count` messages over a number of idempotency keys, which repeat in turns.
pub(crate) fn messages_over(count: usize, keys: usize) -> Vec<Message> {
    (0..count).map(|n| message(n % keys)).collect()
}

/// The `n`th message.
pub(crate) fn message(n: usize) -> Message {
    Message::new(ROUTE, Origin::Other("memory".into()), Some(payload(n))).with_key(broker_key(n))
}

/// A random scope for one measurement, short enough for the smallest store key.
pub(crate) fn fresh_scope() -> String {
    format!("b{:06x}", fastrand::u32(..1 << 24))
}
