//! The tasks that units run in, and how they report the ends of their members.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use futures_util::future::poll_fn;
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::mpsc;
use tokio::task::{JoinError, JoinSet};
use tracing::Span;

use super::super::end::End;
use super::super::member::{Ended, Member};
use super::super::settle::settle;
use super::super::shared::Shared;
use crate::gate::Lease;

/// A member whose claim was granted.
#[derive(Debug)]
pub(super) struct Granted {
    pub(super) member: Member,
    pub(super) lease: Lease,
    pub(super) span: Span,
}

/// The tasks of a consumer's units.
pub(in crate::consumer) struct Tasks {
    pub(in crate::consumer) shared: Arc<Shared>,
    running: Mutex<JoinSet<Vec<Ended>>>,
    /// Members that have ended before the last of their task.
    ended_early: mpsc::UnboundedSender<Vec<Ended>>,
}

impl Tasks {
    pub(in crate::consumer) fn new(
        shared: Arc<Shared>,
    ) -> (Arc<Self>, mpsc::UnboundedReceiver<Vec<Ended>>) {
        let (ended_early, ends) = mpsc::unbounded_channel();
        (
            Arc::new(Self {
                shared,
                running: Mutex::default(),
                ended_early,
            }),
            ends,
        )
    }

    /// Waits for the end of a task; `None` when none runs.
    pub(in crate::consumer) async fn join_next(&self) -> Option<Result<Vec<Ended>, JoinError>> {
        poll_fn(|context| self.running().poll_join_next(context)).await
    }

    /// The end of a task that has ended.
    pub(in crate::consumer) fn try_join_next(&self) -> Option<Result<Vec<Ended>, JoinError>> {
        self.running().try_join_next()
    }

    /// Returns the number of running tasks.
    pub(in crate::consumer) fn len(&self) -> usize {
        self.running().len()
    }

    /// Drops what runs. A handler that blocks its thread goes on.
    pub(in crate::consumer) fn abort_all(&self) {
        self.running().abort_all();
    }

    pub(super) fn spawn(&self, task: impl Future<Output = Vec<Ended>> + Send + 'static) {
        self.running().spawn(task);
    }

    /// Tells the engine of members that have ended while others of their task go on.
    pub(super) fn report(&self, ended: &mut Vec<Ended>) {
        if !ended.is_empty() {
            // The engine receives until every task has ended.
            _ = self.ended_early.send(std::mem::take(ended));
        }
    }

    /// Runs what ends a member here if it ends at once, and in a task of its own if it waits for
    /// something. Returns whether it has ended.
    pub(super) fn apart(
        &self,
        ended: &mut Vec<Ended>,
        work: impl Future<Output = Ended> + Send + 'static,
    ) -> bool {
        match polled(work) {
            Ok(end) => {
                ended.push(end);
                true
            }
            Err(work) => {
                self.spawn(async move { vec![work.await] });
                false
            }
        }
    }

    /// Settles a member.
    pub(super) fn settle(self: &Arc<Self>, ended: &mut Vec<Ended>, member: Member, end: End) {
        let tasks = Arc::clone(self);
        self.apart(
            ended,
            async move { settle(&tasks.shared, member, end).await },
        );
    }

    fn running(&self) -> MutexGuard<'_, JoinSet<Vec<Ended>>> {
        self.running.lock()
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

/// Lets the tasks run that are ready now. Unlike after `tokio::task::yield_now`, another thread of
/// the runtime can take this task over when one of them blocks its own.
pub(in crate::consumer) async fn after_ready_tasks() {
    let mut has_yielded = false;
    poll_fn(|context| {
        if std::mem::replace(&mut has_yielded, true) {
            return Poll::Ready(());
        }
        context.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}
