//! The table of a gate's leases, by the owner's clock, and the guard that an owner holds of one of
//! them.
//!
//! The lease renewer extends what stands in the table; the guard's drop takes its lease out.

use std::sync::Arc;
use std::time::Duration;

use oncegate_core::key::StoreKey;
use oncegate_core::record::Token;
use parking_lot::{Mutex, MutexGuard};
use tokio::time::Instant;

use crate::attempt::Attempt;
use crate::observe::ExtraRunCause;

/// The leases of a gate, each in a slot that is reused.
#[derive(Debug, Default)]
pub(super) struct Leases {
    slots: Mutex<Slots>,
}

#[derive(Debug, Default)]
pub(super) struct Slots {
    held: Vec<Option<Held>>,
    free: Vec<usize>,
}

impl Slots {
    pub(super) fn iter(&self) -> impl Iterator<Item = Option<&Held>> {
        self.held.iter().map(Option::as_ref)
    }

    /// Every slot, with the lease in it if there is one.
    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = Option<&mut Held>> {
        self.held.iter_mut().map(Option::as_mut)
    }

    /// The lease in this slot, if it is still the one of this token.
    pub(super) fn get_mut(&mut self, slot: usize, token: Token) -> Option<&mut Held> {
        self.held
            .get_mut(slot)?
            .as_mut()
            .filter(|held| held.token() == token)
    }
}

impl Leases {
    /// Locks the slots. Each change below leaves them consistent, so a panic elsewhere does no
    /// harm.
    pub(super) fn lock(&self) -> MutexGuard<'_, Slots> {
        self.slots.lock()
    }

    pub(super) fn insert(&self, held: Held) -> usize {
        let mut slots = self.lock();
        if let Some(slot) = slots.free.pop()
            && let Some(place) = slots.held.get_mut(slot)
        {
            *place = Some(held);
            return slot;
        }
        slots.held.push(Some(held));
        slots.held.len() - 1
    }

    pub(super) fn remove(&self, slot: usize) {
        let mut slots = self.lock();
        if slots.held.get_mut(slot).and_then(Option::take).is_some() {
            slots.free.push(slot);
        }
    }
}

/// A lease, by the owner's monotonic clock.
#[derive(Debug)]
pub(super) struct Held {
    /// The run under the lease.
    pub(super) attempt: Attempt,
    /// Counted from before the claim or extend was sent: the lease never ends earlier in the store.
    pub(super) valid_until: Instant,
    pub(super) extend_at: Instant,
    /// An extend is in progress.
    pub(super) waiting: bool,
    /// The handler has ended, and the store did not answer its completion.
    pub(super) completing: bool,
    /// The lease ran out while no heartbeat was answered: the cause of another run, if another
    /// process takes over.
    pub(super) ran_out: Option<ExtraRunCause>,
}

impl Held {
    pub(super) fn key(&self) -> &StoreKey {
        &self.attempt.completion().key
    }

    pub(super) fn token(&self) -> Token {
        self.attempt.completion().token
    }

    /// Returns whether its handler has run for longer than that. A claim whose handler has not
    /// begun uses nothing of the time of its run up.
    pub(super) fn has_run_for(&self, max_run: Duration, now: Instant) -> bool {
        self.attempt
            .began()
            .is_some_and(|began| now.saturating_duration_since(began) >= max_run)
    }

    /// The cause of another run, if another process owns the record.
    pub(super) fn cause(&self) -> ExtraRunCause {
        let now = if self.completing {
            ExtraRunCause::CompleteUnknown
        } else {
            ExtraRunCause::LeaseLost
        };
        self.ran_out.unwrap_or(now)
    }
}

/// Ends the heartbeats of a lease when it is dropped.
#[derive(Debug)]
pub(super) struct LeaseGuard {
    pub(super) leases: Arc<Leases>,
    pub(super) slot: usize,
    pub(super) token: Token,
    /// Until then the lease cannot have changed, and no lock is needed.
    pub(super) extended_from: Instant,
    pub(super) margin: Duration,
    pub(super) max_run: Duration,
}

impl LeaseGuard {
    /// Returns whether no more than the margin is left of the lease, or the run has reached
    /// `max_run`.
    pub(super) fn is_over(&self, now: Instant) -> bool {
        if now < self.extended_from {
            return false;
        }
        let mut slots = self.leases.lock();
        slots.get_mut(self.slot, self.token).is_none_or(|held| {
            now + self.margin >= held.valid_until || held.has_run_for(self.max_run, now)
        })
    }

    /// Returns how long the lease lasts without another heartbeat. In the store it may end a little
    /// later.
    pub(super) fn remaining(&self) -> Duration {
        let mut slots = self.leases.lock();
        let valid_until = slots
            .get_mut(self.slot, self.token)
            .map(|held| held.valid_until);
        valid_until.map_or(Duration::ZERO, |end| {
            end.saturating_duration_since(Instant::now())
        })
    }

    /// Notes that the completion was refused, because another process owns the record. Returns the
    /// cause of the other run, unless the run had to end before or a heartbeat was refused as well.
    pub(super) fn refused(&self) -> Option<ExtraRunCause> {
        let mut slots = self.leases.lock();
        let held = slots.get_mut(self.slot, self.token)?;
        let cancellation = held.attempt.cancellation();
        if cancellation.is_discarded() {
            return None;
        }
        cancellation.discard();
        Some(held.cause())
    }

    /// Notes that the handler has ended and the outcome of its completion is unknown: a lease lost
    /// from now on is not that of a running handler.
    pub(super) fn completing(&self) {
        if let Some(held) = self.leases.lock().get_mut(self.slot, self.token) {
            held.completing = true;
        }
    }
}

impl Drop for LeaseGuard {
    fn drop(&mut self) {
        self.leases.remove(self.slot);
    }
}
