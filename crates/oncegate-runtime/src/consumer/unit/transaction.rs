//! The first attempts of a transactional handler: one transaction, for one message or for a batch,
//! and no claim before it.
//!
//! It is for keys of which nothing is known. Whatever else it finds is [claimed](super::claims): a
//! key with a record, a key that a process may have died with, and a run whose failure must be
//! counted.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use oncegate_core::store::StoreError;
use tokio::time::{Instant, sleep};
use tracing::{Instrument as _, Span, debug, info, warn};

use super::super::end::{BUSY_BACKOFF, End};
use super::super::erased::{BatchEnd, ErasedTransactionalBatches, Rest, TransactionEnd};
use super::super::item::Item;
use super::super::member::{Ended, Member};
use super::super::progress::{Progress, RolledBack, after_transaction};
use super::super::session::UnitListing;
use super::super::shared::{Shared, TransactionalRoute};
use super::super::split::{Blame, NextStep, Part, Split, blame};
use super::super::trace;
use super::claims::{self, Purpose};
use super::tasks::Tasks;
use crate::gate::{OnGrant, TransactionRun};
use crate::handler::BoxFuture;
use crate::health::{Stage, WaitCause};
use crate::observe::{BatchCall, Event, RunOutcome};
use crate::transactional::Excuse;

/// Runs each member in a transaction of its own, if nothing is known of its key.
pub(super) async fn run_each(
    tasks: &Arc<Tasks>,
    transactional: &TransactionalRoute,
    members: Vec<Member>,
    mut ended: Vec<Ended>,
) -> Vec<Ended> {
    let mut listing = UnitListing::default();
    let mut to_claim = Vec::new();
    for mut member in members {
        let run = match prepare(&mut listing, &mut member.item).await {
            ControlFlow::Continue(Some(run)) => run,
            ControlFlow::Continue(None) => {
                to_claim.push(member);
                continue;
            }
            ControlFlow::Break(end) => {
                tasks.settle(&mut ended, member, end);
                continue;
            }
        };
        let run = Arc::new(run);
        let span = tasks
            .shared
            .spans
            .unclaimed(&member.item.delivery.message, run.store_key());
        member.item.enter(Stage::Running, Instant::now());
        let running = transactional.work.run(Arc::clone(&run));
        let end = until_lost(&member.item, &run, running)
            .instrument(span.clone())
            .await;
        to_claim.extend(follow(
            tasks,
            InTransaction { member, run, span },
            end,
            &mut ended,
        ));
    }
    claims::run(tasks, to_claim, Purpose::Run, ended).await
}

/// Runs the members in one transaction. What fails it runs again without the message that made it
/// fail. What cannot be in one runs alone, and later.
pub(super) async fn run_batch(
    tasks: &Arc<Tasks>,
    caller: &Arc<dyn ErasedTransactionalBatches>,
    members: Vec<Member>,
    mut ended: Vec<Ended>,
) -> Vec<Ended> {
    let mut listing = UnitListing::default();
    let (mut begun, mut to_claim) = (Vec::with_capacity(members.len()), Vec::new());
    for mut member in members {
        match prepare(&mut listing, &mut member.item).await {
            ControlFlow::Continue(Some(run)) => {
                let span = tasks
                    .shared
                    .spans
                    .unclaimed(&member.item.delivery.message, run.store_key());
                begun.push(InTransaction {
                    member,
                    run: Arc::new(run),
                    span,
                });
            }
            // Another attempt, or another process, may have ended with it. It is not claimed here:
            // that would cost it an attempt if one of its neighbours ended this process.
            ControlFlow::Continue(None)
                if matches!(member.item.past.progress, Progress::NeedsClaim) =>
            {
                member.item.past.runs_alone = true;
                let end = End::NotNow {
                    ask_again_in: Duration::ZERO,
                    cause: WaitCause::Retry,
                };
                tasks.settle(&mut ended, member, end);
            }
            ControlFlow::Continue(None) => to_claim.push(member),
            ControlFlow::Break(end) => tasks.settle(&mut ended, member, end),
        }
    }
    tasks.report(&mut ended);
    if !to_claim.is_empty() {
        claim_apart(tasks, to_claim);
    }
    TransactionMembers::of(tasks, caller, begun).run().await
}

/// A member in a transaction.
struct InTransaction {
    member: Member,
    run: Arc<TransactionRun>,
    span: Span,
}

/// The members of a batch, each until its end is known.
struct TransactionMembers<'a> {
    tasks: &'a Arc<Tasks>,
    caller: &'a Arc<dyn ErasedTransactionalBatches>,
    members: Vec<Option<InTransaction>>,
    /// Resolves when the broker has taken a member away.
    lost: FuturesUnordered<BoxFuture<'static, ()>>,
    ended: Vec<Ended>,
    to_claim: Vec<Member>,
}

