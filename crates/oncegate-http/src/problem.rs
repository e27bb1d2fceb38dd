//! The layer's own responses: problem details (RFC 9457).

use std::fmt;
use std::str::FromStr;

use ::http::header::{CONTENT_TYPE, RETRY_AFTER};
use ::http::{HeaderValue, Response, StatusCode};
use bytes::Bytes;
use oncegate_runtime::running::policy::OUTCOME_UNKNOWN;
use serde::Serialize;

use super::body::Body;

/// Default of [`IdempotencyLayer::problems_at`](super::IdempotencyLayer::problems_at): the
/// documentation of this module.
pub(super) const DEFAULT_PROBLEMS_AT: &str =
    "https://docs.rs/oncegate/latest/oncegate/http/index.html#";

/// The `Retry-After` for a request that may be repeated, in seconds. The owner of a key usually
/// finishes long before its lease expires.
const RETRY_AFTER_SECONDS: HeaderValue = HeaderValue::from_static("1");

/// The reason that a request was not handled, or that its response cannot be given.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Problem {
    KeyMissing,
    KeyInvalid(&'static str),
    /// The body has not the fields that are the key, as the text says.
    BodyKey(String),
    PrincipalMissing,
    RequestTooLarge {
        limit_bytes: usize,
    },
    RequestTooSlow,
    RequestBroken,
    KeyReused,
    InProgress,
    OutcomeUnknown,
    ResponseNotKept {
        status: Option<StatusCode>,
    },
    StoreUnavailable,
    Overloaded,
    CallerOverloaded,
    HandlerPanicked,
    NotCommitted,
    Failed(GivenUp),
    Misconfigured,
}

#[derive(Serialize)]
struct Details<'a> {
    r#type: String,
    title: &'static str,
    status: u16,
    detail: &'a str,
}

