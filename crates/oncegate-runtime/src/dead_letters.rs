//! Dead letters: messages that cannot be handled, stored durably with their original bytes and the
//! reason.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use async_trait::async_trait;

use crate::failure::BoxError;
use crate::message::Message;

/// A durable destination for messages that cannot be handled, such as a dead-letter topic or queue.
#[async_trait]
pub trait DeadLetters: Send + Sync + fmt::Debug {
    /// Connects, and rejects settings that could lose dead letters. Called once, before the first
    /// message.
    ///
    /// # Errors
    /// Names what to change.
    async fn open(&self) -> Result<(), BoxError> {
        Ok(())
    }

    /// Stores the dead letter. Returns only when it is durable, because the message is acknowledged
    /// right after.
    ///
    /// # Errors
    /// When it may not be durable. The consumer retries, and does not acknowledge the message
    /// meanwhile. So a dead letter may be stored twice, but is never lost. After a
    /// [`DeadLetterRefused`] the consumer ends with that error, and the message is not
    /// acknowledged.
    async fn send(&self, letter: &DeadLetter) -> Result<(), BoxError>;
}

/// The error of a dead letter that its destination will not take however often it is sent, for
/// example because it is too large.
#[derive(Debug, thiserror::Error)]
#[error("{what}")]
pub struct DeadLetterRefused {
    what: String,
}

impl DeadLetterRefused {
    /// Creates the error. `what` says why, and what to change.
    pub fn new(what: impl Into<String>) -> Self {
        Self { what: what.into() }
    }
}

/// Shared dead letters, which forward to the inner ones.
#[async_trait]
impl<D: DeadLetters + ?Sized> DeadLetters for Arc<D> {
    async fn open(&self) -> Result<(), BoxError> {
        (**self).open().await
    }

    async fn send(&self, letter: &DeadLetter) -> Result<(), BoxError> {
        (**self).send(letter).await
    }
}

/// A message that cannot be handled, and the reason.
#[derive(Clone, Debug)]
pub struct DeadLetter {
    /// The message, with its bytes unchanged.
    pub message: Message,
    /// The scope of the gate that dead-lettered it.
    pub scope: String,
    /// The idempotency key, if one could be derived.
    pub key: Option<String>,
    /// The kind of cause.
    pub cause: DeadLetterCause,
    /// The reason as text, without any part of the payload.
    pub reason: String,
    /// The number of attempts that ran.
    pub attempts: u32,
    /// The time at which its first attempt failed, on the wall clock of the process that saw it.
    ///
    /// `None` when that time is unknown: another process saw the failure and the message was
    /// redelivered by its broker, not by a retry topic, or the first attempt ended without a
    /// report.
    pub first_failed_at: Option<SystemTime>,
    /// The time at which it was dead-lettered, on the wall clock of the process that did so.
    pub failed_at: SystemTime,
}

impl DeadLetter {
    /// Returns the letter's id, 32 hexadecimal digits: equal for all letters that one consumer
    /// scope writes of one message, and for no others.
    ///
    /// A process that ends between the write and the ack leaves a message whose dead letter is
    /// written again. Programs that count or handle dead letters recognise the copies by this id.
    /// It is derived from the scope, and from the message's origin and timestamp, which each
    /// delivery has in common.
    pub fn id(&self) -> String {
        let mut hasher = blake3::Hasher::new_derive_key("oncegate v1 dead letter");
        for text in [&self.scope, &self.message.origin().to_string()] {
            hasher
                .update(&(text.len() as u64).to_be_bytes())
                .update(text.as_bytes());
        }
        // A topic that was made again has other messages at the same offsets.
        hasher.update(
            &self
                .message
                .timestamp_ms()
                .unwrap_or_default()
                .to_be_bytes(),
        );
        let mut id = hasher.finalize().to_hex().to_string();
        id.truncate(ID_DIGITS);
        id
    }
}

/// The number of hexadecimal digits in the id of a dead letter.
const ID_DIGITS: usize = 32;

/// Converts a time to milliseconds since 1970, as stored in dead letters.
pub fn millis_since_1970(time: SystemTime) -> u64 {
    let since_1970 = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since_1970.as_millis()).unwrap_or(u64::MAX)
}

/// Converts a dead letter's milliseconds since 1970 to a time.
pub fn time_of(millis: u64) -> Option<SystemTime> {
    UNIX_EPOCH.checked_add(Duration::from_millis(millis))
}

/// The cause for which a message became a dead letter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DeadLetterCause {
    /// No key could be derived: the message is malformed, lacks a field, or is too large.
    BadKey,
    /// The handler returned a permanent error.
    Permanent,
    /// Every attempt failed or ended its process.
    AttemptsUsedUp,
    /// The key has a record with other content.
    Mismatch,
    /// The message failed before, and that process ended before the dead letter was written.
    NotHandedOver,
    /// An attempt ended without an outcome, and the message must not run again by itself
    /// ([`AfterUnknown::GiveUp`](crate::gate::AfterUnknown::GiveUp)): its effect may have happened.
    OutcomeUnknown,
}

impl DeadLetterCause {
    /// Every cause.
    pub const ALL: [Self; 6] = [
        Self::BadKey,
        Self::Permanent,
        Self::AttemptsUsedUp,
        Self::Mismatch,
        Self::NotHandedOver,
        Self::OutcomeUnknown,
    ];

    /// Returns the lower-case name for headers and metrics.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::BadKey => "bad_key",
            Self::Permanent => "permanent",
            Self::AttemptsUsedUp => "attempts_used_up",
            Self::Mismatch => "mismatch",
            Self::NotHandedOver => "not_handed_over",
            Self::OutcomeUnknown => "outcome_unknown",
        }
    }
}

impl FromStr for DeadLetterCause {
    type Err = UnknownCause;

    /// Parses the name from [`as_str`](Self::as_str).
    fn from_str(word: &str) -> Result<Self, UnknownCause> {
        Self::ALL
            .into_iter()
            .find(|cause| cause.as_str() == word)
            .ok_or(UnknownCause)
    }
}

/// The error for a text that names no cause.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "it must be one of bad_key, permanent, attempts_used_up, mismatch, not_handed_over, outcome_unknown"
)]
pub struct UnknownCause;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::Origin;

    fn letter(scope: &str, offset: i64, timestamp_ms: i64, cause: DeadLetterCause) -> DeadLetter {
        let origin = Origin::Kafka {
            topic: "orders".into(),
            partition: 0,
            offset,
        };
        DeadLetter {
            message: Message::new("orders", origin, None).with_timestamp_ms(timestamp_ms),
            scope: scope.to_owned(),
            key: None,
            cause,
            reason: "broken".to_owned(),
            attempts: 1,
            first_failed_at: None,
            failed_at: SystemTime::now(),
        }
    }

    // invariant: dead-letter-id
    #[test]
    fn copies_of_a_letter_have_one_id_and_other_letters_have_others() {
        let id = letter("billing", 1, 1_000, DeadLetterCause::Permanent).id();
        assert_eq!(id.len(), ID_DIGITS);
        assert_eq!(
            id,
            letter("billing", 1, 1_000, DeadLetterCause::NotHandedOver).id(),
            "written again"
        );
        for other in [
            ("billing", 2, 1_000),
            ("billing", 1, 2_000),
            ("refunds", 1, 1_000),
        ] {
            assert_ne!(
                id,
                letter(other.0, other.1, other.2, DeadLetterCause::Permanent).id(),
                "{other:?}"
            );
        }
    }
}
