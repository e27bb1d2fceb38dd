//! Results that are too large for a record: a [`ResultStore`] keeps them, and the record keeps a
//! reference.
//!
//! The object is written **before** COMPLETED, under a name that no other attempt uses. The record
//! then refers to it and contains its size and its BLAKE3 digest. So a reference never points to a
//! missing object, and a duplicate gets exactly what the first attempt stored. A process that is
//! killed in between leaves an object without a reference.
//! [`Gate::sweep_results`](crate::Gate::sweep_results) deletes such objects, and those whose
//! records have expired.
//!
//! `ObjectResults` keeps results in a folder or in S3. The effect of the handler has happened when
//! a result is stored, so a result store that is down never stops a completion: after a bounded
//! time, the record is completed without its result, which is counted as `results_not_kept`.
//!
//! # Not obvious
//!
//! Implementation notes: facts about result stores that this code depends on.
//!
//! - Objects must not be named by their content. Two attempts would share one object, and the
//!   sweep, which goes by age, would delete what the younger one's record refers to.
//! - The sweep does not trust its own clock: it puts an object and reads how old the result store
//!   considers it.
//! - `object_store` does not list the unfinished write of a killed process (`name#1`); the sweep of
//!   a folder lists the files itself.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::{BufMut, Bytes, BytesMut};
use oncegate_core::key::{Scope, StoreKey};
use oncegate_core::record::Token;

use crate::failure::BoxError;

/// The first byte of a reference to a result, among those of the codecs.
pub(crate) const REFERENCE: u8 = 4;

/// A store for results that are too large for a record.
///
/// Names are made of `A-Z a-z 0-9 . _ - /` and begin with the scope and a slash.
#[async_trait]
pub trait ResultStore: Send + Sync + fmt::Debug {
    /// Stores `bytes` under `name`; they are durable when it returns. Atomic: no reader ever gets a
    /// part of them.
    ///
    /// After an error or a lost answer it is called again with the same name and the same bytes,
    /// which must work.
    ///
    /// # Errors
    /// When the bytes are not known to be durable.
    async fn put(&self, name: &str, bytes: Bytes) -> Result<(), ResultStoreError>;

    /// Returns the bytes under `name`; `None` when there are none, or more than `most_bytes`.
    ///
    /// # Errors
    /// When the store cannot answer. The caller tries again later.
    async fn get(&self, name: &str, most_bytes: u64) -> Result<Option<Bytes>, ResultStoreError>;

    /// Deletes, or only counts, the objects of `scope` that were stored more than `older_than` ago,
    /// by the store's own clock.
    ///
    /// # Errors
    /// When the store cannot be reached or refuses. Objects deleted until then stay deleted.
    async fn sweep(
        &self,
        scope: &Scope,
        older_than: Duration,
        sweep: Sweep,
    ) -> Result<Swept, ResultStoreError>;
}

/// A shared result store is a result store.
#[async_trait]
impl<S: ResultStore + ?Sized> ResultStore for Arc<S> {
    async fn put(&self, name: &str, bytes: Bytes) -> Result<(), ResultStoreError> {
        (**self).put(name, bytes).await
    }

    async fn get(&self, name: &str, most_bytes: u64) -> Result<Option<Bytes>, ResultStoreError> {
        (**self).get(name, most_bytes).await
    }

    async fn sweep(
        &self,
        scope: &Scope,
        older_than: Duration,
        sweep: Sweep,
    ) -> Result<Swept, ResultStoreError> {
        (**self).sweep(scope, older_than, sweep).await
    }
}

/// The action of a sweep on expired objects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sweep {
    /// Deletes them.
    Delete,
    /// Only counts them.
    Count,
}

/// The result of a sweep.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Swept {
    /// The number of objects of the scope that are kept.
    pub kept: u64,
    /// The number of expired objects, which were deleted unless they were only counted.
    pub over: u64,
    /// The size of the expired objects in bytes.
    pub over_bytes: u64,
}

impl Swept {
    /// Counts one expired object of this size.
    pub fn add(&mut self, bytes: u64) {
        self.over += 1;
        self.over_bytes += bytes;
    }
}

/// The error of a result store that did not answer, or cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("the result store: {source}")]
pub struct ResultStoreError {
    source: BoxError,
}

impl ResultStoreError {
    /// Creates the error of a cause and location, without a password.
    pub fn new(source: impl Into<BoxError>) -> Self {
        Self {
            source: source.into(),
        }
    }
}

