//! A response as stored in a record: an HTTP/1.1 message, which any language can read.
//!
//! ```text
//! HTTP/1.1 201 Created
//! content-type: application/json
//! oncegate-expires: 1796000000
//!
//! {"charge":"ch_1"}
//! ```
//!
//! `oncegate-expires` is the time at which the record expires, in seconds since 1970.
//! `oncegate-body: not-kept` means that there was a body and that it was not stored. A 1xx response
//! (a change of protocols) cannot be repeated and is not kept.

use ::http::header::{self, HeaderName};
use ::http::{HeaderMap, HeaderValue, Response, StatusCode};
use bytes::{BufMut, Bytes, BytesMut};

use super::body::Body;

/// The most headers of a kept response.
const MAX_KEPT_HEADERS: usize = 128;

const EXPIRES: &str = "oncegate-expires";
const BODY: &str = "oncegate-body";
const NOT_KEPT: &[u8] = b"not-kept";
/// Headers with this prefix belong to the record, not to the response.
const OURS: &str = "oncegate-";

/// Marks a response as a repetition.
const REPLAYED: HeaderName = HeaderName::from_static("idempotent-replayed");
/// The time at which the key expires: a date of RFC 9651, `@` and seconds since 1970.
const IDEMPOTENCY_EXPIRES: HeaderName = HeaderName::from_static("idempotency-expires");

/// Headers that are not kept: they are valid for one connection, one moment or one request.
const NOT_REPEATED: [HeaderName; 25] = [
    header::CONNECTION,
    HeaderName::from_static("keep-alive"),
    header::TE,
    header::TRAILER,
    header::TRANSFER_ENCODING,
    header::UPGRADE,
    header::DATE,
    header::AGE,
    // Computed again from the body.
    header::CONTENT_LENGTH,
    // A client that repeats the request must not get another client's session.
    header::SET_COOKIE,
    HeaderName::from_static("server-timing"),
    HeaderName::from_static("traceparent"),
    HeaderName::from_static("tracestate"),
    HeaderName::from_static("baggage"),
    HeaderName::from_static("b3"),
    HeaderName::from_static("uber-trace-id"),
    HeaderName::from_static("x-trace-id"),
    HeaderName::from_static("x-amzn-trace-id"),
    HeaderName::from_static("x-amzn-requestid"),
    HeaderName::from_static("x-cloud-trace-context"),
    HeaderName::from_static("cf-ray"),
    HeaderName::from_static("request-id"),
    HeaderName::from_static("x-request-id"),
    HeaderName::from_static("x-correlation-id"),
    header::ALT_SVC,
];
const NOT_REPEATED_PREFIXES: [&str; 6] = [
    "proxy-",
    "ratelimit",
    "x-ratelimit-",
    "x-b3-",
    "x-datadog-",
    OURS,
];

/// Headers with this prefix allow one origin to read the response, unless that is `*`.
const CORS: &str = "access-control-";

/// The part of a response that is kept.
#[derive(Debug)]
pub(super) struct StoredResponse {
    pub(super) status: StatusCode,
    headers: HeaderMap,
    /// The body; `None` when it is too large, endless or broken.
    body: Option<Bytes>,
    expires_unix_s: u64,
}

impl StoredResponse {
    pub(super) fn new(
        status: StatusCode,
        headers: &HeaderMap,
        body: Option<Bytes>,
        expires_unix_s: u64,
    ) -> Self {
        let kept = repeatable(headers);
        if status.is_informational() || kept.len() > MAX_KEPT_HEADERS - 2 {
            return Self {
                status,
                headers: HeaderMap::new(),
                body: None,
                expires_unix_s,
            };
        }
        Self {
            status,
            headers: kept,
            body,
            expires_unix_s,
        }
    }

    pub(super) fn is_whole(&self) -> bool {
        self.body.is_some()
    }

