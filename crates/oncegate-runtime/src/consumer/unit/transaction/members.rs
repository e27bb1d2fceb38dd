//! The members of a unit in their transactions: one of all, and others for what is left of it.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep};
use tracing::{Instrument as _, Span, info};

use super::follow::{InTransaction, claim, claim_apart, follow};
use crate::consumer::end::BUSY_BACKOFF;
use crate::consumer::erased::{ErasedTransactional, Rest, RunEnd, TransactionEnd};
use crate::consumer::member::{Ended, Member};
use crate::consumer::split::{Blame, NextStep, Part, Split, blame};
use crate::consumer::unit::tasks::Tasks;
use crate::gate::TransactionRun;
use crate::health::Stage;
use crate::observe::{BatchCall, Event, RunOutcome};
use crate::transactional::Excuse;

/// The members of a unit, each until its end is known.
pub(super) struct TransactionMembers<'a> {
    tasks: &'a Arc<Tasks>,
    handler: &'a Arc<dyn ErasedTransactional>,
    members: Vec<Option<InTransaction>>,
    ended: Vec<Ended>,
    to_claim: Vec<Member>,
}

impl<'a> TransactionMembers<'a> {
    pub(super) fn of(
        tasks: &'a Arc<Tasks>,
        handler: &'a Arc<dyn ErasedTransactional>,
        begun: Vec<InTransaction>,
    ) -> Self {
        let began = Instant::now();
        for InTransaction { member, .. } in &begun {
            member.item.enter(Stage::Running, began);
        }
        let members = begun.into_iter().map(Some).collect();
        Self {
            tasks,
            handler,
            members,
            ended: Vec::new(),
            to_claim: Vec::new(),
        }
    }

    /// Runs transactions until each message has an end.
    pub(super) async fn run(mut self) -> Vec<Ended> {
        let mut split = Split::new((0..self.members.len()).collect(), Vec::new());
        while let Some((mut part, call)) = split.next_part() {
            // What the transaction before has ended does not wait for this one.
            self.tasks.report(&mut self.ended);
            claim_apart(self.tasks, std::mem::take(&mut self.to_claim));
            let Some(rest) = self.run_one(&mut part, call, &mut split).await else {
                continue;
            };
            let messages = part.members.len();
            let was_split = matches!(rest.blame(), Blame::One | Blame::InTheWay | Blame::Conflict);
            match split.failed(part, rest.blame()) {
                NextStep::GoOn if was_split => self.log_split(messages, &rest),
                NextStep::GoOn => {}
                NextStep::BackOff(conflicts) => {
                    sleep(BUSY_BACKOFF.wait(conflicts, self.tasks.shared.random())).await;
                }
                NextStep::Fail { members, .. } => self.end_all(members, &rest),
                NextStep::Outage {
                    members,
                    rest: others,
                    ..
                } => {
                    self.end_all(members, &rest);
                    let later = Rest::Excused {
                        excuse: Excuse::Conflict,
                        reason: rest.reason(),
                    };
                    self.end_all(others, &later);
                }
            }
        }
        claim(self.tasks, self.to_claim, self.ended).await
    }

    /// Runs one transaction. Returns why it has not ended those that are left in `part`.
    async fn run_one(
        &mut self,
        part: &mut Part<usize>,
        call: BatchCall,
        split: &mut Split<usize>,
    ) -> Option<Rest> {
        self.leave_out_late(part);
        part.members.retain(|place| self.get(*place).is_some());
        let members = part.members.iter().filter_map(|place| self.get(*place));
        let runs: Vec<Arc<TransactionRun>> =
            members.map(|running| Arc::clone(&running.run)).collect();
        let first = self.get(*part.members.first()?)?;
        // The handler of a batch runs in a span of its own.
        let (call, span) = if first.member.in_batch {
            (Some(call), Span::none())
        } else {
            (None, first.span.clone())
        };
        let running = self.handler.run(runs, call).instrument(span);
        let RunEnd { ends, rest, took } = running.await;
        for (place, end) in part.members.iter().zip(ends) {
            let Some(end) = end else { continue };
            if let TransactionEnd::Committed = end {
                split.succeeded();
            }
            self.end(*place, end, took);
        }
        part.members.retain(|place| self.get(*place).is_some());
        (!part.members.is_empty()).then_some(rest)
    }

