//! The stage that the programs play on: a broker, and worker processes that can be killed.
//!
//! What you would write yourself is in `payments/worker.rs` and `payments_sqs/worker.rs`.

pub mod broker;
pub mod crew;

/// The guide's programs, compiled and run as documentation tests.
#[cfg(doctest)]
#[doc = include_str!("../../docs/GUIDE.md")]
pub mod guide {}
