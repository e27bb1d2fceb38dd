//! Turns a message, or a batch, into an HTTP request.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use bytes::Bytes;
use http_body_util::Full;
use hyper::header::{AUTHORIZATION, CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue};
use hyper::{Method, Request, Uri};
use oncegate_runtime::Message;
use parking_lot::Mutex;
use tracing::warn;

use super::attributes::Room;
use super::call::{AttemptInfo, Order};
use super::lines::HandleLine;
use super::origin;

/// The longest content type of a message that is passed on, in bytes; a longer one is replaced by
/// that of the settings.
const CONTENT_TYPE_MAX_BYTES: usize = 256;
/// The prefix of a message's own headers.
const ATTRIBUTE: &str = "oncegate-attr-";
/// The prefix that the Kafka binding of CloudEvents gives to their attributes.
const CE_KAFKA: &str = "ce_";

/// The parts that all requests to a worker share.
#[derive(Clone)]
pub(crate) struct RequestParts {
    pub(crate) content_type: HeaderValue,
    pub(crate) token: Option<Arc<Token>>,
    /// The lease that a run begins with, in milliseconds.
    pub(crate) lease_ms: u128,
    /// `true` if messages that are not CloudEvents get the headers of one.
    pub(crate) cloudevents: bool,
}

impl RequestParts {
    /// The lease that a run begins with.
    fn lease(&self) -> Duration {
        Duration::from_millis(u64::try_from(self.lease_ms).unwrap_or(u64::MAX))
    }
}

/// The request for a message.
///
/// # Errors
/// When one of oncegate's headers cannot be made, which no message from a broker can cause.
pub(crate) fn of(
    message: &Message,
    attempt: &AttemptInfo,
    uri: &Uri,
    told: &RequestParts,
) -> Result<Request<Full<Bytes>>, hyper::http::Error> {
    let content_type = message
        .header("content-type")
        .filter(|value| value.len() <= CONTENT_TYPE_MAX_BYTES);
    let content_type = content_type.and_then(|value| HeaderValue::from_bytes(value).ok());
    let mut request = Request::builder()
        .method(Method::POST)
        .uri(uri)
        .header(
            CONTENT_TYPE,
            content_type.unwrap_or_else(|| told.content_type.clone()),
        )
        .header("idempotency-key", origin::quoted(&attempt.idempotency_key))
        .header("oncegate-attempt", attempt.number)
        .header(
            "oncegate-recovered",
            if attempt.recovered { "?1" } else { "?0" },
        )
        .header("oncegate-lease", told.lease_ms.to_string())
        .header("oncegate-origin", origin::as_dictionary(message));
    if let Some(fencing_token) = attempt.fencing_token {
        request = request.header("oncegate-fencing-token", fencing_token);
    }
    if message.is_tombstone() {
        request = request.header("oncegate-tombstone", "?1");
    }
    if let Some(token) = &told.token {
        request = request.header(AUTHORIZATION, token.header());
    }
    let mut request = request.body(Full::new(message.payload_bytes().unwrap_or_default()))?;
    // Headers with a defined meaning use the limited space first.
    let headers = request.headers_mut();
    let mut room = Room::default();
    for name in ["traceparent", "tracestate"] {
        if let Some(value) = message.header(name)
            && let Ok(header) = HeaderValue::from_bytes(value)
            && room.takes(name, value)
        {
            headers.insert(name, header);
        }
    }
    if let Some(key) = message.key()
        && room.takes("oncegate-message-key", key)
        && let Ok(value) = HeaderValue::try_from(format!(":{}:", BASE64.encode(key)))
    {
        headers.insert("oncegate-message-key", value);
    }
    add_cloudevent(message, told.cloudevents, headers, &mut room);
    add_attributes(message, headers, &mut room);
    if room.tell(message) > 0 {
        headers.insert(
            "oncegate-attrs-left-out",
            HeaderValue::from(room.left_out()),
        );
    }
    Ok(request)
}

