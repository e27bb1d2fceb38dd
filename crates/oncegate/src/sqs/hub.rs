//! Where the consumer and the queue's own thread meet.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::Instant;

use super::held::{Admitted, Held, MessageId};
use crate::health::{FailureLog, PartitionStatus, SourceStatus};
use crate::message::Message;
use crate::observe::{Event, Observer};

/// What both sides share.
#[derive(Debug)]
pub(crate) struct Hub {
    state: Mutex<State>,
    /// Something is there for the thread to do.
    pub(crate) wake: Notify,
    arrived: Notify,
    observer: Arc<dyn Observer>,
    /// Which calls fail now.
    pub(crate) failures: FailureLog,
}

#[derive(Debug)]
pub(crate) struct State {
    pub(crate) held: Held,
    /// Received, and not taken yet.
    arrived: VecDeque<Fetched>,
    /// How many the consumer could run now; 0 while it does not wait.
    wanted: usize,
    end: Option<End>,
    /// Set when the source is to leave the queue.
    pub(crate) leave_by: Option<Instant>,
    /// When the thread last had a turn, and when messages last came.
    pub(crate) turned_at: Instant,
    delivered_at: Option<Instant>,
}

/// Why nothing more will come.
#[derive(Clone, Debug)]
pub(crate) enum End {
    Closed,
    Failed(String),
}

/// A message that nobody has taken yet.
#[derive(Debug)]
pub(crate) struct Fetched {
    pub(crate) message: Message,
    pub(crate) id: MessageId,
    pub(crate) admitted: Admitted,
    pub(crate) stays: bool,
}

impl Hub {
    pub(crate) fn new(visibility: Duration, observer: Arc<dyn Observer>) -> Self {
        let state = State {
            held: Held::new(visibility),
            arrived: VecDeque::new(),
            wanted: 0,
            end: None,
            leave_by: None,
            turned_at: Instant::now(),
            delivered_at: None,
        };
        let (wake, arrived) = (Notify::new(), Notify::new());
        Self { state: Mutex::new(state), wake, arrived, observer, failures: FailureLog::default() }
    }

    /// Every change leaves the state whole, so a panic elsewhere spoils nothing.
    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn observe(&self, event: Event<'_>) {
        self.observer.observe(event);
    }

    /// Waits for messages; the queue is asked for up to `most` as long as this is awaited.
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

    /// Hands out what was received, or back what comes when nobody will take it any more.
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

    pub(crate) fn ack(&self, id: &MessageId, delivery: u64) {
        self.lock().held.ack(Instant::now(), id, delivery);
        self.wake.notify_one();
    }

    pub(crate) fn give_back(&self, id: &MessageId, delivery: u64, delay: Duration) {
        if self.lock().held.give_back(Instant::now(), id, delivery, delay) {
            self.wake.notify_one();
        }
    }

    /// What is held of the queue. How much waits there is the queue's to say.
    pub(crate) fn status(&self, queue: &str) -> SourceStatus {
        let (now, state) = (Instant::now(), self.lock());
        let mut held = PartitionStatus::new(queue, 0);
        held.in_flight = state.arrived.len();
        held.oldest_unfinished = state.held.oldest().map(|oldest| now.duration_since(oldest));
        held.delivered_ago = state.delivered_at.map(|delivered| now.duration_since(delivered));
        let polled_ago = Some(now.duration_since(state.turned_at));
        let failures = self.failures.at(now.into_std());
        SourceStatus { polled_ago, partitions: vec![held], failures, ..SourceStatus::default() }
    }

    /// Nothing more is handed out; what nobody has taken goes back.
    pub(crate) fn end(&self, end: End) {
        let mut state = self.lock();
        state.end.get_or_insert(end);
        state.return_arrived();
        drop(state);
        self.arrived.notify_one();
        self.wake.notify_one();
    }

    /// Everything is to be told to the queue by then.
    pub(crate) fn leave(&self, by: Instant) {
        self.lock().leave_by.get_or_insert(by);
        self.end(End::Closed);
    }
}

impl State {
    pub(crate) fn is_ended(&self) -> bool {
        self.end.is_some()
    }

    fn return_arrived(&mut self) {
        let now = Instant::now();
        while let Some(fetched) = self.arrived.pop_front() {
            self.held.give_back(now, &fetched.id, fetched.admitted.delivery, Duration::ZERO);
        }
    }

    /// How many more the queue may be asked for, when answers for `asked` are awaited. A message that is
    /// finished keeps its place until it is deleted.
    pub(crate) fn free(&self, asked: usize) -> usize {
        self.wanted.saturating_sub(self.arrived.len() + self.held.undeleted() + asked)
    }
}

/// The wish for messages, as long as somebody waits for them.
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
