//! An operation that the lease renewer finishes in place of its caller.

use std::sync::Arc;
use std::time::Duration;

use oncegate_core::rules::{Operation, Reply};
use oncegate_core::store::{Command, Store, StoreError};
use tokio::sync::watch;

use crate::backoff::Backoff;
use crate::entropy::Entropy;

/// The delays between repeats of an operation whose outcome is unknown.
pub(super) const REPEAT_BACKOFF: Backoff =
    Backoff::new(Duration::from_millis(20), Duration::from_secs(2));

/// Returns whether the operation may have been executed, or may still be.
pub(super) fn is_unknown(error: &StoreError) -> bool {
    matches!(error, StoreError::Unknown { .. })
}

/// An operation whose caller is gone. It counts as unfinished until it is dropped.
#[derive(Debug)]
pub(super) struct PendingOperation {
    pub(super) command: Command,
    /// A request for it has had no answer, and may have been executed.
    may_be_executed: bool,
    unfinished: Arc<watch::Sender<usize>>,
}

impl PendingOperation {
    pub(super) fn new(
        command: Command,
        may_be_executed: bool,
        unfinished: &Arc<watch::Sender<usize>>,
    ) -> Self {
        unfinished.send_modify(|unfinished| *unfinished += 1);
        Self {
            command,
            may_be_executed,
            unfinished: Arc::clone(unfinished),
        }
    }

    /// Repeats the operation until the store has answered. `note` is called with each error.
    pub(super) async fn execute(
        &mut self,
        store: &dyn Store,
        entropy: &Entropy,
        note: impl Fn(&StoreError) + Send,
    ) -> Reply {
        let mut failures = 0;
        loop {
            match store.execute_one(self.command.clone()).await {
                Ok(reply) => return reply,
                Err(error) => {
                    self.may_be_executed |= is_unknown(&error);
                    note(&error);
                }
            }
            failures += 1;
            tokio::time::sleep(REPEAT_BACKOFF.wait(failures, entropy.fraction())).await;
        }
    }

    /// Returns whether it was executed, now or by a request that had no answer: another process may
    /// have claimed the key between that execution and this reply.
    pub(super) fn is_executed(&self, reply: &Reply) -> bool {
        self.may_be_executed || matches!(reply, Reply::Applied { .. })
    }

    /// Returns whether the operation ends a run that this process has thrown away.
    pub(super) fn is_discard(&self) -> bool {
        matches!(
            self.command.operation,
            Operation::Release { end, .. } if end.is_without_outcome()
        )
    }
}

impl Drop for PendingOperation {
    fn drop(&mut self) {
        self.unfinished
            .send_modify(|unfinished| *unfinished = unfinished.saturating_sub(1));
    }
}
