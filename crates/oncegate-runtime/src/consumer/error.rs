//! The errors by which a consumer ends by itself.

use crate::failure::BoxError;
use crate::gate::GateError;
use crate::message::Origin;
use crate::source::SourceError;

/// The reason why a consumer did not start, or stopped by itself. Nothing unfinished was
/// acknowledged.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConsumerError {
    /// A setting makes no sense.
    #[error("consumer: {0}")]
    Settings(String),
    /// A gate cannot be opened.
    #[error(transparent)]
    Gate(#[from] GateError),
    /// The source cannot go on.
    #[error(transparent)]
    Source(#[from] SourceError),
    /// The dead letters cannot be used.
    #[error("dead letters: {0}")]
    DeadLetters(#[source] BoxError),
    /// A message has to be given up, and no dead letters are configured.
    #[error(
        "{origin} must be given up ({reason}), and there is nowhere to put it: set `dead_letters`"
    )]
    NoDeadLetters {
        /// The message's origin.
        origin: Origin,
        /// The reason why it must be given up.
        reason: String,
    },
    /// The destination of the dead letters will never take one.
    #[error("the dead letter of {origin} is refused: {reason}")]
    DeadLetterRefused {
        /// The message's origin.
        origin: Origin,
        /// The reason, and what to change.
        reason: String,
    },
    /// No key can be made of a message, and [`bad_keys`](super::Consumer::bad_keys) refuses such
    /// messages.
    #[error(
        "{origin} has no key ({reason}), and `bad_keys` refuses such messages: mend the key or the message"
    )]
    BadKey {
        /// The message's origin.
        origin: Origin,
        /// The defect of the message.
        reason: String,
    },
    /// So many messages were given up that the consumer must be at fault, not the messages.
    ///
    /// A restart does not change that: see
    /// [`dead_letter_limit`](super::Consumer::dead_letter_limit).
    #[error(
        "{what}, the last one because: {last_reason}. Mend that; or raise `dead_letter_limit`, or let as many be given up \
         again with `oncegate accept dead-letters`: until a message succeeds, a restart stops at the next one"
    )]
    TooManyDeadLetters {
        /// The limit that is reached, with the number.
        what: String,
        /// The reason of the last one.
        last_reason: String,
    },
    /// Handlers block their threads and cannot be ended. Everything else has stopped.
    #[error(
        "handlers block their threads and did not end with the consumer: {}. End the process, by `std::process::exit`: a \
         runtime that is dropped waits for them for ever",
        .handlers.join("; ")
    )]
    StillRunning {
        /// The handlers: the origins of their messages, and their scopes.
        handlers: Vec<String>,
    },
    /// oncegate itself has failed.
    #[error("this is a bug in oncegate: {0}")]
    Bug(String),
}
