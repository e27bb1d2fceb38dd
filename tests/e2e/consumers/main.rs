//! Consumers as a whole, and processes of them: each file is about one thing. They are one program
//! because each program is linked with every client library.
#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "a test that cannot go on has failed"
)]

mod bad_input;
mod batches;
mod breaker;
mod handlers;
mod kafka_memory;
mod kill;
mod other_language;
mod processes;
mod promises;
mod readme;
mod redis_at_scale;
mod replay;
mod retry_topics;
mod sqlite_disk;
mod sqlite_processes;
mod store_outage;
