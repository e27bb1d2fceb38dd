//! The failure by which a handler reports that it did not succeed.

use std::fmt;
use std::time::Duration;

pub use oncegate_core::BoxError;

use crate::backoff::LONGEST_TIME;

/// The reason that a handler did not succeed, and whether another attempt makes sense.
///
/// `?` on any error means "try again"; giving up must be explicit, by [`Failure::permanent`] or
/// [`OrPermanent::or_permanent`]. `Failure` cannot implement [`Error`](std::error::Error), because
/// `?` converts every error into it; [`Failure::into_error`] is for other code.
pub struct Failure {
    advice: Advice,
    error: BoxError,
}

/// The next step for the message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Advice {
    /// Another attempt, after the usual back-off or after this long.
    Retry { after: Option<Duration> },
    /// Another attempt, once the lease has lapsed: this one may still be running.
    Unknown,
    /// Another attempt after the usual back-off; this one did not begin, and does not count.
    NotRun,
    /// The same message after this long: it cannot be done yet. This attempt is no failure, and
    /// does not count.
    Later { after: Duration },
    /// No more attempts: the message goes to the dead letters.
    GiveUp,
}

impl Failure {
    /// Gives up, because another attempt would fail as well: the message goes to the dead letters.
    pub fn permanent(error: impl Into<BoxError>) -> Self {
        Self {
            advice: Advice::GiveUp,
            error: error.into(),
        }
    }

    /// Requests another attempt after the consumer's back-off. `?` does the same.
    pub fn retry(error: impl Into<BoxError>) -> Self {
        Self {
            advice: Advice::Retry { after: None },
            error: error.into(),
        }
    }

    /// Requests another attempt, but not before `delay` has passed. A delay of more than 365 days
    /// is shortened to that. A delay of less than half of the consumer's first back-off is
    /// prolonged to that, so that other messages run meanwhile.
    pub fn retry_after(delay: Duration, error: impl Into<BoxError>) -> Self {
        Self {
            advice: Advice::Retry {
                after: Some(delay.min(LONGEST_TIME)),
            },
            error: error.into(),
        }
    }

    /// Reports an unknown outcome: the effect may have happened, and may still be in progress, as
    /// after a timeout.
    ///
    /// The message is tried again when the lease has lapsed, not sooner, and the next attempt is
    /// flagged by [`Attempt::recovered`](crate::Attempt::recovered). It counts as an attempt that
    /// ended without an outcome.
    pub fn unknown(error: impl Into<BoxError>) -> Self {
        Self {
            advice: Advice::Unknown,
            error: error.into(),
        }
    }

    /// Reports work that did not begin: its executor could not be reached, or had no capacity.
    /// Nothing has happened.
    ///
    /// The message is tried again after the consumer's back-off. It does not count as an attempt,
    /// so it never leads to the dead letters; a handler that fails so for many keys is paused by
    /// its circuit breaker like one that fails otherwise.
    pub fn not_run(error: impl Into<BoxError>) -> Self {
        Self {
            advice: Advice::NotRun,
            error: error.into(),
        }
    }

    /// Postpones a message that cannot be done yet: the handler wants it again after `delay`.
    /// Nothing has failed, and nothing has happened. `reason` says what the message waits for: "the
    /// report is not ready".
    ///
    /// It counts neither as an attempt nor as a failure, so it leads neither to the dead letters
    /// nor to an open circuit breaker, however often the handler returns it: only the handler can
    /// end the wait. Bound it by the age of the message, and return [`permanent`](Self::permanent)
    /// when that is over:
    ///
    /// ```
    /// use std::time::Duration;
    /// use oncegate::{Failure, Message};
    ///
    /// fn not_ready(message: &Message) -> Failure {
    ///     match message.age() {
    ///         Some(age) if age > Duration::from_secs(86_400) => Failure::permanent("no report after a day"),
    ///         _ => Failure::later(Duration::from_secs(30), "the report is not ready"),
    ///     }
    /// }
    /// # let _ = not_ready;
    /// ```
    ///
    /// The message keeps its place in its order meanwhile, as after a failure; a long delay goes to
    /// a retry topic, if there is one. The limits on `delay` are those of
    /// [`retry_after`](Self::retry_after).
    pub fn later(delay: Duration, reason: impl Into<BoxError>) -> Self {
        Self {
            advice: Advice::Later {
                after: delay.min(LONGEST_TIME),
            },
            error: reason.into(),
        }
    }

    /// Returns whether the handler wants the message later, and nothing has failed.
    pub fn is_later(&self) -> bool {
        matches!(self.advice, Advice::Later { .. })
    }

    /// Returns whether another attempt makes no sense.
    pub fn is_permanent(&self) -> bool {
        self.advice == Advice::GiveUp
    }

    /// The underlying error.
    pub fn into_error(self) -> BoxError {
        self.error
    }

    pub(crate) fn error(&self) -> &(dyn std::error::Error + 'static) {
        &*self.error
    }

    pub(crate) fn advice(&self) -> Advice {
        self.advice
    }

    /// The delay that the handler has requested before the next attempt.
    pub(crate) fn requested_delay(&self) -> Option<Duration> {
        match self.advice {
            Advice::Retry { after } => after,
            _ => None,
        }
    }

    /// The same advice for another message, with the error as text.
    pub(crate) fn copied(&self) -> Self {
        Self {
            advice: self.advice,
            error: self.reason().into(),
        }
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
