//! `Idempotency-Key` over real sockets: every rule, every fault, and processes that are killed.

#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "a test that cannot go on has failed"
)]

mod faults;
mod held;
mod kill;
mod logs;
mod responses;
mod rules;
mod tasks;
mod teller;
mod transactions;
mod world;
