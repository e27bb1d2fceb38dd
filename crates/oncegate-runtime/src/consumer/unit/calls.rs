//! Calls the handlers of a unit's granted members, and the `duplicate` hooks of its completed ones,
//! one after another.
//!
//! A call needs a permit, and is polled in the unit's own task first. One that ends at once costs
//! no task, no timer and no wake-up, and leaves its permit to the next. One that waits goes on in a
//! task of its own with the permit, and the next call needs another one.
//!
//! Nothing depends on a neighbour. Right before each call, lease, delivery and stop are looked at.
//! When the calls have taken longer than [`BOUND`], what has ended is finished, and other tasks
//! run. While a call holds its thread for longer, a second task goes on with the others. What
//! cannot begin in time is released, uncounted.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use futures_util::FutureExt;
use parking_lot::{Mutex, MutexGuard};
use tokio::time::{Instant, sleep, timeout};
use tracing::Instrument as _;

use super::super::end::{End, RELEASED_IS_DUE, Ran};
use super::super::item::Item;
use super::super::member::{Ended, Member};
use super::super::pace::BOUND;
use super::super::permits::Permit;
use super::super::settle::settle;
use super::super::shared::Route;
use super::duplicate::Answering;
use super::finish::{Finished, finish};
use super::tasks::{Granted, Tasks, after_ready_tasks};
use crate::attempt::CANCELLATION_GRACE;
use crate::failure::Failure;
use crate::handler::{BoxFuture, Encoded};
use crate::health::{Stage, WaitCause};
use crate::observe::{BatchCall, Event};

/// A handler's work for one message.
type HandlerCall = BoxFuture<'static, Result<Encoded, Failure>>;

/// The reason of a release at a stop.
const STOPS: &str = "the consumer stops";

/// A call that a member waits for.
pub(super) enum Work {
    /// Of its handler, under its claim.
    Run(Granted),
    /// Of the handler's `duplicate`.
    Answer(Answering),
    /// None: it has no key.
    WithoutKey(Member),
}

/// Calls what these members wait for, and finishes what ends. What waits goes on in tasks of its
/// own. Of the permits, one is enough to begin.
pub(super) async fn run(
    tasks: &Arc<Tasks>,
    mut work: Vec<Work>,
    mut permits: Vec<Permit>,
    mut ended: Vec<Ended>,
) -> Vec<Ended> {
    let Some(first) = work.first_mut() else {
        return ended;
    };
    let route = Arc::clone(&first.member().item.route);
    tasks.report(&mut ended);
    permits.extend(work.iter_mut().filter_map(|one| one.member().permit.take()));
    let has_neighbours = work.len() > 1;
    let calls = Arc::new(Calls {
        tasks: Arc::clone(tasks),
        route,
        members: Mutex::new(Members {
            waiting: work.into(),
            permits,
            ..Members::default()
        }),
    });
    if has_neighbours {
        calls.watch();
    }
    calls.run().await
}

/// The members of a unit that are not finished, shared by the tasks that call them.
struct Calls {
    tasks: Arc<Tasks>,
    route: Arc<Route>,
    members: Mutex<Members>,
}

#[derive(Default)]
struct Members {
    /// The members that were not called.
    waiting: VecDeque<Work>,
    /// The members whose handlers have ended.
    ended: Vec<Finished>,
    /// The permits that no call has.
    permits: Vec<Permit>,
    /// The number of members that were taken from `waiting`.
    taken: usize,
}

impl Calls {
    /// Calls members until none is waiting, and finishes those that have ended.
    async fn run(self: Arc<Self>) -> Vec<Ended> {
        let mut answered = Vec::new();
        let mut permit = None;
        let mut now = Instant::now();
        let mut spell_began = now;
        while self.has_waiting() {
            if permit.is_none() {
                permit = self.permit().await;
                now = Instant::now();
            }
            let Some(held) = permit.clone() else {
                self.give_back("no permit was free in time");
                break;
            };
            let Some(work) = self.next() else { break };
            if self.call(work, held, now, &mut answered) == Call::Waits {
                permit = None;
            }
            now = Instant::now();
            if now.duration_since(spell_began) >= BOUND {
                self.finish_apart();
                self.tasks.report(&mut answered);
                after_ready_tasks().await;
                now = Instant::now();
                spell_began = now;
            }
        }
        drop(permit);
        let ended = std::mem::take(&mut self.members().ended);
        answered.extend(finish(&self.tasks, ended).await);
        answered
    }

