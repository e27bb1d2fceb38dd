//! The answers to requests that did not do what they asked for.

use std::time::Duration;

use bytes::Bytes;
use http::header::{ALLOW, CONTENT_TYPE, HeaderValue, RETRY_AFTER, WWW_AUTHENTICATE};
use http::{Response, StatusCode};
use oncegate_core::record::whole_millis;
use oncegate_core::store::StoreError;
use oncegate_runtime::gate::GateError;

use super::forms::ProblemDocument;
use crate::Body;

/// The address before the name of a problem.
const PROBLEMS_AT: &str = "https://docs.rs/oncegate-serve/latest/oncegate_serve/api/index.html#";

/// The pause before a request is repeated that the store did not answer.
const RETRY_SOON: Duration = Duration::from_secs(1);

/// The reason why a request did not do what it asked for.
#[derive(Debug)]
pub(super) enum ApiProblem {
    Unauthorized,
    ScopeForbidden { scope: String },
    NotFound,
    MethodNotAllowed { allowed: &'static str },
    RequestInvalid { what: String },
    RequestTooLarge { limit_bytes: usize },
    RequestTooSlow,
    RequestBroken,
    KeyMissing,
    KeyInvalid { what: String },
    ClaimInvalid,
    Busy { retry_in: Duration },
    LeaseLost,
    GivenUp { reason: String },
    Mismatch,
    CallerOverloaded { what: &'static str },
    StoreUnavailable,
    OutcomeUnknown,
    RecordUnreadable,
    Misconfigured,
}

impl ApiProblem {
    /// The problem of a gate, which is logged if the caller cannot change it.
    pub(super) fn of_gate(scope: &str, error: GateError) -> Self {
        match error {
            GateError::BadKey(error) => {
                return Self::KeyInvalid {
                    what: error.to_string(),
                };
            }
            GateError::Store(StoreError::Unknown { reason }) => {
                tracing::warn!(scope, %reason, "the store's answer to a claim's operation is unknown");
                return Self::OutcomeUnknown;
            }
            _ => {}
        }
        tracing::error!(scope, %error, "an operation on a claim was not carried out");
        match error {
            GateError::Store(StoreError::Unreadable { .. }) => Self::RecordUnreadable,
            GateError::Store(_) | GateError::Results(_) | GateError::Format(_) => {
                Self::StoreUnavailable
            }
            _ => Self::Misconfigured,
        }
    }

    fn name(&self) -> &'static str {
        match self {
            Self::Unauthorized => "unauthorized",
            Self::ScopeForbidden { .. } => "scope-forbidden",
            Self::NotFound => "not-found",
            Self::MethodNotAllowed { .. } => "method-not-allowed",
            Self::RequestInvalid { .. } => "request-invalid",
            Self::RequestTooLarge { .. } => "request-too-large",
            Self::RequestTooSlow => "request-too-slow",
            Self::RequestBroken => "request-broken",
            Self::KeyMissing => "key-missing",
            Self::KeyInvalid { .. } => "key-invalid",
            Self::ClaimInvalid => "claim-invalid",
            Self::Busy { .. } => "busy",
            Self::LeaseLost => "lease-lost",
            Self::GivenUp { .. } => "given-up",
            Self::Mismatch => "mismatch",
            Self::CallerOverloaded { .. } => "caller-overloaded",
            Self::StoreUnavailable => "store-unavailable",
            Self::OutcomeUnknown => "outcome-unknown",
            Self::RecordUnreadable => "record-unreadable",
            Self::Misconfigured => "misconfigured",
        }
    }

    fn status(&self) -> StatusCode {
        match self {
            Self::RequestInvalid { .. }
            | Self::RequestBroken
            | Self::KeyMissing
            | Self::KeyInvalid { .. }
            | Self::ClaimInvalid => StatusCode::BAD_REQUEST,
            Self::Unauthorized => StatusCode::UNAUTHORIZED,
            Self::ScopeForbidden { .. } => StatusCode::FORBIDDEN,
            Self::NotFound => StatusCode::NOT_FOUND,
            Self::MethodNotAllowed { .. } => StatusCode::METHOD_NOT_ALLOWED,
            Self::RequestTooSlow => StatusCode::REQUEST_TIMEOUT,
            Self::Busy { .. } | Self::LeaseLost => StatusCode::CONFLICT,
            Self::GivenUp { .. } => StatusCode::GONE,
            Self::RequestTooLarge { .. } => StatusCode::PAYLOAD_TOO_LARGE,
            Self::Mismatch => StatusCode::UNPROCESSABLE_ENTITY,
            Self::CallerOverloaded { .. } => StatusCode::TOO_MANY_REQUESTS,
            Self::StoreUnavailable | Self::OutcomeUnknown => StatusCode::SERVICE_UNAVAILABLE,
            Self::RecordUnreadable | Self::Misconfigured => StatusCode::INTERNAL_SERVER_ERROR,
        }
    }

    fn title(&self) -> &'static str {
        match self {
            Self::Unauthorized => "The request has no known token",
            Self::ScopeForbidden { .. } => "The caller may not use this scope",
            Self::NotFound => "There is no such path",
            Self::MethodNotAllowed { .. } => "The path has another method",
            Self::RequestInvalid { .. } => "The request cannot be read",
            Self::RequestTooLarge { .. } => "The request body is too large",
            Self::RequestTooSlow => "The request body came too slowly",
            Self::RequestBroken => "The request body is incomplete",
            Self::KeyMissing => "The key is missing",
            Self::KeyInvalid { .. } => "The key cannot be used",
            Self::ClaimInvalid => "This is no claim",
            Self::Busy { .. } => "The key is claimed, or its next attempt is not due",
            Self::LeaseLost => "The claim is over",
            Self::GivenUp { .. } => "The work was given up",
            Self::Mismatch => "The key is known with other arguments",
            Self::CallerOverloaded { .. } => "The caller has reached a limit",
            Self::StoreUnavailable => "The store does not answer",
            Self::OutcomeUnknown => "The outcome is not known",
            Self::RecordUnreadable => "The record cannot be read",
            Self::Misconfigured => "The server is set up wrongly",
        }
    }

