//! Outboxes in real databases, with a real Kafka and a real SQS server: what transactions write is
//! published once they are committed.

#![allow(clippy::unwrap_used, reason = "tests")]

mod content;
mod faults;
mod foreign;
mod kill;
mod parts;
mod sqlite;
mod sqs;
mod topics;
mod world;
