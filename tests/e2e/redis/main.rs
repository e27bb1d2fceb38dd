//! The Redis store on real servers.
#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "a test that cannot go on has failed"
)]

mod cluster;
mod compact;
mod conformance;
mod durability;
mod equivalence;
mod faults;
mod gates;
mod hand;
mod losses;
mod lost_replies;
mod rights;
mod runtimes;
mod sentinel;
mod server;
mod shard_down;
mod sharded;
mod tls;
