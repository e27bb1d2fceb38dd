//! A unit: 1 to n messages of one route that start together, each with its permit. One path for all of them:
//! claims → calls → finish → [`settle`](super::settle).
//!
//! 1. **Claim** (`claims`): the keys are claimed by one call of the store, or, for a transactional handler, taken in its
//!    transaction (`transaction`). A member that is completed, busy, failed or without an answer ends here.
//! 2. **Call** (`calls`): each handler is polled in the unit's own task; a batch handler is called once (`batch`). A
//!    handler that waits for something goes on in a task of its own. While one blocks its thread, another task calls the
//!    rest.
//! 3. **Finish** (`finish`): those that ended together are completed by one call.
//!
//! No member waits for a slower one: what does not end at once goes on [apart](Tasks::apart).

use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use bytes::Bytes;
use futures_util::future::poll_fn;
use tokio::sync::mpsc;
use tokio::task::{JoinError, JoinSet};
use tracing::Span;

use super::answer::answer;
use super::end::End;
use super::member::{Ended, Member};
use super::settle::settle;
use super::shared::{Shared, TransactionalRoute};
use crate::dead_letters::DeadLetterCause;
use crate::gate::Lease;

mod batch;
mod calls;
mod claims;
mod finish;
mod transaction;

use claims::Purpose;

/// A member whose claim was granted.
#[derive(Debug)]
struct Granted {
    member: Member,
    lease: Lease,
    span: Span,
}

/// The tasks of a consumer's units.
pub(super) struct Tasks {
    pub(super) shared: Arc<Shared>,
    running: Mutex<JoinSet<Vec<Ended>>>,
    /// Members that have ended before the last of their task.
    ended_early: mpsc::UnboundedSender<Vec<Ended>>,
}

impl Tasks {
    pub(super) fn new(shared: Arc<Shared>) -> (Arc<Self>, mpsc::UnboundedReceiver<Vec<Ended>>) {
        let (ended_early, ends) = mpsc::unbounded_channel();
        (Arc::new(Self { shared, running: Mutex::default(), ended_early }), ends)
    }

    /// Starts a unit.
    pub(super) fn start(self: &Arc<Self>, members: Vec<Member>) {
        self.spawn(run(Arc::clone(self), members));
    }

    /// Starts the answers to messages that were found completed, under one permit.
    pub(super) fn start_answers(self: &Arc<Self>, members: Vec<Member>) {
        self.spawn(answer_all(Arc::clone(self), members));
    }

    /// Waits for the end of a task; `None` when none runs.
    pub(super) async fn join_next(&self) -> Option<Result<Vec<Ended>, JoinError>> {
        poll_fn(|context| self.running().poll_join_next(context)).await
    }

    /// The end of a task that has ended.
    pub(super) fn try_join_next(&self) -> Option<Result<Vec<Ended>, JoinError>> {
        self.running().try_join_next()
    }

    /// How many tasks run.
    pub(super) fn len(&self) -> usize {
        self.running().len()
    }

    /// Drops what runs. A handler that blocks its thread goes on.
    pub(super) fn abort_all(&self) {
        self.running().abort_all();
    }

    fn spawn(&self, task: impl Future<Output = Vec<Ended>> + Send + 'static) {
        self.running().spawn(task);
    }

    /// Tells the engine of members that have ended while others of their task go on.
    fn report(&self, ended: &mut Vec<Ended>) {
        if !ended.is_empty() {
            // The engine receives until every task has ended.
            _ = self.ended_early.send(std::mem::take(ended));
        }
    }

    /// Runs what ends a member here if it ends at once, and in a task of its own if it waits for something.
    fn apart(&self, ended: &mut Vec<Ended>, work: impl Future<Output = Ended> + Send + 'static) {
        match polled(work) {
            Ok(end) => ended.push(end),
            Err(work) => self.spawn(async move { vec![work.await] }),
        }
    }

    /// Settles a member.
    fn settle(self: &Arc<Self>, ended: &mut Vec<Ended>, member: Member, end: End) {
        let tasks = Arc::clone(self);
        self.apart(ended, async move { settle(&tasks.shared, member, end).await });
    }

    fn running(&self) -> MutexGuard<'_, JoinSet<Vec<Ended>>> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Polls the future once. The task that polls it again is woken by it.
fn polled<T>(
    work: impl Future<Output = T> + Send + 'static,
) -> Result<T, Pin<Box<dyn Future<Output = T> + Send>>> {
    let mut work: Pin<Box<dyn Future<Output = T> + Send>> = Box::pin(work);
    match work.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(value) => Ok(value),
        Poll::Pending => Err(work),
    }
}

/// Runs the unit. Returns those of its members that have not been reported, and do not go on apart.
async fn run(tasks: Arc<Tasks>, members: Vec<Member>) -> Vec<Ended> {
    let mut ended = Vec::with_capacity(members.len());
    let mut started = Vec::with_capacity(members.len());
    for mut member in members {
        if tasks.shared.stopping.is_cancelled() || !member.item.start() {
            ended.push(member.not_ours());
        } else if let Err(error) = &member.item.identity {
            let (cause, reason) = (DeadLetterCause::BadKey, error.to_string());
            tasks.settle(&mut ended, member, End::GiveUp { lease: None, cause, reason, attempts: 0 });
        } else if let Some(stored) = member.item.found.take() {
            let tasks_of_answer = Arc::clone(&tasks);
            tasks.apart(&mut ended, async move { answered(&tasks_of_answer.shared, member, stored).await });
        } else {
            started.push(member);
        }
    }
    let Some(first) = started.first() else { return ended };
    let (route, is_batch) = (Arc::clone(&first.item.route), first.is_in_batch());
    match &route.transactional {
        None => claims::run(&tasks, started, Purpose::Run, ended).await,
        Some(TransactionalRoute { batches: Some(caller), .. }) if is_batch => {
            transaction::run_batch(&tasks, caller, started, ended).await
        }
        Some(transactional) => transaction::run_each(&tasks, transactional, started, ended).await,
    }
}

async fn answered(shared: &Shared, member: Member, stored: Bytes) -> Ended {
    let end = answer(&member.item, stored).await;
    settle(shared, member, end).await
}

async fn answer_all(tasks: Arc<Tasks>, members: Vec<Member>) -> Vec<Ended> {
    let mut ended = Vec::with_capacity(members.len());
    for mut member in members {
        match member.item.found.take() {
            Some(stored) if member.item.start() => {
                ended.push(answered(&tasks.shared, member, stored).await);
            }
            _ => ended.push(member.not_ours()),
        }
    }
    ended
}
