//! Workers under fire: a short run on every store with each fault once, and zombies between every
//! two steps.
//!
//! `scripts/torture` runs for as long as one likes.

#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "a test that cannot go on has failed"
)]

mod short;
mod zombies;
