//! The state shared by the consumer and the queue's thread.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};
use tokio::sync::Notify;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::held::{Admitted, Held, MessageId};
use oncegate_runtime::health::{FailureLog, PartitionStatus, SourceStatus};
use oncegate_runtime::message::Message;
use oncegate_runtime::observe::{Event, Observer};

/// The state that both sides share.
#[derive(Debug)]
pub(crate) struct Hub {
    state: Mutex<HubState>,
    /// Wakes the thread when it has work.
    pub(crate) wake: Notify,
    arrived: Notify,
    observer: Arc<dyn Observer>,
    /// The calls that are failing now.
    pub(crate) failures: FailureLog,
    /// Fires when no more messages are passed on.
    pub(crate) ended: CancellationToken,
}

#[derive(Debug)]
pub(crate) struct HubState {
    pub(crate) held: Held,
    /// Messages that are received and not taken yet.
    arrived: VecDeque<Fetched>,
    /// The number of messages that the consumer could run now; 0 while it does not wait.
    wanted: usize,
    end: Option<End>,
    /// The deadline for leaving the queue, once the source leaves.
    pub(crate) leave_by: Option<Instant>,
    /// The time at which the thread last ran.
    pub(crate) turned_at: Instant,
    /// The time at which messages last arrived.
    delivered_at: Option<Instant>,
}

/// The reason for which no more messages arrive.
#[derive(Clone, Debug)]
pub(crate) enum End {
    Closed,
    Failed(String),
}

/// A message that is not taken yet.
#[derive(Debug)]
pub(crate) struct Fetched {
    pub(crate) message: Message,
    pub(crate) id: MessageId,
    pub(crate) admitted: Admitted,
    pub(crate) stays: bool,
}

impl Hub {
    pub(crate) fn new(visibility: Duration, observer: Arc<dyn Observer>) -> Self {
        let state = HubState {
            held: Held::new(visibility),
            arrived: VecDeque::new(),
            wanted: 0,
            end: None,
            leave_by: None,
            turned_at: Instant::now(),
            delivered_at: None,
        };
        Self {
            state: Mutex::new(state),
            wake: Notify::new(),
            arrived: Notify::new(),
            observer,
            failures: FailureLog::default(),
            ended: CancellationToken::new(),
        }
    }

    /// Locks the state. Every change leaves it consistent, so a panic elsewhere does no harm.
    pub(crate) fn lock(&self) -> MutexGuard<'_, HubState> {
        self.state.lock()
    }

    pub(crate) fn observe(&self, event: Event<'_>) {
        self.observer.observe(event);
    }

    /// Waits for messages. While this is awaited, up to `most` are requested from the queue.
    pub(crate) async fn take(&self, most: usize) -> Result<Vec<Fetched>, End> {
        let _demand = Demand::new(self, most);
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
    pub(crate) fn put(&self, fetched: Vec<Fetched>) {
        let mut state = self.lock();
        if !fetched.is_empty() {
            state.delivered_at = Some(Instant::now());
        }
        state.arrived.extend(fetched);
        if state.is_ended() {
            state.return_arrived();
        }
        drop(state);
        self.arrived.notify_one();
    }

    pub(crate) fn may_start(&self, id: &MessageId, delivery: u64) -> bool {
        self.lock().held.may_start(Instant::now(), id, delivery)
    }

    pub(crate) fn is_ours(&self, id: &MessageId, delivery: u64) -> bool {
        self.lock().held.is_ours(id, delivery)
    }

    pub(crate) fn ack(&self, id: &MessageId, delivery: u64) {
        self.lock().held.ack(Instant::now(), id, delivery);
        self.wake.notify_one();
    }

    pub(crate) fn give_back(&self, id: &MessageId, delivery: u64, delay: Duration) {
        if self
            .lock()
            .held
            .give_back(Instant::now(), id, delivery, delay)
        {
            self.wake.notify_one();
        }
    }

    /// Returns what is held of the queue. Only the queue knows how many messages wait there.
    pub(crate) fn status(&self, queue: &str) -> SourceStatus {
        let now = Instant::now();
        let state = self.lock();
        let mut held = PartitionStatus::new(queue, 0);
        held.in_flight = state.arrived.len();
        held.oldest_unfinished = state.held.oldest().map(|oldest| now.duration_since(oldest));
        held.delivered_ago = state
            .delivered_at
            .map(|delivered| now.duration_since(delivered));
        let polled_ago = Some(now.duration_since(state.turned_at));
        let failures = self.failures.at(now.into_std());
        SourceStatus {
            polled_ago,
            partitions: vec![held],
            failures,
            ..SourceStatus::default()
        }
    }

    /// Ends the source: no further message is passed on, and messages not taken return to the
    /// queue.
    pub(crate) fn end(&self, end: End) {
        let mut state = self.lock();
        state.end.get_or_insert(end);
        state.return_arrived();
        drop(state);
        self.ended.cancel();
        self.arrived.notify_one();
        self.wake.notify_one();
    }

    /// Sets the deadline for all calls to the queue.
    pub(crate) fn leave(&self, by: Instant) {
        self.lock().leave_by.get_or_insert(by);
        self.end(End::Closed);
    }
}

impl HubState {
    pub(crate) fn is_ended(&self) -> bool {
        self.end.is_some()
    }

    fn return_arrived(&mut self) {
        let now = Instant::now();
        while let Some(fetched) = self.arrived.pop_front() {
            self.held
                .give_back(now, &fetched.id, fetched.admitted.delivery, Duration::ZERO);
        }
    }

    /// Returns how many more messages may be requested while `asked` are already requested.
    /// Finished messages whose deletes fill a batch take up room until they are deleted, so that
    /// they do not pile up.
    pub(crate) fn free(&self, asked: usize) -> usize {
        self.wanted
            .saturating_sub(self.arrived.len() + self.held.overdue_deletes() + asked)
    }
}

/// A request for messages, while a receiver waits for them.
struct Demand<'a>(&'a Hub);

impl<'a> Demand<'a> {
    fn new(hub: &'a Hub, most: usize) -> Self {
        hub.lock().wanted = most;
        hub.wake.notify_one();
        Self(hub)
    }
}

impl Drop for Demand<'_> {
    fn drop(&mut self) {
        self.0.lock().wanted = 0;
    }
}
