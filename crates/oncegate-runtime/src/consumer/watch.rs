//! The records of a running consumer about itself for its [`Monitor`](super::Monitor): cheap for
//! each message, complete when the monitor asks.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use oncegate_core::key::StoreKey;
use parking_lot::{Mutex, MutexGuard};
use tokio::time::Instant;

use super::schedule::Shard;
use crate::gate::OpenGate;
use crate::health::{Messages, Rates, Stage, StoreOutage};
use crate::message::{Message, Origin};

mod handler_times;

use handler_times::HandlerTimes;

/// The most attempts that are named in a log line or an error.
const MOST_NAMED: usize = 16;
/// The weight of the last second in a rate.
const NEWEST: f64 = 0.2;

/// The records of one run of a consumer.
#[derive(Debug)]
pub(super) struct Watch {
    began: Instant,
    /// Both in milliseconds since `began`.
    taken_at: AtomicU64,
    delivered_at: AtomicU64,
    delivered: AtomicU64,
    ended: AtomicU64,
    /// The units that have started.
    started: AtomicU64,
    pub(super) handler_times: HandlerTimes,
    units: Mutex<HashMap<u64, Arc<UnitInProgress>>>,
    next_unit: AtomicU64,
    snapshot: Mutex<Snapshot>,
}

/// An attempt in progress.
#[derive(Clone, Debug)]
pub(super) struct Underway {
    pub(super) gate: Arc<OpenGate>,
    /// The number of its route.
    pub(super) route: usize,
    pub(super) origin: Origin,
    pub(super) received_at: Instant,
    pub(super) stage: Stage,
    pub(super) since: Instant,
    /// The earlier failures of the message.
    pub(super) failures: Option<Arc<PastFailures>>,
    /// The number of its unit, if one call is for all messages of that.
    pub(super) one_call: Option<u64>,
}

impl fmt::Display for Underway {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            gate,
            origin,
            stage,
            ..
        } = self;
        write!(f, "{origin} in `{}` {stage}", gate.scope())
    }
}

/// The failures of a message in this process.
#[derive(Debug)]
pub(super) struct PastFailures {
    /// The time of the first one.
    pub(super) since: Instant,
    /// The attempts that have failed: those that its record counts, or those of this process if
    /// they are more. Failures in an outage are not counted by a record.
    pub(super) times: u32,
    /// The reason of the last one.
    pub(super) reason: Box<str>,
    /// The key of its record.
    pub(super) key: Option<StoreKey>,
}

/// A partition or queue by name, taken from a message's [`Origin`].
pub(super) type PartitionName = (Arc<str>, i32);

/// The time for which an answer of a shard counts while another one is away. Servers of a cluster
/// fail one after the other, and when only messages of the first one wait, nothing asks the others
/// again.
const ANSWER_LIMIT: Duration = Duration::from_secs(60);

/// The engine's last count of everything that waits.
#[derive(Clone, Debug, Default)]
pub(super) struct Snapshot {
    /// Attempts in progress are not included.
    pub(super) messages: Messages,
    /// The shards that were asked of late, and when each was asked last.
    pub(super) asked: Vec<(Shard, Instant)>,
    /// The number of ready messages that wait for their batch.
    pub(super) gathering: usize,
    pub(super) outages: Vec<SeenOutage>,
    pub(super) partitions: BTreeMap<PartitionName, SeenPartition>,
    /// Parked for a cause that an operator should know.
    pub(super) waiting: Vec<Seen>,
    /// Messages that have failed, the most failures first.
    pub(super) failing: Vec<Seen>,
    /// Since when messages have been ready while permits were free.
    pub(super) ready_since: Option<Instant>,
    pub(super) rates: Rates,
    /// The number of messages that had been delivered, and that had ended, by then.
    pub(super) totals: (u64, u64),
    /// The number of units that had started by then.
    pub(super) started: u64,
}

