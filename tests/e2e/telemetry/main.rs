//! What operators see, on real servers: metrics, probes, the status page in a browser, spans, alert
//! rules, and nothing of what messages hold.

#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "a test that cannot go on has failed"
)]

mod canary;
mod documents;
mod endpoint;
mod page;
mod seen;
mod spans;
mod stage;
