//! Selects the messages whose handler should run: for a replay of exactly these.

use std::sync::Arc;

use oncegate_core::store::StoreError;

use super::lookups::{Judge, Lookups};
use super::report::Standing;
use super::{DryRun, DryRunError, Known};
use oncegate_runtime::message::Message;

/// The messages that a replay runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunAgain {
    /// Messages without a record.
    WithoutRecord,
    /// Also messages whose attempt ended without an outcome and whose lease is over, and those
    /// whose retry is due. Their effects may have happened.
    Overdue,
}

/// Selects messages by their records, as a [`DryRun`] counts them.
#[derive(Clone, Debug)]
pub struct Selector {
    judge: Arc<Judge>,
    known: Known,
    which: RunAgain,
}

impl DryRun {
    /// Checks the specifications as [`open`](Self::open) does, and returns a selector of messages.
    ///
    /// # Errors
    /// The text of the [`DryRunError`] names what to change.
    pub async fn selector(self, which: RunAgain) -> Result<Selector, DryRunError> {
        let lookups = Lookups::open(self.subject()).await?;
        Ok(Selector {
            judge: lookups.judge(),
            known: lookups.known(),
            which,
        })
    }
}

impl Selector {
    /// Returns the store's knowledge of the scope.
    pub fn known(&self) -> Known {
        self.known
    }

    /// Returns the messages that should run, in their order. Several messages of one key are all
    /// returned, and a gate runs one of them.
    ///
    /// # Errors
    /// When the store or the schema registry did not answer for some ten seconds, or refuses.
    pub async fn select(&self, messages: &[Message]) -> Result<Vec<Message>, StoreError> {
        let findings = self.judge.examine(messages.to_vec()).await?;
        let wanted = messages
            .iter()
            .zip(findings)
            .filter(|(_, finding)| self.wants(&finding.standing));
        Ok(wanted.map(|(message, _)| message.clone()).collect())
    }

    fn wants(&self, standing: &Standing) -> bool {
        match standing {
            Standing::WithoutRecord => true,
            Standing::Abandoned | Standing::RetryDue => self.which == RunAgain::Overdue,
            _ => false,
        }
    }
}
