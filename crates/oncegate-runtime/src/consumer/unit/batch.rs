//! A call of a batch handler with the granted members of a unit, and what follows when it fails as
//! a whole.

use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::sync::Arc;

use futures_util::future::poll_fn;
use futures_util::stream::FuturesUnordered;
use futures_util::{FutureExt as _, StreamExt as _};
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep};
use tracing::{Instrument as _, info};

use super::super::end::{PANICKED, Ran};
use super::super::member::Ended;
use super::super::shared::Route;
use super::super::split::{Blame, NextStep, Part, Split, blame};
use super::super::trace;
use super::calls::{give_back, grace, may_begin};
use super::finish::{Finished, finish};
use super::tasks::{Granted, Tasks};
use crate::batch::{BatchMessage, BatchOutcome, EarlyAnswer, ErasedBatchHandler};
use crate::failure::Failure;
use crate::handler::BoxFuture;
use crate::health::Stage;
use crate::observe::{BatchCall, Event, RunOutcome};
use crate::running::policy::outcome_of;

/// The number of the attempt from which a message is called alone: two have failed, and it may fail
/// again.
const ALONE_FROM_ATTEMPT: u32 = 3;

/// Calls the handler with all members, and splits a batch that fails. Finishes each member as soon
/// as its end is known.
pub(super) async fn run(
    tasks: &Arc<Tasks>,
    handler: &dyn ErasedBatchHandler,
    granted: Vec<Granted>,
    mut ended: Vec<Ended>,
) -> Vec<Ended> {
    tasks.report(&mut ended);
    let (alone, together) = (0..granted.len()).partition(|place| {
        granted
            .get(*place)
            .is_some_and(|one| one.lease.attempt().number() >= ALONE_FROM_ATTEMPT)
    });
    let mut split = Split::new(together, alone);
    let mut batch = BatchMembers::of(tasks, handler, granted);
    while let Some((mut part, call)) = split.next_part() {
        batch.give_back_late();
        part.members.retain(|place| batch.has(*place));
        if part.members.is_empty() {
            continue;
        }
        let Some(failure) = batch.call(&mut part, call).await else {
            split.succeeded();
            continue;
        };
        let messages = part.members.len();
        let reason = failure.reason();
        match split.failed(part, failure.blame()) {
            NextStep::GoOn | NextStep::BackOff(_) => batch.log_split(messages, &reason),
            NextStep::Fail { members, is_cause } => batch.fail(members, &failure, is_cause),
            NextStep::Outage {
                members,
                is_cause,
                rest,
            } => {
                batch.fail(members, &failure, is_cause);
                batch.fail(rest, &Failed::Returned(Failure::not_run(reason)), false);
            }
        }
    }
    finish(tasks, batch.finished).await
}

/// The reason why a call failed for all its messages.
enum Failed {
    Returned(Failure),
    Panicked,
}

impl Failed {
    fn blame(&self) -> Blame {
        match self {
            Self::Panicked => Blame::One,
            Self::Returned(failure) => blame(failure),
        }
    }

    fn reason(&self) -> String {
        match self {
            Self::Panicked => PANICKED.to_owned(),
            Self::Returned(failure) => failure.reason(),
        }
    }

    fn of_one(&self) -> Ran {
        match self {
            Self::Panicked => Ran::Panicked,
            Self::Returned(failure) => Ran::Returned(Err(failure.copied())),
        }
    }
}

/// The end of a call by itself; `Err` if it panicked.
type CallEnd = std::thread::Result<BatchOutcome>;

/// Returns how a call ended by itself, for its span.
fn outcome_of_call(ran: &CallEnd) -> RunOutcome {
    match ran {
        Ok(Ok(_)) => RunOutcome::Succeeded,
        Ok(Err(failure)) => outcome_of(failure),
        Err(_panic) => RunOutcome::Panicked,
    }
}

/// The members of a batch, each until its end is known.
struct BatchMembers<'a> {
    tasks: &'a Arc<Tasks>,
    handler: &'a dyn ErasedBatchHandler,
    members: Vec<Option<Granted>>,
    /// Resolves with the place of a member that was cancelled and whose time to end is over.
    cancelled: FuturesUnordered<BoxFuture<'static, usize>>,
    /// The time of the last call.
    began: Instant,
    /// The members that the last call has ended.
    finished: Vec<Finished>,
}

impl<'a> BatchMembers<'a> {
    fn of(
        tasks: &'a Arc<Tasks>,
        handler: &'a dyn ErasedBatchHandler,
        granted: Vec<Granted>,
    ) -> Self {
        let cancelled = granted.iter().enumerate().map(|(place, one)| {
            let grace = grace(&one.member.item);
            let discarded = one.lease.discarded().clone();
            Box::pin(async move {
                discarded.cancelled().await;
                sleep(grace).await;
                place
            }) as BoxFuture<'static, usize>
        });
        let cancelled = cancelled.collect();
        let members = granted.into_iter().map(Some).collect();
        Self {
            tasks,
            handler,
            members,
            cancelled,
            began: Instant::now(),
            finished: Vec::new(),
        }
    }

    fn has(&self, place: usize) -> bool {
        self.members.get(place).is_some_and(Option::is_some)
    }

    /// Gives back the members for which no call may begin any more.
    fn give_back_late(&mut self) {
        let now = Instant::now();
        for slot in &mut self.members {
            let Some(Err(why)) = slot.as_ref().map(|one| may_begin(one, now)) else {
                continue;
            };
            if let Some(granted) = slot.take() {
                give_back(self.tasks, granted, why);
            }
        }
    }

