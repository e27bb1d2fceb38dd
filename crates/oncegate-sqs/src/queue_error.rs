//! The reason for which a queue cannot be used, in words that name what to change.

use oncegate_runtime::source::SourceError;

use super::api::CallError;

/// The reason for which a queue cannot be used. Each text names what to change.
#[derive(Debug, thiserror::Error)]
pub(crate) enum QueueError {
    #[error(
        "the queue `{0}` does not exist: create it, or correct its name, the region or the account"
    )]
    Missing(String),
    #[error(
        "the credentials may not call `sqs:{action}` on the queue `{queue}`: grant that right ({error})"
    )]
    Denied {
        queue: String,
        action: &'static str,
        error: CallError,
    },
    #[error("the call `sqs:{action}` failed for the queue `{queue}`: {error}")]
    Failed {
        queue: String,
        action: &'static str,
        error: CallError,
    },
    #[error(
        "no server answers `sqs:{action}` for the queue `{queue}`: correct its region or endpoint, or wait"
    )]
    Unreachable {
        queue: String,
        action: &'static str,
        error: CallError,
    },
    #[error(
        "the queue `{0}` is FIFO by its attributes but not by its name; SQS does not allow that"
    )]
    Misnamed(String),
    #[error(
        "the URL of a queue contains a user or a password: take it out; credentials come in the AWS SDK's usual ways"
    )]
    Login,
}

impl QueueError {
    pub(crate) fn of(queue: &str, action: &'static str, error: CallError) -> Self {
        let queue = queue.to_owned();
        match error {
            error if error.is_no_queue() => Self::Missing(queue),
            error if error.is_denied() => Self::Denied {
                queue,
                action,
                error,
            },
            error if error.is_unreachable => Self::Unreachable {
                queue,
                action,
                error,
            },
            error => Self::Failed {
                queue,
                action,
                error,
            },
        }
    }
}

impl From<QueueError> for SourceError {
    fn from(error: QueueError) -> Self {
        let what = error.to_string();
        match error {
            QueueError::Unreachable { error, .. } => Self::caused(what, error).away(),
            QueueError::Failed { error, .. } if error.is_passing() => {
                Self::caused(what, error).away()
            }
            QueueError::Failed { error, .. } if error.is_unanswered() => Self::caused(what, error),
            _ => Self::new(what),
        }
    }
}
