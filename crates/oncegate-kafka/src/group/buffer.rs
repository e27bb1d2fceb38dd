//! The bounded, ordered buffer of messages that are fetched and not yet received.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};

use super::wake::Wake;
use crate::partitions::assignment::{Assignment, Receipt};
use oncegate_runtime::message::Message;

/// A fetched message and its position in the partition's epoch.
#[derive(Debug)]
pub(crate) struct Fetched {
    pub(crate) message: Message,
    pub(crate) bytes: usize,
    pub(crate) assignment: Arc<Assignment>,
    pub(crate) receipt: Receipt,
}

/// The queue between the poll thread and `receive`. It moves many messages per lock and per
/// wake-up.
#[derive(Debug)]
pub(crate) struct Buffer {
    queue: Mutex<FetchedQueue>,
    filled: Wake,
    room: Condvar,
    messages_max: usize,
    bytes_max: usize,
}

#[derive(Debug, Default)]
struct FetchedQueue {
    fetched: VecDeque<Fetched>,
    bytes: usize,
    /// `true` while the poll thread waits for room.
    awaited: bool,
    end: Option<End>,
}

/// The reason for which no more messages arrive.
#[derive(Clone, Debug)]
pub(crate) enum End {
    Closed,
    Failed(String),
}

impl Buffer {
    /// # Errors
    /// When the process has no file descriptors left.
    pub(crate) fn new(messages_max: usize, bytes_max: usize) -> std::io::Result<Self> {
        Ok(Self {
            queue: Mutex::default(),
            filled: Wake::new()?,
            room: Condvar::new(),
            messages_max: messages_max.max(1),
            bytes_max: bytes_max.max(1),
        })
    }

    /// Adds all fetched messages. The poll thread keeps the bound by checking
    /// [`is_full`](Self::is_full) before a fetch.
    pub(crate) fn push(&self, batch: &mut Vec<Fetched>) {
        let mut queue = self.queue();
        if queue.end.is_some() {
            batch.clear();
            return;
        }
        queue.bytes += batch.iter().map(|fetched| fetched.bytes).sum::<usize>();
        queue.fetched.extend(batch.drain(..));
        drop(queue);
        self.filled.wake();
    }

    /// Waits for messages, and takes at least one and at most `most`. Dropping the future takes
    /// none.
    pub(crate) async fn take(&self, most: usize) -> Result<Vec<Fetched>, End> {
        loop {
            if let Some(taken) = self.try_take(most) {
                return taken;
            }
            self.filled.woken().await;
        }
    }

    fn try_take(&self, most: usize) -> Option<Result<Vec<Fetched>, End>> {
        let mut queue = self.queue();
        if let Some(end) = &queue.end {
            // Wake the next waiting receiver as well.
            self.filled.wake();
            return Some(Err(end.clone()));
        }
        if queue.fetched.is_empty() {
            return None;
        }
        let count = queue.fetched.len().min(most.max(1));
        let taken: Vec<_> = queue.fetched.drain(..count).collect();
        queue.bytes -= taken.iter().map(|fetched| fetched.bytes).sum::<usize>();
        let rest = !queue.fetched.is_empty();
        let wake = queue.awaited && self.is_half_empty(&queue);
        drop(queue);
        if rest {
            self.filled.wake();
        }
        if wake {
            self.room.notify_one();
        }
        Some(Ok(taken))
    }

    /// Drops the messages of revoked partitions.
    pub(crate) fn purge_revoked(&self) {
        let mut queue = self.queue();
        queue
            .fetched
            .retain(|fetched| !fetched.assignment.is_revoked());
        queue.bytes = queue.fetched.iter().map(|fetched| fetched.bytes).sum();
    }

    pub(crate) fn is_full(&self) -> bool {
        self.full(&self.queue())
    }

    /// Returns whether there is enough room to resume after a pause: half the buffer, so that it is
    /// not full again at once.
    pub(crate) fn has_ample_room(&self) -> bool {
        self.is_half_empty(&self.queue())
    }

    /// Waits for ample room; after `patience`, any room is enough. Returns `false` when there is
    /// none at all.
    pub(crate) fn wait_for_room(&self, patience: Duration) -> bool {
        let deadline = Instant::now() + patience;
        let mut queue = self.queue();
        queue.awaited = true;
        while queue.end.is_none() && !self.is_half_empty(&queue) {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            self.room.wait_for(&mut queue, left);
        }
        queue.awaited = false;
        !self.full(&queue)
    }

    /// Ends the buffer. The first reason is kept.
    pub(crate) fn end(&self, end: End) {
        let mut queue = self.queue();
        queue.end.get_or_insert(end);
        queue.fetched.clear();
        queue.bytes = 0;
        drop(queue);
        self.filled.wake();
        self.room.notify_one();
    }

    fn full(&self, queue: &FetchedQueue) -> bool {
        queue.fetched.len() >= self.messages_max || queue.bytes >= self.bytes_max
    }

    fn is_half_empty(&self, queue: &FetchedQueue) -> bool {
        queue.fetched.len() <= self.messages_max / 2 && queue.bytes <= self.bytes_max / 2
    }

    fn queue(&self) -> MutexGuard<'_, FetchedQueue> {
        self.queue.lock()
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;
    use crate::partitions::assignment::Begin;
    use crate::partitions::assignments::Assignments;
    use crate::partitions::partition::Partition;
    use oncegate_runtime::message::Origin;

    struct Feed {
        assignments: Assignments,
        next: i64,
    }

