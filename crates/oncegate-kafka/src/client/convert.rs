//! Converts librdkafka's messages to ours.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use bytes::Bytes;
use rdkafka::Message as _;
use rdkafka::message::{BorrowedHeaders, BorrowedMessage, Headers as _};

use super::headers::{ID_HEADER, ROUTE_HEADER, SCOPE_HEADER};
use oncegate_runtime::message::{Header, Message, Origin};

/// The name of a header whose own name is not UTF-8.
const UNREADABLE_NAME: &str = "\u{fffd}";

/// The longest route that a header may have, in bytes; a longer one is not ours.
const ROUTE_MAX_BYTES: usize = 249;

/// Copies a message from librdkafka: the payload once, the rest as needed.
pub(crate) fn message(topic: &Arc<str>, routes: Routes, borrowed: &BorrowedMessage<'_>) -> Message {
    let origin = Origin::Kafka {
        topic: Arc::clone(topic),
        partition: borrowed.partition(),
        offset: borrowed.offset(),
    };
    let payload = borrowed.payload().map(Bytes::copy_from_slice);
    let headers = borrowed.headers().map(headers).unwrap_or_default();
    let route = match routes {
        Routes::Topics => None,
        Routes::Headers => route(&headers),
    };
    let mut message = Message::new(route.unwrap_or_else(|| Arc::clone(topic)), origin, payload);
    if let Some(key) = borrowed.key() {
        message = message.with_key(Bytes::copy_from_slice(key));
    }
    if let Some(timestamp_ms) = borrowed.timestamp().to_millis() {
        message = message.with_timestamp_ms(timestamp_ms);
    }
    if let Some(scope) = letter_of(&headers) {
        message = message.with_dead_letter_of(scope);
    }
    if headers.is_empty() {
        message
    } else {
        message.with_headers(headers)
    }
}

/// The source of a message's route.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Routes {
    /// The topic; the route header is ignored, because any service may copy headers to another
    /// message.
    #[default]
    Topics,
    /// The route header that dead letters have, else the topic.
    Headers,
}

/// Returns the first route of a message that was retried or redriven.
fn route(headers: &[Header]) -> Option<Arc<str>> {
    let route = text(headers, ROUTE_HEADER)?;
    (!route.is_empty() && route.len() <= ROUTE_MAX_BYTES).then(|| Arc::from(route))
}

/// Returns the scope that has written the message as a dead letter. A message that a redrive of
/// ours has sent has none of these headers.
fn letter_of(headers: &[Header]) -> Option<Arc<str>> {
    let scope = text(headers, SCOPE_HEADER)?;
    text(headers, ID_HEADER)
        .filter(|id| !id.is_empty())
        .map(|_| Arc::from(scope))
}

/// Returns the last header of this name, if it is text.
fn text<'a>(headers: &'a [Header], name: &str) -> Option<&'a str> {
    let header = headers.iter().rev().find(|header| &*header.name == name)?;
    std::str::from_utf8(header.value.as_deref()?).ok()
}

fn headers(borrowed: &BorrowedHeaders) -> Vec<Header> {
    (0..borrowed.count())
        .filter_map(|index| header(borrowed, index))
        .collect()
}

/// Returns one header.
///
/// A name that is not UTF-8 is not an error: the protocol forbids it, but producers send it, and an
/// error would make the message be delivered again and again.
fn header(borrowed: &BorrowedHeaders, index: usize) -> Option<Header> {
    // rdkafka unwraps the name as UTF-8 and has no other access to a header. Nothing is borrowed
    // mutably, so a panic leaves no broken state; only the value of such a header cannot be read.
    let read = catch_unwind(AssertUnwindSafe(|| borrowed.try_get(index)));
    match read {
        Ok(header) => {
            let header = header?;
            Some(Header {
                name: header.key.into(),
                value: header.value.map(Bytes::copy_from_slice),
            })
        }
        Err(_) => Some(Header {
            name: UNREADABLE_NAME.into(),
            value: None,
        }),
    }
}
