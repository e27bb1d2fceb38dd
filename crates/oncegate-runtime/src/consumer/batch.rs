//! One call of a batch handler: gathers the granted messages of a batch, calls the handler once, and splits a batch
//! that fails.
//!
//! Every message of a batch has an attempt of its own (`attempt`), with its own claim, lease and outcome. An attempt
//! holds a [`BatchSeat`]. It gives the seat up when its message is not to run, or takes it when its claim was granted.
//! When no seat is left undecided, the handler is called. Batches in one transaction are in `transaction_batch`.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;

use futures_util::FutureExt;
use tokio::sync::mpsc;
use tracing::{Instrument as _, info};

use super::seats::{Member, Members, Seat};
use super::shared::{BatchCaller, Batches, Route};
use super::trace;
use super::transactional::outcome_of_failure;
use super::work::{ConsumerHandler, Work, sealed};
use crate::batch::{
    BatchHandler, BatchLimits, BatchMessage, BatchOutcome, EarlyAnswer, ErasedBatchHandler, ErasedBatches,
};
use crate::failure::{Advice, Failure};
use crate::handler::{Encoded, ErasedHandler};
use crate::observe::{BatchCall, Event, RunOutcome};

/// A [`BatchHandler`] with the limits of its batches; pass it to [`Consumer::new`](crate::Consumer::new) or
/// [`route`](crate::Consumer::route) in the place of a handler.
///
/// ```
/// use oncegate::{BatchHandler, BatchLimits, BatchMessage, Batched, Failure};
///
/// struct Ledger;
///
/// impl BatchHandler for Ledger {
///     type Output = ();
///
///     async fn handle(&self, batch: &[BatchMessage]) -> Result<Vec<Result<(), Failure>>, Failure> {
///         Ok(batch.iter().map(|_| Ok(())).collect())
///     }
/// }
///
/// let hundreds = Batched::new(BatchLimits::new(100), Ledger);
/// ```
pub struct Batched {
    batches: Batches,
    handler: Arc<dyn ErasedHandler>,
}

impl Batched {
    /// The handler, with batches within these limits.
    pub fn new(limits: BatchLimits, handler: impl BatchHandler) -> Self {
        let handler = Arc::new(ErasedBatches(handler));
        let caller = BatchCaller::Claimed(Arc::clone(&handler) as _);
        Self { batches: Batches { caller, limits }, handler }
    }
}

impl std::fmt::Debug for Batched {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Batched").field("limits", &self.batches.limits).finish_non_exhaustive()
    }
}

impl ConsumerHandler for Batched {}

impl sealed::Sealed for Batched {
    fn into_work(self) -> Work {
        Work { handler: self.handler, transactional: None, batches: Some(self.batches) }
    }
}

/// How many messages must fail alone, one after another and without a call that succeeds, until the cause is taken to be
/// what all of them need.
pub(super) const OUTAGE_AFTER: u32 = 3;

/// The number of the attempt from which a message is called alone: two have failed, and it may fail again.
const ALONE_FROM_ATTEMPT: u32 = 3;

/// How the handler ended for one message.
#[derive(Debug)]
pub(super) enum MemberRan {
    Returned(Result<Encoded, Failure>),
    Panicked,
}

/// The outcome of one message, and whether it was found to fail alone.
#[derive(Debug)]
pub(super) struct Verdict {
    pub(super) ran: MemberRan,
    pub(super) fails_alone: bool,
}

/// The seat of a message with a claim of its own.
pub(super) type BatchSeat = Seat<BatchMessage, Verdict>;

type BatchMember = Member<BatchMessage, Verdict>;

/// The call of one batch.
pub(super) struct Batch {
    route: Arc<Route>,
    handler: Arc<dyn ErasedBatchHandler>,
}

impl Batch {
    pub(super) fn new(route: &Arc<Route>, handler: &Arc<dyn ErasedBatchHandler>) -> Self {
        Self { route: Arc::clone(route), handler: Arc::clone(handler) }
    }

    /// Waits until every seat is taken or given up, and runs the handler.
    pub(super) async fn run(self, members: Members<BatchMessage, Verdict>) {
        let members = members.gathered().await;
        let fails_again = |member: &BatchMember| member.one.attempt().number() >= ALONE_FROM_ATTEMPT;
        let (alone, together): (Vec<_>, Vec<_>) = members.into_iter().partition(fails_again);
        let alone = alone.into_iter().rev().map(|member| vec![member]);
        let mut parts: Vec<Vec<BatchMember>> = alone.chain([together]).collect();
        let (mut call, mut failed_alone) = (BatchCall::Gathered, 0);
        while let Some(mut part) = parts.pop() {
            part.retain(|member| !member.is_gone());
            if part.is_empty() {
                continue;
            }
            // Those that are answered early are not in `part` when the call has failed for the rest.
            let was_alone = part.len() == 1;
            let Called::Failed(failure) = self.call(&mut part, call).await else {
                failed_alone = 0;
                continue;
            };
            if was_alone {
                failed_alone += 1;
                settle_all(part, &failure, call == BatchCall::Split);
            } else if failure.may_be_of_one() {
                self.log_split(&part, &failure);
                let second = part.split_off(part.len() / 2);
                parts.extend([second, part]);
                call = BatchCall::Split;
            } else {
                settle_all(part, &failure, false);
            }
            if failed_alone >= OUTAGE_AFTER {
                let rest = BatchFailure::Returned(Failure::not_run(failure.reason()));
                parts.drain(..).for_each(|part| settle_all(part, &rest, false));
            }
        }
    }

