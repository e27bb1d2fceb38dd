//! The PostgreSQL store on real servers.

#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "a test that cannot go on has failed"
)]

#[path = "../../../crates/oncegate-runtime/tests/runtime/list.rs"]
#[allow(dead_code, reason = "its other users need more of it")]
mod list;

mod begins;
mod conformance;
mod equivalence;
mod faults;
mod hand;
mod plans;
mod pooler;
mod proxy;
mod purge;
mod server;
mod sqlstates;
mod standbys;
mod tables;
mod tls;