    /// Calls for one member, unless it may no longer begin.
    fn call(&self, work: Work, permit: Permit, now: Instant, answered: &mut Vec<Ended>) -> Call {
        match work {
            Work::Run(mut granted) => {
                if let Err(why) = may_begin(&granted, now) {
                    give_back(&self.tasks, granted, why);
                    return Call::Over;
                }
                granted.member.permit = Some(permit);
                match call(granted, now) {
                    Called::Ended(finished) => self.members().ended.push(finished),
                    Called::Waits(granted, work, began) => {
                        let tasks = Arc::clone(&self.tasks);
                        self.tasks
                            .spawn(async move { wait(&tasks, granted, work, began).await });
                        return Call::Waits;
                    }
                }
            }
            Work::WithoutKey(member) => {
                self.members().ended.push(Finished::WithoutKey(member));
            }
            Work::Answer(answering) if answering.member.item.route.gate.is_stopped() => {
                answered.push(answering.member.not_ours());
            }
            Work::Answer(mut answering) => {
                answering.member.item.enter(Stage::Answering, now);
                answering.member.permit = Some(permit);
                let tasks = Arc::clone(&self.tasks);
                let has_ended = self.tasks.apart(answered, async move {
                    let (member, end) = answering.answer().await;
                    settle(&tasks.shared, member, end).await
                });
                if !has_ended {
                    return Call::Waits;
                }
            }
        }
        Call::Over
    }

    /// A permit for the next call: one of the unit, or one that is free within the bound.
    async fn permit(&self) -> Option<Permit> {
        if let Some(permit) = self.members().permits.pop() {
            return Some(permit);
        }
        let permits = &self.tasks.shared.permits;
        if let Some(permit) = permits.try_for(&self.route.pace) {
            return Some(permit);
        }
        // What has ended does not wait for it.
        self.finish_apart();
        timeout(BOUND, permits.one()).await.ok()?
    }

    fn has_waiting(&self) -> bool {
        !self.members().waiting.is_empty()
    }

    fn next(&self) -> Option<Work> {
        let mut members = self.members();
        members.taken += 1;
        members.waiting.pop_front()
    }

    /// Gives back what was not called.
    fn give_back(&self, why: &'static str) {
        let waiting = std::mem::take(&mut self.members().waiting);
        for work in waiting {
            match work {
                Work::Run(granted) => give_back(&self.tasks, granted, why),
                Work::Answer(answering) => ask_again(&self.tasks, answering.put_off()),
                Work::WithoutKey(member) => {
                    self.members().ended.push(Finished::WithoutKey(member));
                }
            }
        }
    }

    /// Finishes those that have ended in a task of their own.
    fn finish_apart(&self) {
        let ended = std::mem::take(&mut self.members().ended);
        if !ended.is_empty() {
            let tasks = Arc::clone(&self.tasks);
            self.tasks.spawn(async move { finish(&tasks, ended).await });
        }
    }

    /// Goes on in another task when a call holds its thread for longer than the bound: finishes
    /// what has ended, and calls what waits behind it.
    fn watch(self: &Arc<Self>) {
        let calls = Arc::clone(self);
        self.tasks.spawn(Box::pin(async move {
            loop {
                let taken = calls.members().taken;
                sleep(BOUND).await;
                let members = calls.members();
                if members.waiting.is_empty() && members.ended.is_empty() {
                    return Vec::new();
                }
                if members.taken == taken {
                    break;
                }
            }
            // It may meet another one that holds its thread.
            calls.watch();
            calls.run().await
        }) as BoxFuture<'static, Vec<Ended>>);
        // The task that a thread has started last waits for that thread, and no other one can take
        // it.
        tokio::spawn(std::future::ready(()));
    }

    /// Locks the members. Each change leaves them consistent, so a panic elsewhere does no harm.
    fn members(&self) -> MutexGuard<'_, Members> {
        self.members.lock()
    }
}

/// The state of a call after its first poll.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Call {
    /// The call has ended, or was not made. Its permit is free for the next one.
    Over,
    /// The call goes on with its permit.
    Waits,
}

impl Work {
    pub(super) fn member(&mut self) -> &mut Member {
        match self {
            Self::Run(granted) => &mut granted.member,
            Self::Answer(answering) => &mut answering.member,
            Self::WithoutKey(member) => member,
        }
    }
}

