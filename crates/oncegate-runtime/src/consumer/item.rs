//! A message between the source and the ack, with what the consumer knows of it.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use bytes::Bytes;
use oncegate_core::key::KeyError;
use tokio::sync::mpsc;
use tokio::time::Instant;

use super::breaker::{FailureCount, RunResult};
use super::lanes::{LaneId, PlaceId};
use super::pace::ClaimTurn;
use super::progress::Past;
use super::schedule::{Arrival, Shard};
use super::session::SessionEntry;
use super::settings::Ordering;
use super::shared::Route;
use super::watch::AttemptNote;
use crate::failure::Failure;
use crate::gate::{Identity, OpenClaim};
use crate::health::Stage;
use crate::message::Origin;
use crate::observe::RunOutcome;
use crate::source::Delivery;

/// A message in flight, with what is known of it.
pub(super) struct Item {
    pub(super) delivery: Delivery,
    pub(super) route: Arc<Route>,
    pub(super) identity: Result<Identity, KeyError>,
    /// The lane of its key; `None` without a key.
    pub(super) key_lane: Option<LaneId>,
    /// Equal for messages of one tenant, if the tenant is part of the key.
    pub(super) tenant: Option<u64>,
    /// A claim whose answer was lost: the next attempt must repeat it. It is released with the
    /// message.
    pub(super) claim: Option<OpenClaim>,
    /// The size of the message, as counted against the limit on bytes.
    pub(super) bytes: usize,
    /// The probe that its attempt is: it finds out whether its shard of the store, which was away,
    /// answers again.
    pub(super) probe: Option<Probe>,
    /// `true` if it runs without its store, which has been away for longer than the patience.
    pub(super) without_store: bool,
    /// The stored result, when the prefetch has found one.
    pub(super) found: Option<Bytes>,
    pub(super) received_at: Instant,
    /// The traces of its earlier attempts in this process.
    pub(super) past: Past,
    /// The entry in the lists of what was received, if its handler is transactional.
    pub(super) entry: Option<SessionEntry>,
    /// The monitor's note of its attempt, while one is in progress.
    pub(super) attempt: Option<AttemptNote>,
    /// The key by which the breaker of its handler has admitted its attempt, while one is in
    /// progress.
    pub(super) admitted: Option<u64>,
    /// `true` once its ack handle has begun an attempt.
    pub(super) is_started: bool,
    /// The turn of its unit, until its handler begins.
    pub(super) turn: Option<ClaimTurn>,
}

impl Drop for Item {
    fn drop(&mut self) {
        self.end_attempt();
    }
}

/// Tells the engine that a shard answers again as soon as the attempt that asks it knows. The
/// attempt's handler may run for a long time after that.
#[derive(Clone, Debug)]
pub(super) struct Probe {
    pub(super) answered: mpsc::UnboundedSender<(PlaceId, Shard)>,
    pub(super) place: PlaceId,
    pub(super) shard: Shard,
}

impl Probe {
    pub(super) fn answered(&self) {
        // The engine receives until every attempt has ended.
        _ = self.answered.send((self.place, self.shard));
    }
}

impl Item {
    /// Begins an attempt. `false` when the delivery is no longer this consumer's.
    pub(super) fn start(&mut self) -> bool {
        self.is_started = self.delivery.ack_handle.start();
        self.is_started
    }

    /// The message for its next attempt: this one is over.
    pub(super) fn given_back(mut self: Box<Self>) -> Box<Self> {
        self.end_attempt();
        self
    }

    /// Tells its source and the breaker of its handler that the attempt is over, whatever its
    /// outcome and whether or not the handler has run.
    fn end_attempt(&mut self) {
        if std::mem::take(&mut self.is_started) {
            self.delivery.ack_handle.stop();
        }
        if let Some(key) = self.admitted.take() {
            self.route.breaker.over(&self.route.gate, key);
        }
        self.turn = None;
        self.attempt = None;
        self.probe = None;
    }

