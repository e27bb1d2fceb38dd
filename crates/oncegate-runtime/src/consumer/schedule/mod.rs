//! The decision which message starts next: the table of all messages in the engine, each in one
//! [`MessageState`].
//!
//! The state changes only in `Schedule::apply`, which asks the pure function `state::next` and
//! updates the [`Index`] of queues and counts. The schedule is deterministic: it has no clock, no
//! randomness, no I/O and no runtime. Time, random numbers and what the circuit breakers admit are
//! parameters.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use super::lanes::{LaneId, Lanes, PlaceId};
use crate::backoff::LONGEST_TIME;
use crate::batch::BatchLimits;
use crate::health::WaitCause;

mod answers;
mod gathering;
mod index;
mod outages;
mod state;
#[cfg(test)]
mod tests;
mod turn;

pub(super) use index::MessageCounts;
pub(super) use outages::{Outage, Shard};
pub(super) use state::{Delay, MessageState};

use gathering::Gathering;
use index::{Fixed, Index};
use outages::{Outages, StoreAccess, Unanswered};
use state::{Action, Facts, MessageEvent, next};

/// Everything that waits or runs. `T` is the content of a message; a running message's content is
/// with its task.
#[derive(Debug)]
pub(super) struct Schedule<T> {
    table: Lanes<Scheduled<T>>,
    index: Index,
    outages: Outages,
    gathering: Gathering,
    /// The most messages of a tenant that run at a time.
    tenant_limit: Option<usize>,
    arrivals: u64,
    /// See [`note_doubt`](Self::note_doubt).
    spares_retries: bool,
}

/// A message in the table.
#[derive(Debug)]
struct Scheduled<T> {
    state: MessageState,
    fixed: Fixed,
    /// The last delay, to which a further one for the same cause is added.
    last_delay: Option<Delay>,
    /// The store has not answered its last attempt.
    unanswered: Option<Unanswered>,
    content: Option<T>,
}

/// The part of an arriving message that the schedule must know.
#[derive(Clone, Copy, Debug)]
pub(super) struct Arrival {
    /// The lane of its order and the lane of its idempotency key.
    pub(super) lanes: [Option<LaneId>; 2],
    pub(super) bytes: usize,
    /// The number of its route.
    pub(super) route: usize,
    pub(super) tenant: Option<u64>,
    /// The prefetch has found its record completed.
    pub(super) is_completed: bool,
}

/// A message that starts now.
#[derive(Debug)]
pub(super) struct Starting<T> {
    pub(super) place: PlaceId,
    pub(super) content: T,
    /// The shard of the store that the attempt asks.
    pub(super) asks: Option<Shard>,
    /// The attempt finds out whether that shard, which was away, answers again.
    pub(super) is_probe: bool,
    /// The attempt must not ask its store, which is away.
    pub(super) without_store: bool,
}

/// The messages that start with the next permit.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum NextStart {
    One(PlaceId),
    /// Messages of one route, in the order of their arrival.
    Batch(Vec<PlaceId>),
}

/// The end of an attempt, as far as the schedule is concerned.
#[derive(Debug)]
pub(super) enum AttemptEnd<T> {
    /// The message was acknowledged, or belongs to another consumer.
    Finished,
    /// The message wants another attempt.
    TryAgain {
        content: T,
        after: Duration,
        cause: WaitCause,
    },
    /// The store did not answer.
    NoAnswer { content: T },
}

impl<T> Schedule<T> {
    /// After `patience` messages run without a store that does not answer.
    pub(super) fn new(tenant_limit: Option<u32>, patience: Option<Duration>) -> Self {
        Self {
            table: Lanes::new(),
            index: Index::default(),
            outages: Outages::new(patience),
            gathering: Gathering::default(),
            tenant_limit: tenant_limit.map(|limit| limit as usize),
            arrivals: 0,
            spares_retries: false,
        }
    }

