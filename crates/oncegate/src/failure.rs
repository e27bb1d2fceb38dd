//! How a handler reports that it did not succeed.

use std::error::Error;
use std::fmt;
use std::time::Duration;

/// Any error, boxed.
pub type BoxError = Box<dyn Error + Send + Sync + 'static>;

/// Why a handler did not succeed, and whether another attempt makes sense.
///
/// `?` on any error means "try again"; giving up must be explicit, by [`Failure::permanent`] or
/// [`OrPermanent::or_permanent`]. `Failure` cannot implement [`Error`], because `?` converts every error into
/// it; [`Failure::into_error`] is for other code.
pub struct Failure {
    advice: Advice,
    error: BoxError,
}

/// What to do with the message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Advice {
    /// Another attempt, after the usual back-off or after this long.
    Retry { after: Option<Duration> },
    /// Another attempt, once the lease has lapsed: this one may still be running.
    Unknown,
    /// Another attempt after the usual back-off; this one did not begin, and does not count.
    NotRun,
    /// No more attempts: the message goes to the dead letters.
    GiveUp,
}

impl Failure {
    /// Another attempt would fail as well: the message goes to the dead letters.
    pub fn permanent(error: impl Into<BoxError>) -> Self {
        Self { advice: Advice::GiveUp, error: error.into() }
    }

    /// Try again after the consumer's back-off. `?` does the same.
    pub fn retry(error: impl Into<BoxError>) -> Self {
        Self { advice: Advice::Retry { after: None }, error: error.into() }
    }

    /// Try again, but not before `delay` has passed.
    pub fn retry_after(delay: Duration, error: impl Into<BoxError>) -> Self {
        Self { advice: Advice::Retry { after: Some(delay) }, error: error.into() }
    }

    /// The outcome is unknown: the effect may have happened, and may still be in progress, as after a timeout.
    ///
    /// The message is tried again when the lease has lapsed, not sooner, and the next attempt is flagged by
    /// [`Attempt::recovered`](crate::Attempt::recovered). It counts as an attempt that ended without an outcome.
    pub fn unknown(error: impl Into<BoxError>) -> Self {
        Self { advice: Advice::Unknown, error: error.into() }
    }

    /// The work did not begin: its executor could not be reached, or had no capacity. Nothing has happened.
    ///
    /// The message is tried again after the consumer's back-off. It does not count as an attempt, so it never leads to
    /// the dead letters; a handler that fails so for many keys is paused by its circuit breaker like one that fails
    /// otherwise.
    pub fn not_run(error: impl Into<BoxError>) -> Self {
        Self { advice: Advice::NotRun, error: error.into() }
    }

    /// Whether another attempt makes no sense.
    pub fn is_permanent(&self) -> bool {
        self.advice == Advice::GiveUp
    }

    /// The underlying error.
    pub fn into_error(self) -> BoxError {
        self.error
    }

    pub(crate) fn advice(&self) -> Advice {
        self.advice
    }

    /// The error and its causes, in one line.
    pub(crate) fn reason(&self) -> String {
        let mut reason = self.error.to_string();
        let mut cause = self.error.source();
        while let Some(error) = cause {
            reason = format!("{reason}: {error}");
            cause = error.source();
        }
        reason
    }
}

impl<E: Into<BoxError>> From<E> for Failure {
    fn from(error: E) -> Self {
        Self::retry(error)
    }
}

impl fmt::Debug for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}: {}", self.advice, self.reason())
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.reason())
    }
}

/// Gives up instead of trying again: `order.id.parse::<u64>().or_permanent()?`.
pub trait OrPermanent<T> {
    /// The value, or a permanent failure.
    ///
    /// # Errors
    /// [`Failure::permanent`] with the error, or with "missing value" for a `None`.
    fn or_permanent(self) -> Result<T, Failure>;
}

impl<T, E: Into<Failure>> OrPermanent<T> for Result<T, E> {
    fn or_permanent(self) -> Result<T, Failure> {
        self.map_err(|error| Failure::permanent(error.into().into_error()))
    }
}

impl<T> OrPermanent<T> for Option<T> {
    fn or_permanent(self) -> Result<T, Failure> {
        self.ok_or_else(|| Failure::permanent("missing value"))
    }
}
