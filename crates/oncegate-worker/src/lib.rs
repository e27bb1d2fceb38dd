//! Workers in any language: calls them by HTTP, by JSON lines on their standard streams, or as a
//! program for each message, and gives a consumer their replies.
//!
//! `docs/RUN.md` of the repository is the manual: what a worker gets, and what its answers mean.
//! The command `oncegate` takes the settings from flags and files, and uses this crate. A program
//! that starts workers calls [`become_worker`] first.
//!
//! A file imports files of lower layers, and of its own layer those to its right:
//!
//! | layer | files |
//! |---|---|
//! | what a consumer and a test use | `conformance`, `handler`, `worker` |
//! | the ways to call a worker | `http`, `exec`, `command` |
//! | processes, and what is told of them | `process`, `program`, `report`, `error` |
//! | what is said | `protocol` |
//!
//! | what | where |
//! |---|---|
//! | what a worker receives | `protocol::lines`, `protocol::request`; for a command, `command` |
//! | which headers of a message are passed on | `protocol::attributes` |
//! | what an answer means | `protocol::answer` (HTTP), `protocol::lines` (lines), `command` (exit codes) |
//! | where an answer on standard output ends, and what is no answer | `protocol::values`, `protocol::lines` |
//! | what a reply means for the message | `handler` |
//! | when wrong answers stop a consumer | `exec::violations` |
//! | when a worker that hangs or has ended is replaced | `exec::{slot, session}` |
//! | when a process has ended, and what becomes of what it leaves behind | `process` |
//! | when a request counts as lost with its connection | `http::tracked` |
//! | when a connection is used again | `http::trial` |

mod command;
mod conformance;
mod error;
mod exec;
mod handler;
mod http;
mod process;
mod program;
mod protocol;
mod report;
mod worker;

pub use conformance::{Dialogue, Interrupted, Subject};
pub use error::WorkerError;
pub use exec::Supervisor;
pub use handler::{BeforeRun, WorkerHandler};
pub use http::{HttpSettings, check_url};
/// The client by which workers are called, for programs that call other services: connections over
/// TCP, TLS or a Unix socket that say whether a request was sent.
pub mod client {
    pub use crate::http::{Endpoint, RequestError, Way};
}
pub use process::become_worker;
pub use program::Program;
pub use protocol::reply::{Reply, ResultBody, WorkerResult};
pub use protocol::request::TokenSource;
pub use report::{Capacity, WorkerReport};
pub use worker::{Worker, WorkerKind, WorkerLimits};
