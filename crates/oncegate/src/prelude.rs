//! The names that a consumer needs: `use oncegate::prelude::*;`.
//!
//! Everything else is in the crate's modules.

pub use crate::attempt::Attempt;
pub use crate::backoff::Backoff;
pub use crate::consumer::{Consumer, ConsumerError, Ordering};
pub use crate::failure::{BoxError, Failure, OrPermanent};
pub use crate::gate::{Gate, OnStoreLoss};
pub use crate::handler::Handler;
#[cfg(feature = "kafka")]
pub use crate::kafka::KafkaSource;
pub use crate::memory::MemoryStore;
pub use crate::message::Message;
#[cfg(feature = "postgres")]
pub use crate::postgres::PostgresStore;
#[cfg(feature = "redis")]
pub use crate::redis::RedisStore;
pub use crate::shutdown::shutdown_signal;
#[cfg(feature = "sqlite-system")]
pub use crate::sqlite::SqliteStore;
#[cfg(feature = "sqs")]
pub use crate::sqs::SqsSource;
pub use oncegate_core::key::{Field, FingerprintSpec, Key};
