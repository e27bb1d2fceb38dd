//! Transactional handlers with their types erased: how they are run, and how a run in a transaction
//! ends.

use std::sync::Arc;
use std::time::Duration;

use oncegate_core::key::Scope;
use oncegate_core::store::StoreError;

use crate::failure::Failure;
use crate::gate::TransactionRun;
use crate::handler::{BoxFuture, ErasedHandler};
use crate::observe::{BatchCall, RunOutcome};
use crate::transactional::{Excuse, Sessions};

/// A [`Transactional`](crate::Transactional) with its types erased.
pub(super) trait ErasedTransactional: ErasedHandler {
    fn limit(&self) -> Duration;

    fn descriptor(&self, scope: Scope) -> BoxFuture<'_, Result<Option<String>, StoreError>>;

    fn sessions(&self) -> Arc<dyn Sessions>;

    /// Runs first attempts, which make no claims, in one transaction. `call` is what the call of a
    /// batch is for, and `None` for a message that is in no batch.
    fn run(&self, runs: Vec<Arc<TransactionRun>>, call: Option<BatchCall>)
    -> BoxFuture<'_, RunEnd>;
}

/// The end of a run without a claim, for one message.
#[derive(Debug)]
pub(super) enum TransactionEnd {
    /// Effect and COMPLETED are committed.
    Committed,
    /// There is a record of the key. The handler has not run.
    RecordExists,
    /// Another transaction holds the key. The handler has not run.
    Held,
    /// No transaction could be opened. The handler has not run.
    NotBegun(StoreError),
    /// The transaction was rolled back because of another transaction, or because its connection
    /// was lost.
    Excused { excuse: Excuse, reason: String },
    /// The handler has failed, and its transaction is rolled back.
    Failed {
        failure: Failure,
        outcome: RunOutcome,
    },
    /// The run was ended from outside, and its transaction is rolled back.
    Discarded,
    /// The commit was sent and not answered.
    Unknown(StoreError),
}

/// The end of one transaction, for each of its messages.
pub(super) struct RunEnd {
    /// In the order of the messages; `None` for a message that belongs to the rest.
    pub(super) ends: Vec<Option<TransactionEnd>>,
    /// Nothing of the rest is done, and its transaction is rolled back.
    pub(super) rest: Rest,
    /// The time that the handler ran.
    pub(super) took: Duration,
}

/// The reason why the rest of the messages has not ended by a transaction.
#[derive(Debug)]
pub(super) enum Rest {
    /// Other messages have failed: the rest runs again without them.
    RunAgain,
    /// Another transaction holds one of the keys. The handler has not run.
    Held,
    /// Another transaction was in the way, or the connection was lost.
    Excused { excuse: Excuse, reason: String },
    /// The handler, or the commit, has failed for all of them.
    Failed {
        failure: Failure,
        outcome: RunOutcome,
    },
}

impl RunEnd {
    pub(super) fn all(count: usize, end: impl Fn() -> TransactionEnd) -> Self {
        let ends = std::iter::repeat_with(|| Some(end())).take(count).collect();
        Self {
            ends,
            rest: Rest::RunAgain,
            took: Duration::ZERO,
        }
    }

    pub(super) fn none(count: usize, rest: Rest) -> Self {
        let ends = std::iter::repeat_with(|| None).take(count).collect();
        Self {
            ends,
            rest,
            took: Duration::ZERO,
        }
    }

    /// Adds the messages that the transaction has not taken, because there is a record of their
    /// keys.
    pub(super) fn with_left_out(self, is_taken: &[bool]) -> Self {
        let mut ends = self.ends.into_iter();
        let with_left_out = is_taken.iter().map(|taken| {
            if *taken {
                ends.next().flatten()
            } else {
                Some(TransactionEnd::RecordExists)
            }
        });
        Self {
            ends: with_left_out.collect(),
            ..self
        }
    }
}
