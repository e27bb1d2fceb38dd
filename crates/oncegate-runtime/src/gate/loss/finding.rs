//! A loss of records as a check finds it, and as the scope's descriptor holds it.

use std::time::{Duration, SystemTime};

use oncegate_core::store::{Epoch, Halt, ScopeDescriptor};

use crate::gate::store_position::StorePosition;
use crate::gate::witnesses::Witness;

/// A process notices a loss up to this long after another one, on another clock: the longest time
/// between two checks of a server, and half a minute of clocks.
const SAME_LOSS_MS: u64 = 70_000;

/// A loss of records that was detected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::gate) struct Loss {
    pub(in crate::gate) at_ms: u64,
    /// The epoch whose records it is about. The acceptance of a loss begins the next one.
    pub(in crate::gate) found_in: Epoch,
    pub(in crate::gate) reason: String,
    /// Epochs that the store no longer knows.
    pub(in crate::gate) epochs: Vec<Epoch>,
    pub(in crate::gate) evidence: Evidence,
}

/// The evidence of a loss. Another look asks for the same before the loss is written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::gate) enum Evidence {
    /// The store has noticed the loss itself.
    Told,
    Descriptor,
    /// A marker record is gone.
    Marker,
    /// The records that are gone.
    Records(Vec<Witness>),
    /// The positions that a broker keeps.
    Positions(Vec<StorePosition>),
}

/// The process that has noticed the loss in a descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Noticed {
    /// The process is this one, which reports the loss.
    Here,
    Elsewhere,
}

impl Loss {
    /// A loss that is noticed now.
    pub(in crate::gate) fn new(
        found_in: Epoch,
        reason: &str,
        epochs: Vec<Epoch>,
        evidence: Evidence,
    ) -> Self {
        Self {
            at_ms: millis_of(SystemTime::now()),
            found_in,
            reason: reason.to_owned(),
            epochs,
            evidence,
        }
    }

    /// Returns whether both are the same, noticed at two times.
    pub(in crate::gate) fn is_same(&self, other: &Self) -> bool {
        Self {
            at_ms: other.at_ms,
            ..self.clone()
        } == *other
    }

    /// Returns whether the descriptor in the store has the loss: another process was faster, or an
    /// operator has accepted it already.
    pub(in crate::gate) fn is_written_in(&self, held: &ScopeDescriptor) -> bool {
        let halt = held.halt.as_ref();
        let is_settled =
            halt.is_some() || (held.epoch != self.found_in && held.knows(self.found_in));
        is_settled
            && self.epochs.iter().all(|lost| {
                held.knows(*lost) || halt.is_some_and(|halt| halt.lost_epochs.contains(lost))
            })
    }

    /// Returns the descriptor with the loss written into it: halted, or in `next_epoch` if work
    /// continues and no other process has halted the scope.
    pub(in crate::gate) fn written_into(
        &self,
        held: Option<&ScopeDescriptor>,
        known: &ScopeDescriptor,
        next_epoch: Option<Epoch>,
    ) -> ScopeDescriptor {
        let base = held.unwrap_or(known);
        let mut lost = self.epochs.clone();
        if base.epoch != known.epoch && !base.knows(known.epoch) && !lost.contains(&known.epoch) {
            lost.push(known.epoch);
        }
        if let Some(epoch) = next_epoch.filter(|_| base.halt.is_none()) {
            return base.succeed(epoch, &lost, self.at_ms);
        }
        let mut halt = base
            .halt
            .clone()
            .unwrap_or_else(|| Halt::new(self.at_ms, &self.reason, Vec::new()));
        for epoch in lost {
            if !halt.lost_epochs.contains(&epoch) {
                halt.lost_epochs.push(epoch);
            }
        }
        ScopeDescriptor {
            halt: Some(halt),
            ..base.clone()
        }
    }
}

/// Returns whether a loss that the store had noticed before the scope was opened needs no halt: the
/// scope has begun since, or its loss was accepted.
pub(super) fn is_settled(at: SystemTime, known: &ScopeDescriptor, first: &ScopeDescriptor) -> bool {
    // Another process may have opened it, on another clock.
    let is_new = known.epoch == first.epoch
        || known.begun_at_ms > millis_of(at).saturating_add(SAME_LOSS_MS);
    let is_accepted = known
        .lost_at_ms
        .is_some_and(|lost| millis_of(at) <= lost.saturating_add(SAME_LOSS_MS));
    is_new || (known.halt.is_none() && is_accepted)
}

pub(super) fn millis_of(time: SystemTime) -> u64 {
    let since = time
        .duration_since(SystemTime::UNIX_EPOCH)
        .unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

pub(super) fn time_of(millis: u64) -> SystemTime {
    SystemTime::UNIX_EPOCH
        .checked_add(Duration::from_millis(millis))
        .unwrap_or(SystemTime::UNIX_EPOCH)
}