/// The request for a batch: the messages are a JSON array, numbered from 1.
///
/// # Errors
/// When a header cannot be made, which no message can cause.
pub(crate) fn of_batch(
    orders: &[Order],
    uri: &Uri,
    told: &RequestParts,
) -> Result<Request<Full<Bytes>>, hyper::http::Error> {
    let ids: Vec<String> = (1..=orders.len())
        .map(|number| number.to_string())
        .collect();
    let lease = told.lease();
    let numbered = orders.iter().zip(&ids);
    let lines: Vec<HandleLine<'_>> = numbered
        .map(|(order, id)| HandleLine::of_order(order, id, lease))
        .collect();
    // Strings, numbers and JSON values cannot fail to be written as JSON.
    let body = serde_json::to_vec(&lines).unwrap_or_default();
    let mut request = Request::builder()
        .method(Method::POST)
        .uri(uri)
        .header(CONTENT_TYPE, "application/json")
        .header("oncegate-batch", orders.len())
        .header("oncegate-lease", told.lease_ms.to_string());
    if let Some(token) = &told.token {
        request = request.header(AUTHORIZATION, token.header());
    }
    request.body(Full::new(Bytes::from(body)))
}

/// The message's own headers, as far as their names and values are allowed in HTTP.
fn add_attributes(message: &Message, headers: &mut HeaderMap, room: &mut Room) {
    for header in message.headers() {
        let name = HeaderName::try_from(format!("{ATTRIBUTE}{}", header.name.to_lowercase()));
        let value = header
            .value
            .as_deref()
            .filter(|value| value.iter().all(|byte| (0x20..0x7f).contains(byte)));
        match (name, value.map(HeaderValue::from_bytes)) {
            (Ok(name), Some(Ok(value))) => {
                if room.takes(name.as_str(), value.as_bytes()) {
                    headers.append(name, value);
                }
            }
            _ => room.leave_out(),
        }
    }
}

/// Adds the headers of a CloudEvent: in binary mode its attributes are headers, in structured mode
/// the body has them.
fn add_cloudevent(message: &Message, always: bool, headers: &mut HeaderMap, room: &mut Room) {
    let mut is_event = false;
    for header in message.headers() {
        let Some(attribute) = header.name.strip_prefix(CE_KAFKA) else {
            continue;
        };
        let Ok(name) = HeaderName::try_from(format!("ce-{attribute}")) else {
            continue;
        };
        let Some(value) = header.value.as_deref().and_then(percent_encoded) else {
            continue;
        };
        is_event = true;
        if room.takes(name.as_str(), value.as_bytes()) {
            headers.insert(name, value);
        }
    }
    let structured = message
        .header("content-type")
        .is_some_and(|name| name.starts_with(b"application/cloudevents"));
    if !always || is_event || structured {
        return;
    }
    let id = message.origin().to_string();
    let attributes = [
        ("ce-specversion", "1.0"),
        ("ce-type", "oncegate.message"),
        ("ce-id", &id),
        ("ce-source", &origin::as_source(message)),
    ];
    for (name, value) in attributes {
        if let Some(value) = percent_encoded(value.as_bytes()) {
            headers.insert(HeaderName::from_static(name), value);
        }
    }
}

/// Percent-encodes a header value as CloudEvents require: everything but visible ASCII, and `"` and
/// `%`.
fn percent_encoded(value: &[u8]) -> Option<HeaderValue> {
    let text = std::str::from_utf8(value).ok()?;
    let mut out = String::with_capacity(text.len());
    for byte in text.bytes() {
        match byte {
            b'"' | b'%' => out.push_str(&format!("%{byte:02X}")),
            b'!'..=b'~' => out.push(char::from(byte)),
            _ => out.push_str(&format!("%{byte:02X}")),
        }
    }
    HeaderValue::try_from(out).ok()
}

/// The place of the token for a worker. Its `Debug` shows no token.
pub trait TokenSource: fmt::Debug + Send + Sync {
    /// Reads the token.
    ///
    /// # Errors
    /// As text: the file or variable cannot be read.
    fn read(&self) -> Result<String, String>;
}

/// The token for a worker. It is read for each request: a file that was replaced may have kept its
/// time.
pub(crate) struct Token {
    source: Arc<dyn TokenSource>,
    last: Mutex<LastToken>,
}

/// The last token that was read.
struct LastToken {
    /// The token of the header, or why it could not be read.
    read: Result<String, String>,
    /// The last one that could be used.
    header: HeaderValue,
}

impl Token {
    /// # Errors
    /// As text: the file or variable cannot be read, or is no token.
    pub(crate) fn of(source: Arc<dyn TokenSource>) -> Result<Self, String> {
        let token = source.read()?;
        let header = bearer(&token)?;
        let last = Mutex::new(LastToken {
            read: Ok(token),
            header,
        });
        Ok(Self { source, last })
    }

