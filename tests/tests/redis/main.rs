//! The Redis store on real servers.

mod conformance;
mod equivalence;
mod faults;
mod hand;
mod proxy;
mod server;
