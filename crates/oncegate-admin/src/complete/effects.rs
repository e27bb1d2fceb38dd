//! The list of effects, by the bits of their idempotency keys.

use super::super::audit::parse_uuid;

/// The idempotency keys of effects.
#[derive(Debug, Default)]
pub struct Effects {
    bits: Vec<u128>,
    /// The texts that are no idempotency key.
    others: u64,
}

impl Effects {
    pub(super) fn of<'a>(keys: impl IntoIterator<Item = &'a str>) -> Self {
        let mut effects = Self::default();
        keys.into_iter().for_each(|key| effects.add(key));
        effects
    }

    /// Adds an effect by its idempotency key.
    pub fn add(&mut self, key: &str) {
        match parse_uuid(key) {
            Some(bits) => self.bits.push(bits),
            None => self.others += 1,
        }
    }

    /// Returns how many were added.
    pub fn count(&self) -> u64 {
        self.bits.len() as u64 + self.others
    }

    pub(super) fn sorted(mut self) -> SortedEffects {
        self.bits.sort_unstable();
        self.bits.dedup();
        SortedEffects {
            is_found: vec![false; self.bits.len()],
            bits: self.bits,
            others: self.others,
        }
    }
}

/// The effects that are looked up, and which of them belong to a message that was read.
#[derive(Debug)]
pub(super) struct SortedEffects {
    bits: Vec<u128>,
    is_found: Vec<bool>,
    others: u64,
}

impl SortedEffects {
    /// Returns `None` if there is no such effect; otherwise whether this is the first message with
    /// it.
    pub(super) fn find(&mut self, bits: u128) -> Option<bool> {
        let place = self.bits.binary_search(&bits).ok()?;
        let is_found = self.is_found.get_mut(place)?;
        Some(!std::mem::replace(is_found, true))
    }

    /// Returns how many effects belong to no message that was read.
    pub(super) fn unexplained(&self) -> u64 {
        let missing = self.is_found.iter().filter(|found| !**found).count();
        missing as u64 + self.others
    }
}
