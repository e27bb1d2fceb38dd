//! The RabbitMQ source on real servers.
#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "a test that cannot go on has failed"
)]

mod stage;

mod connections;
mod consumers;
mod fire;
mod frames;
mod happy;
mod letters;
mod redrive;
mod restarts;
mod returns;
mod startup;
mod tls;
