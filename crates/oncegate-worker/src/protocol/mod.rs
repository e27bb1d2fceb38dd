//! The protocol of workers, as `docs/RUN.md` of the repository has it: what they get and what their
//! answers mean. No process and no connection.
//!
//! | layer | files |
//! |---|---|
//! | what a worker has written; what it is sent by HTTP | `values`, `answer`, `request` |
//! | lines to a worker; objects of it | `lines`, `said`, `repaired`, `json` |
//! | a message and its reply | `call`, `reply`, `attributes`, `origin` |

pub(crate) mod answer;
pub(crate) mod attributes;
pub(crate) mod call;
mod json;
pub(crate) mod lines;
pub(crate) mod origin;
mod repaired;
pub(crate) mod reply;
pub(crate) mod request;
pub(crate) mod said;
pub(crate) mod values;
