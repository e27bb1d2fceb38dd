//! The loop that decides what runs when: lanes, permits, waits, outages and the stop.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap, VecDeque};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;
use std::time::Duration;

use oncegate_core::store::StoreError;
use tokio::sync::{OwnedSemaphorePermit, mpsc};
use tokio::task::{JoinError, JoinSet};
use tokio::time::{Instant, MissedTickBehavior, interval, sleep_until};
use tracing::{error, info, warn};

use super::breaker::{Admission, Held};
use super::lanes::{LaneId, Lanes, PlaceId};
use super::settle::Outcome;
use super::tenants::Tenants;
use super::{ConsumerError, Item, Ordering, Settings, Shared, Wait};
use crate::backoff::Backoff;
use crate::message::Origin;
use crate::observe::Event;

mod look;
mod stop;
mod tasks;

use tasks::{answer_all, attempt_one};

/// How often the engine counts everything that waits, for the monitor.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// The handler times fade after this many counts.
const LOOKS_PER_FADE: u32 = 60;
/// How many messages that the prefetch found completed are answered under one permit.
const ANSWERS_PER_PERMIT: usize = 64;
/// The delays between probes of a store that does not answer.
const PROBE_BACKOFF: Backoff = Backoff::new(Duration::from_millis(100), Duration::from_secs(2));

/// The shortest delay before a probe that is sent early, because messages would otherwise run without the store.
const SHORTEST_PROBE_WAIT: Duration = Duration::from_millis(100);

/// Everything that waits or runs.
pub(super) struct Engine {
    shared: Arc<Shared>,
    lanes: Lanes<Item>,
    /// First in their lanes, waiting for a permit.
    ready: VecDeque<PlaceId>,
    /// Found completed by the prefetch, waiting for a permit.
    found: VecDeque<Item>,
    /// Waiting until a point in time, without a permit.
    parked: BinaryHeap<Reverse<(Instant, PlaceId)>>,
    running: JoinSet<Done>,
    /// The shards of the store that were asked so far.
    shards: BTreeSet<Shard>,
    /// The shards that do not answer.
    outages: BTreeMap<Shard, Outage>,
    /// First in their lanes, waiting for a paused handler.
    held: Held,
    tenants: Tenants,
    failed: Option<ConsumerError>,
}

/// A shard of a route's store. Each route may have a store of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Shard {
    route: usize,
    number: u64,
}

/// What a task returns.
#[expect(
    clippy::large_enum_variant,
    reason = "nearly all are of the large kind, and a box for each costs more"
)]
enum Done {
    /// `asked` is the shard of the store that was asked, if any.
    Attempted {
        place: PlaceId,
        bytes: usize,
        asked: Option<Shard>,
        outcome: Outcome,
    },
    Answered {
        messages: Vec<usize>,
    },
}

/// A shard of the store that does not answer. Of its keys, only one probe at a time is dispatched.
#[derive(Debug)]
struct Outage {
    since: Instant,
    /// The store's last error.
    error: Arc<str>,
    probe_at: Instant,
    probes: u32,
    probing: Option<PlaceId>,
    /// It has lasted so long that messages run without the store.
    open: bool,
    /// The store has answered that it refuses until something is changed: it is not away.
    is_refusal: bool,
    /// First in their lanes, waiting for the store.
    waiting: VecDeque<PlaceId>,
}

impl Outage {
    fn new(now: Instant) -> Self {
        let waiting = VecDeque::new();
        Self {
            since: now,
            error: Arc::default(),
            probe_at: now,
            probes: 0,
            probing: None,
            open: false,
            is_refusal: false,
            waiting,
        }
    }

    /// When messages begin to run without the store; `None` if they already do or never will.
    fn opens_at(&self, settings: &Settings) -> Option<Instant> {
        settings
            .fail_open_after
            .filter(|_| !self.open && !self.is_refusal)
            .map(|patience| self.since + patience)
    }

    /// The delay before the next probe, short enough to ask the store again before messages run without it.
    fn probe_within(&self, wait: Duration, now: Instant, settings: &Settings) -> Duration {
        let left = self.opens_at(settings).and_then(|at| at.checked_duration_since(now));
        left.map_or(wait, |left| wait.min((left / 2).max(SHORTEST_PROBE_WAIT)))
    }

    /// When the next probe may start, if one can.
    fn next_probe(&self) -> Option<Instant> {
        (self.probing.is_none() && !self.waiting.is_empty()).then_some(self.probe_at)
    }
}

