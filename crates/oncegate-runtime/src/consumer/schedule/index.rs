//! The messages by their state: the queues and counts of the engine.
//!
//! A message is entered and removed by the same function, [`Index::update`], so no queue and no
//! count can miss one of the two.

use std::collections::BTreeMap;
use std::time::Instant;

use super::outages::Shard;
use super::state::MessageState;
use crate::consumer::lanes::PlaceId;

/// The part of a message that the index knows beside its state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Fixed {
    /// Grows with each message. The oldest messages are first in every queue.
    pub(super) arrival: u64,
    pub(super) bytes: usize,
    /// The number of its route.
    pub(super) route: usize,
    /// The tenant, if tenants are limited.
    pub(super) tenant: Option<u64>,
    /// `true` if it starts together with others of its route. This changes only while it runs.
    pub(super) in_batch: bool,
}

/// Messages in the order of their arrival.
type Queue = BTreeMap<u64, PlaceId>;

/// The messages by their state.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Index {
    pub(super) counts: MessageCounts,
    /// The messages that start alone.
    pub(super) ready: Queue,
    /// The messages that start in batches, by the number of their route.
    pub(super) gathering: BTreeMap<usize, GatherQueue>,
    pub(super) found: Queue,
    pub(super) delayed: BTreeMap<(Instant, u64), PlaceId>,
    pub(super) tenants: BTreeMap<u64, TenantQueue>,
    pub(super) shards: BTreeMap<Shard, ShardQueue>,
    /// The messages that ask no store, and wait until a store answers.
    pub(super) every_store_away: Queue,
    /// By the number of their route.
    pub(super) paused: BTreeMap<usize, Queue>,
}

/// The messages that are ready to start in the next batches of a route.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct GatherQueue {
    pub(super) ready: Queue,
    pub(super) bytes: usize,
}

/// The messages of a tenant that may run, do run, or wait until others have run.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct TenantQueue {
    pub(super) running: usize,
    pub(super) ready: Queue,
    pub(super) waiting: Queue,
}

/// The messages that wait for a shard, and those that find out whether it answers.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct ShardQueue {
    pub(super) waiting: Queue,
    pub(super) probes: usize,
}

/// The number of messages by state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::consumer) struct MessageCounts {
    pub(in crate::consumer) messages: usize,
    pub(in crate::consumer) bytes: usize,
    /// The messages that could not use a permit now.
    pub(in crate::consumer) waiting: usize,
    /// The messages whose shard of the store is away.
    pub(in crate::consumer) held_back: usize,
    /// The messages that a task has.
    pub(in crate::consumer) running: usize,
}

/// The direction of a change: a message enters its state, or leaves it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    In,
    Out,
}

impl Way {
    fn add(self, sum: &mut usize, amount: usize) {
        *sum = match self {
            Self::In => *sum + amount,
            Self::Out => sum.saturating_sub(amount),
        };
    }

    fn queue<K: Ord>(self, queue: &mut BTreeMap<K, PlaceId>, key: K, place: PlaceId) {
        match self {
            Self::In => _ = queue.insert(key, place),
            Self::Out => _ = queue.remove(&key),
        }
    }
}

impl TenantQueue {
    /// The oldest waiting message, if fewer than `limit` run or are ready before it.
    pub(super) fn next(&self, limit: usize) -> Option<PlaceId> {
        let (arrival, place) = self.waiting.first_key_value()?;
        let before = self.ready.range(..arrival).take(limit).count();
        (self.running + before < limit).then_some(*place)
    }
}

impl Index {
    /// Moves a message from one state to another. A message that arrives comes from `Gone`, and one
    /// that leaves goes there.
    pub(super) fn update(
        &mut self,
        place: PlaceId,
        message: Fixed,
        from: MessageState,
        to: MessageState,
    ) {
        self.note(place, message, from, Way::Out);
        self.note(place, message, to, Way::In);
    }

    fn note(&mut self, place: PlaceId, message: Fixed, state: MessageState, way: Way) {
        let Fixed {
            arrival,
            bytes,
            route,
            tenant,
            in_batch,
        } = message;
        if state == MessageState::Gone {
            return;
        }
        way.add(&mut self.counts.messages, 1);
        way.add(&mut self.counts.bytes, bytes);
        match state {
            MessageState::Ready if in_batch => change(&mut self.gathering, route, |of_route| {
                way.queue(&mut of_route.ready, arrival, place);
                way.add(&mut of_route.bytes, bytes);
            }),
            MessageState::Ready => way.queue(&mut self.ready, arrival, place),
            MessageState::Found => way.queue(&mut self.found, arrival, place),
            MessageState::Behind { .. } | MessageState::TenantFull => {
                way.add(&mut self.counts.waiting, 1);
            }
            MessageState::Delayed(delay) => {
                way.add(&mut self.counts.waiting, 1);
                way.queue(&mut self.delayed, (delay.until, arrival), place);
            }
            MessageState::StoreAway { shard } => {
                way.add(&mut self.counts.held_back, 1);
                change(&mut self.shards, shard, |of_shard| {
                    way.queue(&mut of_shard.waiting, arrival, place);
                });
            }
            MessageState::EveryStoreAway => {
                way.add(&mut self.counts.held_back, 1);
                way.queue(&mut self.every_store_away, arrival, place);
            }
            MessageState::HandlerPaused => {
                change(&mut self.paused, route, |of_route| {
                    way.queue(of_route, arrival, place);
                });
            }
            MessageState::Running {
                asks: Some(shard),
                is_probe: true,
            } => {
                way.add(&mut self.counts.running, 1);
                change(&mut self.shards, shard, |of_shard| {
                    way.add(&mut of_shard.probes, 1);
                });
            }
            MessageState::Running { .. } | MessageState::Answering => {
                way.add(&mut self.counts.running, 1);
            }
            MessageState::Gone => {}
        }
        let Some(tenant) = tenant else { return };
        change(&mut self.tenants, tenant, |of_tenant| match state {
            MessageState::Ready => way.queue(&mut of_tenant.ready, arrival, place),
            MessageState::Running { .. } => way.add(&mut of_tenant.running, 1),
            MessageState::TenantFull => way.queue(&mut of_tenant.waiting, arrival, place),
            _ => {}
        });
    }
}

/// Changes the value of a key. A key whose value is empty is not kept.
fn change<K: Ord + Copy, V: Default + PartialEq>(
    map: &mut BTreeMap<K, V>,
    key: K,
    how: impl FnOnce(&mut V),
) {
    let value = map.entry(key).or_default();
    how(value);
    if *value == V::default() {
        map.remove(&key);
    }
}
