//! The reasons why a worker cannot be used.

use std::time::Duration;

/// The reason why a worker cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum WorkerError {
    /// A setting is wrong, or a file that it names cannot be read. The text names the setting.
    #[error("{0}")]
    Settings(String),
    /// The setting `content_type` is no content type.
    #[error("`content_type` is {0:?}, which is not a content type")]
    ContentType(String),
    /// The program cannot be started, for this reason.
    #[error("the worker cannot be started: {0}")]
    CannotStart(String),
    /// The worker's processes have ended before they were ready, until the patience was over.
    #[error("the worker was not ready within {patience:?}: {why}")]
    NotReady {
        /// The time for which the start has waited.
        patience: Duration,
        /// The end of the last process.
        why: String,
    },
}
