//! The location of a record: its own key, or a bucket that it shares with others.
//!
//! Buckets are used when completions without a result are kept compactly.

use std::borrow::Cow;

use oncegate_core::key::StoreKey;
use oncegate_core::store::StoreError;

use super::slots;

/// The approximate number of keys per bucket when the scope holds the expected number; at least
/// half as many.
const KEYS_PER_BUCKET: u64 = 100;

/// The most buckets, as a power of two.
const MAX_BITS: u32 = 23;

/// The most keys that a scope may be expected to hold: 838,860,800.
const MAX_KEYS: u64 = KEYS_PER_BUCKET << MAX_BITS;

/// Prefix of a scope's descriptor when its completions are in buckets. Other descriptors never have
/// it.
const MARK: &str = "compact/";

/// The number of buckets of a scope: a power of two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Buckets {
    bits: u32,
}

/// The keys of one record in buckets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Names {
    /// The record's own key: the bucket's key and the digest.
    pub(super) record: String,
    pub(super) bucket: String,
    /// The record's field in the bucket.
    pub(super) field: [u8; 16],
}

impl Buckets {
    /// Enough buckets for this many keys.
    ///
    /// # Errors
    /// When there cannot be enough: with more keys in each, buckets would be unpacked and save no
    /// memory.
    pub(super) fn for_keys(keys: u64) -> Result<Self, StoreError> {
        if keys > MAX_KEYS {
            return Err(StoreError::refused(format!(
                "the store's `compact({keys})`: buckets hold at most {MAX_KEYS} keys of a scope; split the scope, or \
                 keep its records without compact"
            )));
        }
        let buckets = keys.div_ceil(KEYS_PER_BUCKET).max(1);
        Ok(Self {
            bits: buckets.next_power_of_two().ilog2(),
        })
    }

    /// The bucket is in braces, so that a cluster keeps it in one slot with its records.
    pub(super) fn names(self, key: &StoreKey) -> Names {
        let digest = key.digest();
        let field = *digest.as_bytes();
        let bucket = format!("{}:{{{:x}}}", key.scope(), self.bucket(field));
        let record = format!(
            "{bucket}{}",
            key.as_str()
                .get(key.scope().len() + 1..)
                .unwrap_or_default()
        );
        Names {
            record,
            bucket,
            field,
        }
    }

    pub(super) fn slot(self, key: &StoreKey) -> u16 {
        slots::slot(&format!("{:x}", self.bucket(*key.digest().as_bytes())))
    }

    fn bucket(self, digest: [u8; 16]) -> u128 {
        // With zero bits, the shift would overflow.
        u128::from_be_bytes(digest)
            .checked_shr(128 - self.bits)
            .unwrap_or(0)
    }
}

/// The descriptor as stored. It prevents a store from opening the scope with the wrong location of
/// records.
pub(super) fn marked(buckets: Option<Buckets>, descriptor: &str) -> Cow<'_, str> {
    match buckets {
        Some(Buckets { bits }) => format!("{MARK}{bits} {descriptor}").into(),
        None => descriptor.into(),
    }
}

/// Returns the descriptor of a scope without the prefix for the location of records.
///
/// # Errors
/// When the scope keeps its records in another way than this store.
pub(super) fn unmarked(buckets: Option<Buckets>, kept: &str) -> Result<String, StoreError> {
    let (theirs, descriptor) = match kept
        .strip_prefix(MARK)
        .and_then(|rest| rest.split_once(' '))
    {
        Some((bits, descriptor)) => (bits.parse().ok(), descriptor),
        None => (None, kept),
    };
    if theirs == buckets.map(|buckets| buckets.bits) {
        return Ok(descriptor.to_owned());
    }
    Err(StoreError::refused(format!(
        "the scope's records were kept with {}, and this store has {}: use the same setting, or another scope",
        setting(theirs),
        setting(buckets.map(|buckets| buckets.bits)),
    )))
}

/// The setting that leads to this number of buckets, for an error.
fn setting(bits: Option<u32>) -> String {
    match bits {
        Some(bits) => format!("`compact({})`", KEYS_PER_BUCKET << bits),
        None => "no `compact`".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use oncegate_core::key::{Digest, Scope};

    use super::*;

    #[test]
    fn buckets_hold_about_a_hundred_keys_of_the_expected_number() {
        for (keys, bits) in [
            (0, 0),
            (100, 0),
            (101, 1),
            (200, 1),
            (1_000_000, 14),
            (MAX_KEYS, MAX_BITS),
        ] {
            assert_eq!(Buckets::for_keys(keys).unwrap(), Buckets { bits }, "{keys}");
            // The value that the error recommends gives the same number again.
            assert_eq!(
                Buckets::for_keys(KEYS_PER_BUCKET << bits).unwrap(),
                Buckets { bits }
            );
        }
        assert_eq!(
            Buckets::for_keys(MAX_KEYS + 1).unwrap_err().class(),
            "refused"
        );
    }

    #[test]
    fn a_record_and_its_bucket_lie_in_one_slot() {
        let key = StoreKey::new(
            &Scope::new("billing").unwrap(),
            Digest::from_bytes([0xab; 16]),
        );
        let digest = key.as_str().split_once(':').unwrap().1;
        let buckets = Buckets { bits: 12 };
        let Names {
            record,
            bucket,
            field,
        } = buckets.names(&key);
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
        for (buckets, kept) in [
            (None, &*kept),
            (compact, "{\"key\":1}"),
            (Some(Buckets { bits: 13 }), &*kept),
        ] {
            let refused = unmarked(buckets, kept).unwrap_err();
            assert!(
                refused.class() == "refused" && refused.to_string().contains("compact("),
                "{refused}"
            );
        }
    }
}