    /// Calls the handler with one part of the batch, and settles its messages if it has an outcome for each. A message
    /// that is answered early is settled at once; `part` keeps those without an outcome.
    async fn call(&self, part: &mut Vec<BatchMember>, call: BatchCall) -> Called {
        let gate = &self.route.gate;
        gate.observe(Event::BatchCalled { scope: gate.scope(), call });
        let codec = gate.settings().codec;
        let (answers, mut early) = mpsc::unbounded_channel();
        let members = part.iter().enumerate();
        let batch: Vec<BatchMessage> =
            members.map(|(place, member)| member.one.in_call(place, codec, &answers)).collect();
        let mut waiting: Vec<Option<BatchMember>> = part.drain(..).map(Some).collect();
        let work = self.handler.handle_batch(&batch, codec);
        let work = AssertUnwindSafe(work).catch_unwind().instrument(trace::batch(gate.scope(), &batch));
        let mut work = std::pin::pin!(work);
        let ran: Option<Result<BatchOutcome, _>> = loop {
            tokio::select! {
                biased;
                Some(answer) = early.recv() => settle_early(&mut waiting, answer),
                ran = &mut work => break Some(ran),
                // Every message was cancelled, and its attempt has ended, or is answered.
                () = all_gone(&mut waiting) => break None,
            }
        };
        // Some may be answered in the same poll in which the handler has ended.
        while let Ok(answer) = early.try_recv() {
            settle_early(&mut waiting, answer);
        }
        trace::batch_ended(work.span(), outcome_of_call(ran.as_ref(), waiting.iter().any(Option::is_some)));
        let failure = match ran {
            None => return Called::Settled,
            Some(Ok(Ok(outcomes))) => {
                for (member, outcome) in waiting.into_iter().zip(outcomes) {
                    if let Some(member) = member {
                        member.end(returned(outcome));
                    }
                }
                return Called::Settled;
            }
            Some(Err(_panic)) => BatchFailure::Panicked,
            Some(Ok(Err(failure))) => BatchFailure::Returned(failure),
        };
        part.extend(waiting.into_iter().flatten());
        if part.is_empty() { Called::Settled } else { Called::Failed(failure) }
    }

    fn log_split(&self, part: &[BatchMember], failure: &BatchFailure) {
        let (scope, messages, reason) = (self.route.gate.scope(), part.len(), failure.reason());
        info!(scope, messages, reason, "a batch failed as a whole; each half of it is tried");
    }
}

/// Waits until the attempt of every message without an outcome has ended.
async fn all_gone(waiting: &mut [Option<BatchMember>]) {
    for member in waiting.iter_mut().flatten() {
        member.gone().await;
    }
}

/// Settles a message whose outcome is known before those of the others.
fn settle_early(waiting: &mut [Option<BatchMember>], EarlyAnswer { place, outcome }: EarlyAnswer) {
    if let Some(member) = waiting.get_mut(place).and_then(Option::take) {
        member.end(returned(outcome));
    }
}

fn returned(outcome: Result<Encoded, Failure>) -> Verdict {
    Verdict { ran: MemberRan::Returned(outcome), fails_alone: false }
}

/// How a call ended, for its span. `None`: it was dropped, because every message was answered, or cancelled: then it is
/// missing an outcome.
fn outcome_of_call<P>(ran: Option<&Result<BatchOutcome, P>>, is_missing_one: bool) -> RunOutcome {
    match ran {
        None if is_missing_one => RunOutcome::Cancelled,
        None => RunOutcome::Succeeded,
        Some(Err(_panic)) => RunOutcome::Panicked,
        Some(Ok(Ok(_))) => RunOutcome::Succeeded,
        Some(Ok(Err(failure))) => outcome_of_failure(failure),
    }
}

/// How a call ended.
enum Called {
    /// Every message has its outcome.
    Settled,
    /// The call failed for all of them.
    Failed(BatchFailure),
}

/// Why a call failed for all its messages.
enum BatchFailure {
    Returned(Failure),
    Panicked,
}

impl BatchFailure {
    /// Whether one of the messages may be the cause.
    fn may_be_of_one(&self) -> bool {
        match self {
            Self::Panicked => true,
            Self::Returned(failure) => may_be_of_one(failure),
        }
    }

    fn reason(&self) -> String {
        match self {
            Self::Panicked => "the handler panicked".to_owned(),
            Self::Returned(failure) => failure.reason(),
        }
    }

    fn for_one(&self) -> MemberRan {
        match self {
            Self::Panicked => MemberRan::Panicked,
            Self::Returned(failure) => MemberRan::Returned(Err(failure.copied())),
        }
    }
}

/// Whether one message of a batch may be the cause of a failure of all of it.
pub(super) fn may_be_of_one(failure: &Failure) -> bool {
    match failure.advice() {
        Advice::GiveUp | Advice::Retry { after: None } => true,
        Advice::Retry { after: Some(_) } | Advice::Later { .. } | Advice::Unknown | Advice::NotRun => false,
    }
}

fn settle_all(part: Vec<BatchMember>, failure: &BatchFailure, fails_alone: bool) {
    part.into_iter().for_each(|member| member.end(Verdict { ran: failure.for_one(), fails_alone }));
}
