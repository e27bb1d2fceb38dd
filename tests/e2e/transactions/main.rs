//! Effects inside the user's own transaction: business rows and COMPLETED commit together, or
//! neither does.

#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "a test that cannot go on has failed"
)]

#[path = "../../../crates/oncegate-runtime/tests/runtime/list.rs"]
#[allow(dead_code, reason = "its other users need more of it")]
mod list;

mod batch_conflicts;
mod batches;
mod begins;
mod cancels;
mod consumer;
mod faults;
mod journal;
mod journal_rules;
mod kill;
mod lease;
mod pay_all;
mod place;
mod statement;
mod transactional;
mod transactional_conflicts;
mod transactional_rules;
