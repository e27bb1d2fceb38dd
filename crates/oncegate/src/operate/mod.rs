//! What an operator may do to records: open one again, and send dead letters back.
//!
//! Everything else that ends well or badly is the consumers' business. The rules are those of
//! [`rules::apply`](oncegate_core::rules::apply): a record is opened again only while it says what the operator saw.

use std::time::Duration;

use oncegate_core::key::StoreKey;
use oncegate_core::record::{Record, State, TokenTag};
use oncegate_core::rules::{Operation, Reply};
use oncegate_core::store::{Command, RecordSnapshot, Store, StoreError};

mod loss;
mod redrive;

pub use loss::{AcceptedLoss, accept_loss, halt_of};
pub use redrive::{Redrive, RedriveAction, RedriveError, Redriven, Step, Wanted};

/// How often a reopen is repeated whose answer was lost.
const REPEATS: u32 = 5;

/// Between two of them.
const REPEAT_AFTER: Duration = Duration::from_millis(200);

/// What a reopen came to.
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use = "only an opened record runs again"]
pub enum Reopened {
    /// The next delivery of the message runs its handler, as attempt 1. It is counted as `extra_runs{reset}` then.
    Opened,
    /// The record is not the one that was seen, and nothing was changed. This is what it is now; `None`: there is none.
    Changed(Option<RecordSnapshot>),
}

/// Opens a record again, whatever its state, provided it still says what the caller has `seen`.
///
/// An owner who is at work loses its claim. What an earlier attempt did may happen again, so show the record to
/// somebody first. An answer that is lost is asked for again, and the record tells what became of it.
///
/// # Errors
/// When the store gives no answer, or the record cannot be read.
pub async fn reopen(store: &dyn Store, key: &StoreKey, seen: &Record) -> Result<Reopened, StoreError> {
    let mut repeats = 0;
    loop {
        let operation = Operation::Reopen { expected: seen.clone() };
        let command = Command { key: key.clone(), operation };
        let mut replies = store.execute(vec![command]).await;
        let reply = replies.pop().unwrap_or_else(|| Err(StoreError::unknown("no answer")));
        match reply {
            Ok(Reply::Applied { .. }) => return Ok(Reopened::Opened),
            Ok(Reply::NotOwner | Reply::Verdict { .. }) => {
                let found = read(store, key).await?;
                // Only a repeat can have met its own work.
                let ours = repeats > 0 && found.as_ref().is_some_and(|found| is_reopened(&found.record));
                return Ok(if ours { Reopened::Opened } else { Reopened::Changed(found) });
            }
            Err(StoreError::Unknown { .. }) if repeats < REPEATS => {
                repeats += 1;
                tokio::time::sleep(REPEAT_AFTER * repeats).await;
            }
            Err(error) => return Err(error),
        }
    }
}

/// What the store holds for a key; `None`: nothing.
///
/// # Errors
/// When the store gives no answer, or the record cannot be read.
pub async fn read(store: &dyn Store, key: &StoreKey) -> Result<Option<RecordSnapshot>, StoreError> {
    let mut answers = store.read(vec![key.clone()]).await;
    answers.pop().unwrap_or_else(|| Err(StoreError::unknown("no answer")))
}

/// Whether an operator has opened the record, and nobody has run since.
pub fn is_reopened(record: &Record) -> bool {
    matches!(record.state, State::Released { by: TokenTag::NONE, recovered: false, .. })
}
