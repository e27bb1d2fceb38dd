//! The state shared by the consumer and the queue's thread.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use oncegate_runtime::health::{FailureLog, PartitionStatus, SourceStatus};
use oncegate_runtime::message::Message;
use oncegate_runtime::observe::{Event, Observer};
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::Notify;
use tokio::time::Instant;

use super::held::Held;

/// The operation that fails while there is no consumer at the broker.
const RECEIVE: &str = "receive";

/// The state that both sides share.
#[derive(Debug)]
pub(crate) struct Hub {
    state: Mutex<HubState>,
    /// Wakes the thread when it has work.
    pub(crate) wake: Notify,
    arrived: Notify,
    observer: Arc<dyn Observer>,
    failures: FailureLog,
    /// The number of bytes of messages that the broker has sent on this connection.
    pub(crate) received: AtomicU64,
    /// Messages go back in their order, and only when all that run are finished.
    pub(crate) in_order: bool,
}

#[derive(Debug)]
pub(crate) struct HubState {
    pub(crate) held: Held,
    /// Messages that are received and not taken yet.
    arrived: VecDeque<Fetched>,
    pub(crate) end: Option<End>,
    /// The deadline for leaving the queue, once the source leaves.
    pub(crate) leave_by: Option<Instant>,
    /// The times at which the thread last ran, and messages last arrived.
    turned_at: Instant,
    pub(crate) delivered_at: Option<Instant>,
    disconnected_at: Option<Instant>,
    /// The prefetch is full of messages that wait.
    is_stalled: bool,
}

/// The number of deliveries that are not finished.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HubLoad {
    pub(crate) in_hand: usize,
    /// Deliveries that were not taken yet.
    pub(crate) arrived: usize,
    /// Deliveries that were taken, and do not run.
    pub(crate) waiting: usize,
    pub(crate) delivered_at: Option<Instant>,
}

/// The reason that no more messages arrive.
#[derive(Clone, Debug)]
pub(crate) enum End {
    Closed,
    Failed(String),
}

/// A message that is not taken yet.
#[derive(Debug)]
pub(crate) struct Fetched {
    pub(crate) message: Message,
    pub(crate) epoch: u64,
    pub(crate) tag: u64,
}

impl Hub {
    pub(crate) fn new(observer: Arc<dyn Observer>, in_order: bool) -> Self {
        let state = HubState {
            held: Held::default(),
            arrived: VecDeque::new(),
            end: None,
            leave_by: None,
            turned_at: Instant::now(),
            delivered_at: None,
            disconnected_at: None,
            is_stalled: false,
        };
        let state = Mutex::new(state);
        let failures = FailureLog::default();
        Self {
            state,
            wake: Notify::new(),
            arrived: Notify::new(),
            observer,
            failures,
            received: AtomicU64::default(),
            in_order,
        }
    }

