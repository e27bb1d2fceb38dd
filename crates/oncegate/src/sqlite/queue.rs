//! What waits for a thread: a bounded queue in which heartbeats overtake.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use oncegate_core::store::StoreError;

/// The most commands or keys that wait; what comes then is told that the store is overloaded.
const MAX_WAITING: usize = 65_536;

/// Something that a thread does for a caller.
pub(super) trait Job {
    /// Whether it overtakes what is not.
    fn urgent(&self) -> bool;

    /// How much of a batch it takes.
    fn size(&self) -> usize;

    /// Whether it must not share its turn with others.
    fn alone(&self) -> bool;
}

/// A queue between the callers and one thread.
pub(super) struct Queue<J> {
    waiting: Mutex<Waiting<J>>,
    arrived: Condvar,
}

struct Waiting<J> {
    urgent: VecDeque<J>,
    others: VecDeque<J>,
    size: usize,
    closed: bool,
}

/// What a thread does next.
pub(super) enum Turn<J> {
    /// These jobs, urgent ones first. Never empty.
    Jobs(Vec<J>),
    /// Nothing has arrived in time.
    Idle,
    /// Nothing will arrive any more.
    Closed,
}

impl<J: Job> Queue<J> {
    pub(super) fn new() -> Self {
        let waiting = Waiting { urgent: VecDeque::new(), others: VecDeque::new(), size: 0, closed: false };
        Self { waiting: Mutex::new(waiting), arrived: Condvar::new() }
    }

    /// Queues a job.
    ///
    /// # Errors
    /// [`StoreError::Unavailable`] when too much waits already, or the thread has ended.
    pub(super) fn push(&self, job: J) -> Result<(), StoreError> {
        let mut waiting = self.waiting();
        if waiting.closed {
            return Err(StoreError::unavailable("the SQLite store is closed"));
        }
        if waiting.size.saturating_add(job.size()) > MAX_WAITING {
            return Err(StoreError::unavailable("too many commands wait for the SQLite file"));
        }
        waiting.size += job.size();
        if job.urgent() {
            waiting.urgent.push_back(job);
        } else {
            waiting.others.push_back(job);
        }
        drop(waiting);
        self.arrived.notify_one();
        Ok(())
    }

    /// Takes what has arrived, up to `most` in size; waits at most `patience` for it.
    pub(super) fn take(&self, most: usize, patience: Duration) -> Turn<J> {
        let deadline = Instant::now().checked_add(patience);
        let mut waiting = self.waiting();
        while waiting.is_empty() {
            if waiting.closed {
                return Turn::Closed;
            }
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            if left.is_some_and(|left| left.is_zero()) {
                return Turn::Idle;
            }
            let left = left.unwrap_or(patience);
            let woken = self.arrived.wait_timeout(waiting, left);
            waiting = woken.unwrap_or_else(PoisonError::into_inner).0;
        }
        Turn::Jobs(waiting.take(most))
    }

    /// Lets nothing more in. What waits is still done.
    pub(super) fn close(&self) {
        self.waiting().closed = true;
        self.arrived.notify_all();
    }

    /// Lets nothing more in and drops what waits, so that its callers learn that nobody answers.
    pub(super) fn abandon(&self) {
        let mut waiting = self.waiting();
        waiting.closed = true;
        waiting.urgent.clear();
        waiting.others.clear();
    }

    /// A panic elsewhere leaves the queue whole: each change of it is complete before the next.
    fn waiting(&self) -> MutexGuard<'_, Waiting<J>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<J: Job> Waiting<J> {
    fn is_empty(&self) -> bool {
        self.urgent.is_empty() && self.others.is_empty()
    }

    fn take(&mut self, most: usize) -> Vec<J> {
        let mut jobs: Vec<J> = Vec::new();
        let mut size = 0;
        loop {
            let lane = if self.urgent.is_empty() { &mut self.others } else { &mut self.urgent };
            let fits = |job: &J| jobs.is_empty() || (size + job.size() <= most && !job.alone());
            let next = if lane.front().is_some_and(fits) { lane.pop_front() } else { None };
            let Some(job) = next else { return jobs };
            self.size = self.size.saturating_sub(job.size());
            size += job.size();
            let alone = job.alone();
            jobs.push(job);
            if alone {
                return jobs;
            }
        }
    }
}
