//! Reads and redrives the dead letters of a topic or queue.
//!
//! `oncegate-admin` decides the action for a dead letter; a reader knows a broker and no store.

use std::fmt;

use async_trait::async_trait;

use crate::dead_letters::DeadLetter;
use crate::failure::BoxError;
use crate::message::{Message, Origin};
use crate::source::SourceError;

/// Reads and redrives the dead letters of a topic or queue.
#[async_trait]
pub trait DeadLetterReader: Send + Sync + fmt::Debug {
    /// Connects. Called once, before the first `next_batch`.
    ///
    /// # Errors
    /// Names what to change.
    async fn open(&mut self) -> Result<(), SourceError>;

    /// Returns the next dead letters; `None` after the last one that existed at the start.
    ///
    /// # Errors
    /// When the broker does not answer, or denies access.
    async fn next_batch(&mut self) -> Result<Option<Vec<StoredDeadLetter>>, SourceError>;

    /// Returns the topic or queue for the message: `to`, or else the one where it was consumed.
    ///
    /// # Errors
    /// Names the reason why the message cannot be sent there.
    fn destination(&self, stored: &StoredDeadLetter, to: Option<&str>) -> Result<String, String>;

    /// Sends the original message with its first route to `destination`. Returns only when it is
    /// durable there.
    ///
    /// # Errors
    /// When it may not be durable there. It may also have been written, so a retry may send it
    /// twice.
    async fn send(&self, stored: &StoredDeadLetter, destination: &str) -> Result<(), BoxError>;

    /// Returns the order key: messages with equal order keys are sent one after another. `None`
    /// allows any order. The default is the message's broker key, which is the group in a FIFO
    /// queue.
    fn order(&self, stored: &StoredDeadLetter) -> Option<Vec<u8>> {
        stored.message().key().map(<[u8]>::to_vec)
    }

    /// Records the disposition of a dead letter. Dead letters of one partition are settled in their
    /// order.
    fn settle(&mut self, stored: &StoredDeadLetter, settled: Disposition);

    /// Saves the dispositions recorded so far, so that they survive a crash.
    ///
    /// # Errors
    /// When the broker does not store them: after a restart, these dead letters are read again.
    async fn save(&mut self) -> Result<(), SourceError>;

    /// Saves, returns the remaining dead letters, and disconnects.
    ///
    /// # Errors
    /// As [`save`](Self::save).
    async fn close(&mut self) -> Result<(), SourceError>;
}

/// The disposition of a dead letter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Disposition {
    /// The message was sent and is durable. A queue deletes the dead letter; a topic keeps it, and
    /// the progress moves past it.
    Sent,
    /// The dead letter is not wanted, or needs no action: it stays, and the progress moves past it.
    Passed,
    /// The dead letter stays, and must be read again.
    Left,
}

/// A message in a dead-letter topic or queue.
#[derive(Clone, Debug)]
pub struct StoredDeadLetter {
    /// The position: partition and offset, or the queue's message id.
    pub place: Origin,
    /// The dead letter or other message.
    pub what: Letter,
}

/// The content of a message in a dead-letter topic or queue.
#[derive(Clone, Debug)]
pub enum Letter {
    /// A dead letter that oncegate wrote: the original message with its own headers and route, and
    /// the cause.
    Known(DeadLetter),
    /// A message from another writer, such as a queue's redrive policy, unchanged.
    Foreign(Message),
}

impl StoredDeadLetter {
    /// Creates it from the message read; `read` decodes the dead letter if oncegate wrote it.
    pub fn of(message: Message, read: impl FnOnce(&Message) -> Option<DeadLetter>) -> Self {
        let letter = read(&message);
        Self {
            place: message.origin().clone(),
            what: letter.map_or(Letter::Foreign(message), Letter::Known),
        }
    }

    /// Returns the original message, as it was before it became a dead letter.
    pub fn message(&self) -> &Message {
        match &self.what {
            Letter::Known(letter) => &letter.message,
            Letter::Foreign(message) => message,
        }
    }

    /// Returns the dead letter with its cause and time, if oncegate wrote it.
    pub fn letter(&self) -> Option<&DeadLetter> {
        match &self.what {
            Letter::Known(letter) => Some(letter),
            Letter::Foreign(_) => None,
        }
    }
}
