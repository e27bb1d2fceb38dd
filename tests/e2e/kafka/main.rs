//! Kafka as a source, on a real broker.
#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "a test that cannot go on has failed"
)]

mod stage;

mod begin;
mod brokers;
mod commits;
mod connection;
mod data;
mod denied;
mod hanging;
mod health;
mod heartbeats;
mod letters;
mod membership;
mod oauth;
mod oauth_admin;
mod outage;
mod pauses;
mod reader;
mod refused;
mod rotation;
mod secured;
mod source;
mod storm;
mod topics;
mod unread;
