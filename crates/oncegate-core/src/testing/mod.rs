//! Test support for stores and for code that uses stores.
//!
//! - [`conformance`]: the suite that every store must pass
//! - [`equivalence`]: compares a store with the rules by random sequences of operations
//! - [`fault`]: a store that loses replies, requests and records, controlled by a seed

pub mod conformance;
pub mod equivalence;
pub mod fault;

use crate::key::{Digest, Fingerprint, Scope, StoreKey};

/// A store key for tests. Equal names give equal keys.
pub fn key(name: &str) -> StoreKey {
    let mut digest = [0; 16];
    blake3::Hasher::new()
        .update(name.as_bytes())
        .finalize_xof()
        .fill(&mut digest);
    StoreKey::new(&scope("tests"), Digest::from_bytes(digest))
}

/// A fingerprint for tests, from the byte that names its specification and a number for the
/// content.
pub fn fingerprint(specification: u8, content: u8) -> Fingerprint {
    Fingerprint::from_bytes([
        specification,
        content,
        content,
        content,
        content,
        content,
        content,
    ])
}

/// A scope for tests.
///
/// # Panics
/// When `name` is not a valid scope.
pub fn scope(name: &str) -> Scope {
    Scope::new(name).expect("tests use valid scope names")
}