    /// Notes that the handler is called with these members.
    fn begin(&mut self, part: &Part<usize>) {
        self.began = Instant::now();
        for place in &part.members {
            if let Some(Some(granted)) = self.members.get_mut(*place) {
                granted.member.item.turn = None;
                granted.lease.begin_run(self.began);
                granted.member.item.enter(Stage::Running, self.began);
            }
        }
    }

    /// Calls the handler with one part of the batch, and ends its messages if it has an outcome for
    /// each. A message that is answered early is finished at once. Returns the failure of those
    /// that are left in `part`.
    async fn call(&mut self, part: &mut Part<usize>, call: BatchCall) -> Option<Failed> {
        // What the call before has ended does not wait for this one.
        self.finish_apart();
        let route = self
            .members
            .iter()
            .flatten()
            .next()
            .map(|one| Arc::clone(&one.member.item.route))?;
        let gate = &route.gate;
        let codec = route.gate.settings().codec;
        gate.observe(Event::BatchCalled {
            scope: gate.scope(),
            call,
        });
        let (answers, mut early) = mpsc::unbounded_channel();
        let batch: Vec<BatchMessage> = part
            .members
            .iter()
            .filter_map(|place| {
                self.message(*place)?
                    .in_call(*place, codec, &answers)
                    .into()
            })
            .collect();
        self.begin(part);
        let work = first_poll_noted(&route, self.handler.handle_batch(&batch, codec));
        let span = trace::batch(gate.scope(), &batch);
        let work = AssertUnwindSafe(work)
            .catch_unwind()
            .instrument(span.clone());
        let ran = match self
            .until_ended(part, &mut early, std::pin::pin!(work))
            .await
        {
            Ok(ran) => ran,
            Err(outcome) => {
                trace::ended(&span, outcome);
                return None;
            }
        };
        // Some may be answered in the same poll in which the handler has ended.
        while let Ok(answer) = early.try_recv() {
            self.answered(answer);
        }
        trace::ended(&span, outcome_of_call(&ran));
        match ran {
            Ok(Ok(outcomes)) => {
                for (place, outcome) in part.members.iter().zip(outcomes) {
                    self.end(*place, Ran::Returned(outcome));
                }
                None
            }
            failed => {
                part.members.retain(|place| self.has(*place));
                let failed = match failed {
                    Ok(Err(failure)) => Failed::Returned(failure),
                    _ => Failed::Panicked,
                };
                (!part.members.is_empty()).then_some(failed)
            }
        }
    }

    /// Waits for the end of a call. Meanwhile, finishes each member that is answered early or
    /// cancelled. `Err`: no member is left, and the call is as good as over with this outcome.
    async fn until_ended(
        &mut self,
        part: &Part<usize>,
        early: &mut mpsc::UnboundedReceiver<EarlyAnswer>,
        mut work: Pin<&mut (impl Future<Output = CallEnd> + Send)>,
    ) -> Result<CallEnd, RunOutcome> {
        let mut has_cancelled = false;
        while part.members.iter().any(|place| self.has(*place)) {
            tokio::select! {
                biased;
                Some(answer) = early.recv() => {
                    self.answered(answer);
                    self.finish_apart();
                }
                ran = &mut work => return Ok(ran),
                Some(place) = self.cancelled.next() => {
                    has_cancelled = true;
                    self.end(place, Ran::Cancelled);
                    self.finish_apart();
                }
            }
        }
        Err(if has_cancelled {
            RunOutcome::Cancelled
        } else {
            RunOutcome::Succeeded
        })
    }

    fn message(&self, place: usize) -> Option<BatchMessage> {
        let lease = &self.members.get(place)?.as_ref()?.lease;
        Some(BatchMessage::new(
            lease.message().clone(),
            lease.attempt().clone(),
        ))
    }

    fn answered(&mut self, EarlyAnswer { place, outcome }: EarlyAnswer) {
        self.end(place, Ran::Returned(outcome));
    }

    /// Ends a member, unless it has ended before.
    fn end(&mut self, place: usize, ran: Ran) {
        if let Some(granted) = self.members.get_mut(place).and_then(Option::take) {
            self.finished
                .push(Finished::ran(granted, ran, self.began.elapsed()));
        }
    }

    fn fail(&mut self, members: Vec<usize>, failure: &Failed, is_cause: bool) {
        for place in members {
            if let Some(granted) = self.members.get_mut(place).and_then(Option::as_mut) {
                granted.member.item.past.runs_alone |= is_cause;
            }
            self.end(place, failure.of_one());
        }
    }

    /// Finishes those that have ended in a task of their own.
    fn finish_apart(&mut self) {
        if !self.finished.is_empty() {
            let tasks = Arc::clone(self.tasks);
            let finished = std::mem::take(&mut self.finished);
            self.tasks
                .spawn(async move { finish(&tasks, finished).await });
        }
    }

    fn log_split(&self, messages: usize, reason: &str) {
        let Some(one) = self.members.iter().flatten().next() else {
            return;
        };
        let scope = one.member.item.route.gate.scope();
        info!(
            scope,
            messages, reason, "a batch failed as a whole; each half of it is tried"
        );
    }
}

/// Tells the route's pace how long the first poll of the call held its thread.
fn first_poll_noted<'a, T: 'a>(
    route: &'a Route,
    mut work: BoxFuture<'a, T>,
) -> impl Future<Output = T> + Send + 'a {
    let mut is_first = true;
    poll_fn(move |context| {
        if !std::mem::take(&mut is_first) {
            return work.as_mut().poll(context);
        }
        let began = Instant::now();
        let polled = work.as_mut().poll(context);
        route.pace.note_poll(began.elapsed());
        polled
    })
}