    pub(super) fn encode(&self) -> Bytes {
        let reason = self.status.canonical_reason().unwrap_or_default();
        let mut out = BytesMut::new();
        out.put_slice(format!("HTTP/1.1 {} {reason}\r\n", self.status.as_u16()).as_bytes());
        for (name, value) in &self.headers {
            put_line(&mut out, name.as_str(), value.as_bytes());
        }
        let expires = self.expires_unix_s.to_string();
        put_line(&mut out, EXPIRES, expires.as_bytes());
        if self.body.is_none() {
            put_line(&mut out, BODY, NOT_KEPT);
        }
        out.put_slice(b"\r\n");
        out.put_slice(self.body.as_deref().unwrap_or_default());
        out.freeze()
    }

    /// Decodes a stored response; `None` when the bytes are not one.
    pub(super) fn decode(stored: &Bytes) -> Option<Self> {
        let mut lines = [httparse::EMPTY_HEADER; MAX_KEPT_HEADERS];
        let mut head = httparse::Response::new(&mut lines);
        let httparse::Status::Complete(head_bytes) = head.parse(stored).ok()? else {
            return None;
        };
        let status = StatusCode::from_u16(head.code?).ok()?;
        let mut headers = HeaderMap::new();
        let mut body = Some(stored.slice(head_bytes..)).filter(|_| !status.is_informational());
        let mut expires_unix_s = 0;
        for line in head.headers {
            match line.name {
                EXPIRES => expires_unix_s = std::str::from_utf8(line.value).ok()?.parse().ok()?,
                BODY => body = None,
                name => {
                    let name = HeaderName::from_bytes(name.as_bytes()).ok()?;
                    headers.append(name, HeaderValue::from_bytes(line.value).ok()?);
                }
            }
        }
        // Another program may have written the record, with headers that would break this
        // connection.
        Some(Self {
            status,
            headers: repeatable(&headers),
            body,
            expires_unix_s,
        })
    }

    /// The response for a repetition; `None` when its body was not kept.
    pub(super) fn replay(self) -> Option<Response<Body>> {
        let mut response = Response::new(Body::from(self.body?));
        *response.status_mut() = self.status;
        *response.headers_mut() = self.headers;
        response
            .headers_mut()
            .insert(REPLAYED, HeaderValue::from_static("true"));
        mark_expiry(response.headers_mut(), self.expires_unix_s);
        Some(response)
    }
}

fn put_line(out: &mut BytesMut, name: &str, value: &[u8]) {
    out.put_slice(name.as_bytes());
    out.put_slice(b": ");
    out.put_slice(value);
    out.put_slice(b"\r\n");
}

