//! Fault-injection runs: real worker processes consume while faults hit them, their store, their
//! broker and the network between. `oncegate_testing::promise` records what they do and judges it,
//! as it does for a store or source of others.
//!
//! - `work` is a worker process; its store, source, dead letters and handler record what they do.
//! - `programs` are members of the other form: `oncegate run`, with `stdio`, a worker on standard
//!   streams, which may hang. Their calls of the store are not recorded, so `outside` judges what
//!   they did by what can be seen from the outside.
//! - `stage` has the servers and the workers, `faults` are what happens to them, `run` is one run,
//!   `records` what the store holds at its end.
//! - `points` makes a worker end or stop at a step of a message.
//! - `zombie` is a worker by itself, which is stopped between two steps and goes on too late.
//! - `commits` is the broker's own log of commits, and `sink` a downstream system that checks
//!   fencing tokens.

mod commits;
mod faults;
mod outside;
mod points;
mod programs;
mod records;
mod report;
mod run;
mod settings;
mod sink;
mod stage;
mod stdio;
mod work;
mod zombie;

pub use commits::commits_of;
pub use faults::Fault;
pub use oncegate_testing::promise::{Entry, History, Occurrence, POINTS, Point, StoreAnswer};
pub use report::{Report, Summary};
pub use run::{Plan, run, seed};
pub use settings::{Protocol, StoreKind, WorkerSettings};
pub use sink::Sink;
pub use stdio::serve;
pub use work::{SESSION, work};
pub use zombie::{Trap, Zombie};