impl Engine {
    pub(super) fn new(shared: Arc<Shared>) -> Self {
        Self {
            tenants: Tenants::new(shared.settings.tenant_limit),
            shared,
            lanes: Lanes::new(),
            ready: VecDeque::new(),
            found: VecDeque::new(),
            parked: BinaryHeap::new(),
            running: JoinSet::new(),
            shards: BTreeSet::new(),
            outages: BTreeMap::new(),
            held: Held::default(),
            failed: None,
        }
    }

    /// Runs until the consumer stops and everything started has ended, or the deadline is over.
    pub(super) async fn run(mut self, mut intake: mpsc::Receiver<Vec<Item>>) -> Result<(), ConsumerError> {
        let (mut more, mut looks) = (true, interval(LOOK_EVERY));
        looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut looked: u32 = 0;
        while more || !self.is_idle() {
            self.dispatch();
            let wake_at = self.next_wake();
            let timer = async {
                match wake_at {
                    Some(at) => sleep_until(at).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                biased;
                () = self.shared.stopping.cancelled() => break,
                Some(done) = self.running.join_next() => {
                    self.note(done);
                    while let Some(done) = self.running.try_join_next() {
                        self.note(done);
                    }
                }
                batch = intake.recv(), if more => match batch {
                    Some(batch) => self.admit(batch),
                    None => more = false,
                },
                () = timer => self.wake(),
                _ = looks.tick() => {
                    self.look();
                    looked = looked.wrapping_add(1);
                    if looked.is_multiple_of(LOOKS_PER_FADE) {
                        self.shared.watch.handler_times.fade();
                    }
                }
            }
        }
        self.stop().await
    }

    fn is_idle(&self) -> bool {
        self.running.is_empty()
            && self.ready.is_empty()
            && self.found.is_empty()
            && self.parked.is_empty()
            && self.held.is_empty()
            && self.outages.values().all(|outage| outage.waiting.is_empty())
    }

    /// Puts messages into their lanes. Those that are completed and first are queued to be answered.
    fn admit(&mut self, batch: Vec<Item>) {
        for item in batch {
            let lanes = self.lanes_of(&item);
            if item.found.is_some() && self.lanes.are_empty(lanes) {
                self.found.push_back(item);
                continue;
            }
            let (place, first) = self.lanes.join(item, lanes);
            if first {
                self.ready.push_back(place);
            } else {
                self.shared.in_flight.waits();
            }
        }
    }

    /// The lane of its order, and the lane of its idempotency key: two deliveries of one key run one after the other.
    fn lanes_of(&self, item: &Item) -> [Option<LaneId>; 2] {
        let message = &item.delivery.message;
        // In a queue, order is kept by the group, which is the message's key, not by the queue.
        let ordering = match (self.shared.settings.ordering, message.origin()) {
            (Ordering::Partition, Origin::Queue { .. }) => Ordering::Key,
            (ordering, _) => ordering,
        };
        let order = match (ordering, message.key()) {
            (Ordering::Partition, _) => Some(lane("partition", &message.origin().partition())),
            (Ordering::Key, Some(key)) => Some(lane("key", &(message.origin().partition(), key))),
            (Ordering::Key, None) | (Ordering::Unordered, _) => None,
        };
        [order, item.identity.as_ref().ok().map(|identity| lane("identity", &identity.key))]
    }

    /// Starts everything that may start.
    fn dispatch(&mut self) {
        self.fail_open();
        let due = self.held.due(|route| self.shared.breaker(route));
        due.into_iter().rev().for_each(|place| self.ready.push_front(place));
        while let Some(permit) = self.permit() {
            if !self.found.is_empty() {
                let chunk = self.found.drain(..self.found.len().min(ANSWERS_PER_PERMIT)).collect();
                self.running.spawn(answer_all(Arc::clone(&self.shared), chunk, permit));
                continue;
            }
            let (place, probed) = match self.due_probe() {
                Some((shard, place)) => (place, Some(shard)),
                None => match self.ready.pop_front() {
                    Some(place) => (place, None),
                    None => return,
                },
            };
            let Some(mut item) = self.lanes.take(place) else { continue };
            let tenant = item.tenant;
            if self.tenants.is_full(tenant) {
                self.lanes.put_back(place, item);
                self.tenants.wait(tenant, place);
                self.shared.in_flight.waits();
                continue;
            }
            // A message held back for a shard probes that shard, even if the store has moved its key since.
            let shard = probed.or_else(|| shard_of(&item));
            self.shards.extend(shard);
            item.without_store = false;
            if let Some(outage) = shard.and_then(|shard| self.outages.get_mut(&shard)) {
                if outage.probing.is_none() && Instant::now() >= outage.probe_at {
                    outage.probing = Some(place);
                } else if outage.open {
                    item.without_store = true;
                } else {
                    self.lanes.put_back(place, item);
                    outage.waiting.push_back(place);
                    self.shared.in_flight.hold_back();
                    continue;
                }
            }
            if let Some(key) = breaker_key(&item)
                && item.route.breaker.admit(&item.route.gate, key) == Admission::Wait
            {
                if let Some(outage) = shard.and_then(|shard| self.outages.get_mut(&shard))
                    && !item.without_store
                {
                    outage.probing = None;
                }
                self.held.push(item.route.number, place);
                self.lanes.put_back(place, item);
                continue;
            }
            self.tenants.enter(tenant, place);
            let origin = item.delivery.message.origin();
            item.attempt = Some(self.shared.watch.begin(&item.route, origin, item.received_at));
            let asked = shard.filter(|_| !item.without_store);
            self.running.spawn(attempt_one(Arc::clone(&self.shared), place, item, asked, permit));
        }
    }

    /// Returns a permit, if there is something to start.
    fn permit(&self) -> Option<OwnedSemaphorePermit> {
        let now = Instant::now();
        let due = |outage: &Outage| outage.next_probe().is_some_and(|at| at <= now);
        let waiting = !self.ready.is_empty() || !self.found.is_empty() || self.outages.values().any(due);
        if waiting { Arc::clone(&self.shared.permits).try_acquire_owned().ok() } else { None }
    }

    /// Takes a message that is due as a probe, with the shard of the store that it probes.
    fn due_probe(&mut self) -> Option<(Shard, PlaceId)> {
        let now = Instant::now();
        let due = |outage: &Outage| outage.next_probe().is_some_and(|at| at <= now);
        let (shard, outage) = self.outages.iter_mut().find(|(_, outage)| due(outage))?;
        let place = outage.waiting.pop_front()?;
        self.shared.in_flight.hold_back_no_more();
        Some((*shard, place))
    }

    /// When the loop must wake even if nothing else happens.
    ///
    /// A probe that is already due waits for a permit, and the end of a task wakes the loop.
    fn next_wake(&self) -> Option<Instant> {
        let parked = self.parked.peek().map(|Reverse((at, _))| *at);
        let now = Instant::now();
        let probes = self.outages.values().filter_map(Outage::next_probe).filter(|at| *at > now);
        let breakers = self.held.next_probe(|route| self.shared.breaker(route)).filter(|at| *at > now);
        let opens = self.outages.values().filter_map(|outage| outage.opens_at(&self.shared.settings));
        parked.into_iter().chain(probes).chain(breakers).chain(opens).min()
    }

    fn wake(&mut self) {
        let now = Instant::now();
        while let Some(Reverse((at, place))) = self.parked.peek().copied()
            && at <= now
        {
            self.parked.pop();
            self.shared.in_flight.waits_no_more();
            self.ready.push_back(place);
        }
    }

    fn note(&mut self, done: Result<Done, JoinError>) {
        match done {
            Ok(Done::Attempted { place, bytes, asked, outcome }) => {
                if let Some(next) = self.tenants.leave(place) {
                    self.shared.in_flight.waits_no_more();
                    self.ready.push_front(next);
                }
                self.note_answers(place, asked, &outcome);
                self.note_attempt(place, bytes, asked, outcome);
            }
            Ok(Done::Answered { messages }) => {
                messages.into_iter().for_each(|bytes| self.shared.in_flight.leave(bytes));
            }
            Err(panic) => self.fail(ConsumerError::Bug(panic.to_string())),
        }
    }

    /// Ends an outage when that shard of the store has answered, not when a message ended that never asked it.
    fn note_answers(&mut self, place: PlaceId, asked: Option<Shard>, outcome: &Outcome) {
        match (asked, outcome) {
            (Some(shard), Outcome::NoAnswer { error, .. }) => self.no_answer(shard, place, error),
            (Some(shard), _) => {
                if let Some(outage) = self.outages.remove(&shard) {
                    // They come before what became ready in the meantime.
                    for place in outage.waiting.into_iter().rev() {
                        self.shared.in_flight.hold_back_no_more();
                        self.ready.push_front(place);
                    }
                    self.shared.in_flight.pause(false);
                    info!("the store answers again");
                    self.shared.observer.observe(Event::StorePaused { paused: false });
                } else if !self.outages.is_empty() {
                    self.shared.in_flight.pause(false);
                }
            }
            (None, _) => {
                let mut outages = self.outages.values_mut();
                if let Some(outage) = outages.find(|outage| outage.probing == Some(place)) {
                    outage.probing = None;
                }
            }
        }
    }

    fn note_attempt(&mut self, place: PlaceId, bytes: usize, asked: Option<Shard>, outcome: Outcome) {
        match outcome {
            Outcome::NoAnswer { mut item, .. } => {
                item.attempt = None;
                self.lanes.put_back(place, item);
                match asked.and_then(|shard| self.outages.get_mut(&shard)) {
                    Some(outage) => {
                        self.shared.in_flight.hold_back();
                        outage.waiting.push_front(place);
                    }
                    None => self.ready.push_front(place),
                }
            }
            Outcome::Again { mut item, after, cause } => {
                let until = Instant::now() + after;
                let before = item.wait.filter(|wait| wait.cause == cause);
                let since = before.map_or_else(Instant::now, |wait| wait.since);
                (item.attempt, item.wait) = (None, Some(Wait { cause, since, until }));
                self.lanes.put_back(place, item);
                self.parked.push(Reverse((until, place)));
                self.shared.in_flight.waits();
            }
            Outcome::Acked | Outcome::NotOurs => {
                self.lanes.leave(place, |ready| {
                    self.shared.in_flight.waits_no_more();
                    self.ready.push_back(ready);
                });
                self.shared.in_flight.leave(bytes);
            }
            Outcome::Stop(error) => self.fail(*error),
        }
    }

    /// Stops dispatching that shard's keys, and probes with one message at a time until the store answers.
    fn no_answer(&mut self, shard: Shard, place: PlaceId, reason: &StoreError) {
        let fresh = !self.outages.contains_key(&shard);
        let new = || Outage::new(Instant::now());
        let outage = self.outages.entry(shard).or_insert_with(new);
        outage.error = reason.to_string().into();
        outage.is_refusal = matches!(reason, StoreError::Refused { .. });
        outage.open &= !outage.is_refusal;
        if fresh || outage.probing == Some(place) {
            outage.probing = None;
            outage.probes += 1;
            let (now, wait) = (Instant::now(), PROBE_BACKOFF.wait(outage.probes, self.shared.random()));
            outage.probe_at = now + outage.probe_within(wait, now, &self.shared.settings);
        }
        if fresh {
            match reason {
                StoreError::Refused { .. } => error!(%reason, "nothing is dispatched until this is changed"),
                _ => warn!(%reason, "nothing is dispatched until the store answers"),
            }
            // While another shard answers, the messages of this one wait, and others are received.
            let open = self.outages.values().any(|outage| outage.open);
            self.shared.in_flight.pause(self.outages.len() >= self.shards.len() && !open);
            self.shared.observer.observe(Event::StorePaused { paused: true });
        }
    }

    /// Releases the messages that have waited for their store for as long as the consumer's patience.
    fn fail_open(&mut self) {
        let (now, settings) = (Instant::now(), &self.shared.settings);
        for outage in self.outages.values_mut() {
            if outage.opens_at(settings).is_some_and(|at| at <= now) {
                outage.open = true;
                error!(away_for = ?outage.since.elapsed(), error = &*outage.error, "messages run without their store until it answers");
                self.shared.in_flight.pause(false);
            }
            if outage.open {
                for place in outage.waiting.drain(..).rev() {
                    self.shared.in_flight.hold_back_no_more();
                    self.ready.push_front(place);
                }
            }
        }
    }

    /// Keeps the first failure and begins the stop; everything that has started may end.
    fn fail(&mut self, error: ConsumerError) {
        self.failed.get_or_insert(error);
        self.shared.stopping.cancel();
    }
}

/// The shard of the store that the message's attempt will ask.
///
/// A bad key needs no store, and neither does a key that the prefetch found completed.
fn shard_of(item: &Item) -> Option<Shard> {
    let identity = item.identity.as_ref().ok().filter(|_| item.found.is_none())?;
    Some(Shard { route: item.route.number, number: item.route.gate.shard(&identity.key) })
}

/// The key by which the handler's breaker counts the message; `None` if no handler will run for it.
pub(super) fn breaker_key(item: &Item) -> Option<LaneId> {
    let identity = item.identity.as_ref().ok().filter(|_| item.found.is_none())?;
    Some(lane("identity", &identity.key))
}

/// A lane's number; `kind` keeps lanes of different meaning apart.
fn lane(kind: &str, what: &impl Hash) -> LaneId {
    let mut hasher = DefaultHasher::new();
    kind.hash(&mut hasher);
    what.hash(&mut hasher);
    hasher.finish()
}