impl Snapshot {
    /// Returns how many shards the store of this route has, as far as is known. A shard that was
    /// not asked since the first of these outages began, or not for [`ANSWER_LIMIT`], is not known
    /// to answer, and does not count.
    pub(super) fn shards_of(&self, route: usize, outages: &[StoreOutage], now: Instant) -> usize {
        let longest = outages.iter().map(|outage| outage.lasts).max();
        let known_for = longest.map(|longest| longest.min(ANSWER_LIMIT));
        let answering = self.asked.iter().filter(|(shard, asked_at)| {
            let is_away = outages.iter().any(|outage| outage.shard == shard.number);
            let was_asked = known_for.is_none_or(|limit| now.duration_since(*asked_at) <= limit);
            shard.route == route && !is_away && was_asked
        });
        outages.len() + answering.count()
    }
}

#[derive(Clone, Debug)]
pub(super) struct SeenOutage {
    pub(super) route: usize,
    pub(super) shard: u64,
    pub(super) since: Instant,
    pub(super) error: Arc<str>,
    pub(super) waiting: usize,
    pub(super) open: bool,
}

#[derive(Clone, Debug)]
pub(super) struct SeenPartition {
    pub(super) in_flight: usize,
    pub(super) first: Seen,
}

/// A message that is not finished.
#[derive(Clone, Debug)]
pub(super) struct Seen {
    pub(super) route: usize,
    pub(super) origin: Origin,
    pub(super) stage: Stage,
    pub(super) since: Instant,
    pub(super) received_at: Instant,
    /// The time of its next attempt, if that is known.
    pub(super) until: Option<Instant>,
    pub(super) key: Option<StoreKey>,
    pub(super) failures: Option<Arc<PastFailures>>,
}

impl Seen {
    /// The number of attempts that have failed.
    pub(super) fn times_failed(&self) -> u32 {
        self.failures.as_ref().map_or(0, |failures| failures.times)
    }

    /// Returns whether it is before `other` in their partition.
    pub(super) fn is_before(&self, other: &Self) -> bool {
        match (&self.origin, &other.origin) {
            (Origin::Kafka { offset, .. }, Origin::Kafka { offset: other, .. }) => offset < other,
            _ => self.received_at < other.received_at,
        }
    }
}

/// Adds a message to the summary of its partition.
pub(super) fn see(partitions: &mut BTreeMap<PartitionName, SeenPartition>, seen: Seen) {
    let (topic, number) = match &seen.origin {
        Origin::Kafka {
            topic, partition, ..
        } => (Arc::clone(topic), *partition),
        Origin::Queue { queue, .. } => (Arc::clone(queue), 0),
        Origin::Other(_) => return,
    };
    match partitions.entry((topic, number)) {
        std::collections::btree_map::Entry::Vacant(vacant) => {
            vacant.insert(SeenPartition {
                in_flight: 1,
                first: seen,
            });
        }
        std::collections::btree_map::Entry::Occupied(mut occupied) => {
            let partition = occupied.get_mut();
            partition.in_flight += 1;
            if seen.is_before(&partition.first) {
                partition.first = seen;
            }
        }
    }
}

impl Watch {
    pub(super) fn new() -> Self {
        Self {
            began: Instant::now(),
            taken_at: AtomicU64::new(0),
            delivered_at: AtomicU64::new(0),
            delivered: AtomicU64::new(0),
            ended: AtomicU64::new(0),
            started: AtomicU64::new(0),
            handler_times: HandlerTimes::default(),
            units: Mutex::default(),
            next_unit: AtomicU64::new(0),
            snapshot: Mutex::default(),
        }
    }