    /// Notes that the next stage of the attempt begins.
    pub(super) fn enter(&self, stage: Stage, since: Instant) {
        if let Some(attempt) = &self.attempt {
            attempt.enter(stage, since);
        }
    }

    /// Notes that the attempt of this number has failed.
    pub(super) fn note_failure(&mut self, attempt: u32, reason: String) {
        let key = self.identity.as_ref().ok().map(|identity| &identity.key);
        self.past.failed(Instant::now(), attempt, reason, key);
    }

    /// Reports the run to the breaker, and returns whether it counts if it failed. A run cut short
    /// by an outage or a stop is no evidence about the handler, and costs no attempt.
    pub(super) fn tell_breaker(
        &self,
        was_cut_short: bool,
        outcome: RunOutcome,
        failure: Option<&Failure>,
    ) -> FailureCount {
        let result = match outcome {
            RunOutcome::Succeeded => RunResult::Success,
            RunOutcome::GaveUp | RunOutcome::Later => RunResult::Answer,
            _ if was_cut_short => return FailureCount::Uncounted,
            _ => RunResult::Failure,
        };
        let Some(key) = self.breaker_key() else {
            return FailureCount::Counted;
        };
        self.route
            .breaker
            .ran(&self.route.gate, key, result, failure)
    }

    /// Returns what the schedule must know of it.
    pub(super) fn arrival(&self, ordering: Ordering) -> Arrival {
        Arrival {
            lanes: self.lanes(ordering),
            bytes: self.bytes,
            route: self.route.number,
            tenant: self.tenant,
            is_completed: self.found.is_some(),
        }
    }

    /// The lane of its order, and the lane of its idempotency key: two deliveries of one key run
    /// one after the other.
    fn lanes(&self, ordering: Ordering) -> [Option<LaneId>; 2] {
        let message = &self.delivery.message;
        // In a queue, order is kept by the group, which is the message's key, not by the queue.
        let ordering = match (ordering, message.origin()) {
            (Ordering::Partition, Origin::Queue { .. }) => Ordering::Key,
            (ordering, _) => ordering,
        };
        let order = match (ordering, message.key()) {
            // A source that was asked for an order keeps it.
            _ if let Some(number) = self.delivery.ack_handle.order() => {
                Some(lane("source", &number))
            }
            (Ordering::Unordered, _) => None,
            (Ordering::Partition, _) => Some(lane("partition", &message.origin().partition())),
            (Ordering::Key, Some(key)) => Some(lane("key", &(message.origin().partition(), key))),
            (Ordering::Key, None) => None,
        };
        [order, self.key_lane]
    }

    /// The shard of the store that its attempt will ask.
    ///
    /// A bad key needs no store, and neither does a key that the prefetch found completed.
    pub(super) fn shard(&self) -> Option<Shard> {
        let identity = self.unanswered()?;
        Some(Shard {
            route: self.route.number,
            number: self.route.gate.shard(&identity.key),
        })
    }

    /// The key by which the handler's breaker counts it; `None` if no handler will run for it.
    pub(super) fn breaker_key(&self) -> Option<u64> {
        self.key_lane.filter(|_| self.found.is_none())
    }

    /// Returns its key, unless the prefetch has found the key's result.
    fn unanswered(&self) -> Option<&Identity> {
        self.identity.as_ref().ok().filter(|_| self.found.is_none())
    }
}

/// The lane of an idempotency key.
pub(super) fn key_lane(identity: &Identity) -> LaneId {
    lane("identity", &identity.key)
}

/// A lane's number; `kind` keeps lanes of different meaning apart.
fn lane(kind: &str, what: &impl Hash) -> LaneId {
    let mut hasher = DefaultHasher::new();
    kind.hash(&mut hasher);
    what.hash(&mut hasher);
    hasher.finish()
}

impl std::fmt::Debug for Item {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.delivery.message.fmt(f)
    }
}
