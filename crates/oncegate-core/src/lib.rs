//! The core of oncegate: idempotency keys, the record that a store holds for a key, and the rules
//! that change it.
//!
//! This crate does no I/O and reads no clock; time and randomness are parameters.
//!
//! - [`key`]: derives an idempotency key from business fields
//! - [`record`]: what a store holds for a key
//! - [`reason`]: reasons as text for people
//! - [`rules`]: the one pure function that defines what each operation does to a record
//! - [`settings`]: settings as data, and their forms in files (a feature)
//! - [`store`]: the trait that every store implements, and the in-memory store
//! - `testing` (a feature): the conformance suite that every store must pass

pub mod key;
pub mod reason;
pub mod record;
pub mod rules;
pub mod settings;
pub mod store;
#[cfg(feature = "testing")]
pub mod testing;

/// Any error, boxed.
pub type BoxError = Box<dyn std::error::Error + Send + Sync + 'static>;