    fn millis(&self) -> u64 {
        u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    fn since(&self, millis: &AtomicU64) -> Duration {
        Duration::from_millis(self.millis().saturating_sub(millis.load(Relaxed)))
    }

    pub(super) fn up(&self) -> Duration {
        self.began.elapsed()
    }

    pub(super) fn delivered(&self, messages: usize) {
        self.delivered_at.store(self.millis(), Relaxed);
        self.delivered.fetch_add(messages as u64, Relaxed);
    }

    pub(super) fn delivered_ago(&self) -> Duration {
        self.since(&self.delivered_at)
    }

    pub(super) fn ended(&self) {
        self.ended.fetch_add(1, Relaxed);
    }

    pub(super) fn snapshot_age(&self) -> Duration {
        self.since(&self.taken_at)
    }

    /// Keeps the engine's count, and updates what spans several counts: rates and `ready_since`.
    pub(super) fn publish(&self, mut snapshot: Snapshot, free_permits: usize) {
        let since =
            Duration::from_millis(self.millis().saturating_sub(self.taken_at.load(Relaxed)));
        self.taken_at.store(self.millis(), Relaxed);
        snapshot.totals = (self.delivered.load(Relaxed), self.ended.load(Relaxed));
        let mut last = self.snapshot();
        snapshot.started = self.started.load(Relaxed);
        // What is ready beside free permits may wait for a thread, as long as something starts.
        let is_ready = snapshot.messages.ready > snapshot.gathering
            && free_permits > 0
            && snapshot.started == last.started;
        snapshot.ready_since = is_ready.then(|| last.ready_since.unwrap_or_else(Instant::now));
        snapshot.rates = last.rates;
        let seconds = since.as_secs_f64();
        if seconds > 0.0 {
            let delivered = snapshot.totals.0.saturating_sub(last.totals.0);
            let ended = snapshot.totals.1.saturating_sub(last.totals.1);
            snapshot.rates = Rates {
                delivered_per_second: rate(last.rates.delivered_per_second, delivered, seconds),
                ended_per_second: rate(last.rates.ended_per_second, ended, seconds),
            };
        }
        *last = snapshot;
    }

    pub(super) fn last_snapshot(&self) -> Snapshot {
        self.snapshot().clone()
    }

    /// Records a unit, until the [note](UnitNote::begin) of its last attempt is dropped.
    /// `is_one_call`: its messages are handled by one call, under one permit.
    pub(super) fn begin(
        self: &Arc<Self>,
        gate: &Arc<OpenGate>,
        route: usize,
        is_one_call: bool,
    ) -> UnitNote {
        self.started.fetch_add(1, Relaxed);
        let number = self.next_unit.fetch_add(1, Relaxed);
        let watch = Arc::clone(self);
        let gate = Arc::clone(gate);
        let unit = Arc::new(UnitInProgress {
            watch,
            number,
            gate,
            route,
            is_one_call,
            claimed_at: OnceLock::new(),
            attempts: Mutex::default(),
        });
        self.units().insert(number, Arc::clone(&unit));
        UnitNote {
            unit,
            began: Instant::now(),
        }
    }

    pub(super) fn underway(&self) -> Vec<Underway> {
        let units: Vec<Arc<UnitInProgress>> = self.units().values().cloned().collect();
        units.iter().flat_map(|unit| unit.underway()).collect()
    }

    /// The attempts in progress, by origin and scope, the longest first.
    pub(super) fn named(&self) -> Vec<String> {
        let mut underway = self.underway();
        underway.sort_by_key(|underway| underway.since);
        underway
            .iter()
            .take(MOST_NAMED)
            .map(ToString::to_string)
            .collect()
    }

    fn units(&self) -> MutexGuard<'_, HashMap<u64, Arc<UnitInProgress>>> {
        self.units.lock()
    }

    fn snapshot(&self) -> MutexGuard<'_, Snapshot> {
        self.snapshot.lock()
    }
}

/// Returns the rate after this many more events within these seconds.
fn rate(before: f64, events: u64, seconds: f64) -> f64 {
    #[expect(
        clippy::cast_precision_loss,
        reason = "a rate that is shown needs no 53 bits"
    )]
    let newest = events as f64 / seconds;
    before * (1.0 - NEWEST) + newest * NEWEST
}

/// The record of a unit, to which its attempts are added.
#[derive(Debug)]
pub(super) struct UnitNote {
    unit: Arc<UnitInProgress>,
    began: Instant,
}

/// A unit whose attempts are in progress.
#[derive(Debug)]
struct UnitInProgress {
    watch: Arc<Watch>,
    number: u64,
    gate: Arc<OpenGate>,
    /// The number of its route.
    route: usize,
    is_one_call: bool,
    /// The time at which its claims were answered: what waits since then waits for its handler's
    /// turn.
    claimed_at: OnceLock<Instant>,
    attempts: Mutex<Attempts>,
}

#[derive(Debug, Default)]
struct Attempts {
    /// `None` for one that is over.
    notes: Vec<Option<NotedAttempt>>,
    /// The number of attempts in progress.
    left: usize,
}

#[derive(Debug)]
struct NotedAttempt {
    message: Message,
    received_at: Instant,
    failures: Option<Arc<PastFailures>>,
    stage: Stage,
    since: Instant,
}

