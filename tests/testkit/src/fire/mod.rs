//! Fault-injection runs: real worker processes consume while faults hit them, their store, their broker and the
//! network between, and a judge checks the invariants on the history they wrote.
//!
//! - `history` is what the workers, the nemesis and the witnesses write: one line per event, in one file.
//! - `work` is a worker process; its store, source, dead letters and handler record what they do.
//! - `stage` has the servers and the workers, `faults` are what happens to them, `run` is one run.
//! - `zombie` is a worker by itself, which is stopped between two steps and goes on too late.
//! - `judge` finds violations in a history, `linear` those of the rules, key by key.

mod calls;
mod commits;
mod faults;
mod history;
mod judge;
mod linear;
mod points;
mod recorded;
mod report;
mod run;
mod sink;
mod stage;
mod work;
mod zombie;

#[cfg(test)]
mod tests;

pub use commits::commits_of;
pub use faults::Fault;
pub use history::{Answer, Entry, History, Op, What};
pub use points::{POINTS, Point};
pub use report::{Report, Summary};
pub use run::{Plan, run};
pub use sink::Sink;
pub use stage::{Protocol, StoreKind, WorkerSettings};
pub use work::{SESSION, work};
pub use zombie::{Trap, Zombie};