    impl Feed {
        fn new() -> Self {
            let assignments = Assignments::default();
            assignments.assign((0..2).map(partition), Begin::Begun);
            Self {
                assignments,
                next: 0,
            }
        }

        fn push(&mut self, buffer: &Buffer, number: i32, count: usize) {
            let all = self.assignments.all();
            let assignment = all
                .iter()
                .find(|one| one.partition().number == number)
                .expect("ours");
            let fetch = |_| {
                self.next += 1;
                let receipt = assignment.receive(self.next).expect("ours").receipt;
                let message = Message::new(
                    "t",
                    Origin::Other("t".into()),
                    Some(Bytes::from_static(b"payload")),
                );
                Fetched {
                    message,
                    bytes: 10,
                    assignment: Arc::clone(assignment),
                    receipt,
                }
            };
            buffer.push(&mut (0..count).map(fetch).collect());
        }
    }

    fn buffer(messages_max: usize, bytes_max: usize) -> Buffer {
        Buffer::new(messages_max, bytes_max).expect("there are file descriptors")
    }

    fn partition(number: i32) -> Partition {
        Partition {
            topic: "t".into(),
            number,
        }
    }

    #[tokio::test]
    async fn batches_come_in_order_and_no_larger_than_asked_for() {
        let buffer = buffer(100, 10_000);
        let mut feed = Feed::new();
        feed.push(&buffer, 0, 5);
        assert_eq!(buffer.take(3).await.expect("open").len(), 3);
        assert_eq!(buffer.take(3).await.expect("open").len(), 2);
    }

    #[tokio::test]
    async fn two_receivers_both_wake_up_for_one_push() {
        let buffer = buffer(100, 10_000);
        let mut feed = Feed::new();
        let push = async { feed.push(&buffer, 0, 2) };
        let (first, second, ()) = tokio::join!(buffer.take(1), buffer.take(1), push);
        assert_eq!(
            (first.expect("open").len(), second.expect("open").len()),
            (1, 1)
        );
    }

    #[tokio::test]
    async fn the_end_wakes_every_receiver_and_the_first_end_counts() {
        let buffer = buffer(100, 10_000);
        let end = async {
            buffer.end(End::Failed("first".to_owned()));
            buffer.end(End::Closed);
        };
        let (first, second, ()) = tokio::join!(buffer.take(1), buffer.take(1), end);
        assert!(matches!(first, Err(End::Failed(why)) if why == "first"));
        assert!(matches!(second, Err(End::Failed(_))));
    }

    #[tokio::test]
    async fn a_receiver_that_gave_up_takes_nothing_and_leaves_its_wake_up() {
        let buffer = buffer(100, 10_000);
        let mut feed = Feed::new();
        assert!(futures_util::FutureExt::now_or_never(buffer.take(1)).is_none());
        feed.push(&buffer, 0, 1);
        assert_eq!(buffer.take(1).await.expect("open").len(), 1);
        // Its wake-up is still there, and is about nothing.
        let push = async { feed.push(&buffer, 0, 1) };
        let (taken, ()) = tokio::join!(buffer.take(1), push);
        assert_eq!(taken.expect("open").len(), 1);
    }

    #[test]
    fn each_take_may_be_of_another_runtime() {
        let buffer = buffer(100, 10_000);
        let mut feed = Feed::new();
        for number in 0..3 {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .expect("a runtime");
            std::thread::scope(|scope| {
                let waiting = scope.spawn(|| runtime.block_on(buffer.take(1)).expect("open").len());
                feed.push(&buffer, number % 2, 1);
                assert_eq!(waiting.join().expect("no panic"), 1);
            });
        }
    }

    #[tokio::test]
    async fn a_revoke_takes_its_messages_out_and_no_others() {
        let buffer = buffer(8, 10_000);
        let mut feed = Feed::new();
        feed.push(&buffer, 0, 5);
        feed.push(&buffer, 1, 3);
        assert!(buffer.is_full());
        feed.assignments.begin_revoke(&[partition(0)]);
        buffer.purge_revoked();
        assert!(!buffer.is_full() && buffer.has_ample_room());
        let left = buffer.take(100).await.expect("open");
        assert!(
            left.iter()
                .all(|fetched| fetched.assignment.partition().number == 1)
        );
        assert_eq!(left.len(), 3);
    }

    #[tokio::test]
    async fn full_means_messages_or_bytes_and_room_comes_back_at_half() {
        for (messages_max, bytes_max) in [(10, 10_000), (1_000, 100)] {
            let buffer = buffer(messages_max, bytes_max);
            let mut feed = Feed::new();
            feed.push(&buffer, 0, 10);
            assert!(buffer.is_full() && !buffer.wait_for_room(Duration::ZERO));
            buffer.take(4).await.expect("open");
            assert!(!buffer.has_ample_room());
            assert!(
                buffer.wait_for_room(Duration::ZERO),
                "after the patience, any room will do"
            );
            buffer.take(1).await.expect("open");
            assert!(buffer.has_ample_room());
        }
    }

    #[test]
    fn a_wait_for_room_ends_at_half() {
        let buffer = buffer(10, 10_000);
        let mut feed = Feed::new();
        feed.push(&buffer, 0, 10);
        let begun = Instant::now();
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| buffer.wait_for_room(Duration::from_secs(60)));
            while !buffer.queue().awaited {
                std::thread::yield_now();
            }
            assert!(matches!(buffer.try_take(5), Some(Ok(taken)) if taken.len() == 5));
            assert!(waiting.join().expect("no panic"));
        });
        assert!(begun.elapsed() < Duration::from_secs(60));
    }
}