    /// Ends the members for which no transaction may begin any more: the consumer stops, or the
    /// broker has taken them away. They have left nothing in the store.
    fn leave_out_late(&mut self, part: &Part<usize>) {
        for place in &part.members {
            let is_late = self
                .get(*place)
                .is_some_and(|InTransaction { member, .. }| {
                    member.item.route.gate.is_stopped()
                        || !member.item.delivery.ack_handle.is_ours()
                });
            if is_late {
                self.end(*place, TransactionEnd::Held, Duration::ZERO);
            }
        }
    }

    fn get(&self, place: usize) -> Option<&InTransaction> {
        self.members.get(place)?.as_ref()
    }

    fn end_all(&mut self, members: Vec<usize>, rest: &Rest) {
        members
            .into_iter()
            .for_each(|place| self.end(place, rest.of_one(), Duration::ZERO));
    }

    /// Ends a message, and notes how the handler's run ended for it.
    fn end(&mut self, place: usize, end: TransactionEnd, took: Duration) {
        let Some(mut running) = self.members.get_mut(place).and_then(Option::take) else {
            return;
        };
        let outcome = match &end {
            TransactionEnd::Committed | TransactionEnd::Unknown(_) => Some(RunOutcome::Succeeded),
            TransactionEnd::Failed { outcome, .. } => Some(*outcome),
            TransactionEnd::Excused { .. } => Some(RunOutcome::Failed),
            TransactionEnd::Discarded => Some(RunOutcome::Cancelled),
            TransactionEnd::RecordExists | TransactionEnd::Held | TransactionEnd::NotBegun(_) => {
                None
            }
        };
        if let Some(outcome) = outcome {
            let gate = running.run.gate();
            gate.observe(Event::HandlerRan {
                scope: gate.scope(),
                outcome,
                took,
            });
        }
        running.member.item.past.runs_alone |= matches!(end, TransactionEnd::Failed { .. });
        self.to_claim
            .extend(follow(self.tasks, running, end, &mut self.ended));
    }

    fn log_split(&self, messages: usize, rest: &Rest) {
        let Some(running) = self.members.iter().flatten().next() else {
            return;
        };
        let scope = running.run.gate().scope();
        let reason = rest.reason();
        info!(
            scope,
            messages,
            reason,
            "the transaction of a batch was rolled back; each half of it is tried"
        );
    }
}

impl Rest {
    fn blame(&self) -> Blame {
        match self {
            Self::RunAgain => Blame::Others,
            Self::Failed { failure, .. } => blame(failure),
            Self::Excused {
                excuse: Excuse::Conflict,
                ..
            } => Blame::Conflict,
            // A message may end the session of its transaction, and a held key is the key of one.
            Self::Excused {
                excuse: Excuse::ConnectionLost,
                ..
            }
            | Self::Held => Blame::InTheWay,
        }
    }

    fn reason(&self) -> String {
        match self {
            Self::Failed { failure, .. } => failure.reason(),
            Self::Excused { reason, .. } => reason.clone(),
            Self::Held | Self::RunAgain => "another transaction holds one of the keys".to_owned(),
        }
    }

    /// Returns what it means to one message.
    fn of_one(&self) -> TransactionEnd {
        match self {
            Self::Failed { failure, outcome } => TransactionEnd::Failed {
                failure: failure.copied(),
                outcome: *outcome,
            },
            Self::Excused { excuse, reason } => TransactionEnd::Excused {
                excuse: *excuse,
                reason: reason.clone(),
            },
            Self::Held | Self::RunAgain => TransactionEnd::Held,
        }
    }
}