    /// The same schedule, in which the messages of these routes, by their numbers, start in
    /// batches.
    pub(super) fn with_batches(mut self, limits: BTreeMap<usize, BatchLimits>) -> Self {
        self.gathering = Gathering::new(limits);
        self
    }

    /// Takes in a message. One that is known to be completed needs no order, unless another one is
    /// before it.
    pub(super) fn arrive(&mut self, content: T, arrival: Arrival) {
        let ahead = self.table.occupied(arrival.lanes);
        let (state, lanes) = match (ahead, arrival.is_completed) {
            (0, true) => (MessageState::Found, [None; 2]),
            (0, false) => (MessageState::Ready, arrival.lanes),
            (lanes, _) => (MessageState::Behind { lanes }, arrival.lanes),
        };
        let fixed = Fixed {
            arrival: self.arrivals,
            bytes: arrival.bytes,
            route: arrival.route,
            tenant: arrival.tenant.filter(|_| self.tenant_limit.is_some()),
            in_batch: self.gathering.limits(arrival.route).is_some(),
        };
        self.arrivals += 1;
        let scheduled = Scheduled {
            state: MessageState::Gone,
            fixed,
            last_delay: None,
            unanswered: None,
            content: Some(content),
        };
        let place = self.table.join(scheduled, lanes);
        self.set(place, state);
    }

    /// The content of a message that does not run.
    pub(super) fn content(&self, place: PlaceId) -> Option<&T> {
        self.table.get(place)?.content.as_ref()
    }

    /// Every message that neither runs nor is answered, with its place and its state.
    pub(super) fn waiting(&self) -> impl Iterator<Item = (PlaceId, &T, MessageState)> {
        let all = self.table.iter();
        all.filter_map(|(place, scheduled)| {
            Some((place, scheduled.content.as_ref()?, scheduled.state))
        })
    }

    /// Returns the counts for the limits on messages in flight.
    pub(super) fn counts(&self) -> MessageCounts {
        self.index.counts
    }

    pub(super) fn is_empty(&self) -> bool {
        self.index.counts.messages == 0
    }

    /// Returns whether every shard that was asked is away, and messages wait for them.
    pub(super) fn is_every_store_away(&self) -> bool {
        self.outages.is_everything_away()
    }

    /// Returns whether no store answers, and messages wait for one or find out whether it does.
    /// What asks no store waits with them: failures that need no store would otherwise follow each
    /// other without the successes between them.
    fn is_every_store_awaited(&self) -> bool {
        self.is_every_store_away() && !self.index.shards.is_empty()
    }

    /// Removes a message that waits and belongs to another consumer now.
    pub(super) fn revoke(&mut self, place: PlaceId) {
        self.apply(place, MessageEvent::Revoked);
    }

    /// The outages, each with the number of messages that wait for its end.
    pub(super) fn outages(&self) -> impl Iterator<Item = (Shard, &Outage, usize)> {
        self.outages.away().map(|(shard, outage)| {
            let waiting = self
                .index
                .shards
                .get(&shard)
                .map_or(0, |queue| queue.waiting.len() + queue.probes);
            (shard, outage, waiting)
        })
    }

    /// The shards that were asked of late, and when each was asked last.
    pub(super) fn asked(&self) -> impl Iterator<Item = (Shard, Instant)> {
        self.outages.asked()
    }

    /// Makes the messages ready whose delay is over, and those that no longer wait for the end of
    /// every outage.
    pub(super) fn advance(&mut self, now: Instant) {
        if !self.index.every_store_away.is_empty() && !self.is_every_store_awaited() {
            let places: Vec<PlaceId> = self.index.every_store_away.values().copied().collect();
            places
                .into_iter()
                .for_each(|place| self.apply(place, MessageEvent::StoreAnswers));
        }
        while let Some((_, place)) = self
            .index
            .delayed
            .first_key_value()
            .filter(|((until, _), _)| *until <= now)
        {
            self.apply(*place, MessageEvent::TimeIs(now));
        }
    }

