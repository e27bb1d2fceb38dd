//! Outboxes on a real Kafka and in real databases: what transactions write is published once they are committed.

#![allow(clippy::unwrap_used, reason = "tests")]

mod content;
mod faults;
mod kill;
mod sqlite;
mod world;