/// The name under which an attempt stores its result: `<scope>/<2>/<digest of the key>.<attempt>`.
///
/// No two attempts share a name. Equal results of two keys, or of two attempts, must not be one
/// object: the sweep goes by the age of objects, and one record may be much older than the other.
pub(crate) fn name(key: &StoreKey, token: &Token) -> String {
    const ATTEMPT_BYTES: usize = 8;
    let mut attempt = [0; ATTEMPT_BYTES];
    let mut hasher = blake3::Hasher::new_derive_key("oncegate v1 result name");
    hasher
        .update(token.as_bytes())
        .finalize_xof()
        .fill(&mut attempt);
    let digest = key.digest().to_string();
    // 4,096 folders, so that none gets too large.
    let shard: String = digest.chars().take(2).collect();
    format!(
        "{}/{shard}/{digest}.{:016x}",
        key.scope(),
        u64::from_be_bytes(attempt)
    )
}

/// The reference in a record to a result in a result store.
///
/// | bytes | |
/// |---|---|
/// | 0 | 4 |
/// | 1–32 | BLAKE3 of the object |
/// | 33–40 | its size in bytes, big-endian |
/// | from 41 | its name, UTF-8 |
///
/// The object is the result as it would be in a record: the byte of its encoding, then the bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Reference {
    pub(crate) digest: [u8; 32],
    pub(crate) size_bytes: u64,
    pub(crate) name: String,
}

impl Reference {
    pub(crate) fn to(name: String, object: &[u8]) -> Self {
        Self {
            digest: *blake3::hash(object).as_bytes(),
            size_bytes: object.len() as u64,
            name,
        }
    }

    /// Returns whether a stored result has the first byte of a reference, valid or not.
    pub(crate) fn is(stored: &[u8]) -> bool {
        stored.first() == Some(&REFERENCE)
    }

    pub(crate) fn encode(&self) -> Bytes {
        let mut stored = BytesMut::with_capacity(41 + self.name.len());
        stored.put_u8(REFERENCE);
        stored.put_slice(&self.digest);
        stored.put_u64(self.size_bytes);
        stored.put_slice(self.name.as_bytes());
        stored.freeze()
    }

    pub(crate) fn decode(stored: &[u8]) -> Option<Self> {
        let rest = stored.strip_prefix(&[REFERENCE])?;
        let (digest, rest) = rest.split_first_chunk::<32>()?;
        let (size_bytes, name) = rest.split_first_chunk::<8>()?;
        let name = std::str::from_utf8(name).ok()?.to_owned();
        Some(Self {
            digest: *digest,
            size_bytes: u64::from_be_bytes(*size_bytes),
            name,
        })
    }

    /// Returns whether `object` is the object that this refers to.
    pub(crate) fn fits(&self, object: &[u8]) -> bool {
        object.len() as u64 == self.size_bytes && blake3::hash(object).as_bytes() == &self.digest
    }
}

/// Describes a stored reference for people.
pub(crate) fn describe(stored: &[u8]) -> String {
    match Reference::decode(stored) {
        Some(Reference {
            size_bytes, name, ..
        }) => {
            format!("{size_bytes} bytes in the result store, as {name}")
        }
        None => "a damaged reference to the result store".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reference_is_laid_out_as_documented() {
        let reference = Reference::to("billing/eM/eMT5".to_owned(), b"\x01\"receipt\"");
        let stored = reference.encode();
        assert_eq!(stored[0], 4);
        assert_eq!(stored[1..33], *blake3::hash(b"\x01\"receipt\"").as_bytes());
        assert_eq!(stored[33..41], [0, 0, 0, 0, 0, 0, 0, 10]);
        assert_eq!(&stored[41..], b"billing/eM/eMT5");
        assert_eq!(Reference::decode(&stored), Some(reference.clone()));
        assert!(reference.fits(b"\x01\"receipt\"") && !reference.fits(b"\x01\"receipT\""));
    }

    #[test]
    fn what_is_no_reference_is_none() {
        let whole = Reference::to("a".to_owned(), b"").encode();
        for cut in 0..41 {
            assert_eq!(Reference::decode(&whole[..cut]), None, "{cut} bytes");
        }
        assert_eq!(Reference::decode(&[1; 60]), None);
        let mut broken = whole.to_vec();
        broken[41] = 0xff;
        assert_eq!(Reference::decode(&broken), None);
    }

    #[test]
    fn each_attempts_result_has_its_own_name_that_hides_the_token() {
        let key: StoreKey = "billing:eMT5oSC2v1zTz8Nw5IO50A".parse().unwrap();
        let names = [1, 2].map(|bits| name(&key, &Token::from_bits(bits)));
        assert!(
            names[0].starts_with("billing/eM/eMT5oSC2v1zTz8Nw5IO50A."),
            "{names:?}"
        );
        assert_ne!(names[0], names[1]);
        assert!(!names[0].ends_with("0001"), "{names:?}");
        assert_eq!(
            names[0],
            name(&key, &Token::from_bits(1)),
            "a repeat writes the same object"
        );
    }
}
