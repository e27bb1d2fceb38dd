//! Work under a claim, for doors that are no consumer: above the gate, and it knows no source.
//!
//! [`policy`] is the table of what follows an attempt; consumers and HTTP layers ask it, too.
//! [`Gate::run`](crate::Gate::run) is the smallest door: it runs a closure and returns its result.
//! [`detached`] is for work of other processes, which send their own heartbeats.

pub mod policy;

pub mod detached;
mod run;

pub use run::{Done, RunError, Runner};