    /// Locks the state. A panic elsewhere does no harm: every change leaves it consistent.
    pub(crate) fn lock(&self) -> MutexGuard<'_, HubState> {
        self.state.lock()
    }

    /// Waits for messages.
    pub(crate) async fn take(&self, most: usize) -> Result<Vec<Fetched>, End> {
        loop {
            let arrived = self.arrived.notified();
            {
                let mut state = self.lock();
                if let Some(end) = &state.end {
                    return Err(end.clone());
                }
                let count = state.arrived.len().min(most);
                if count > 0 {
                    return Ok(state.arrived.drain(..count).collect());
                }
            }
            arrived.await;
        }
    }

    /// Passes received messages to the receiver, or returns them to the queue after the end.
    pub(crate) fn put(&self, messages: Vec<(u64, Message)>) {
        let now = Instant::now();
        let mut state = self.lock();
        state.delivered_at = Some(now);
        let was_stalled = std::mem::take(&mut state.is_stalled);
        for (tag, message) in messages {
            let epoch = state.held.admit(now, tag);
            state.arrived.push_back(Fetched {
                message,
                epoch,
                tag,
            });
        }
        if state.end.is_some() {
            state.return_arrived(self.in_order);
        }
        drop(state);
        self.arrived.notify_one();
        if was_stalled {
            self.failures.succeeded(RECEIVE);
        }
    }

    /// Holds a delivery that is not passed on yet, and returns its epoch.
    pub(crate) fn hold(&self, tag: u64) -> u64 {
        self.lock().held.admit(Instant::now(), tag)
    }

    /// Passes on a delivery that was only held.
    pub(crate) fn pass_on(&self, fetched: Fetched) {
        let mut state = self.lock();
        if !state.held.is_ours(fetched.epoch, fetched.tag) {
            return;
        }
        state.arrived.push_back(fetched);
        if state.end.is_some() {
            state.return_arrived(self.in_order);
        }
        drop(state);
        self.arrived.notify_one();
    }

    /// Returns to the queue what has been held for so long. Returns how many messages these are.
    pub(crate) fn give_back_old(&self, hold_most: Duration) -> usize {
        let Some(before) = Instant::now().checked_sub(hold_most) else {
            return 0;
        };
        let mut state = self.lock();
        let old = state.held.give_back_old(before);
        let HubState { arrived, held, .. } = &mut *state;
        if old > 0 {
            arrived.retain(|fetched| held.is_ours(fetched.epoch, fetched.tag));
            self.wake.notify_one();
        }
        old
    }

    /// Returns what is held.
    pub(crate) fn load(&self) -> HubLoad {
        let state = self.lock();
        let counts = state.held.counts();
        let arrived = state.arrived.len();
        HubLoad {
            in_hand: counts.in_hand,
            arrived,
            waiting: counts.in_hand.saturating_sub(counts.running + arrived),
            delivered_at: state.delivered_at,
        }
    }

    /// Notes that the broker delivers nothing, and why. The next delivery ends that.
    pub(crate) fn stalled(&self, why: &str) {
        self.lock().is_stalled = true;
        self.failures
            .failed(Instant::now().into_std(), RECEIVE, &why);
    }

    /// Notes that a new channel consumes the queue. The failure that ended the last one stays until
    /// a message is delivered, if it is expected again.
    pub(crate) fn connected(&self, may_fail_again: bool) {
        let mut state = self.lock();
        state.begin();
        state.disconnected_at = None;
        state.is_stalled = may_fail_again;
        drop(state);
        if !may_fail_again {
            self.failures.succeeded(RECEIVE);
        }
    }

    /// Notes that the channel is lost: its deliveries are no longer ours.
    pub(crate) fn disconnected(&self, error: &dyn std::fmt::Display) {
        let now = Instant::now();
        let mut state = self.lock();
        state.begin();
        state.disconnected_at.get_or_insert(now);
        drop(state);
        self.failures.failed(now.into_std(), RECEIVE, error);
        self.observer
            .observe(Event::SourceError { operation: RECEIVE });
    }

    /// Notes that the thread runs.
    pub(crate) fn turned(&self) {
        self.lock().turned_at = Instant::now();
    }

    pub(crate) fn is_ours(&self, epoch: u64, tag: u64) -> bool {
        self.lock().held.is_ours(epoch, tag)
    }

    pub(crate) fn start(&self, epoch: u64, tag: u64) -> bool {
        self.lock().held.start(epoch, tag)
    }

    pub(crate) fn stop(&self, epoch: u64, tag: u64) {
        self.lock().held.stop(epoch, tag);
    }

    pub(crate) fn ack(&self, epoch: u64, tag: u64) {
        if self.lock().held.ack(epoch, tag) {
            self.wake.notify_one();
        }
    }

    pub(crate) fn give_back(&self, epoch: u64, tag: u64) {
        if self.lock().give_back(epoch, tag, self.in_order) {
            self.wake.notify_one();
        }
    }

    /// Returns the state of the deliveries. Only the broker knows how many messages wait in the
    /// queue.
    pub(crate) fn status(&self, queue: &str) -> SourceStatus {
        let now = Instant::now();
        let state = self.lock();
        let mut held = PartitionStatus::new(queue, 0);
        held.in_flight = state.arrived.len();
        held.oldest_unfinished = state.held.oldest().map(|oldest| now.duration_since(oldest));
        held.delivered_ago = state
            .delivered_at
            .map(|delivered| now.duration_since(delivered));
        SourceStatus {
            polled_ago: Some(now.duration_since(state.turned_at)),
            disconnected_for: state.disconnected_at.map(|since| now.duration_since(since)),
            partitions: vec![held],
            failures: self.failures.at(now.into_std()),
            ..SourceStatus::default()
        }
    }

    /// Ends the source: no further message is passed on, and messages not taken return to the
    /// queue.
    pub(crate) fn end(&self, end: End) {
        let mut state = self.lock();
        state.end.get_or_insert(end);
        state.return_arrived(self.in_order);
        drop(state);
        self.arrived.notify_one();
        self.wake.notify_one();
    }

    /// Sets the deadline for leaving the queue.
    pub(crate) fn leave(&self, by: Instant) {
        self.lock().leave_by.get_or_insert(by);
        self.end(End::Closed);
    }
}

impl HubState {
    fn begin(&mut self) {
        self.held.begin();
        self.arrived.clear();
    }

    /// Returns a message; one of an order only with the channel. Alone, it would be delivered after
    /// those behind it: a consumer that stops drops its messages one by one, also before the source
    /// has been told of the end.
    fn give_back(&mut self, epoch: u64, tag: u64, in_order: bool) -> bool {
        if in_order {
            self.held.withhold(epoch, tag)
        } else {
            self.held.give_back(epoch, tag)
        }
    }

    fn return_arrived(&mut self, in_order: bool) {
        while let Some(fetched) = self.arrived.pop_front() {
            self.give_back(fetched.epoch, fetched.tag, in_order);
        }
    }
}

#[cfg(test)]
mod tests {
    use oncegate_runtime::message::Origin;
    use oncegate_runtime::observe::Counters;

    use super::*;
    use crate::ack_handle;
    use crate::held::Settlement;

    /// A queue's hub that has received these deliveries.
    fn with_deliveries(tags: std::ops::RangeInclusive<u64>, in_order: bool) -> Arc<Hub> {
        let hub = Arc::new(Hub::new(Arc::new(Counters::default()), in_order));
        hub.connected(false);
        let messages = tags.map(|tag| {
            let origin = Origin::Queue {
                queue: "orders".into(),
                id: tag.to_string().into(),
            };
            (tag, Message::new("orders", origin, None))
        });
        hub.put(messages.collect());
        hub
    }

    /// Drops one of three deliveries before the end, as a consumer does that stops, and the others
    /// after it. Returns what the broker is told.
    async fn told_of_a_stop(in_order: bool) -> Vec<Settlement> {
        let hub = with_deliveries(1..=3, in_order);
        let taken = hub.take(1).await.unwrap();
        for fetched in taken {
            drop(ack_handle::delivery(&hub, fetched, in_order));
        }
        hub.end(End::Closed);
        hub.lock().held.take().0
    }

    // invariant: amqp-order
    #[tokio::test]
    async fn messages_of_an_order_go_back_with_the_channel_alone() {
        assert_eq!(told_of_a_stop(true).await, []);
        let each = [1, 2, 3].map(Settlement::Return);
        assert_eq!(told_of_a_stop(false).await, each);
    }
}