impl<'a> TransactionMembers<'a> {
    fn of(
        tasks: &'a Arc<Tasks>,
        caller: &'a Arc<dyn ErasedTransactionalBatches>,
        begun: Vec<InTransaction>,
    ) -> Self {
        let began = Instant::now();
        let lost = begun.iter().map(|InTransaction { member, run, .. }| {
            member.item.enter(Stage::Running, began);
            let (run, ack_handle) = (
                Arc::clone(run),
                Arc::clone(&member.item.delivery.ack_handle),
            );
            Box::pin(async move {
                if let Some(lost) = ack_handle.lost() {
                    lost.await;
                    run.discarded().cancel();
                }
            }) as BoxFuture<'static, ()>
        });
        let lost = lost.collect();
        let members = begun.into_iter().map(Some).collect();
        Self {
            tasks,
            caller,
            members,
            lost,
            ended: Vec::new(),
            to_claim: Vec::new(),
        }
    }

    /// Runs transactions until each message has an end.
    async fn run(mut self) -> Vec<Ended> {
        let mut split = Split::new((0..self.members.len()).collect(), Vec::new());
        while let Some((mut part, call)) = split.next_part() {
            // What the transaction before has ended does not wait for this one.
            self.tasks.report(&mut self.ended);
            let to_claim = std::mem::take(&mut self.to_claim);
            if !to_claim.is_empty() {
                claim_apart(self.tasks, to_claim);
            }
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
        claims::run(self.tasks, self.to_claim, Purpose::Look, self.ended).await
    }

    /// Runs one transaction. Returns why it has not ended those that are left in `part`.
    async fn run_one(
        &mut self,
        part: &mut Part<usize>,
        call: BatchCall,
        split: &mut Split<usize>,
    ) -> Option<Rest> {
        for place in &part.members {
            let is_discarded = |running: &InTransaction| running.run.discarded().is_cancelled();
            if self
                .members
                .get(*place)
                .and_then(Option::as_ref)
                .is_some_and(is_discarded)
            {
                self.end(*place, TransactionEnd::Discarded, Duration::ZERO);
            }
        }
        part.members
            .retain(|place| self.members.get(*place).is_some_and(Option::is_some));
        let members = part
            .members
            .iter()
            .filter_map(|place| self.members.get(*place)?.as_ref());
        let runs: Vec<Arc<TransactionRun>> =
            members.map(|running| Arc::clone(&running.run)).collect();
        if runs.is_empty() {
            return None;
        }
        let mut running = self.caller.run_batch(runs, call);
        let BatchEnd { ends, rest, took } = loop {
            tokio::select! {
                biased;
                end = &mut running => break end,
                Some(()) = self.lost.next() => {}
            }
        };
        drop(running);
        for (place, end) in part.members.iter().zip(ends) {
            let Some(end) = end else { continue };
            if let TransactionEnd::Committed = end {
                split.succeeded();
            }
            self.end(*place, end, took);
        }
        part.members
            .retain(|place| self.members.get(*place).is_some_and(Option::is_some));
        (!part.members.is_empty()).then_some(rest)
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
        let (scope, reason) = (running.run.gate().scope(), rest.reason());
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

    /// What it means to one message.
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

/// Claims the keys of a batch's members while its transactions go on.
fn claim_apart(tasks: &Arc<Tasks>, members: Vec<Member>) {
    let others = Arc::clone(tasks);
    tasks.spawn(Box::pin(
        async move { claims::run(&others, members, Purpose::Look, Vec::new()).await },
    ) as BoxFuture<'static, Vec<Ended>>);
}

/// The right to run without a claim; `None` if the key must be claimed.
async fn prepare(
    listing: &mut UnitListing,
    item: &mut Item,
) -> ControlFlow<End, Option<TransactionRun>> {
    // A fencing token comes from a claim.
    if !item.past.progress.is_new() || item.claim.is_some() || item.route.gate.settings().fenced {
        return ControlFlow::Continue(None);
    }
    match is_suspect(listing, item).await {
        Ok(false) => {}
        Ok(true) => {
            item.past.progress = Progress::NeedsClaim;
            return ControlFlow::Continue(None);
        }
        Err(error) => return ControlFlow::Break(End::NoAnswer { error }),
    }
    let Ok(identity) = &item.identity else {
        return ControlFlow::Continue(None);
    };
    let Some(limit) = item
        .route
        .transactional
        .as_ref()
        .map(|transactional| transactional.work.limit())
    else {
        return ControlFlow::Continue(None);
    };
    let on_grant = item
        .probe
        .clone()
        .map(|probe| OnGrant::new(move || probe.answered()));
    match item
        .route
        .gate
        .transaction_run(&item.delivery.message, identity, limit, on_grant)
    {
        Ok(run) => ControlFlow::Continue(Some(run)),
        Err(error) => ControlFlow::Break(End::NoAnswer { error }),
    }
}

/// Whether another process may have died with this key. When this returns, this process is known to
/// have it.
async fn is_suspect(listing: &mut UnitListing, item: &Item) -> Result<bool, StoreError> {
    match &item.entry {
        Some(entry) => listing.list(entry).await,
        None => Ok(false),
    }
}

/// Waits for the end of the transaction, which is rolled back when the broker takes the message
/// away.
async fn until_lost(
    item: &Item,
    run: &TransactionRun,
    running: BoxFuture<'_, TransactionEnd>,
) -> TransactionEnd {
    let Some(lost) = item.delivery.ack_handle.lost() else {
        return running.await;
    };
    let mut running = running;
    tokio::select! {
        biased;
        end = &mut running => end,
        () = lost => {
            run.discarded().cancel();
            running.await
        }
    }
}

/// Does what the end of the transaction says. Returns the member if its key must be claimed.
fn follow(
    tasks: &Arc<Tasks>,
    InTransaction {
        mut member,
        run,
        span,
    }: InTransaction,
    end: TransactionEnd,
    ended: &mut Vec<Ended>,
) -> Option<Member> {
    let (shared, item) = (&tasks.shared, &mut member.item);
    note(item, &span, &end);
    let route = Arc::clone(&item.route);
    let gate = &route.gate;
    item.past.progress = after_transaction(&end, run.tag());
    let end = match end {
        TransactionEnd::Committed => End::Completed,
        TransactionEnd::RecordExists => return Some(member),
        TransactionEnd::Held => {
            item.past.busy = item.past.busy.saturating_add(1);
            let ask_again_in = BUSY_BACKOFF.wait(item.past.busy, shared.random());
            End::NotNow {
                ask_again_in,
                cause: WaitCause::Busy,
            }
        }
        TransactionEnd::NotBegun(error) => {
            gate.observe(Event::StoreError {
                scope: gate.scope(),
                class: error.class(),
            });
            End::NoAnswer { error }
        }
        TransactionEnd::Excused { excuse, reason } => excused(shared, item, excuse, &reason),
        TransactionEnd::Failed { failure, outcome } => {
            let count = item.tell_breaker(false, outcome, Some(&failure));
            item.past.progress = Progress::RolledBack(RolledBack { failure, count });
            return Some(member);
        }
        TransactionEnd::Discarded => End::NotNow {
            ask_again_in: BUSY_BACKOFF.first(),
            cause: WaitCause::Lapse,
        },
        TransactionEnd::Unknown(error) => {
            let origin = item.delivery.message.origin();
            warn!(scope = gate.scope(), %origin, %error, "the commit was not answered; the record decides");
            gate.observe(Event::StoreError {
                scope: gate.scope(),
                class: error.class(),
            });
            return Some(member);
        }
    };
    tasks.settle(ended, member, end);
    None
}

/// Tells the span, and the breaker of a success, how the transaction ended.
fn note(item: &Item, span: &Span, end: &TransactionEnd) {
    item.enter(Stage::Ending, Instant::now());
    let outcome = match end {
        TransactionEnd::Committed => {
            item.tell_breaker(false, RunOutcome::Succeeded, None);
            RunOutcome::Succeeded
        }
        TransactionEnd::Failed { outcome, .. } => *outcome,
        TransactionEnd::Discarded | TransactionEnd::Unknown(_) => RunOutcome::Cancelled,
        TransactionEnd::Excused { .. }
        | TransactionEnd::RecordExists
        | TransactionEnd::Held
        | TransactionEnd::NotBegun(_) => RunOutcome::Failed,
    };
    trace::ended(span, outcome);
}

/// A run that failed through no fault of its own is repeated after a back-off, and is not counted.
fn excused(shared: &Shared, item: &mut Item, excuse: Excuse, reason: &str) -> End {
    let (scope, origin) = (item.route.gate.scope(), item.delivery.message.origin());
    debug!(scope, %origin, reason, ?excuse, "the transaction was rolled back; it is repeated, and not counted");
    item.past.uncounted = item.past.uncounted.saturating_add(1);
    let ask_again_in = BUSY_BACKOFF.wait(item.past.uncounted, shared.random());
    End::NotNow {
        ask_again_in,
        cause: WaitCause::Retry,
    }
}
