//! The meaning of DynamoDB's errors for a caller.

use std::error::Error;
use std::io::ErrorKind;

use aws_sdk_dynamodb::error::{ProvideErrorMetadata, SdkError};
use oncegate_core::store::StoreError;

/// A failed request, by what follows from it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Failure {
    /// The request was not executed; the same request may be later.
    NotExecuted(String),
    /// The request may have been executed, or may still be.
    Unknown(String),
    /// The request is refused until something is changed: rights, credentials, the table.
    Refused(String),
}

/// The codes of requests that were not executed, and may be repeated.
///
/// A transaction of the user's conflicts with a heartbeat, and the other way round: neither has
/// lost a lease. Replicas with strong consistency refuse a write while another region writes.
const NOT_EXECUTED: [&str; 8] = [
    "ProvisionedThroughputExceededException",
    "RequestLimitExceeded",
    "Throttling",
    "ThrottlingException",
    "TransactionConflictException",
    "TransactionInProgressException",
    "ReplicatedWriteConflictException",
    "ReplicaNotFoundException",
];

/// The codes of a service that has failed. A write may have been executed before.
const FAILED: [&str; 5] = [
    "InternalServerError",
    "InternalFailure",
    "ServiceUnavailable",
    "ServiceUnavailableException",
    "RequestTimeout",
];

/// The code for a table that does not exist.
pub(crate) const NO_TABLE: &str = "ResourceNotFoundException";

/// The codes of signatures that another clock has made. The SDK learns the service's time from the
/// answer, so the next request has another signature.
const OTHER_CLOCK: [&str; 3] = [
    "InvalidSignatureException",
    "RequestExpired",
    "RequestTimeTooSkewed",
];

impl Failure {
    /// Classifies an error. `table` is named when it does not exist.
    pub(crate) fn of<E>(error: &SdkError<E>, table: &str) -> Self
    where
        E: ProvideErrorMetadata + Error + 'static,
    {
        let Some(code) = error.code() else {
            return Self::without_answer(error);
        };
        let said = error.message().unwrap_or_default();
        let text = format!("{code}: {said}");
        let status = error.raw_response().map(|answer| answer.status().as_u16());
        if NOT_EXECUTED.contains(&code) {
            Self::NotExecuted(text)
        } else if FAILED.contains(&code) || status.is_some_and(|status| status >= 500) {
            Self::Unknown(text)
        } else if OTHER_CLOCK.contains(&code) && is_of_another_clock(said) {
            Self::NotExecuted(format!(
                "{text}; set this machine's clock: requests are signed with it"
            ))
        } else if code == NO_TABLE {
            Self::Refused(format!(
                "there is no table `{table}`, or its state does not allow this ({text}); `oncegate migrate` creates it"
            ))
        } else {
            Self::Refused(text)
        }
    }

    fn without_answer<E>(error: &SdkError<E>) -> Self
    where
        E: ProvideErrorMetadata + Error + 'static,
    {
        let text = with_causes(error);
        // A proxy or load balancer that is not DynamoDB answers without a code.
        let status = error.raw_response().map(|answer| answer.status().as_u16());
        match error {
            SdkError::ConstructionFailure(_) => Self::Refused(text),
            // Credentials are resolved before anything is sent.
            SdkError::DispatchFailure(_) if text.contains("credentials") => {
                Self::NotExecuted(format!("no credentials of AWS could be loaded: {text}"))
            }
            SdkError::DispatchFailure(_) if is_never_sent(error) => Self::NotExecuted(text),
            _ => match status {
                Some(status) if (400..500).contains(&status) && status != 408 => Self::NotExecuted(
                    format!("HTTP status {status} without an error of DynamoDB's: {text}"),
                ),
                _ => Self::Unknown(text),
            },
        }
    }

    /// The error of a read, which changes nothing, so its outcome is never in doubt.
    pub(crate) fn of_read(self) -> StoreError {
        match self {
            Self::NotExecuted(text) | Self::Unknown(text) => StoreError::unavailable(text),
            Self::Refused(text) => StoreError::refused(text),
        }
    }
}

fn is_of_another_clock(said: &str) -> bool {
    ["expired", "not yet current", "skew"]
        .iter()
        .any(|word| said.to_lowercase().contains(word))
}

/// Returns whether no connection was made.
fn is_never_sent(error: &(dyn Error + 'static)) -> bool {
    let mut cause = Some(error);
    while let Some(inner) = cause {
        if let Some(io) = inner.downcast_ref::<std::io::Error>() {
            return matches!(
                io.kind(),
                ErrorKind::ConnectionRefused
                    | ErrorKind::HostUnreachable
                    | ErrorKind::NetworkUnreachable
                    | ErrorKind::AddrNotAvailable
            );
        }
        cause = inner.source();
    }
    false
}

/// The texts of an error and of its causes, without those that an outer text contains.
fn with_causes(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(inner) = cause {
        let words = inner.to_string();
        if !text.contains(&words) {
            text = format!("{text}: {words}");
        }
        cause = inner.source();
    }
    text
}
