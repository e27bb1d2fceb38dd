//! Where a record is: under a key of its own, or, when completions without a result are kept compactly, perhaps in a
//! bucket that it shares with others.

use std::borrow::Cow;

use oncegate_core::key::StoreKey;
use oncegate_core::store::StoreError;

use super::slots;

/// About how many keys share a bucket when as many are kept as were expected; half as many at least.
const KEYS_PER_BUCKET: u64 = 100;

/// Some 800,000,000 keys.
const MAX_BITS: u32 = 23;

/// What a scope's descriptor begins with when its completions are in buckets. Other descriptors never do.
const MARK: &str = "compact/";

/// How many buckets a scope has: a power of two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Buckets {
    bits: u32,
}

/// The names of one record in buckets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Names {
    /// The record's own key: the bucket's, and the digest.
    pub(super) record: String,
    pub(super) bucket: String,
    /// The record's field in the bucket.
    pub(super) field: [u8; 16],
}

impl Buckets {
    /// Enough for so many keys.
    pub(super) fn for_keys(keys: u64) -> Self {
        let buckets = keys.div_ceil(KEYS_PER_BUCKET).max(1);
        Self { bits: buckets.checked_next_power_of_two().map_or(MAX_BITS, u64::ilog2).min(MAX_BITS) }
    }

    /// The bucket stands in braces, so that a cluster keeps it in one slot with its records.
    pub(super) fn names(self, key: &StoreKey) -> Names {
        let digest = key.digest();
        let field = *digest.as_bytes();
        let bucket = format!("{}:{{{:x}}}", key.scope(), self.bucket(field));
        let record = format!("{bucket}{}", key.as_str().get(key.scope().len() + 1..).unwrap_or_default());
        Names { record, bucket, field }
    }

    pub(super) fn slot(self, key: &StoreKey) -> u16 {
        slots::slot(&format!("{:x}", self.bucket(*key.digest().as_bytes())))
    }

    fn bucket(self, digest: [u8; 16]) -> u128 {
        // Of no bits, the shift would be one too far.
        u128::from_be_bytes(digest).checked_shr(128 - self.bits).unwrap_or(0)
    }
}

/// The descriptor as it is kept, so that nobody opens the scope who looks for its records in the wrong place.
pub(super) fn marked(buckets: Option<Buckets>, descriptor: &str) -> Cow<'_, str> {
    match buckets {
        Some(Buckets { bits }) => format!("{MARK}{bits} {descriptor}").into(),
        None => descriptor.into(),
    }
}

/// The descriptor of a scope whose records are kept as they are here.
///
/// # Errors
/// When they are kept in another way.
pub(super) fn unmarked(buckets: Option<Buckets>, kept: &str) -> Result<String, StoreError> {
    let (theirs, descriptor) = match kept.strip_prefix(MARK).and_then(|rest| rest.split_once(' ')) {
        Some((bits, descriptor)) => (bits.parse().ok(), descriptor),
        None => (None, kept),
    };
    if theirs == buckets.map(|buckets| buckets.bits) {
        return Ok(descriptor.to_owned());
    }
    let keys = |bits: Option<u32>| match bits {
        Some(bits) => format!("RedisBuilder::compact({})", KEYS_PER_BUCKET << bits),
        None => "no RedisBuilder::compact()".to_owned(),
    };
    Err(StoreError::refused(format!(
        "the scope's records were kept with {}, and this store has {}: open it as it was, or take another scope",
        keys(theirs),
        keys(buckets.map(|buckets| buckets.bits)),
    )))
}

#[cfg(test)]
mod tests {
    use oncegate_core::key::{Digest, Scope};

    use super::*;

    #[test]
    fn buckets_hold_about_a_hundred_keys_of_the_expected_number() {
        for (keys, bits) in [(0, 0), (100, 0), (101, 1), (200, 1), (1_000_000, 14), (u64::MAX, MAX_BITS)] {
            assert_eq!(Buckets::for_keys(keys), Buckets { bits }, "{keys}");
            // What the error tells to write gives the same number again.
            assert_eq!(Buckets::for_keys(KEYS_PER_BUCKET << bits), Buckets { bits });
        }
    }

    #[test]
    fn a_record_and_its_bucket_lie_in_one_slot() {
        let key = StoreKey::new(&Scope::new("billing").unwrap(), Digest::from_bytes([0xab; 16]));
        let digest = key.as_str().split_once(':').unwrap().1;
        let buckets = Buckets { bits: 12 };
        let Names { record, bucket, field } = buckets.names(&key);
        assert_eq!((bucket.as_str(), field), ("billing:{aba}", [0xab; 16]));
        assert_eq!(record, format!("billing:{{aba}}{digest}"));
        assert_eq!(buckets.slot(&key), slots::slot("aba"));
        assert_eq!(Buckets { bits: 0 }.names(&key).bucket, "billing:{0}");
    }

    #[test]
    fn a_descriptor_tells_how_records_are_kept() {
        let compact = Some(Buckets { bits: 14 });
        let kept = marked(compact, "{\"key\":1}");
        assert_eq!(kept, "compact/14 {\"key\":1}");
        assert_eq!(unmarked(compact, &kept).unwrap(), "{\"key\":1}");
        assert_eq!(unmarked(None, "{\"key\":1}").unwrap(), "{\"key\":1}");
        for (buckets, kept) in
            [(None, &*kept), (compact, "{\"key\":1}"), (Some(Buckets { bits: 13 }), &*kept)]
        {
            let refused = unmarked(buckets, kept).unwrap_err();
            assert!(refused.class() == "refused" && refused.to_string().contains("compact("), "{refused}");
        }
    }
}
