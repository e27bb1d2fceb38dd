//! The records that a store must still hold, and the sequence number of its scope.

use std::sync::atomic::Ordering;

use oncegate_core::store::ScopeDescriptor;

use super::LossWatch;
use super::finding::{Evidence, Loss};
use crate::gate::shard_markers;

/// The shards are counted again after this many checks.
const LOOKS_PER_SHARD_COUNT: u32 = 64;

impl LossWatch {
    /// Raises the sequence number when a message was completed since, unless another process has
    /// raised it.
    pub(super) async fn advance(&self, held: ScopeDescriptor, is_raised: bool) {
        if is_raised || !self.completed.swap(false, Ordering::Relaxed) {
            return;
        }
        let next = ScopeDescriptor {
            sequence: held.sequence.saturating_add(1),
            ..held.clone()
        };
        if self
            .replace(Some(&held), &next)
            .await
            .is_ok_and(|replaced| replaced)
        {
            self.lock().follow(&held, next);
        } else {
            self.note_completed();
        }
    }

    /// Reads the records that must be there, and returns what is missing. With many processes on a
    /// store, few checks do so; each reads the scope's descriptor, so that a halt reaches every
    /// process soon.
    pub(super) async fn missing_record(&self) -> Option<Loss> {
        let (known, looks) = {
            let mut state = self.lock();
            state.skipped = state.skipped.saturating_add(1);
            if state.skipped < self.store.check_spacing() {
                return None;
            }
            state.skipped = 0;
            state.looks = state.looks.wrapping_add(1);
            (state.known.clone(), state.looks)
        };
        if shard_markers::is_one_missing(&*self.store, &self.scope, &known).await {
            return Some(Loss::new(
                known.epoch,
                "a shard of the store was emptied",
                Vec::new(),
                Evidence::Marker,
            ));
        }
        if looks % LOOKS_PER_SHARD_COUNT == 1 {
            self.mark_shards(&known).await;
        }
        let asked = self.witnesses.ask();
        if asked.is_empty() {
            return None;
        }
        let keys = asked.iter().map(|asked| asked.key.clone()).collect();
        let found = self.store.read(keys).await;
        let state = self.lock();
        if state.known.epoch != known.epoch {
            // A loss was accepted meanwhile: what was asked for may be lost.
            return None;
        }
        let missing = self.witnesses.check(asked, found);
        if missing.is_empty() {
            return None;
        }
        Some(Loss::new(
            known.epoch,
            "a completed record is missing",
            Vec::new(),
            Evidence::Records(missing),
        ))
    }

    /// Notes new markers in the descriptor. A shard that gets none now gets one at the next count;
    /// until then the other evidence covers it.
    async fn mark_shards(&self, known: &ScopeDescriptor) {
        let markers =
            shard_markers::write_missing(&*self.store, &self.scope, known, &self.entropy).await;
        let Ok(Some(markers)) = markers else { return };
        let next = ScopeDescriptor {
            markers,
            ..known.clone()
        };
        if self
            .replace(Some(known), &next)
            .await
            .is_ok_and(|replaced| replaced)
        {
            self.lock().follow(known, next);
        }
    }
}
