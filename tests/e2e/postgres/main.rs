//! The PostgreSQL store on real servers.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test that cannot go on has failed")]

mod conformance;
mod equivalence;
mod faults;
mod hand;
mod pooler;
mod proxy;
mod purge;
mod server;
mod sqlstates;
mod standbys;
mod tls;
