//! Where messages go that cannot be handled: durably, with their original bytes and the reason.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use async_trait::async_trait;

use crate::failure::BoxError;
use crate::message::Message;

/// A durable place for messages that were given up.
#[async_trait]
pub trait DeadLetters: Send + Sync + fmt::Debug {
    /// Connects, and refuses settings that would lose letters. Called once, before the first message.
    ///
    /// # Errors
    /// Says what to change.
    async fn open(&self) -> Result<(), BoxError> {
        Ok(())
    }

    /// Keeps the letter. Returns only when it is durable: the message is acknowledged right after.
    ///
    /// # Errors
    /// When it may not be durable. The consumer tries again and acknowledges nothing meanwhile; a letter
    /// may therefore be kept twice, but never zero times.
    async fn send(&self, letter: &DeadLetter) -> Result<(), BoxError>;
}

/// Shared dead letters are dead letters.
#[async_trait]
impl<D: DeadLetters + ?Sized> DeadLetters for Arc<D> {
    async fn open(&self) -> Result<(), BoxError> {
        (**self).open().await
    }

    async fn send(&self, letter: &DeadLetter) -> Result<(), BoxError> {
        (**self).send(letter).await
    }
}

/// A message that was given up, and why.
#[derive(Clone, Debug)]
pub struct DeadLetter {
    /// The message, its bytes untouched.
    pub message: Message,
    /// The scope of the gate that gave it up.
    pub scope: String,
    /// The key, when one could be derived.
    pub key: Option<String>,
    /// The kind of reason.
    pub cause: DeadLetterCause,
    /// The reason in words; nothing of the payload.
    pub reason: String,
    /// How many attempts ran.
    pub attempts: u32,
    /// When its first attempt failed, on the wall clock of the process that saw it. `None` when that was not the one that
    /// gave it up and it came back by its broker, not by a retry topic, or when the first attempt ended without a word:
    /// nobody has kept that time.
    pub first_failed_at: Option<SystemTime>,
    /// When it was given up, on the same clock.
    pub failed_at: SystemTime,
}

/// In milliseconds since 1970, as letters have their times.
#[cfg(any(feature = "kafka", feature = "sqs"))]
pub(crate) fn millis_since_1970(time: SystemTime) -> u64 {
    let since_1970 = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since_1970.as_millis()).unwrap_or(u64::MAX)
}

/// The time that a letter has in milliseconds since 1970.
#[cfg(any(feature = "kafka", feature = "sqs"))]
pub(crate) fn time_of(millis: u64) -> Option<SystemTime> {
    UNIX_EPOCH.checked_add(Duration::from_millis(millis))
}

/// Why a message was given up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DeadLetterCause {
    /// No key could be derived: malformed, a field missing, too large.
    BadKey,
    /// The handler said that trying again makes no sense.
    Permanent,
    /// Every attempt failed or ended its process.
    AttemptsUsedUp,
    /// The key is known with other content.
    Mismatch,
    /// It was given up before, and that process ended before the dead letter was written.
    NotHandedOver,
}

impl DeadLetterCause {
    /// All of them.
    pub const ALL: [Self; 5] =
        [Self::BadKey, Self::Permanent, Self::AttemptsUsedUp, Self::Mismatch, Self::NotHandedOver];

    /// One lower-case word for headers and metrics.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::BadKey => "bad_key",
            Self::Permanent => "permanent",
            Self::AttemptsUsedUp => "attempts_used_up",
            Self::Mismatch => "mismatch",
            Self::NotHandedOver => "not_handed_over",
        }
    }
}

impl FromStr for DeadLetterCause {
    type Err = UnknownCause;

    /// The word of [`as_str`](Self::as_str).
    fn from_str(word: &str) -> Result<Self, UnknownCause> {
        Self::ALL.into_iter().find(|cause| cause.as_str() == word).ok_or(UnknownCause)
    }
}

/// A word that names no cause.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("it must be one of bad_key, permanent, attempts_used_up, mismatch, not_handed_over")]
pub struct UnknownCause;
