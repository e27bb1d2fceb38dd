//! The transactions of one batch: all its messages are in one, and what that fails is run again without the message that
//! made it fail.
//!
//! An attempt holds a [`TransactionSeat`], and takes it when nothing is known of its key. No message is claimed here.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::sleep;
use tracing::info;

use super::batch::{OUTAGE_AFTER, may_be_of_one};
use super::ending::BUSY_BACKOFF;
use super::seats::{Member, Members, Seat};
use super::shared::Route;
use super::transactional::{BatchEnd, ErasedTransactionalBatches, Rest, RunEnd};
use crate::gate::TransactionRun;
use crate::observe::{BatchCall, Event, RunOutcome};
use crate::transactional::Excuse;

/// The seat of a message whose key the transaction of the batch takes.
pub(super) type TransactionSeat = Seat<Arc<TransactionRun>, RunEnd>;

type RunMember = Member<Arc<TransactionRun>, RunEnd>;

/// How often the same messages are tried again together after a conflict with another transaction. Then they are split:
/// a shorter transaction has fewer conflicts.
const MOST_CONFLICTS: u32 = 3;

/// A batch, or what is left of it.
pub(super) struct TransactionBatch {
    route: Arc<Route>,
    caller: Arc<dyn ErasedTransactionalBatches>,
    /// How many messages have failed alone since a transaction was committed.
    failed_alone: u32,
}

/// The messages of one transaction.
struct Part {
    members: Vec<RunMember>,
    /// How often another transaction was in the way of these.
    conflicts: u32,
}

impl Part {
    fn of(members: Vec<RunMember>) -> Self {
        Self { members, conflicts: 0 }
    }
}

impl TransactionBatch {
    pub(super) fn new(route: &Arc<Route>, caller: &Arc<dyn ErasedTransactionalBatches>) -> Self {
        Self { route: Arc::clone(route), caller: Arc::clone(caller), failed_alone: 0 }
    }

    /// Waits until every seat is taken or given up, and runs transactions until each message has an end.
    pub(super) async fn run(mut self, members: Members<Arc<TransactionRun>, RunEnd>) {
        let mut parts = vec![Part::of(members.gathered().await)];
        let mut call = BatchCall::Gathered;
        while let Some(Part { members, conflicts }) = parts.pop() {
            let (left, rest) = self.run_one(members, call).await;
            if left.is_empty() {
                continue;
            }
            match rest {
                Rest::RunAgain => {
                    call = BatchCall::Split;
                    parts.push(Part::of(left));
                }
                Rest::Excused { excuse: Excuse::Conflict, .. }
                    if left.len() > 1 && conflicts < MOST_CONFLICTS =>
                {
                    let conflicts = conflicts + 1;
                    sleep(BUSY_BACKOFF.wait(conflicts, self.route.gate.fraction())).await;
                    parts.push(Part { members: left, conflicts });
                }
                rest if left.len() > 1 && rest.may_be_of_one() => {
                    call = BatchCall::Split;
                    parts.extend(self.halves(left, &rest));
                }
                rest => {
                    self.end_all(left, &rest);
                    if self.failed_alone >= OUTAGE_AFTER {
                        let later = Rest::Excused { excuse: Excuse::Conflict, reason: rest.reason() };
                        parts.drain(..).for_each(|part| self.end_all(part.members, &later));
                    }
                }
            }
        }
    }

    /// Runs one transaction. Returns the messages that it has not ended, and why.
    async fn run_one(&mut self, members: Vec<RunMember>, call: BatchCall) -> (Vec<RunMember>, Rest) {
        let (gone, members): (Vec<_>, Vec<_>) =
            members.into_iter().partition(|member| member.one.discarded().is_cancelled());
        gone.into_iter().for_each(|member| member.end(RunEnd::Discarded));
        if members.is_empty() {
            return (members, Rest::RunAgain);
        }
        let runs = members.iter().map(|member| Arc::clone(&member.one)).collect();
        let BatchEnd { ends, rest, took } = self.caller.run_batch(runs, call).await;
        let mut left = Vec::new();
        for (member, end) in members.into_iter().zip(ends) {
            match end {
                Some(end) => self.end(member, end, took),
                None => left.push(member),
            }
        }
        if let (Rest::Failed { .. }, 1) = (&rest, left.len()) {
            self.failed_alone += 1;
        }
        (left, rest)
    }

    /// The halves of a part that has failed, the second one first.
    fn halves(&self, mut first: Vec<RunMember>, rest: &Rest) -> [Part; 2] {
        let (scope, messages, reason) = (self.route.gate.scope(), first.len(), rest.reason());
        info!(
            scope,
            messages, reason, "the transaction of a batch was rolled back; each half of it is tried"
        );
        let second = first.split_off(first.len() / 2);
        [Part::of(second), Part::of(first)]
    }

    fn end_all(&mut self, members: Vec<RunMember>, rest: &Rest) {
        members.into_iter().for_each(|member| self.end(member, rest.of_one(), Duration::ZERO));
    }

    /// Ends a message, and notes how the handler's run ended for it.
    fn end(&mut self, member: RunMember, end: RunEnd, took: Duration) {
        let outcome = match &end {
            RunEnd::Committed | RunEnd::Unknown(_) => Some(RunOutcome::Succeeded),
            RunEnd::Failed { outcome, .. } => Some(*outcome),
            RunEnd::Excused { .. } => Some(RunOutcome::Failed),
            RunEnd::Discarded => Some(RunOutcome::Cancelled),
            RunEnd::RecordExists | RunEnd::Held | RunEnd::NotBegun(_) => None,
        };
        if let RunEnd::Committed = end {
            self.failed_alone = 0;
        }
        if let Some(outcome) = outcome {
            let gate = &self.route.gate;
            gate.observe(Event::HandlerRan { scope: gate.scope(), outcome, took });
        }
        member.end(end);
    }
}

impl Rest {
    /// Whether one of the messages may be the cause.
    fn may_be_of_one(&self) -> bool {
        match self {
            Self::Failed { failure, .. } => may_be_of_one(failure),
            // A message may end the session of its transaction, and a held key is the key of one.
            Self::Excused { .. } | Self::Held | Self::RunAgain => true,
        }
    }

    fn reason(&self) -> String {
        match self {
            Self::Failed { failure, .. } => failure.reason(),
            Self::Excused { reason, .. } => reason.clone(),
            Self::Held | Self::RunAgain => "another transaction holds one of the keys".to_owned(),
        }
    }

    /// What it means to one message.
    fn of_one(&self) -> RunEnd {
        match self {
            Self::Failed { failure, outcome } => {
                RunEnd::Failed { failure: failure.copied(), outcome: *outcome }
            }
            Self::Excused { excuse, reason } => RunEnd::Excused { excuse: *excuse, reason: reason.clone() },
            Self::Held | Self::RunAgain => RunEnd::Held,
        }
    }
}
