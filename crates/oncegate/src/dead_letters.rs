//! Where messages go that cannot be handled: durably, with their original bytes and the reason.

use std::fmt;
use std::sync::Arc;

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
