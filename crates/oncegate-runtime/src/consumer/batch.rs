//! One call of a batch handler: gathers the granted messages of a batch, calls the handler once, and splits a batch
//! that fails.
//!
//! Every message of a batch has an attempt of its own (`attempt`), with its own claim, lease and outcome. An attempt
//! holds a [`BatchSeat`]. It gives the seat up when its message is not to run, or takes it when its claim was granted.
//! When no seat is left undecided, the handler is called.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;

use futures_util::FutureExt;
use tokio::sync::{OwnedSemaphorePermit, mpsc, oneshot};
use tracing::{Instrument as _, info};

use super::shared::{Batches, Route};
use super::trace;
use super::transactional::{ConsumerHandler, Work, sealed};
use crate::attempt::Attempt;
use crate::batch::{
    BatchHandler, BatchLimits, BatchMessage, BatchOutcome, ErasedBatchHandler, ErasedBatches,
};
use crate::failure::{Advice, Failure};
use crate::handler::{Encoded, ErasedHandler};
use crate::message::Message;
use crate::observe::{BatchCall, Event};

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
        Self { batches: Batches { handler: Arc::clone(&handler) as _, limits }, handler }
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
const OUTAGE_AFTER: u32 = 3;

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
struct Verdict {
    ran: MemberRan,
    fails_alone: bool,
}

/// The right of one message to be in the call of its batch. A seat that is dropped is given up.
#[derive(Debug)]
pub(super) struct BatchSeat {
    position: usize,
    takes: mpsc::UnboundedSender<Member>,
    permit: Arc<OwnedSemaphorePermit>,
}

/// A message that is in the call.
#[derive(Debug)]
struct Member {
    position: usize,
    one: BatchMessage,
    outcome: oneshot::Sender<Verdict>,
}

impl BatchSeat {
    /// The permit that the messages of the batch share.
    pub(super) fn permit(&self) -> Arc<OwnedSemaphorePermit> {
        Arc::clone(&self.permit)
    }

    /// Waits for the call, and returns the outcome of this message; `true`: it was found to fail alone.
    pub(super) async fn take(self, message: Message, attempt: Attempt) -> (MemberRan, bool) {
        let (outcome, verdict) = oneshot::channel();
        let Self { position, takes, permit } = self;
        // When this is not taken, the task of the batch is being dropped, and this future with it.
        _ = takes.send(Member { position, one: BatchMessage::new(message, attempt), outcome });
        drop((takes, permit));
        match verdict.await {
            Ok(Verdict { ran, fails_alone }) => (ran, fails_alone),
            Err(_) => std::future::pending().await,
        }
    }
}

/// The call of one batch.
pub(super) struct Batch {
    route: Arc<Route>,
    handler: Arc<dyn ErasedBatchHandler>,
    takes: mpsc::UnboundedReceiver<Member>,
}

impl Batch {
    /// A batch with this many seats, which share the permit.
    pub(super) fn new(
        route: &Arc<Route>,
        handler: &Arc<dyn ErasedBatchHandler>,
        seats: usize,
        permit: OwnedSemaphorePermit,
    ) -> (Self, Vec<BatchSeat>) {
        let (sender, takes) = mpsc::unbounded_channel();
        let permit = Arc::new(permit);
        let seat = |position| BatchSeat { position, takes: sender.clone(), permit: Arc::clone(&permit) };
        let seats = (0..seats).map(seat).collect();
        (Self { route: Arc::clone(route), handler: Arc::clone(handler), takes }, seats)
    }

    /// Waits until every seat is taken or given up, and runs the handler.
    pub(super) async fn run(mut self) {
        let mut members = Vec::new();
        while let Some(member) = self.takes.recv().await {
            members.push(member);
        }
        // Claims are answered in any order.
        members.sort_by_key(|member| member.position);
        let fails_again = |member: &Member| member.one.attempt().number() >= ALONE_FROM_ATTEMPT;
        let (alone, together): (Vec<Member>, Vec<Member>) = members.into_iter().partition(fails_again);
        let alone = alone.into_iter().rev().map(|member| vec![member]);
        let mut parts: Vec<Vec<Member>> = alone.chain([together]).collect();
        let (mut call, mut failed_alone) = (BatchCall::Gathered, 0);
        while let Some(mut part) = parts.pop() {
            part.retain(|member| !member.outcome.is_closed());
            if part.is_empty() {
                continue;
            }
            let Called::Failed(failure) = self.call(&mut part, call).await else {
                failed_alone = 0;
                continue;
            };
            if part.len() == 1 {
                failed_alone += 1;
                settle_all(part, &failure, call == BatchCall::Split);
            } else if failure.is_of_one() {
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

    /// Calls the handler with one part of the batch, and settles its messages if it has an outcome for each.
    async fn call(&self, part: &mut Vec<Member>, call: BatchCall) -> Called {
        let gate = &self.route.gate;
        gate.observe(Event::BatchCalled { scope: gate.scope(), call });
        let batch: Vec<BatchMessage> = part.iter().map(|member| member.one.clone()).collect();
        let work = self.handler.handle_batch(&batch, gate.settings().codec);
        let work = AssertUnwindSafe(work).catch_unwind().instrument(trace::batch(gate.scope(), batch.len()));
        let unwanted = async {
            for member in &mut *part {
                member.outcome.closed().await;
            }
        };
        let ran: Option<Result<BatchOutcome, _>> = tokio::select! {
            biased;
            ran = work => Some(ran),
            // Every message was cancelled, and its attempt has ended.
            () = unwanted => None,
        };
        match ran {
            None => Called::Settled,
            Some(Err(_panic)) => Called::Failed(BatchFailure::Panicked),
            Some(Ok(Err(failure))) => Called::Failed(BatchFailure::Returned(failure)),
            Some(Ok(Ok(outcomes))) => {
                for (member, outcome) in part.drain(..).zip(outcomes) {
                    member.end(MemberRan::Returned(outcome), false);
                }
                Called::Settled
            }
        }
    }

    fn log_split(&self, part: &[Member], failure: &BatchFailure) {
        let (scope, messages, reason) = (self.route.gate.scope(), part.len(), failure.reason());
        info!(scope, messages, reason, "a batch failed as a whole; each half of it is tried");
    }
}

impl Member {
    /// Ends the message's wait. If its attempt has ended before, it was cancelled, and the outcome is ignored.
    fn end(self, ran: MemberRan, fails_alone: bool) {
        _ = self.outcome.send(Verdict { ran, fails_alone });
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
    fn is_of_one(&self) -> bool {
        match self {
            Self::Panicked => true,
            Self::Returned(failure) => match failure.advice() {
                Advice::GiveUp | Advice::Retry { after: None } => true,
                Advice::Retry { after: Some(_) }
                | Advice::Later { .. }
                | Advice::Unknown
                | Advice::NotRun => false,
            },
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

fn settle_all(part: Vec<Member>, failure: &BatchFailure, fails_alone: bool) {
    part.into_iter().for_each(|member| member.end(failure.for_one(), fails_alone));
}
