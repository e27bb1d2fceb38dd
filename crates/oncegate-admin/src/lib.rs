//! Operator actions: reopen a record, complete or give up a message, redrive dead letters, and
//! audit what has happened.
//!
//! Consumers do everything else. The rules are those of
//! [`rules::apply`](oncegate_core::rules::apply): a record is changed only if it is still the one
//! that the operator saw.

use std::time::Duration;

use oncegate_core::key::StoreKey;
use oncegate_core::record::{Record, Recovery, State, TokenTag};
use oncegate_core::rules::{Operation, Reply};
use oncegate_core::store::{Command, RecordSnapshot, Store, StoreError};

pub mod audit;
pub mod complete;
mod dead_letter_stop;
pub mod dry_run;
mod letter_state;
mod loss;
mod pause;
mod redrive;
mod redrive_action;
mod resolve;

pub use oncegate_runtime::dead_letter_reader;

pub use dead_letter_stop::{accept_dead_letters, dead_letter_stop_of};
pub use letter_state::{LetterState, letter_states};
pub use loss::{AcceptedLoss, accept_loss, halt_of};
pub use pause::{Paused, Resumed, pause, pause_of, resume};
pub use redrive::{Redrive, RedriveError, Wanted};
pub use redrive_action::{RedriveAction, Redriven, Step};
pub use resolve::{Decided, Decision, decide};

/// The most repeats of a reopen whose answer was lost.
const REPEATS: u32 = 5;

/// Delay between two repeats.
const REPEAT_AFTER: Duration = Duration::from_millis(200);

/// The outcome of a reopen.
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use = "only an opened record runs again"]
pub enum Reopened {
    /// The record was reopened. The next delivery of the message runs its handler, as attempt 1,
    /// and is counted as `extra_runs{reset}`.
    Opened,
    /// The record is not the one that was seen, and nothing was changed. The value is the current
    /// record; `None` when there is none.
    Changed(Option<RecordSnapshot>),
}

/// Reopens a record in any state, if it is still the one that the caller has `seen`.
///
/// A running owner loses its claim. The effect of an earlier attempt may happen again, so show the
/// record to an operator first. If the answer is lost, the call is repeated, and the record shows
/// the outcome.
///
/// # Errors
/// When the store does not answer, or the record cannot be read.
pub async fn reopen(
    store: &dyn Store,
    key: &StoreKey,
    seen: &Record,
) -> Result<Reopened, StoreError> {
    let mut repeats = 0;
    loop {
        let operation = Operation::Reopen {
            expected: seen.clone(),
        };
        let command = Command {
            key: key.clone(),
            operation,
        };
        let mut replies = store.execute(vec![command]).await;
        let reply = replies
            .pop()
            .unwrap_or_else(|| Err(StoreError::unknown("no answer")));
        match reply {
            Ok(Reply::Applied { .. }) => return Ok(Reopened::Opened),
            Ok(Reply::NotOwner | Reply::Verdict { .. }) => {
                let found = read(store, key).await?;
                // Only a repeat can find the result of this call.
                let ours = repeats > 0
                    && found
                        .as_ref()
                        .is_some_and(|found| is_reopened(&found.record));
                return Ok(if ours {
                    Reopened::Opened
                } else {
                    Reopened::Changed(found)
                });
            }
            Err(StoreError::Unknown { .. }) if repeats < REPEATS => {
                repeats += 1;
                tokio::time::sleep(REPEAT_AFTER * repeats).await;
            }
            Err(error) => return Err(error),
        }
    }
}

/// Returns the record that the store has for a key; `None` when it has none.
///
/// # Errors
/// When the store does not answer, or the record cannot be read.
pub async fn read(store: &dyn Store, key: &StoreKey) -> Result<Option<RecordSnapshot>, StoreError> {
    let mut answers = store.read(vec![key.clone()]).await;
    answers
        .pop()
        .unwrap_or_else(|| Err(StoreError::unknown("no answer")))
}

/// Returns whether an operator has reopened the record, and no attempt has run since.
pub fn is_reopened(record: &Record) -> bool {
    matches!(
        record.state,
        State::Released {
            by: TokenTag::NONE,
            recovery: Recovery::None,
            ..
        }
    )
}
