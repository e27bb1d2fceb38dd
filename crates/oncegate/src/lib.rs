//! oncegate makes Kafka and SQS consumers safe against duplicates.
//!
//! A message walks one way through this crate, and its modules stand in that order:
//!
//! ```text
//! source (kafka)  →  lanes (order, permits)  →  key  →  gate (claim … complete)  →  handler
//!        ↑ ack only from here: settle  ←──────────────────────┘ outcome
//! ```

pub mod backoff;
pub mod codec;
pub mod consumer;
pub mod dead_letters;
mod entropy;
pub mod failure;
pub mod gate;
pub mod handler;
mod memory;
pub mod message;
pub mod observe;
pub mod proof;
mod shutdown;
pub mod source;

#[cfg(feature = "redis")]
mod batch;

#[cfg(feature = "kafka")]
pub mod kafka;
#[cfg(feature = "redis")]
pub mod redis;
#[cfg(feature = "sqlite-system")]
pub mod sqlite;

pub use backoff::Backoff;
pub use codec::{Codec, Raw};
pub use consumer::{Consumer, ConsumerError, Ordering};
pub use failure::{BoxError, Failure, OrPermanent};
pub use gate::{Completion, Entry, Gate, GateError, Lease};
pub use handler::Handler;
pub use memory::MemoryStore;
pub use message::{Header, Message, Origin};
pub use observe::{Counters, Event, Observer};
pub use oncegate_core as core;
pub use oncegate_core::key::{Field, FingerprintSpec, Key, TenantSource};
pub use shutdown::shutdown_signal;