impl Problem {
    /// The name of the problem, the same in the URI of its type, the metrics and the documentation.
    pub(super) fn name(&self) -> &'static str {
        match self {
            Self::KeyMissing => "key-missing",
            Self::KeyInvalid(_) | Self::BodyKey(_) => "key-invalid",
            Self::PrincipalMissing => "principal-missing",
            Self::RequestTooLarge { .. } => "request-too-large",
            Self::RequestTooSlow => "request-too-slow",
            Self::RequestBroken => "request-broken",
            Self::KeyReused => "key-reused",
            Self::InProgress => "in-progress",
            Self::OutcomeUnknown => "outcome-unknown",
            Self::ResponseNotKept { .. } => "response-not-kept",
            Self::StoreUnavailable => "store-unavailable",
            Self::Overloaded => "overloaded",
            Self::CallerOverloaded => "caller-overloaded",
            Self::HandlerPanicked => "handler-panicked",
            Self::NotCommitted => "not-committed",
            Self::Failed(GivenUp {
                cause: Cause::AttemptsExhausted,
                ..
            }) => "attempts-exhausted",
            Self::Failed(GivenUp {
                cause: Cause::Handler,
                ..
            }) => "given-up",
            Self::Failed(GivenUp {
                cause: Cause::OutcomeUnknown,
                ..
            }) => "outcome-undecided",
            Self::Misconfigured => "misconfigured",
        }
    }

    fn status(&self) -> StatusCode {
        match self {
            Self::KeyMissing | Self::KeyInvalid(_) | Self::BodyKey(_) | Self::RequestBroken => {
                StatusCode::BAD_REQUEST
            }
            Self::PrincipalMissing => StatusCode::UNAUTHORIZED,
            Self::RequestTooLarge { .. } => StatusCode::PAYLOAD_TOO_LARGE,
            Self::RequestTooSlow => StatusCode::REQUEST_TIMEOUT,
            Self::KeyReused => StatusCode::UNPROCESSABLE_ENTITY,
            Self::InProgress | Self::ResponseNotKept { .. } => StatusCode::CONFLICT,
            Self::OutcomeUnknown
            | Self::StoreUnavailable
            | Self::Overloaded
            | Self::NotCommitted => StatusCode::SERVICE_UNAVAILABLE,
            Self::CallerOverloaded => StatusCode::TOO_MANY_REQUESTS,
            Self::HandlerPanicked | Self::Misconfigured => StatusCode::INTERNAL_SERVER_ERROR,
            Self::Failed(given_up) => given_up.status,
        }
    }

    /// Returns whether the client should repeat the same request soon.
    fn may_retry_soon(&self) -> bool {
        matches!(
            self,
            Self::InProgress
                | Self::OutcomeUnknown
                | Self::StoreUnavailable
                | Self::Overloaded
                | Self::CallerOverloaded
                | Self::NotCommitted
        )
    }

    fn title(&self) -> &'static str {
        match self {
            Self::KeyMissing => "Idempotency-Key is missing",
            Self::KeyInvalid(_) => "Idempotency-Key cannot be read",
            Self::BodyKey(_) => "The body has no key",
            Self::PrincipalMissing => "The request has no authenticated caller",
            Self::RequestTooLarge { .. } => "The request body is too large",
            Self::RequestTooSlow => "The request body came too slowly",
            Self::RequestBroken => "The request body is incomplete",
            Self::KeyReused => "Idempotency-Key is already used",
            Self::InProgress => "A request is outstanding for this Idempotency-Key",
            Self::OutcomeUnknown => "The outcome is not known yet",
            Self::ResponseNotKept { .. } => "Done before; the response was not kept",
            Self::StoreUnavailable => "The request cannot be made safe at the moment",
            Self::Overloaded => "Too many requests are running",
            Self::CallerOverloaded => "Too many requests of this caller are running",
            Self::HandlerPanicked => "The request failed",
            Self::NotCommitted => "The transaction of the request was not committed",
            Self::Failed(GivenUp {
                cause: Cause::AttemptsExhausted,
                ..
            }) => "Every attempt has failed",
            Self::Failed(GivenUp {
                cause: Cause::Handler,
                ..
            }) => "It was given up",
            Self::Failed(GivenUp {
                cause: Cause::OutcomeUnknown,
                ..
            }) => "It may have been done before",
            Self::Misconfigured => "The service is set up wrongly",
        }
    }

    fn detail(&self) -> String {
        let plain = match self {
            Self::KeyInvalid(reason) => {
                return format!(
                    "{reason}. Send for example Idempotency-Key: \"8e03978e-40d5-43e8-bc93-6894a57f9324\"."
                );
            }
            Self::BodyKey(reason) => {
                return format!("The key of this operation is in its body: {reason}.");
            }
            Self::RequestTooLarge { limit_bytes } => {
                return format!("The limit is {limit_bytes} bytes.");
            }
            Self::ResponseNotKept {
                status: Some(status),
            } => {
                return format!(
                    "The request was handled once, with status {}, and is not handled again.",
                    status.as_u16()
                );
            }
            Self::KeyMissing => {
                "This operation requires the header Idempotency-Key: a unique value for each operation, the same for each repetition of it."
            }
            Self::PrincipalMissing => {
                "Keys belong to a caller, and this request has none. Authenticate first."
            }
            Self::RequestTooSlow => "Nothing was done. Send it again.",
            Self::RequestBroken => "Nothing was done.",
            Self::KeyReused => {
                "The key was used for another request: another method, host, path, query or body. Use a new key for a new operation."
            }
            Self::InProgress => {
                "The first request with this key is still being handled. Send the same request again later."
            }
            Self::OutcomeUnknown => {
                "The request may have been handled. Send it again with the same key to learn its outcome."
            }
            Self::ResponseNotKept { status: None } => {
                "The request was handled once, and is not handled again."
            }
            Self::StoreUnavailable => "Nothing was done. Send it again with the same key.",
            Self::Overloaded | Self::CallerOverloaded => {
                "Nothing was done. Send it again with the same key."
            }
            Self::HandlerPanicked => "Send it again with the same key.",
            Self::NotCommitted => "Nothing of it was done. Send it again with the same key.",
            Self::Failed(GivenUp {
                cause: Cause::OutcomeUnknown,
                ..
            }) => {
                "An earlier attempt ended without an outcome. The request is not handled again under this key until an operator has looked what became of it."
            }
            Self::Failed(_) => "The request is not handled again under this key.",
            Self::Misconfigured => "Nothing was done. The service's log contains what to change.",
        };
        plain.to_owned()
    }

    pub(super) fn response(&self, problems_at: &str) -> Response<Body> {
        let status = self.status();
        let details = Details {
            r#type: format!("{problems_at}{}", self.name()),
            title: self.title(),
            status: status.as_u16(),
            detail: &self.detail(),
        };
        // Strings and a number can always be serialized.
        let json = serde_json::to_vec(&details).unwrap_or_default();
        let mut response = Response::new(Body::from(Bytes::from(json)));
        *response.status_mut() = status;
        let headers = response.headers_mut();
        headers.insert(
            CONTENT_TYPE,
            HeaderValue::from_static("application/problem+json"),
        );
        if self.may_retry_soon() {
            headers.insert(RETRY_AFTER, RETRY_AFTER_SECONDS);
        }
        if matches!(self, Self::ResponseNotKept { .. }) {
            response.extensions_mut().insert(DoneBefore);
        }
        response
    }
}

