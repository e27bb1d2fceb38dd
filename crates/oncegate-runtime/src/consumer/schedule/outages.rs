//! The shards of the stores that do not answer, and the times at which one message asks them again.
//! Pure: time and randomness are parameters.
//!
//! # Not obvious
//!
//! Implementation notes: what a store cannot answer for may be one key alone, such as one of a slot
//! that is moved halfway, or a record on a damaged page.
//!
//! - A probe that fails is followed by one of another message: the oldest one would otherwise hold
//!   up all the others for as long as its own key has no answer.
//! - A message whose shard has answered another one since its last try waits by itself when it has
//!   no answer again ([`Unanswered::waits_alone`]). The shard is not away.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use oncegate_core::store::StoreError;

use crate::backoff::Backoff;

/// The delays between probes of a store that does not answer.
const PROBE_BACKOFF: Backoff = Backoff::new(Duration::from_millis(100), Duration::from_secs(2));

/// The shortest delay before a probe that is sent early, because messages would otherwise run
/// without the store.
const SHORTEST_PROBE_WAIT: Duration = Duration::from_millis(100);

/// A shard that was not asked for this long may have left its store: it no longer counts as one
/// that answers.
const FORGOTTEN_AFTER: Duration = Duration::from_secs(600);

/// A shard of a route's store. Each route may have a store of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::consumer) struct Shard {
    pub(in crate::consumer) route: usize,
    pub(in crate::consumer) number: u64,
}

/// The answer to a message that wants to ask its shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StoreAccess {
    /// The shard answers, as far as is known.
    Open,
    /// The shard does not answer, and a message is due that asks it again.
    ProbeDue,
    /// The shard does not answer.
    Away,
    /// The shard has not answered for so long that messages run without it.
    Bypassed,
}

/// A shard that does not answer. Of its keys, only one probe at a time is dispatched.
#[derive(Clone, Debug)]
pub(in crate::consumer) struct Outage {
    pub(in crate::consumer) since: Instant,
    /// The store's last error.
    pub(in crate::consumer) error: Arc<str>,
    /// Messages run without the store.
    pub(in crate::consumer) is_bypassed: bool,
    probe_at: Instant,
    probes: u32,
    /// The arrival of the message that asked last.
    asked_last: u64,
    /// The store has answered that it refuses until something is changed: it is not away.
    is_refusal: bool,
}

/// A message that its shard has not answered.
#[derive(Clone, Copy, Debug)]
pub(super) struct Unanswered {
    /// The answers of the shard up to then.
    answers: u64,
    /// The number of its tries in a row between which the shard has answered others.
    pub(super) alone: u32,
    /// The delay before it asks again by itself; `None` if it waits for the end of an outage.
    pub(super) waits_alone: Option<Duration>,
}

/// A shard that was asked of late.
#[derive(Clone, Copy, Debug)]
struct AskedShard {
    at: Instant,
    /// The number of its answers to messages that asked it while it was not away, and to probes.
    answers: u64,
}

/// Every shard that was asked of late, and the outages.
#[derive(Debug)]
pub(super) struct Outages {
    /// After this time without an answer messages run without the store; `None`: never.
    patience: Option<Duration>,
    asked: BTreeMap<Shard, AskedShard>,
    away: BTreeMap<Shard, Outage>,
}

impl Outages {
    pub(super) fn new(patience: Option<Duration>) -> Self {
        Self {
            patience,
            asked: BTreeMap::new(),
            away: BTreeMap::new(),
        }
    }

    /// Returns whether a message of this shard may ask it. `is_probed`: another one is asking it
    /// now.
    pub(super) fn access(&mut self, shard: Shard, now: Instant, is_probed: bool) -> StoreAccess {
        self.asked
            .entry(shard)
            .and_modify(|asked| asked.at = now)
            .or_insert(AskedShard {
                at: now,
                answers: 0,
            });
        self.asked
            .retain(|_, asked| now.saturating_duration_since(asked.at) < FORGOTTEN_AFTER);
        match self.away.get(&shard) {
            None => StoreAccess::Open,
            Some(outage) if !is_probed && now >= outage.probe_at => StoreAccess::ProbeDue,
            Some(outage) if outage.is_bypassed => StoreAccess::Bypassed,
            Some(_) => StoreAccess::Away,
        }
    }

    /// Returns what a message is that its shard has not answered now. `before` is what it was since
    /// an earlier try.
    pub(super) fn unanswered(
        &self,
        shard: Shard,
        before: Option<Unanswered>,
        fraction: f64,
    ) -> Unanswered {
        let answers = self.asked.get(&shard).map_or(0, |asked| asked.answers);
        let others_are_answered = before.is_some_and(|before| before.answers < answers);
        let alone = match before {
            Some(before) if others_are_answered => before.alone.saturating_add(1),
            _ => 0,
        };
        let is_alone = alone > 0 && !self.away.contains_key(&shard);
        Unanswered {
            answers,
            alone,
            waits_alone: is_alone.then(|| PROBE_BACKOFF.wait(alone, fraction)),
        }
    }

