//! The SQS source on real servers: `ElasticMQ`, and moto as a second opinion.
#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "a test that cannot go on has failed"
)]

mod stage;

mod content;
mod deletes;
mod fifo;
mod happy;
mod health;
mod held;
mod kill;
mod outages;
mod retries;
mod returned;
mod s3;
mod startup;
mod stop;