/// The headers that a repetition gets: those that are not about one connection, one moment or one
/// request.
fn repeatable(headers: &HeaderMap) -> HeaderMap {
    let named_by_connection: Vec<&str> = headers
        .get_all(header::CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .map(str::trim)
        .collect();
    // Any other origin is that of the first client.
    let for_all = headers
        .get(header::ACCESS_CONTROL_ALLOW_ORIGIN)
        .is_some_and(|origin| origin == "*");
    headers
        .iter()
        .filter(|(name, _)| is_repeatable(name, &named_by_connection))
        .filter(|(name, _)| for_all || !name.as_str().starts_with(CORS))
        .map(|(name, value)| (name.clone(), value.clone()))
        .collect()
}

fn is_repeatable(name: &HeaderName, named_by_connection: &[&str]) -> bool {
    !NOT_REPEATED.contains(name)
        && !NOT_REPEATED_PREFIXES
            .iter()
            .any(|prefix| name.as_str().starts_with(prefix))
        && !named_by_connection
            .iter()
            .any(|named| name.as_str().eq_ignore_ascii_case(named))
}

/// Adds the header with the time when the key expires.
pub(super) fn mark_expiry(headers: &mut HeaderMap, expires_unix_s: u64) {
    if let Ok(date) = HeaderValue::try_from(format!("@{expires_unix_s}")) {
        headers.insert(IDEMPOTENCY_EXPIRES, date);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(lines: &[(&'static str, &'static str)]) -> HeaderMap {
        lines
            .iter()
            .map(|(name, value)| {
                (
                    HeaderName::from_static(name),
                    HeaderValue::from_static(value),
                )
            })
            .collect()
    }

    #[test]
    fn a_response_comes_back_with_the_headers_that_are_its_own() {
        let given = headers(&[
            ("content-type", "application/json"),
            ("location", "/charges/1"),
            ("etag", "\"x\""),
            ("set-cookie", "session=secret"),
            ("date", "Sat, 21 Nov 2026 00:00:00 GMT"),
            ("content-length", "3"),
            ("connection", "close, X-Hop"),
            ("x-hop", "1"),
            ("proxy-authenticate", "Basic"),
            ("ratelimit-remaining", "3"),
            ("x-request-id", "r"),
            ("oncegate-body", "not-kept"),
        ]);
        let body = Bytes::from_static(b"a\r\n\r\n\0\xffb");
        let stored =
            StoredResponse::new(StatusCode::CREATED, &given, Some(body.clone()), 7).encode();
        let kept = StoredResponse::decode(&stored).unwrap();
        assert_eq!(
            (kept.status, kept.body.clone(), kept.expires_unix_s),
            (StatusCode::CREATED, Some(body), 7)
        );
        let expected = [
            ("content-type", "application/json"),
            ("location", "/charges/1"),
            ("etag", "\"x\""),
        ];
        assert_eq!(kept.headers, headers(&expected));
        let replayed = kept.replay().unwrap();
        assert_eq!(
            replayed.headers().get("idempotent-replayed").unwrap(),
            "true"
        );
        assert_eq!(replayed.headers().get("idempotency-expires").unwrap(), "@7");
    }

    #[test]
    fn a_repetition_gets_nothing_of_the_first_client() {
        let kept = |lines: &[(&'static str, &'static str)]| repeatable(&headers(lines));
        let of_one = kept(&[
            ("access-control-allow-origin", "https://one.example"),
            ("access-control-allow-credentials", "true"),
            ("access-control-expose-headers", "x-a"),
            ("x-b3-traceid", "1"),
            ("b3", "1"),
            ("x-amzn-trace-id", "1"),
            ("x-correlation-id", "1"),
            ("vary", "origin"),
        ]);
        assert_eq!(of_one, headers(&[("vary", "origin")]));
        let of_all = [
            ("access-control-allow-origin", "*"),
            ("access-control-expose-headers", "x-a"),
        ];
        assert_eq!(kept(&of_all), headers(&of_all));
    }

    #[test]
    fn a_body_that_was_not_kept_is_no_empty_body() {
        let stored = StoredResponse::new(StatusCode::OK, &HeaderMap::new(), None, 0).encode();
        let kept = StoredResponse::decode(&stored).unwrap();
        assert!(!kept.is_whole() && kept.replay().is_none());
        let stored =
            StoredResponse::new(StatusCode::OK, &HeaderMap::new(), Some(Bytes::new()), 0).encode();
        assert!(StoredResponse::decode(&stored).unwrap().is_whole());
    }

    #[test]
    fn odd_headers_survive_and_too_many_are_not_kept() {
        let mut given = HeaderMap::new();
        given.append("x-latin", HeaderValue::from_bytes(b"caf\xe9 \t x").unwrap());
        given.append("x-empty", HeaderValue::from_static(""));
        given.append("x-twice", HeaderValue::from_static("1"));
        given.append("x-twice", HeaderValue::from_static("2"));
        let status = StatusCode::from_u16(599).unwrap();
        let kept = StoredResponse::decode(
            &StoredResponse::new(status, &given, Some(Bytes::new()), 0).encode(),
        )
        .unwrap();
        assert_eq!((kept.status, kept.headers), (status, given));
        let many: HeaderMap = (0..200)
            .map(|n| {
                (
                    HeaderName::try_from(format!("x-{n}")).unwrap(),
                    HeaderValue::from_static("v"),
                )
            })
            .collect();
        assert!(
            !StoredResponse::decode(
                &StoredResponse::new(StatusCode::OK, &many, Some(Bytes::new()), 0).encode()
            )
            .unwrap()
            .is_whole()
        );
    }

    #[test]
    fn garbage_is_no_response() {
        for garbage in [
            "",
            "{}",
            "HTTP/1.1 2",
            "HTTP/1.1 200 OK\r\nx: y\r\n",
            "GET / HTTP/1.1\r\n\r\n",
        ] {
            assert!(
                StoredResponse::decode(&Bytes::from_static(garbage.as_bytes())).is_none(),
                "{garbage:?}"
            );
        }
    }
}