/// Checks that a handler may still begin under its claim.
///
/// # Errors
/// Returns the reason why it must not.
pub(super) fn may_begin(
    Granted { member, lease, .. }: &Granted,
    now: Instant,
) -> Result<(), &'static str> {
    if member.item.route.gate.is_stopped() {
        return Err(STOPS);
    }
    if lease.is_over(now) {
        return Err("the lease was over before the handler began");
    }
    if lease.attempt().is_cancelled() {
        return Err("the lease was lost before the handler began");
    }
    if !member.item.delivery.ack_handle.is_ours() {
        return Err("the delivery was lost before the handler began");
    }
    // Those before it in its unit may have failed.
    let breaker = &member.item.route.breaker;
    if member
        .item
        .admitted
        .is_some_and(|key| !breaker.still_admits(key))
    {
        return Err("the circuit breaker opened before the handler began");
    }
    Ok(())
}

/// Releases a claim whose handler has not begun, uncounted. Its message keeps its place.
pub(super) fn give_back(tasks: &Arc<Tasks>, granted: Granted, why: &'static str) {
    let others = Arc::clone(tasks);
    let Granted {
        mut member, lease, ..
    } = granted;
    member.item.turn = None;
    member.permit = None;
    tasks.spawn(async move {
        lease.release(Duration::ZERO, false, why).await;
        vec![settle(&others.shared, member, not_begun()).await]
    });
}

/// Lets a completed message come again that was not answered.
fn ask_again(tasks: &Arc<Tasks>, member: Member) {
    let others = Arc::clone(tasks);
    tasks.spawn(async move { vec![settle(&others.shared, member, not_begun()).await] });
}

/// The end of a message that was claimed and did not begin.
fn not_begun() -> End {
    End::NotNow {
        ask_again_in: RELEASED_IS_DUE,
        cause: WaitCause::Retry,
    }
}

/// The result of a handler's first poll.
enum Called {
    Ended(Finished),
    /// The handler waits for something. It began at this time.
    Waits(Granted, HandlerCall, Instant),
}

/// Calls the handler with this message alone, and polls it once.
fn call(mut granted: Granted, began: Instant) -> Called {
    if granted.member.item.turn.take().is_some() {
        // This wakes the unit that claims next. The task that a thread has woken last waits for
        // that thread, and no other one can take it.
        tokio::spawn(std::future::ready(()));
    }
    granted.lease.begin_run(began);
    let item = &granted.member.item;
    let gate = &item.route.gate;
    if item.route.limits.is_some() {
        gate.observe(Event::BatchCalled {
            scope: gate.scope(),
            call: BatchCall::Gathered,
        });
    }
    item.enter(Stage::Running, began);
    let message = granted.lease.message().clone();
    let attempt = granted.lease.attempt().clone();
    let mut work = Arc::clone(&item.route.handler).handle(message, attempt, gate.settings().codec);
    let polled = {
        let _entered = granted.span.enter();
        catch_unwind(AssertUnwindSafe(|| {
            work.as_mut().poll(&mut Context::from_waker(Waker::noop()))
        }))
    };
    let took = began.elapsed();
    item.route.pace.note_poll(took);
    let ran = match polled {
        Ok(Poll::Pending) => return Called::Waits(granted, work, began),
        Ok(Poll::Ready(returned)) => Ran::Returned(returned),
        Err(_panic) => Ran::Panicked,
    };
    Called::Ended(Finished::ran(granted, ran, took))
}

/// Waits for the end of a handler that has begun, and finishes its member.
async fn wait(
    tasks: &Arc<Tasks>,
    granted: Granted,
    work: HandlerCall,
    began: Instant,
) -> Vec<Ended> {
    let ran = until_cancelled(&granted, work)
        .instrument(granted.span.clone())
        .await;
    let finished = Finished::ran(granted, ran, began.elapsed());
    finish(tasks, vec![finished]).await
}

/// Waits for the handler's end, or until it is cancelled and does not end in time.
async fn until_cancelled(granted: &Granted, work: HandlerCall) -> Ran {
    let mut work = std::pin::pin!(AssertUnwindSafe(work).catch_unwind());
    let ran = tokio::select! {
        biased;
        ran = &mut work => Some(ran),
        () = granted.lease.discarded().cancelled() => {
            timeout(grace(&granted.member.item), work).await.ok()
        }
    };
    match ran {
        Some(Ok(returned)) => Ran::Returned(returned),
        Some(Err(_panic)) => Ran::Panicked,
        None => Ran::Cancelled,
    }
}

/// The time that a run has to end after it was discarded.
pub(super) fn grace(item: &Item) -> Duration {
    item.route.gate.settings().lease.min(CANCELLATION_GRACE)
}
