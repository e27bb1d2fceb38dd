//! What the poll thread has fetched and nobody has received yet: bounded, in order.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::Notify;

use super::assignment::{Assignment, Receipt};
use crate::message::Message;

/// A fetched message and where it stands.
#[derive(Debug)]
pub(crate) struct Fetched {
    pub(crate) message: Message,
    pub(crate) bytes: usize,
    pub(crate) assignment: Arc<Assignment>,
    pub(crate) receipt: Receipt,
}

/// The queue between the poll thread and `receive`. Many messages travel per lock and per wake-up.
#[derive(Debug)]
pub(crate) struct Buffer {
    queue: Mutex<Queue>,
    filled: Notify,
    room: Condvar,
    messages_max: usize,
    bytes_max: usize,
}

#[derive(Debug, Default)]
struct Queue {
    fetched: VecDeque<Fetched>,
    bytes: usize,
    /// The poll thread waits for room.
    awaited: bool,
    end: Option<End>,
}

/// Why nothing more comes.
#[derive(Clone, Debug)]
pub(crate) enum End {
    Closed,
    Failed(String),
}

impl Buffer {
    pub(crate) fn new(messages_max: usize, bytes_max: usize) -> Self {
        Self {
            queue: Mutex::default(),
            filled: Notify::new(),
            room: Condvar::new(),
            messages_max: messages_max.max(1),
            bytes_max: bytes_max.max(1),
        }
    }

    /// Adds what was fetched, all of it: the bound is kept by asking [`is_full`](Self::is_full) before fetching.
    pub(crate) fn push(&self, batch: &mut Vec<Fetched>) {
        let mut queue = self.queue();
        if queue.end.is_some() {
            batch.clear();
            return;
        }
        queue.bytes += batch.iter().map(|fetched| fetched.bytes).sum::<usize>();
        queue.fetched.extend(batch.drain(..));
        drop(queue);
        self.filled.notify_one();
    }

    /// Waits for messages, and takes at least one and at most `most`. Dropping the future takes none.
    pub(crate) async fn take(&self, most: usize) -> Result<Vec<Fetched>, End> {
        loop {
            let filled = self.filled.notified();
            if let Some(taken) = self.try_take(most) {
                return taken;
            }
            filled.await;
        }
    }

    fn try_take(&self, most: usize) -> Option<Result<Vec<Fetched>, End>> {
        let mut queue = self.queue();
        if let Some(end) = &queue.end {
            // The next one who waits should hear of it as well.
            self.filled.notify_one();
            return Some(Err(end.clone()));
        }
        if queue.fetched.is_empty() {
            return None;
        }
        let count = queue.fetched.len().min(most.max(1));
        let taken: Vec<_> = queue.fetched.drain(..count).collect();
        queue.bytes -= taken.iter().map(|fetched| fetched.bytes).sum::<usize>();
        let (rest, wake) = (!queue.fetched.is_empty(), queue.awaited && self.is_half_empty(&queue));
        drop(queue);
        if rest {
            self.filled.notify_one();
        }
        if wake {
            self.room.notify_one();
        }
        Some(Ok(taken))
    }

    /// Drops what belongs to revoked partitions.
    pub(crate) fn purge_revoked(&self) {
        let mut queue = self.queue();
        queue.fetched.retain(|fetched| !fetched.assignment.is_revoked());
        queue.bytes = queue.fetched.iter().map(|fetched| fetched.bytes).sum();
    }

    pub(crate) fn is_full(&self) -> bool {
        self.full(&self.queue())
    }

    /// Whether there is enough room to go on after a standstill. Half, so that it does not come again at once.
    pub(crate) fn has_ample_room(&self) -> bool {
        self.is_half_empty(&self.queue())
    }

    /// Waits for ample room; after `patience` any room will do. `false` when there is none at all.
    pub(crate) fn wait_for_room(&self, patience: Duration) -> bool {
        let deadline = Instant::now() + patience;
        let mut queue = self.queue();
        queue.awaited = true;
        while queue.end.is_none() && !self.is_half_empty(&queue) {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            queue = self.room.wait_timeout(queue, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        queue.awaited = false;
        !self.full(&queue)
    }

    /// Nothing more comes or goes. The first end wins.
    pub(crate) fn end(&self, end: End) {
        let mut queue = self.queue();
        queue.end.get_or_insert(end);
        queue.fetched.clear();
        queue.bytes = 0;
        drop(queue);
        self.filled.notify_one();
        self.room.notify_one();
    }

    fn full(&self, queue: &Queue) -> bool {
        queue.fetched.len() >= self.messages_max || queue.bytes >= self.bytes_max
    }

    fn is_half_empty(&self, queue: &Queue) -> bool {
        queue.fetched.len() <= self.messages_max / 2 && queue.bytes <= self.bytes_max / 2
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