    /// Notes that the shard gave no answer to the message of this arrival. Returns whether its
    /// outage begins with this.
    pub(super) fn no_answer(
        &mut self,
        (shard, arrival): (Shard, u64),
        (error, was_probe): (&StoreError, bool),
        now: Instant,
        fraction: f64,
    ) -> bool {
        let is_new = !self.away.contains_key(&shard);
        let outage = self.away.entry(shard).or_insert_with(|| Outage {
            since: now,
            error: Arc::default(),
            is_bypassed: false,
            probe_at: now,
            probes: 0,
            asked_last: arrival,
            is_refusal: false,
        });
        outage.error = error.to_string().into();
        outage.is_refusal = matches!(error, StoreError::Refused { .. });
        outage.is_bypassed &= !outage.is_refusal;
        if is_new || was_probe {
            outage.asked_last = arrival;
            outage.probes = outage.probes.saturating_add(1);
            let wait = PROBE_BACKOFF.wait(outage.probes, fraction);
            outage.probe_at = now + outage.probe_within(wait, now, self.patience);
        }
        is_new
    }

    /// Lets the next message ask the shard, if it is away: it may be back.
    pub(super) fn probe_at_once(&mut self, shard: Shard, now: Instant) {
        if let Some(outage) = self.away.get_mut(&shard) {
            outage.probe_at = outage.probe_at.min(now);
        }
    }

    /// Notes that the shard answered a probe, or another message while it was not away. Returns
    /// whether that ends an outage.
    pub(super) fn answered(&mut self, shard: Shard) -> bool {
        if let Some(asked) = self.asked.get_mut(&shard) {
            asked.answers += 1;
        }
        self.away.remove(&shard).is_some()
    }

    pub(super) fn is_away(&self, shard: Shard) -> bool {
        self.away.contains_key(&shard)
    }

    /// Ends each outage for which no message waits, unless messages run without that shard: nothing
    /// would ask it again. The next message asks, and the gate's own checks notice a store that is
    /// away meanwhile.
    pub(super) fn forget_without_messages(&mut self, waits: impl Fn(Shard) -> bool) {
        self.away
            .retain(|shard, outage| outage.is_bypassed || waits(*shard));
    }

    /// Lets messages run without each shard that has been away for longer than the patience.
    /// Returns the outages for which that begins now.
    pub(super) fn bypass_overdue(&mut self, now: Instant) -> Vec<Outage> {
        let mut begun = Vec::new();
        for outage in self.away.values_mut() {
            if outage.bypass_at(self.patience).is_some_and(|at| at <= now) {
                outage.is_bypassed = true;
                begun.push(outage.clone());
            }
        }
        begun
    }

    /// Returns whether every shard that was asked is away, and messages wait for them.
    pub(super) fn is_everything_away(&self) -> bool {
        !self.away.is_empty()
            && self.away.len() >= self.asked.len()
            && !self.away.values().any(|outage| outage.is_bypassed)
    }

    /// Returns the next time at which messages begin to run without a shard.
    pub(super) fn next_bypass(&self) -> Option<Instant> {
        self.away
            .values()
            .filter_map(|outage| outage.bypass_at(self.patience))
            .min()
    }

    /// Returns when the shard may be probed, if it is away.
    pub(super) fn probe_at(&self, shard: Shard) -> Option<Instant> {
        self.away.get(&shard).map(|outage| outage.probe_at)
    }

    /// Returns the arrival of the message that asked the shard last, if it is away.
    pub(super) fn asked_last(&self, shard: Shard) -> Option<u64> {
        self.away.get(&shard).map(|outage| outage.asked_last)
    }

    pub(super) fn away(&self) -> impl Iterator<Item = (Shard, &Outage)> {
        self.away.iter().map(|(shard, outage)| (*shard, outage))
    }

    /// The shards that were asked of late, and when each was asked last.
    pub(super) fn asked(&self) -> impl Iterator<Item = (Shard, Instant)> {
        self.asked.iter().map(|(shard, asked)| (*shard, asked.at))
    }
}

impl Outage {
    /// Returns when messages begin to run without the store; `None` if they already do or never
    /// will.
    fn bypass_at(&self, patience: Option<Duration>) -> Option<Instant> {
        patience
            .filter(|_| !self.is_bypassed && !self.is_refusal)
            .map(|patience| self.since + patience)
    }

    /// The delay before the next probe, short enough to ask the store again before messages run
    /// without it.
    fn probe_within(&self, wait: Duration, now: Instant, patience: Option<Duration>) -> Duration {
        let left = self
            .bypass_at(patience)
            .and_then(|at| at.checked_duration_since(now));
        left.map_or(wait, |left| wait.min((left / 2).max(SHORTEST_PROBE_WAIT)))
    }
}
