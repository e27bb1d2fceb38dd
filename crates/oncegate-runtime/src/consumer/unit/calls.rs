//! Calls the handlers of a unit's granted members, each with its own message.
//!
//! A handler is polled in the unit's own task first. One that ends at once costs no task, no timer
//! and no wake-up; one that waits goes on in a task of its own. A handler that computes or blocks
//! holds up its thread, so a second task takes what the first has not called yet, and completes
//! what has ended.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use futures_util::FutureExt as _;
use parking_lot::{Mutex, MutexGuard};
use tokio::time::{Instant, timeout};
use tracing::Instrument as _;

use super::super::end::Ran;
use super::super::member::Ended;
use super::finish::{Finished, finish};
use super::tasks::{Granted, Tasks};
use crate::attempt::CANCELLATION_GRACE;
use crate::failure::Failure;
use crate::handler::{BoxFuture, Encoded};
use crate::health::Stage;
use crate::observe::{BatchCall, Event};

/// A handler's work for one message.
type HandlerCall = BoxFuture<'static, Result<Encoded, Failure>>;

/// Calls the handler of each member, and finishes what ends. What waits goes on in tasks of its
/// own.
pub(super) async fn run(
    tasks: &Arc<Tasks>,
    mut granted: Vec<Granted>,
    mut ended: Vec<Ended>,
) -> Vec<Ended> {
    tasks.report(&mut ended);
    if granted.len() > 1 {
        return Calls::of(tasks, granted).run().await;
    }
    let Some(granted) = granted.pop() else {
        return ended;
    };
    match call(granted) {
        Called::Ended(finished) => finish(tasks, vec![finished]).await,
        Called::Waits(granted, work, began) => wait(tasks, granted, work, began).await,
    }
}

/// The members of a unit that are not finished, shared by the tasks that call them.
struct Calls {
    tasks: Arc<Tasks>,
    members: Mutex<Members>,
}

#[derive(Default)]
struct Members {
    /// The members whose handlers have not begun.
    waiting: VecDeque<Granted>,
    /// The members whose handlers have ended.
    ended: Vec<Finished>,
    /// A task is about to help.
    is_help_due: bool,
}

impl Calls {
    fn of(tasks: &Arc<Tasks>, granted: Vec<Granted>) -> Arc<Self> {
        let members = Members {
            waiting: granted.into(),
            ..Members::default()
        };
        Arc::new(Self {
            tasks: Arc::clone(tasks),
            members: Mutex::new(members),
        })
    }

    /// Calls members until none is waiting, and finishes those that have ended.
    async fn run(self: Arc<Self>) -> Vec<Ended> {
        while let Some(granted) = self.next() {
            match call(granted) {
                Called::Ended(finished) => self.members().ended.push(finished),
                Called::Waits(granted, work, began) => {
                    let tasks = Arc::clone(&self.tasks);
                    self.tasks
                        .spawn(async move { wait(&tasks, granted, work, began).await });
                }
            }
        }
        let ended = std::mem::take(&mut self.members().ended);
        finish(&self.tasks, ended).await
    }

    /// Takes the next member. While others wait behind it, another task is ready to take them.
    fn next(self: &Arc<Self>) -> Option<Granted> {
        let mut members = self.members();
        let next = members.waiting.pop_front()?;
        if !members.waiting.is_empty() && !members.is_help_due {
            members.is_help_due = true;
            drop(members);
            let others = Arc::clone(self);
            self.tasks.spawn(Box::pin(async move {
                others.members().is_help_due = false;
                others.run().await
            }) as BoxFuture<'static, Vec<Ended>>);
            // The task that a thread has started last waits for that thread, and no other one can
            // take it.
            tokio::spawn(std::future::ready(()));
        }
        Some(next)
    }

    /// Locks the members. Each change leaves them consistent, so a panic elsewhere does no harm.
    fn members(&self) -> MutexGuard<'_, Members> {
        self.members.lock()
    }
}

/// The result of a handler's first poll.
enum Called {
    Ended(Finished),
    /// The handler waits for something. It began at this time.
    Waits(Granted, HandlerCall, Instant),
}

/// Calls the handler with this message alone, and polls it once.
fn call(granted: Granted) -> Called {
    let item = &granted.member.item;
    let gate = &item.route.gate;
    if item.route.limits.is_some() {
        gate.observe(Event::BatchCalled {
            scope: gate.scope(),
            call: BatchCall::Gathered,
        });
    }
    let began = Instant::now();
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
    let ran = match polled {
        Ok(Poll::Pending) => return Called::Waits(granted, work, began),
        Ok(Poll::Ready(returned)) => Ran::Returned(returned),
        Err(_panic) => Ran::Panicked,
    };
    Called::Ended(Finished {
        granted,
        ran,
        began,
    })
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
    finish(
        tasks,
        vec![Finished {
            granted,
            ran,
            began,
        }],
    )
    .await
}

/// Waits for the handler's end, or until it is cancelled and does not end in time.
async fn until_cancelled(granted: &Granted, work: HandlerCall) -> Ran {
    let mut work = std::pin::pin!(AssertUnwindSafe(work).catch_unwind());
    let ran = tokio::select! {
        biased;
        ran = &mut work => Some(ran),
        () = discarded(granted) => {
            let grace = granted.member.item.route.gate.settings().lease.min(CANCELLATION_GRACE);
            timeout(grace, work).await.ok()
        }
    };
    match ran {
        Some(Ok(returned)) => Ran::Returned(returned),
        Some(Err(_panic)) => Ran::Panicked,
        None => Ran::Cancelled,
    }
}

/// Waits until the run should stop and its result would not be used: its lease says so, or the
/// broker takes its message away.
pub(super) fn discarded(granted: &Granted) -> impl Future<Output = ()> + Send + 'static {
    let discarded = granted.lease.discarded().clone();
    let ack_handle = Arc::clone(&granted.member.item.delivery.ack_handle);
    async move {
        match ack_handle.lost() {
            None => discarded.cancelled().await,
            Some(lost) => tokio::select! {
                () = discarded.cancelled() => {}
                () = lost => discarded.cancel(),
            },
        }
    }
}
