//! An operation that the lease renewer finishes in place of its caller.

use std::sync::Arc;

use oncegate_core::rules::{Operation, ReleaseCause};
use oncegate_core::store::Command;
use tokio::sync::watch;

/// An operation whose caller is gone. It counts as unfinished until it is dropped.
#[derive(Debug)]
pub(super) struct PendingOperation {
    pub(super) command: Command,
    /// A request for it has had no answer, and may have been executed.
    pub(super) may_be_executed: bool,
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

    /// Returns whether the operation ends a run that this process has thrown away.
    pub(super) fn is_discard(&self) -> bool {
        matches!(
            self.command.operation,
            Operation::Release {
                end: ReleaseCause::Discarded,
                ..
            }
        )
    }
}

impl Drop for PendingOperation {
    fn drop(&mut self) {
        self.unfinished
            .send_modify(|unfinished| *unfinished = unfinished.saturating_sub(1));
    }
}
