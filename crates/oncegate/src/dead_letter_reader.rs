//! Places of dead letters as operators see them: to be looked through, and to be emptied.
//!
//! What may become of a letter is decided by [`operate`](crate::operate); a letter box knows a broker and no store.

use std::fmt;

use async_trait::async_trait;

use crate::dead_letters::DeadLetter;
use crate::failure::BoxError;
use crate::message::{Message, Origin};
use crate::source::SourceError;

/// A topic or queue of dead letters.
#[async_trait]
pub trait DeadLetterReader: Send + Sync + fmt::Debug {
    /// Connects. Called once, before the first `next_batch`.
    ///
    /// # Errors
    /// Says what to change.
    async fn open(&mut self) -> Result<(), SourceError>;

    /// The next letters; `None` when there are no more of those that were there at the start.
    ///
    /// # Errors
    /// When the broker does not answer, or refuses.
    async fn next_batch(&mut self) -> Result<Option<Vec<StoredDeadLetter>>, SourceError>;

    /// Where the message would go: to `to`, or else to where it was consumed.
    ///
    /// # Errors
    /// Says why it cannot go there.
    fn destination(&self, buried: &StoredDeadLetter, to: Option<&str>) -> Result<String, String>;

    /// Sends the message to `destination`, as it was and on its first route. Returns only when it is durable there.
    ///
    /// # Errors
    /// When it may not be there. It may be all the same, so whoever sends it again sends it twice.
    async fn send(&self, buried: &StoredDeadLetter, destination: &str) -> Result<(), BoxError>;

    /// What keeps an order: messages for which this is equal are sent one after another. `None`: any order will do. The
    /// message's key, which is the group in a FIFO queue, unless overridden.
    fn order(&self, buried: &StoredDeadLetter) -> Option<Vec<u8>> {
        buried.message().key().map(<[u8]>::to_vec)
    }

    /// Notes what became of a letter; letters of one partition are settled in their order.
    fn settle(&mut self, buried: &StoredDeadLetter, settled: Disposition);

    /// Makes what was settled so far survive a crash.
    ///
    /// # Errors
    /// When the broker does not take it: after a restart, these letters come again.
    async fn save(&mut self) -> Result<(), SourceError>;

    /// Saves, gives back what is left, and leaves.
    ///
    /// # Errors
    /// As [`save`](Self::save).
    async fn close(&mut self) -> Result<(), SourceError>;
}

/// What became of a letter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Disposition {
    /// Its message is durably where it belongs. A queue deletes the letter; a topic keeps it, behind the progress.
    Sent,
    /// It is none of ours, or nothing is to be done: it stays, and this progress passes it.
    Passed,
    /// It stays, and must be seen again.
    Left,
}

/// A message of a letter box, as it lies there.
#[derive(Clone, Debug)]
pub struct StoredDeadLetter {
    /// Where it lies: partition and offset, or the queue's id of it.
    pub place: Origin,
    /// What it is.
    pub what: Letter,
}

/// What lies in a letter box.
#[derive(Clone, Debug)]
pub enum Letter {
    /// A letter that oncegate wrote: the message as it was consumed, with its own headers and route, and why it was
    /// given up.
    Known(DeadLetter),
    /// Something that somebody else put there, a queue's redrive policy for example, as it is.
    Foreign(Message),
}

impl StoredDeadLetter {
    /// What lies there; `read` finds the letter as it was before it was written, if oncegate wrote it.
    pub(crate) fn of(message: Message, read: impl FnOnce(&Message) -> Option<DeadLetter>) -> Self {
        let (place, letter) = (message.origin().clone(), read(&message));
        Self { place, what: letter.map_or(Letter::Foreign(message), Letter::Known) }
    }

    /// The message, as it was before it was given up.
    pub fn message(&self) -> &Message {
        match &self.what {
            Letter::Known(letter) => &letter.message,
            Letter::Foreign(message) => message,
        }
    }

    /// Why and when it was given up, if oncegate did that.
    pub fn letter(&self) -> Option<&DeadLetter> {
        match &self.what {
            Letter::Known(letter) => Some(letter),
            Letter::Foreign(_) => None,
        }
    }
}
