//! The lines that a worker gets on its standard input: one JSON object each.

use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use oncegate_runtime::{Header, Message};
use serde::Serialize;
use serde_json::value::Value;
use tokio::io::AsyncWriteExt as _;
use tokio::process::ChildStdin;
use tokio::sync::mpsc;

use super::attributes::Room;
use super::call::{AttemptInfo, Call, Order};
use super::origin;

/// A message as a line for a worker.
#[derive(Serialize)]
pub(crate) struct HandleLine<'a> {
    r#type: &'static str,
    v: u32,
    id: &'a str,
    idempotency_key: &'a str,
    attempt: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    fencing_token: Option<u64>,
    recovered: bool,
    lease_ms: u64,
    origin: serde_json::Value,
    #[serde(skip_serializing_if = "Option::is_none")]
    key: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    key_base64: Option<String>,
    headers: Vec<(&'a str, serde_json::Value)>,
    /// The number of headers, the key among them, that are too large to be passed.
    #[serde(skip_serializing_if = "is_zero")]
    headers_left_out: usize,
    /// `null` for a tombstone; left out when it is not text.
    #[serde(skip_serializing_if = "Option::is_none")]
    payload: Option<Option<&'a str>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    payload_base64: Option<String>,
}

#[expect(
    clippy::trivially_copy_pass_by_ref,
    reason = "serde passes a reference"
)]
fn is_zero(count: &usize) -> bool {
    *count == 0
}

/// A batch as a line for a worker.
#[derive(Serialize)]
pub(crate) struct BatchLine<'a> {
    r#type: &'static str,
    v: u32,
    messages: Vec<HandleLine<'a>>,
}

impl<'a> BatchLine<'a> {
    /// The messages with their ids.
    pub(crate) fn of(orders: &'a [(Order, String)], lease: Duration) -> Self {
        let messages = orders
            .iter()
            .map(|(order, id)| HandleLine::of_order(order, id, lease))
            .collect();
        Self {
            r#type: "batch",
            v: 1,
            messages,
        }
    }
}

fn header_value(value: Option<&[u8]>) -> Value {
    match value.map(|value| (value, std::str::from_utf8(value))) {
        None => Value::Null,
        Some((_, Ok(text))) => Value::from(text),
        Some((value, Err(_))) => serde_json::json!({ "base64": BASE64.encode(value) }),
    }
}

impl<'a> HandleLine<'a> {
    pub(crate) fn of_order(order: &'a Order, id: &'a str, lease: Duration) -> Self {
        Self::of(&order.message, &order.attempt, id, lease)
    }

    /// Logs how many headers are left out, if any are.
    pub(crate) fn of(
        message: &'a Message,
        attempt: &'a AttemptInfo,
        id: &'a str,
        lease: Duration,
    ) -> Self {
        let text = std::str::from_utf8(message.payload()).ok();
        let mut room = Room::default();
        let key = message.key().filter(|key| room.takes("key", key));
        let key_text = key.and_then(|key| std::str::from_utf8(key).ok());
        let headers = message
            .headers()
            .iter()
            .filter(|Header { name, value }| room.takes(name, value.as_deref().unwrap_or_default()))
            .map(|Header { name, value }| (&**name, header_value(value.as_deref())))
            .collect();
        let headers_left_out = room.tell(message);
        Self {
            r#type: "message",
            v: 1,
            id,
            idempotency_key: &attempt.idempotency_key,
            attempt: attempt.number,
            fencing_token: attempt.fencing_token,
            recovered: attempt.recovered,
            lease_ms: u64::try_from(lease.as_millis()).unwrap_or(u64::MAX),
            origin: origin::as_json(message),
            key: key_text.map(str::to_owned),
            key_base64: key
                .filter(|_| key_text.is_none())
                .map(|key| BASE64.encode(key)),
            headers,
            headers_left_out,
            payload: text.map(|text| (!message.is_tombstone()).then_some(text)),
            payload_base64: text.is_none().then(|| BASE64.encode(message.payload())),
        }
    }
}

/// A line for a worker.
#[derive(Debug)]
pub(crate) struct Outgoing {
    pub(crate) line: Vec<u8>,
    /// The call that begins when this line is written.
    pub(crate) call: Option<Call>,
}

/// Writes lines until all senders are dropped, and closes the worker's input. A call that was
/// withdrawn before its line is written does not begin.
pub(crate) async fn write_lines(mut stdin: ChildStdin, mut lines: mpsc::Receiver<Outgoing>) {
    while let Some(Outgoing { mut line, call }) = lines.recv().await {
        if call.is_some_and(|call| !call.begin()) {
            continue;
        }
        line.push(b'\n');
        if stdin.write_all(&line).await.is_err() || stdin.flush().await.is_err() {
            return;
        }
    }
}

#[cfg(test)]
mod tests;
