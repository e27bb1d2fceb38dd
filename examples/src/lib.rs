//! Programs to start from: see `payments/`.

/// The guide's programs, compiled and run as documentation tests.
#[cfg(doctest)]
#[doc = include_str!("../../docs/GUIDE.md")]
pub mod guide {}
