//! The door's own answers: problem details (RFC 9457).

use bytes::Bytes;
use http::header::{ALLOW, CONNECTION, CONTENT_TYPE, RETRY_AFTER};
use http::{HeaderValue, Response, StatusCode, Version};
use serde_json::json;

use crate::Body;

/// The address of the descriptions: the documentation of the module above.
const PROBLEMS_AT: &str =
    "https://docs.rs/oncegate-serve/latest/oncegate_serve/webhook/index.html#";

const RETRY_AFTER_SECONDS: HeaderValue = HeaderValue::from_static("1");

/// The reason that a request is not handled.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum EventProblem {
    MethodNotAllowed,
    SignatureRefused(&'static str),
    EventWithoutId(String),
    SecretsMissing,
    RequestTooLarge {
        limit_bytes: usize,
    },
    RequestTooSlow,
    RequestBroken,
    Overloaded,
    InProgress,
    HandlerFailed,
    /// The event was given up: a person decides what becomes of it.
    Undecided,
}

impl EventProblem {
    /// The name of the problem, the same in the URI of its type, the metrics and the documentation.
    pub(super) fn name(&self) -> &'static str {
        match self {
            Self::MethodNotAllowed => "method-not-allowed",
            Self::SignatureRefused(_) => "signature-refused",
            Self::EventWithoutId(_) => "event-without-id",
            Self::SecretsMissing => "secrets-missing",
            Self::RequestTooLarge { .. } => "request-too-large",
            Self::RequestTooSlow => "request-too-slow",
            Self::RequestBroken => "request-broken",
            Self::Overloaded => "overloaded",
            Self::InProgress => "in-progress",
            Self::HandlerFailed => "handler-failed",
            Self::Undecided => "outcome-undecided",
        }
    }

    fn status(&self) -> StatusCode {
        match self {
            Self::MethodNotAllowed => StatusCode::METHOD_NOT_ALLOWED,
            Self::SignatureRefused(_) => StatusCode::UNAUTHORIZED,
            Self::EventWithoutId(_) => StatusCode::UNPROCESSABLE_ENTITY,
            Self::RequestTooLarge { .. } => StatusCode::PAYLOAD_TOO_LARGE,
            Self::RequestTooSlow => StatusCode::REQUEST_TIMEOUT,
            Self::RequestBroken => StatusCode::BAD_REQUEST,
            Self::SecretsMissing | Self::Overloaded | Self::InProgress | Self::Undecided => {
                StatusCode::SERVICE_UNAVAILABLE
            }
            Self::HandlerFailed => StatusCode::BAD_GATEWAY,
        }
    }

    fn title(&self) -> &'static str {
        match self {
            Self::MethodNotAllowed => "Events come by POST",
            Self::SignatureRefused(_) => "The signature is refused",
            Self::EventWithoutId(_) => "The event has no id",
            Self::SecretsMissing => "No secret could be read yet",
            Self::RequestTooLarge { .. } => "The request body is too large",
            Self::RequestTooSlow => "The request body came too slowly",
            Self::RequestBroken => "The request body is incomplete",
            Self::Overloaded => "Too many requests are running",
            Self::InProgress => "The event is being handled",
            Self::HandlerFailed => "The handler did not answer",
            Self::Undecided => "The event was given up, and is not handled again by itself",
        }
    }

    fn detail(&self) -> String {
        match self {
            Self::SignatureRefused(reason) => format!("Nothing was done: {reason}."),
            Self::EventWithoutId(reason) => format!("Nothing was done: {reason}."),
            Self::RequestTooLarge { limit_bytes } => {
                format!("Nothing was done. The limit is {limit_bytes} bytes.")
            }
            Self::InProgress => "Send it again later.".to_owned(),
            Self::HandlerFailed => "Send it again.".to_owned(),
            Self::Undecided => "It may have been handled before; an operator decides.".to_owned(),
            _ => "Nothing was done.".to_owned(),
        }
    }

    /// Returns whether the provider should send the same request again soon.
    fn may_retry_soon(&self) -> bool {
        matches!(
            self,
            Self::SecretsMissing | Self::InProgress | Self::Overloaded
        )
    }

    /// Returns whether the request's body may not have come yet.
    fn is_unread(&self) -> bool {
        matches!(
            self,
            Self::Overloaded
                | Self::RequestTooLarge { .. }
                | Self::RequestTooSlow
                | Self::RequestBroken
                | Self::MethodNotAllowed
        )
    }

    /// The answer to a request of this version of HTTP. A server of HTTP/1 closes the connection of
    /// a request whose body it has not read, and the client must learn of it.
    pub(super) fn response(&self, version: Version) -> Response<Body> {
        let status = self.status();
        let details = json!({
            "type": format!("{PROBLEMS_AT}{}", self.name()),
            "title": self.title(),
            "status": status.as_u16(),
            "detail": self.detail(),
        });
        let mut response = Response::new(Body::from(Bytes::from(details.to_string())));
        *response.status_mut() = status;
        let headers = response.headers_mut();
        headers.insert(
            CONTENT_TYPE,
            HeaderValue::from_static("application/problem+json"),
        );
        if self.may_retry_soon() {
            headers.insert(RETRY_AFTER, RETRY_AFTER_SECONDS);
        }
        if self.is_unread() && version <= Version::HTTP_11 {
            headers.insert(CONNECTION, HeaderValue::from_static("close"));
        }
        if *self == Self::MethodNotAllowed {
            headers.insert(ALLOW, HeaderValue::from_static("POST"));
        }
        response
    }
}
