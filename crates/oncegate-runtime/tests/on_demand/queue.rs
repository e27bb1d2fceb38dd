//! A queue in memory, as a source that gives messages on demand and takes them back.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use oncegate::observe::Observer;
use oncegate::source::{AckHandle, Delivery, Source, SourceError, Supply, Terms};
use oncegate::{Message, Origin};
use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until, timeout};
use tokio_util::sync::CancellationToken;

/// The longest that a test waits, in the time of the test.
const LIMIT: Duration = Duration::from_secs(3_600);

/// A queue in memory.
#[derive(Debug, Default)]
pub(super) struct Queue {
    state: Mutex<State>,
    changed: Notify,
}

#[derive(Debug, Default)]
pub(super) struct State {
    /// What can be received, and from when on.
    pub(super) visible_from: BTreeMap<usize, Instant>,
    /// What is in the consumer's hands.
    pub(super) held: BTreeMap<usize, CancellationToken>,
    pub(super) acked: Vec<usize>,
    pub(super) handed_back: Vec<(usize, Duration)>,
    /// The most that were in its hands, or would have been if all that was asked for had been
    /// there.
    pub(super) most_wanted: usize,
    pub(super) receives: usize,
    /// Each message is in one of so many groups, or in none.
    pub(super) groups: usize,
    pub(super) terms: Option<Terms>,
}

impl Queue {
    pub(super) fn of(count: usize) -> Arc<Self> {
        let queue = Self::default();
        let now = Instant::now();
        queue.state.lock().unwrap().visible_from = (0..count).map(|n| (n, now)).collect();
        Arc::new(queue)
    }

    pub(super) fn look<T>(&self, at: impl FnOnce(&mut State) -> T) -> T {
        at(&mut self.state.lock().unwrap())
    }

    /// Waits until the queue is so.
    pub(super) async fn until(&self, so: impl Fn(&State) -> bool + Send + Sync) {
        let waiting = async {
            loop {
                let changed = self.changed.notified();
                if so(&self.state.lock().unwrap()) {
                    return;
                }
                changed.await;
            }
        };
        timeout(LIMIT, waiting)
            .await
            .unwrap_or_else(|_| panic!("{:?}", self.state));
    }

    pub(super) async fn until_acked(&self, count: usize) {
        self.until(|state| state.acked.len() >= count).await;
    }

    pub(super) fn change(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.state.lock().unwrap());
        self.changed.notify_waiters();
    }
}

/// What a consumer is given.
#[derive(Debug)]
pub(super) struct Reader(pub(super) Arc<Queue>);

#[async_trait]
impl Source for Reader {
    fn agree(&self, terms: &Terms) -> Supply {
        self.0.look(|state| state.terms = Some(*terms));
        Supply::OnDemand
    }

    async fn open(&self, _: Arc<dyn Observer>) -> Result<(), SourceError> {
        Ok(())
    }

    async fn receive(&self, most: usize) -> Result<Option<Vec<Delivery>>, SourceError> {
        loop {
            let changed = self.0.changed.notified();
            let (taken, next) = self.0.look(|state| {
                state.receives += 1;
                state.most_wanted = state.most_wanted.max(state.held.len() + most);
                let now = Instant::now();
                let visible = state.visible_from.iter().filter(|(_, from)| **from <= now);
                let taken: Vec<usize> = visible.map(|(n, _)| *n).take(most).collect();
                state.visible_from.retain(|n, _| !taken.contains(n));
                let tokens: Vec<(usize, CancellationToken)> = taken
                    .into_iter()
                    .map(|n| (n, CancellationToken::new()))
                    .collect();
                state.held.extend(tokens.iter().cloned());
                (tokens, state.visible_from.values().min().copied())
            });
            if !taken.is_empty() {
                let deliveries = taken.into_iter().map(|(n, lost)| deliver(&self.0, n, lost));
                return Ok(Some(deliveries.collect()));
            }
            match next {
                Some(at) => tokio::select! { () = changed => {}, () = sleep_until(at) => {} },
                None => changed.await,
            }
        }
    }

    async fn close(&self, _: Duration) -> Result<(), SourceError> {
        Ok(())
    }
}

fn deliver(queue: &Arc<Queue>, n: usize, lost: CancellationToken) -> Delivery {
    let origin = Origin::Queue {
        queue: "orders".into(),
        id: n.to_string().into(),
    };
    let message = Message::new("orders", origin, Some(payload(n).into()));
    let message = match queue.look(|state| n.checked_rem(state.groups)) {
        Some(group) => message.with_key(group.to_string()),
        None => message,
    };
    Delivery {
        message,
        ack_handle: Arc::new(Receipt {
            queue: Arc::clone(queue),
            n,
            lost,
        }),
    }
}

pub(super) fn payload(n: usize) -> String {
    format!(r#"{{"id":{n}}}"#)
}

#[derive(Debug)]
struct Receipt {
    queue: Arc<Queue>,
    n: usize,
    lost: CancellationToken,
}

impl Receipt {
    fn give_back(&self, delay: Duration) {
        self.queue.change(|state| {
            if state.held.remove(&self.n).is_some() {
                state.handed_back.push((self.n, delay));
                state.visible_from.insert(self.n, Instant::now() + delay);
            }
        });
    }
}

impl AckHandle for Receipt {
    fn start(&self) -> bool {
        !self.lost.is_cancelled()
    }

    fn ack(&self) {
        self.queue.change(|state| {
            if !self.lost.is_cancelled() && state.held.remove(&self.n).is_some() {
                state.acked.push(self.n);
            }
        });
    }

    fn stop(&self) {}

    fn nack_after(&self, delay: Duration) -> bool {
        self.give_back(delay);
        true
    }

    fn is_ours(&self) -> bool {
        !self.lost.is_cancelled()
    }
}

impl Drop for Receipt {
    fn drop(&mut self) {
        self.give_back(Duration::ZERO);
    }
}
