//! The Redis store on real servers.

mod conformance;
mod equivalence;
mod hand;