    /// Notes whether messages may still arrive. If not, and nothing runs, no batch waits.
    pub(super) fn note_supply(&mut self, more_may_arrive: bool) {
        self.gathering.more_may_arrive = more_may_arrive;
    }

    /// Makes the messages ready that the circuit breakers admit: `admitted` returns how many of a
    /// route, by its number.
    pub(super) fn resume_handlers(&mut self, admitted: impl Fn(usize) -> usize) {
        let paused = self.index.paused.iter();
        let resumed: Vec<PlaceId> = paused
            .flat_map(|(route, queue)| queue.values().take(admitted(*route)))
            .copied()
            .collect();
        resumed
            .into_iter()
            .for_each(|place| self.apply(place, MessageEvent::HandlerResumes));
    }

    /// The routes with messages that wait for their paused handler.
    pub(super) fn paused_routes(&self) -> impl Iterator<Item = usize> {
        self.index.paused.keys().copied()
    }

    /// Lets messages run without the shards that have been away for longer than the patience.
    /// Returns the outages for which that begins now.
    pub(super) fn bypass_outages(&mut self, now: Instant) -> Vec<Outage> {
        let begun = self.outages.bypass_overdue(now);
        let bypassed = self.outages.away().filter(|(_, outage)| outage.is_bypassed);
        let shards: Vec<Shard> = bypassed.map(|(shard, _)| shard).collect();
        shards
            .into_iter()
            .for_each(|shard| self.release_waiting(shard));
        begun
    }

    /// Notes whether a handler may be failing for all messages alike. Then those start first that
    /// were not delayed yet: failures of other keys open its circuit breaker before retries use up
    /// the attempts of a few.
    pub(super) fn note_doubt(&mut self, is_in_doubt: bool) {
        self.spares_retries = is_in_doubt;
    }

    /// From now on the message, which runs, does not start together with others.
    pub(super) fn keep_out_of_batches(&mut self, place: PlaceId) {
        if let Some(scheduled) = self.table.get_mut(place)
            && matches!(scheduled.state, MessageState::Running { .. })
        {
            scheduled.fixed.in_batch = false;
        }
    }

    /// Starts the message, or makes it wait for what it lacks. `shard` is the one that its attempt
    /// would ask.
    pub(super) fn offer(
        &mut self,
        place: PlaceId,
        shard: Option<Shard>,
        now: Instant,
    ) -> Option<Starting<T>> {
        let scheduled = self.table.get(place)?;
        // A message held back for a shard probes that shard, even if the store has moved its key
        // since.
        let shard = match scheduled.state {
            MessageState::StoreAway { shard } => Some(shard),
            _ => shard,
        };
        let tenant_is_full = scheduled
            .fixed
            .tenant
            .is_some_and(|tenant| self.is_tenant_full(tenant));
        let is_probed = shard.is_some_and(|shard| {
            self.index
                .shards
                .get(&shard)
                .is_some_and(|queue| queue.probes > 0)
        });
        let access = match shard {
            Some(shard) => self.outages.access(shard, now, is_probed),
            None if self.is_every_store_awaited() => StoreAccess::Away,
            None => StoreAccess::Open,
        };
        self.apply(
            place,
            MessageEvent::Offered(Facts {
                tenant_is_full,
                shard,
                access,
            }),
        );
        let scheduled = self.table.get_mut(place)?;
        let MessageState::Running { asks, is_probe } = scheduled.state else {
            return None;
        };
        let without_store = access == StoreAccess::Bypassed;
        Some(Starting {
            place,
            content: scheduled.content.take()?,
            asks,
            is_probe,
            without_store,
        })
    }

    /// Takes a message back whose start the circuit breaker did not admit.
    pub(super) fn refuse(&mut self, place: PlaceId, content: T) {
        self.put_back(place, content);
        self.apply(place, MessageEvent::HandlerRefused);
    }

