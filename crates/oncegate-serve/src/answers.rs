//! Responses that no door gives: problem details (RFC 9457), without a place in any record.

use bytes::Bytes;
use http::header::{ALLOW, CONNECTION, CONTENT_TYPE, RETRY_AFTER};
use http::{HeaderValue, Response, StatusCode};
use serde::Serialize;

use crate::Body;

/// The reason that a request has no response of a door or of its service.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    /// No door takes the path.
    NoDoor,
    /// A tunnel was asked for.
    NoTunnel,
    /// The request's own body broke off.
    RequestBroken,
    /// The service was not reached: it has read nothing of the request.
    NotReached,
    /// The service has read some or all of the request, and has not answered.
    NotAnswered,
    /// The service has not begun to answer in time.
    TooSlow,
}

#[derive(Serialize)]
struct Details {
    r#type: String,
    title: &'static str,
    status: u16,
    detail: &'static str,
}

impl Answer {
    /// The documentation of the problems, which are those of the layer besides these.
    const AT: &'static str =
        "https://docs.rs/oncegate-serve/latest/oncegate_serve/proxy/index.html#";

    fn parts(self) -> (&'static str, StatusCode, &'static str, &'static str) {
        match self {
            Self::NoDoor => (
                "no-door",
                StatusCode::NOT_FOUND,
                "Nothing is here",
                "No door of this address takes the path.",
            ),
            Self::NoTunnel => (
                "no-tunnel",
                StatusCode::METHOD_NOT_ALLOWED,
                "Tunnels are not opened",
                "CONNECT is not allowed.",
            ),
            Self::RequestBroken => (
                "request-broken",
                StatusCode::BAD_REQUEST,
                "The request body is incomplete",
                "The body of the request ended too early, or paused for too long.",
            ),
            Self::NotReached => (
                "upstream-unreachable",
                StatusCode::BAD_GATEWAY,
                "The service cannot be reached",
                "Nothing was done. Send the request again; one with an Idempotency-Key with the same key.",
            ),
            Self::NotAnswered => (
                "upstream-broken",
                StatusCode::BAD_GATEWAY,
                "The service did not answer",
                "The request may have been handled. If it has an Idempotency-Key, send it again with the same key to learn its outcome.",
            ),
            Self::TooSlow => (
                "upstream-too-slow",
                StatusCode::GATEWAY_TIMEOUT,
                "The service did not answer in time",
                "The request may have been handled. If it has an Idempotency-Key, send it again with the same key to learn its outcome.",
            ),
        }
    }

    pub(crate) fn response(self) -> Response<Body> {
        let (name, status, title, detail) = self.parts();
        let details = Details {
            r#type: format!("{}{name}", Self::AT),
            title,
            status: status.as_u16(),
            detail,
        };
        // Texts and a number can always be written.
        let json = serde_json::to_vec(&details).unwrap_or_default();
        let mut response = Response::new(Body::from(Bytes::from(json)));
        *response.status_mut() = status;
        let headers = response.headers_mut();
        headers.insert(
            CONTENT_TYPE,
            HeaderValue::from_static("application/problem+json"),
        );
        match self {
            Self::NotReached | Self::NotAnswered | Self::TooSlow => {
                headers.insert(RETRY_AFTER, HeaderValue::from_static("1"));
            }
            Self::NoTunnel => {
                headers.insert(
                    ALLOW,
                    HeaderValue::from_static("GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS"),
                );
            }
            // What is left of the body must not be taken for another request.
            Self::RequestBroken => {
                headers.insert(CONNECTION, HeaderValue::from_static("close"));
            }
            Self::NoDoor => {}
        }
        response
    }
}