impl UnitNote {
    /// Records an attempt until the returned note is dropped.
    pub(super) fn begin(
        &self,
        message: &Message,
        received_at: Instant,
        failures: Option<&Arc<PastFailures>>,
    ) -> AttemptNote {
        let mut attempts = self.unit.attempts();
        let note = NotedAttempt {
            message: message.clone(),
            received_at,
            failures: failures.cloned(),
            stage: Stage::Claiming,
            since: self.began,
        };
        attempts.notes.push(Some(note));
        attempts.left += 1;
        AttemptNote {
            unit: Arc::clone(&self.unit),
            position: attempts.notes.len() - 1,
        }
    }
}

impl UnitInProgress {
    fn underway(&self) -> Vec<Underway> {
        let attempts = self.attempts();
        let notes = attempts.notes.iter().flatten();
        let underway = notes.map(|note| {
            let (stage, since) = match (note.stage, self.claimed_at.get()) {
                (Stage::Claiming, Some(claimed_at)) => (Stage::Claimed, *claimed_at),
                (stage, _) => (stage, note.since),
            };
            Underway {
                gate: Arc::clone(&self.gate),
                route: self.route,
                origin: note.message.origin().clone(),
                received_at: note.received_at,
                stage,
                since,
                failures: note.failures.clone(),
                one_call: self.is_one_call.then_some(self.number),
            }
        });
        underway.collect()
    }

    fn attempts(&self) -> MutexGuard<'_, Attempts> {
        self.attempts.lock()
    }
}

/// The record of an attempt in progress; the attempt is over when this is dropped.
#[derive(Debug)]
pub(super) struct AttemptNote {
    unit: Arc<UnitInProgress>,
    position: usize,
}

impl AttemptNote {
    /// Notes that the claims of its unit are answered.
    pub(super) fn claimed(&self) {
        self.unit.claimed_at.get_or_init(Instant::now);
    }

    /// Notes that the next stage of the attempt has begun.
    pub(super) fn enter(&self, stage: Stage, since: Instant) {
        if let Some(Some(note)) = self.unit.attempts().notes.get_mut(self.position) {
            note.stage = stage;
            note.since = since;
        }
    }
}

impl Drop for AttemptNote {
    fn drop(&mut self) {
        let left = {
            let mut attempts = self.unit.attempts();
            attempts.left -= attempts
                .notes
                .get_mut(self.position)
                .and_then(Option::take)
                .iter()
                .len();
            attempts.left
        };
        if left == 0 {
            self.unit.watch.units().remove(&self.unit.number);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outage(shard: u64, seconds: u64) -> StoreOutage {
        StoreOutage {
            halted: false,
            shard,
            lasts: Duration::from_secs(seconds),
            error: String::new(),
            waiting: 0,
            open: false,
        }
    }

    // invariant: outage-without-end
    #[test]
    fn a_shard_asked_before_the_outage_is_not_known_to_answer() {
        let now = Instant::now() + Duration::from_secs(100);
        let asked = [(0, 1, 40), (0, 2, 20), (0, 3, 60), (0, 5, 120), (1, 4, 0)];
        let asked = asked.map(|(route, number, ago)| {
            let shard = Shard { route, number };
            (shard, now - Duration::from_secs(ago))
        });
        let snapshot = Snapshot {
            asked: asked.to_vec(),
            ..Snapshot::default()
        };
        assert_eq!(snapshot.shards_of(0, &[], now), 4);
        assert_eq!(
            snapshot.shards_of(0, &[outage(1, 10)], now),
            1,
            "nothing was asked since"
        );
        assert_eq!(
            snapshot.shards_of(0, &[outage(0, 0)], now),
            1,
            "the scope is halted"
        );
        assert_eq!(
            snapshot.shards_of(0, &[outage(1, 20)], now),
            2,
            "the second one was asked since"
        );
        assert_eq!(
            snapshot.shards_of(0, &[outage(1, 10), outage(2, 20)], now),
            2
        );
        assert_eq!(
            snapshot.shards_of(0, &[outage(1, 10), outage(2, 70)], now),
            3,
            "the third one was asked since"
        );
        assert_eq!(
            snapshot.shards_of(0, &[outage(2, 200)], now),
            3,
            "the fifth one answered since, but too long ago"
        );
    }
}
