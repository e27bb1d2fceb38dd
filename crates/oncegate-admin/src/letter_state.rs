//! The states of dead letters since they were written, by the records of their messages.

use oncegate_core::key::StoreKey;
use oncegate_core::record::{Record, State};
use oncegate_core::store::{Store, StoreError};

use super::is_reopened;
use oncegate_runtime::dead_letter_reader::StoredDeadLetter;
use oncegate_runtime::dead_letters::DeadLetterCause;

/// The state of a dead letter's message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum LetterState {
    /// The record says that it has failed: a redrive runs it again.
    Open,
    /// A redrive, or an operator, has reopened the record, and no attempt has begun since.
    Reopened,
    /// An attempt runs, or a retry waits.
    UnderWay,
    /// The message was completed since.
    Completed,
    /// No record says anything about it: it has no key, oncegate did not write it, its key belongs
    /// to a message with other content, or the record has expired or is in another store.
    NoRecord,
    /// The record cannot be read.
    Unreadable,
}

impl LetterState {
    /// The name: lower case, with underscores.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Open => "open",
            Self::Reopened => "reopened",
            Self::UnderWay => "under_way",
            Self::Completed => "completed",
            Self::NoRecord => "no_record",
            Self::Unreadable => "unreadable",
        }
    }

    /// Returns whether nothing was done about it yet.
    pub const fn is_open(self) -> bool {
        matches!(self, Self::Open | Self::NoRecord | Self::Unreadable)
    }

    fn of(record: &Record) -> Self {
        match record.state {
            State::Completed { .. } => Self::Completed,
            State::Failed { .. } => Self::Open,
            State::Released { .. } if is_reopened(record) => Self::Reopened,
            State::Released { .. } | State::Pending { .. } => Self::UnderWay,
        }
    }
}

/// Returns what became of each of these dead letters, in their order. It only reads.
///
/// # Errors
/// When the store does not answer.
pub async fn letter_states(
    store: &dyn Store,
    letters: &[StoredDeadLetter],
) -> Result<Vec<LetterState>, StoreError> {
    let keys: Vec<Option<StoreKey>> = letters.iter().map(key).collect();
    let asked: Vec<StoreKey> = keys.iter().flatten().cloned().collect();
    let mut found = store.read(asked).await.into_iter();
    keys.iter()
        .map(|key| {
            if key.is_none() {
                return Ok(LetterState::NoRecord);
            }
            let answer = found.next();
            match answer.unwrap_or_else(|| Err(StoreError::unknown("no answer"))) {
                Ok(Some(snapshot)) => Ok(LetterState::of(&snapshot.record)),
                Ok(None) => Ok(LetterState::NoRecord),
                Err(StoreError::Unreadable { .. }) => Ok(LetterState::Unreadable),
                Err(error) => Err(error),
            }
        })
        .collect()
}

/// The key of the record that is about the letter's own message.
fn key(stored: &StoredDeadLetter) -> Option<StoreKey> {
    let letter = stored
        .letter()
        .filter(|letter| letter.cause != DeadLetterCause::Mismatch)?;
    letter.key.as_deref()?.parse().ok()
}
