//! Programs to start from: see `payments/` and `payments_http/`.

/// The guide's programs, compiled and run as documentation tests.
#[cfg(doctest)]
#[doc = include_str!("../../docs/GUIDE.md")]
pub mod guide {}

/// The programs of the HTTP manual, compiled as documentation tests.
#[cfg(doctest)]
#[doc = include_str!("../../docs/HTTP.md")]
pub mod http {}
