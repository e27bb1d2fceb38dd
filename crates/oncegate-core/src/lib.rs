//! The heart of oncegate: what makes two messages the same, what a store holds for them, and the rules by
//! which that changes. It opens no socket and reads no clock; time and randomness are parameters.
//!
//! - [`key`]: from business fields to an idempotency key
//! - [`record`]: what a store holds for a key
//! - [`rules`]: the one pure function that says what each operation does to a record
//! - [`store`]: the port that every store implements, and the store in memory
//! - `testing` (a feature): the conformance suite that every store passes

pub mod key;
pub mod record;
pub mod rules;
pub mod store;
#[cfg(feature = "testing")]
pub mod testing;