    fn detail(&self) -> String {
        let plain = match self {
            Self::ScopeForbidden { scope } => {
                return format!(
                    "The scope {scope:?} is not one of this caller's. Nothing was done."
                );
            }
            Self::MethodNotAllowed { allowed } => return format!("Send {allowed}."),
            Self::RequestInvalid { what } | Self::KeyInvalid { what } => {
                return format!("{what}. Nothing was done.");
            }
            Self::RequestTooLarge { limit_bytes } => {
                return format!("The limit is {limit_bytes} bytes. Nothing was done.");
            }
            Self::CallerOverloaded { what } => {
                return format!("{what}. Nothing was done: send it again later.");
            }
            Self::Unauthorized => {
                "Send the header `Authorization: Bearer <token>` with a token of this server."
            }
            Self::NotFound => "The paths are in /v1/openapi.json.",
            Self::RequestTooSlow | Self::RequestBroken => "Nothing was done. Send it again.",
            Self::KeyMissing => {
                "The field \"key\" is missing, null or empty, and without it nothing can be protected. Nothing was done."
            }
            Self::ClaimInvalid => {
                "Send the field \"claim\" of the answer to the claim, unchanged. Nothing was done."
            }
            Self::Busy { .. } => "Do not do the work. Claim again later, or wait with \"wait_ms\".",
            Self::LeaseLost => {
                "Another owner has taken over, or the claim has ended before. Nothing was changed: claim again to learn what became of the work."
            }
            Self::GivenUp { .. } => "No attempt follows under this key.",
            Self::Mismatch => {
                "The key was claimed with other arguments. Use a new key for other work. Nothing was done."
            }
            Self::StoreUnavailable => {
                "Nothing was done: without the store, duplicates cannot be detected. Send it again, and do not do the work before."
            }
            Self::OutcomeUnknown => {
                "It may have been done. Send the same request again: a repeat with the same claim or nonce does no harm."
            }
            Self::RecordUnreadable | Self::Misconfigured => {
                "Nothing was done. The log of the server has what to change."
            }
        };
        plain.to_owned()
    }

    fn retry_in(&self) -> Option<Duration> {
        match self {
            Self::Busy { retry_in } => Some(*retry_in),
            Self::CallerOverloaded { .. } | Self::StoreUnavailable | Self::OutcomeUnknown => {
                Some(RETRY_SOON)
            }
            _ => None,
        }
    }

    /// Returns the response: `application/problem+json`.
    pub(super) fn response(&self) -> Response<Body> {
        let status = self.status();
        let retry_in = self.retry_in();
        let document = ProblemDocument {
            r#type: format!("{PROBLEMS_AT}{}", self.name()),
            title: self.title(),
            status: status.as_u16(),
            detail: self.detail(),
            state: self.name(),
            retry_in_ms: retry_in.map(whole_millis),
            reason: match self {
                Self::GivenUp { reason } => Some(reason.clone()),
                _ => None,
            },
        };
        // Strings and numbers can always be serialized.
        let json = serde_json::to_vec(&document).unwrap_or_default();
        let mut response = Response::new(Body::from(Bytes::from(json)));
        *response.status_mut() = status;
        let headers = response.headers_mut();
        headers.insert(
            CONTENT_TYPE,
            HeaderValue::from_static("application/problem+json"),
        );
        if let Some(retry_in) = retry_in {
            // Whole seconds, and never 0, which would be a request to repeat at once.
            let seconds = retry_in.as_millis().div_ceil(1_000).max(1);
            if let Ok(seconds) = HeaderValue::from_str(&seconds.to_string()) {
                headers.insert(RETRY_AFTER, seconds);
            }
        }
        match self {
            Self::Unauthorized => {
                headers.insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
            }
            Self::MethodNotAllowed { allowed } => {
                headers.insert(ALLOW, HeaderValue::from_static(allowed));
            }
            _ => {}
        }
        response
    }
}