/// Marks the answer to a request that was handled before, and whose response was not kept, as an
/// extension.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DoneBefore;

/// The reason in a failed record: the cause, and the status.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct GivenUp {
    pub(super) cause: Cause,
    pub(super) status: StatusCode,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Cause {
    AttemptsExhausted,
    Handler,
    /// An earlier attempt ended without an outcome, and the gate is set to give up then.
    OutcomeUnknown,
}

const ATTEMPTS_EXHAUSTED: &str = "attempts exhausted, the last with HTTP status ";
const HANDLER: &str = "given up by the handler with HTTP status ";

impl fmt::Display for GivenUp {
    /// The reason as stored in the record.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let words = match self.cause {
            Cause::AttemptsExhausted => ATTEMPTS_EXHAUSTED,
            Cause::Handler => HANDLER,
            // The gate writes this reason itself.
            Cause::OutcomeUnknown => return f.write_str(OUTCOME_UNKNOWN),
        };
        write!(f, "{words}{}", self.status.as_u16())
    }
}

impl FromStr for GivenUp {
    type Err = ();

    fn from_str(reason: &str) -> Result<Self, ()> {
        if reason.starts_with(OUTCOME_UNKNOWN) {
            return Ok(Self {
                cause: Cause::OutcomeUnknown,
                status: StatusCode::CONFLICT,
            });
        }
        let (cause, status) = match (
            reason.strip_prefix(ATTEMPTS_EXHAUSTED),
            reason.strip_prefix(HANDLER),
        ) {
            (Some(status), _) => (Cause::AttemptsExhausted, status),
            (None, Some(status)) => (Cause::Handler, status),
            (None, None) => return Err(()),
        };
        Ok(Self {
            cause,
            status: status.parse().map_err(|_| ())?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reason_reads_back() {
        for cause in [Cause::AttemptsExhausted, Cause::Handler] {
            let given_up = GivenUp {
                cause,
                status: StatusCode::BAD_GATEWAY,
            };
            assert_eq!(given_up.to_string().parse(), Ok(given_up));
        }
        let unknown = format!("{OUTCOME_UNKNOWN}attempt 1 ended without reporting one");
        let unknown: GivenUp = unknown.parse().unwrap();
        assert_eq!(unknown.cause, Cause::OutcomeUnknown);
        assert_eq!("something else".parse::<GivenUp>(), Err(()));
    }
}
