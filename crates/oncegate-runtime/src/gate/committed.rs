//! The outcome of a transaction of the user that may have completed a key: only the record decides.

use std::fmt;
use std::time::Duration;

use oncegate_core::record::State;
use oncegate_core::rules::Operation;
use oncegate_core::store::StoreError;
use tracing::warn;

use super::pending::REPEAT_BACKOFF;
use super::{Completion, Lease};
use crate::codec::ToStored;
use crate::failure::Failure;
use crate::observe::Event;
use crate::transaction::SqlTransaction;

/// The record's state after a transaction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Committed {
    /// COMPLETED, by this lease.
    Yes,
    /// Still PENDING under this lease, and no transaction that could change this is in progress.
    No,
    /// The record belongs to another owner, or is gone.
    NotOwner,
}

/// The reason why a lease's transaction was not committed, and the lease, which is still valid.
///
/// [`Lease::release`] or [`Lease::fail`] it. If it is dropped, it lapses like that of a crashed
/// process.
#[derive(Debug)]
pub struct NotCommitted {
    lease: Box<Lease>,
    reason: String,
}

impl NotCommitted {
    /// Returns the lease, to be ended in another way.
    pub fn into_lease(self) -> Lease {
        *self.lease
    }
}

impl fmt::Display for NotCommitted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.reason)
    }
}

impl std::error::Error for NotCommitted {}

impl Lease {
    /// Completes the message inside `transaction`, commits it, and reads the record back; see
    /// [`Attempt::commit_with`](crate::Attempt::commit_with).
    ///
    /// Repeats the read until the store has answered. If this future is dropped before, do not
    /// acknowledge, and ask the gate again.
    ///
    /// # Errors
    /// Returns an error when the transaction was not committed, and will not be: nothing of it has
    /// happened.
    pub fn commit_with<S, Tx: SqlTransaction<S>, T: ToStored + ?Sized>(
        self,
        transaction: Tx,
        output: &T,
    ) -> impl Future<Output = Result<Completion, NotCommitted>> + Send + use<S, Tx, T> {
        let committing = self.attempt.commit_with(transaction, output);
        async move {
            // The record decides, not this answer; an error is kept for the reason.
            _ = committing.await;
            self.committed().await
        }
    }

    /// Reads back the record after a transaction that was given the completion of this lease's
    /// [`attempt`](Self::attempt).
    ///
    /// Repeats until the store has answered, and while a commit may still be in progress.
    ///
    /// # Errors
    /// Returns an error when it was not committed, and will not be: nothing of it has happened.
    pub async fn committed(self) -> Result<Completion, NotCommitted> {
        match self.read_back().await {
            Committed::Yes => Ok(Completion::Applied),
            Committed::NotOwner => Ok(Completion::NotOwner),
            Committed::No => {
                let reason = self.not_committed().reason();
                Err(NotCommitted {
                    lease: Box::new(self),
                    reason,
                })
            }
        }
    }

    /// Returns whether the handler has tried to complete the message in a transaction of its own.
    /// Then only [`committed`](Self::committed) shows what has become of it.
    pub fn is_attempted(&self) -> bool {
        self.attempt.completion().is_attempted()
    }

    /// Returns why there is no completion, with the error of the transaction if there was one.
    pub(crate) fn not_committed(&self) -> Failure {
        let attempted = self.attempt.completion().lock().take();
        Failure::retry(match attempted.and_then(|attempted| attempted.trouble) {
            Some(trouble) => format!("nothing was committed: {trouble}"),
            None => "the handler's transaction was rolled back, or never committed".to_owned(),
        })
    }

    /// Reads the record until the store answers. Heartbeats continue in the meantime.
    pub(crate) async fn read_back(&self) -> Committed {
        let scope = self.gate.scope();
        let mut failures = 0;
        let committed = loop {
            match self.try_read_back().await {
                Ok(committed) => break committed,
                Err(error) => {
                    self.kept.completing();
                    self.gate.observe(Event::StoreError {
                        scope,
                        class: error.class(),
                    });
                }
            }
            failures += 1;
            tokio::time::sleep(REPEAT_BACKOFF.wait(failures, self.gate.fraction())).await;
        };
        match committed {
            Committed::Yes => {
                self.tell_if_not_kept();
                self.gate.observe(Event::Completed {
                    scope,
                    result_bytes: self.result_bytes(),
                });
                self.gate.note_completed(
                    &self.identity.key,
                    &self.token,
                    (self.granted_at, self.retention),
                );
                self.note_ended("completed", "");
            }
            Committed::NotOwner => {
                self.gate.observe(Event::CompleteLost { scope });
                self.note_ended("lost", "");
            }
            Committed::No => {}
        }
        committed
    }

    async fn try_read_back(&self) -> Result<Committed, StoreError> {
        let committed = self.look().await?;
        if committed != Committed::No {
            return Ok(committed);
        }
        // A commit whose answer was lost may still be in progress at the server, and locks the
        // record until it is decided. A read does not wait for that lock, a write does; this write
        // adds no time to the lease.
        let extend = Operation::Extend {
            token: self.token,
            lease: Duration::ZERO,
        };
        self.gate.execute(&self.identity.key, extend).await?;
        self.look().await
    }

    /// Returns what the record holds at this moment.
    async fn look(&self) -> Result<Committed, StoreError> {
        let snapshot = self
            .gate
            .store
            .read(vec![self.identity.key.clone()])
            .await
            .into_iter()
            .next();
        let snapshot =
            snapshot.unwrap_or_else(|| Err(StoreError::unknown("the store gave no answer")))?;
        Ok(match snapshot.map(|snapshot| snapshot.record.state) {
            Some(State::Completed { by, .. }) if by == self.token.tag() => Committed::Yes,
            Some(State::Pending { token, .. }) if token == self.token => Committed::No,
            Some(_) | None => Committed::NotOwner,
        })
    }

    fn tell_if_not_kept(&self) {
        let not_kept = self
            .attempt
            .completion()
            .lock()
            .as_mut()
            .and_then(|attempted| attempted.not_kept.take());
        if let Some(error) = not_kept {
            let scope = self.gate.scope();
            self.gate.observe(Event::ResultNotKept { scope });
            warn!(scope, origin = %self.message.origin(), %error, "the work is recorded without its result");
        }
    }

    /// The size of the result that a transaction has stored.
    fn result_bytes(&self) -> u64 {
        self.attempt
            .completion()
            .lock()
            .as_ref()
            .map_or(0, |attempted| attempted.result_bytes)
    }
}