    /// The header's value. If the file has changed to something unusable, the former one is used.
    pub(crate) fn header(&self) -> HeaderValue {
        let read = self.source.read();
        let mut last = self.last.lock();
        if read != last.read {
            match read.clone().and_then(|token| bearer(&token)) {
                Ok(header) => last.header = header,
                Err(why) => warn!(why, "the changed token for the worker cannot be used"),
            }
            last.read = read;
        }
        last.header.clone()
    }
}

impl fmt::Debug for Token {
    /// Shows no token.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.source.fmt(f)
    }
}

/// A header with a secret value, which never appears in a log.
fn bearer(token: &str) -> Result<HeaderValue, String> {
    let mut value = HeaderValue::try_from(format!("Bearer {}", token.trim()))
        .map_err(|_| "the token has characters that are not allowed in a header".to_owned())?;
    value.set_sensitive(true);
    Ok(value)
}

#[cfg(test)]
mod tests {
    use oncegate_runtime::{Header, Origin};

    use super::*;

    fn told(cloudevents: bool) -> RequestParts {
        let content_type = HeaderValue::from_static("application/octet-stream");
        RequestParts {
            content_type,
            token: None,
            lease_ms: 30_000,
            cloudevents,
        }
    }

    fn message(headers: &[(&str, &'static [u8])]) -> Message {
        let origin = Origin::Kafka {
            topic: "orders".into(),
            partition: 3,
            offset: 42,
        };
        let headers = headers.iter().map(|(name, value)| Header {
            name: (*name).into(),
            value: Some(Bytes::from_static(value)),
        });
        Message::new("orders", origin, Some("{}".into()))
            .with_headers(headers.collect())
            .with_key("k7")
    }

    fn header(request: &Request<Full<Bytes>>, name: &str) -> Option<String> {
        request
            .headers()
            .get(name)
            .map(|value| value.to_str().unwrap().to_owned())
    }

    fn request(headers: &[(&str, &'static [u8])], cloudevents: bool) -> Request<Full<Bytes>> {
        of(
            &message(headers),
            &AttemptInfo::first("01980000-40d5-83e8-bc93-6894a57f9324"),
            &Uri::from_static("http://localhost/handle"),
            &told(cloudevents),
        )
        .unwrap()
    }

    #[test]
    fn a_message_is_a_post_with_these_headers() {
        let request = request(
            &[
                ("Tenant", b"acme"),
                ("content-type", b"text/plain"),
                ("bin", b"\xff"),
                ("a b", b"x"),
            ],
            false,
        );
        assert_eq!(
            (request.method(), request.uri().path()),
            (&Method::POST, "/handle")
        );
        let expected = [
            ("content-type", "text/plain"),
            ("oncegate-attempt", "1"),
            ("oncegate-recovered", "?0"),
            ("oncegate-lease", "30000"),
            (
                "oncegate-origin",
                r#"kafka, topic="orders", partition=3, offset=42"#,
            ),
            ("oncegate-message-key", ":azc=:"),
            ("oncegate-attr-tenant", "acme"),
            ("oncegate-attrs-left-out", "2"),
        ];
        for (name, value) in expected {
            assert_eq!(header(&request, name).as_deref(), Some(value), "{name}");
        }
        let key = header(&request, "idempotency-key").unwrap();
        assert!(
            key.starts_with('"') && key.ends_with('"') && key.len() == 38,
            "{key}"
        );
        assert_eq!(header(&request, "oncegate-fencing-token"), None);
        assert_eq!(header(&request, "ce-id"), None);
    }

    #[test]
    fn cloudevents_pass_in_the_headers_of_http() {
        let event = request(
            &[("ce_id", "é 1".as_bytes()), ("ce_specversion", b"1.0")],
            true,
        );
        assert_eq!(header(&event, "ce-id").as_deref(), Some("%C3%A9%201"));
        assert_eq!(header(&event, "ce-source"), None, "it is its own event");
        let other = request(&[], true);
        assert_eq!(
            header(&other, "ce-source").as_deref(),
            Some("/kafka/orders")
        );
        assert_eq!(header(&other, "ce-id").as_deref(), Some("orders/3@42"));
        let structured = request(&[("content-type", b"application/cloudevents+json")], true);
        assert_eq!(header(&structured, "ce-id"), None);
    }
}
