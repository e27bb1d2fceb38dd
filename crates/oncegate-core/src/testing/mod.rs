//! What stores, and whatever stands on them, are tested with.
//!
//! - [`conformance`]: the one suite that every store passes
//! - [`equivalence`]: random sequences through a store and through the rules
//! - [`fault`]: a store that loses replies, goes down and forgets, from a seed

pub mod conformance;
pub mod equivalence;
pub mod fault;

use crate::key::{Digest, Fingerprint, Scope, StoreKey};

/// A store key for tests; the same for the same name.
pub fn key(name: &str) -> StoreKey {
    let mut digest = [0; 16];
    blake3::Hasher::new().update(name.as_bytes()).finalize_xof().fill(&mut digest);
    StoreKey::new(&scope("tests"), Digest::from_bytes(digest))
}

/// A fingerprint for tests: the byte that names its specification, and a number for the content.
pub fn fingerprint(specification: u8, content: u8) -> Fingerprint {
    Fingerprint::from_bytes([specification, content, content, content, content, content, content])
}

/// A scope for tests.
///
/// # Panics
/// When `name` is none that a scope may have.
pub fn scope(name: &str) -> Scope {
    Scope::new(name).expect("tests name their scopes by the rules")
}
