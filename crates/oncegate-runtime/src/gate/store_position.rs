//! The position of a scope in its store, as a broker keeps it with its commits.

use std::fmt;

use oncegate_core::store::{Epoch, ScopeDescriptor};

/// A position of the store that a broker stores with its commits: an epoch, and a sequence number
/// reached in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct StorePosition {
    pub(super) epoch: Epoch,
    pub(super) sequence: u64,
}

impl StorePosition {
    /// Reads `epoch:sequence`.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let (epoch, sequence) = text.split_once(':')?;
        Some(Self {
            epoch: epoch.parse().ok()?,
            sequence: sequence.parse().ok()?,
        })
    }

    /// Returns whether a store that holds this descriptor is older than the position, or another
    /// one.
    pub(super) fn is_ahead_of(&self, held: &ScopeDescriptor) -> bool {
        if self.epoch == held.epoch {
            self.sequence > held.sequence
        } else {
            !held.knows(self.epoch)
        }
    }
}

impl fmt::Display for StorePosition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.epoch, self.sequence)
    }
}
