//! oncegate makes Kafka and SQS consumers safe against duplicates.

pub mod dead_letters;
pub mod failure;
pub mod message;
pub mod observe;
pub mod source;

#[cfg(feature = "redis")]
mod batch;

#[cfg(feature = "kafka")]
pub mod kafka;
#[cfg(feature = "redis")]
pub mod redis;
#[cfg(feature = "sqlite-system")]
pub mod sqlite;