    /// Notes how an attempt ended.
    pub(super) fn end(&mut self, place: PlaceId, end: AttemptEnd<T>, now: Instant) {
        let event = match end {
            AttemptEnd::Finished => MessageEvent::Finished,
            AttemptEnd::NoAnswer { content } => {
                self.put_back(place, content);
                self.unanswered(place, now)
            }
            AttemptEnd::TryAgain {
                content,
                after,
                cause,
            } => {
                self.put_back(place, content);
                self.delay(place, after, cause, now)
            }
        };
        self.apply(place, event);
        debug_assert!(
            !self.is_with_task(place),
            "an attempt has ended, and its message still runs"
        );
        // The last message that waited may have been another consumer's, and asked nothing.
        let shards = &self.index.shards;
        self.outages.forget_without_messages(|shard| {
            shards
                .get(&shard)
                .is_some_and(|queue| queue.probes > 0 || !queue.waiting.is_empty())
        });
    }

    /// Returns whether a task runs or answers the message.
    fn is_with_task(&self, place: PlaceId) -> bool {
        let state = self.table.get(place).map(|scheduled| scheduled.state);
        matches!(
            state,
            Some(MessageState::Running { .. } | MessageState::Answering)
        )
    }

    /// Drops every message that has not started.
    pub(super) fn stop(&mut self) {
        let places: Vec<PlaceId> = self.table.iter().map(|(place, _)| place).collect();
        places
            .into_iter()
            .for_each(|place| self.apply(place, MessageEvent::Stopped));
    }

    fn is_tenant_full(&self, tenant: u64) -> bool {
        let running = self
            .index
            .tenants
            .get(&tenant)
            .map_or(0, |of_tenant| of_tenant.running);
        self.tenant_limit.is_some_and(|limit| running >= limit)
    }

    /// Delays a message, beside the delays before it for the same cause.
    fn delay(
        &mut self,
        place: PlaceId,
        after: Duration,
        cause: WaitCause,
        now: Instant,
    ) -> MessageEvent {
        let mut delay = Delay {
            cause,
            since: now,
            until: now + after.min(LONGEST_TIME),
        };
        if let Some(scheduled) = self.table.get_mut(place) {
            let before = scheduled.last_delay.filter(|delay| delay.cause == cause);
            delay.since = before.map_or(now, |delay| delay.since);
            scheduled.last_delay = Some(delay);
        }
        MessageEvent::TryAgain(delay)
    }

    fn put_back(&mut self, place: PlaceId, content: T) {
        if let Some(scheduled) = self.table.get_mut(place) {
            scheduled.content = Some(content);
        }
    }

    /// Applies an event to a message. Nothing else changes the state of a message that has arrived.
    fn apply(&mut self, place: PlaceId, event: MessageEvent) {
        let Some(scheduled) = self.table.get(place) else {
            return;
        };
        let state = scheduled.state;
        let tenant = scheduled.fixed.tenant;
        let (new, action) = next(state, event);
        self.set(place, new);
        if action == Action::Remove {
            let advanced = self.table.leave(place);
            advanced
                .into_iter()
                .flatten()
                .for_each(|place| self.apply(place, MessageEvent::LaneAdvanced));
        }
        if let Some(tenant) = tenant.filter(|_| state != new) {
            self.fill(tenant);
        }
    }

    fn set(&mut self, place: PlaceId, new: MessageState) {
        let Some(scheduled) = self.table.get_mut(place) else {
            return;
        };
        let old = std::mem::replace(&mut scheduled.state, new);
        if new == MessageState::Gone {
            scheduled.content = None;
        }
        if old != new {
            self.index.update(place, scheduled.fixed, old, new);
        }
    }

    /// Makes as many messages of the tenant ready as may run, the oldest first. So a message that
    /// leaves its turn to others does that whether it has run or waits for something else.
    fn fill(&mut self, tenant: u64) {
        let limit = self.tenant_limit.unwrap_or(usize::MAX);
        if let Some(place) = self
            .index
            .tenants
            .get(&tenant)
            .and_then(|of_tenant| of_tenant.next(limit))
        {
            self.apply(place, MessageEvent::TenantHasRoom);
        }
    }
}
