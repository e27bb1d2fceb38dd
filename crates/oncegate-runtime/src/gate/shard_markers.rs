//! Marker records: one in each shard of a store that has several, so that an emptied shard is
//! noticed.

use std::collections::{BTreeSet, HashMap};
use std::time::Duration;

use bytes::Bytes;
use oncegate_core::key::{Scope, StoreKey};
use oncegate_core::rules::Operation;
use oncegate_core::store::{Command, ScopeDescriptor, Store, StoreError};

use crate::entropy::Entropy;

/// Marker numbers are below this limit.
const MAX_MARKER_NUMBER: u16 = 4_096;
/// The count of numbers without a new shard after which all shards are known.
const NUMBERS_WITHOUT_A_NEW_SHARD: u16 = 512;
/// The most numbers that are tried for a shard: keys of some of them may not be served now.
const NUMBERS_TRIED: usize = 4;
/// The time for which a marker is kept: as long as the longest retention.
const MARKER_RETENTION: Duration = Duration::from_secs(10 * 365 * 86_400);

/// Returns whether a marker that the descriptor names is gone.
pub(super) async fn is_one_missing(
    store: &dyn Store,
    scope: &Scope,
    known: &ScopeDescriptor,
) -> bool {
    let keys: Vec<StoreKey> = known
        .markers
        .iter()
        .map(|number| known.marker(scope, *number))
        .collect();
    // Most stores have one shard, and no markers.
    !keys.is_empty()
        && store
            .read(keys)
            .await
            .iter()
            .any(|found| matches!(found, Ok(None)))
}

/// Writes a marker into each shard that has none, and returns all markers; `None` if none was
/// missing. A store with one shard needs none: its descriptor serves as one.
///
/// A shard of which no key can be asked about stays without one until the next call.
pub(super) async fn write_missing(
    store: &dyn Store,
    scope: &Scope,
    known: &ScopeDescriptor,
    entropy: &Entropy,
) -> Result<Option<Vec<u16>>, StoreError> {
    let shard = |number: u16| store.shard(&known.marker(scope, number));
    let marked: BTreeSet<u64> = known.markers.iter().map(|number| shard(*number)).collect();
    let mut unmarked: HashMap<u64, Vec<u16>> = HashMap::new();
    let mut seen = BTreeSet::new();
    let mut since_new = 0;
    for number in 0..MAX_MARKER_NUMBER {
        let shard = shard(number);
        since_new = if seen.insert(shard) { 0 } else { since_new + 1 };
        if !marked.contains(&shard) {
            let numbers = unmarked.entry(shard).or_default();
            if numbers.len() < NUMBERS_TRIED {
                numbers.push(number);
            }
        }
        if since_new >= NUMBERS_WITHOUT_A_NEW_SHARD {
            break;
        }
    }
    if seen.len() <= 1 || unmarked.is_empty() {
        return Ok(None);
    }
    let mut markers = known.markers.clone();
    for numbers in unmarked.into_values() {
        for number in numbers {
            match write(store, known.marker(scope, number), entropy).await {
                Ok(()) => {
                    markers.push(number);
                    break;
                }
                // Another key of the shard is as good.
                Err(StoreError::KeyUnavailable { .. }) => {}
                Err(error) => return Err(error),
            }
        }
    }
    markers.sort_unstable();
    Ok(Some(markers))
}

async fn write(store: &dyn Store, key: StoreKey, entropy: &Entropy) -> Result<(), StoreError> {
    // Completing an absent record writes it; an existing one stays as it is.
    let operation = Operation::Complete {
        token: entropy.token(),
        fingerprint: None,
        result: Bytes::new(),
        retention: MARKER_RETENTION,
    };
    store
        .execute_one(Command { key, operation })
        .await
        .map(drop)
}
