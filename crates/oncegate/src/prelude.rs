//! The names that a consumer needs: `use oncegate::prelude::*;`.
//!
//! Everything else is in the crate's modules.

#[cfg(feature = "amqp")]
pub use oncegate_amqp::AmqpSource;
pub use oncegate_core::key::{Field, FingerprintSpec, Key};
#[cfg(feature = "kafka")]
pub use oncegate_kafka::KafkaSource;
#[cfg(feature = "postgres")]
pub use oncegate_postgres::PostgresStore;
#[cfg(feature = "redis")]
pub use oncegate_redis::RedisStore;
pub use oncegate_runtime::{
    Attempt, Backoff, BatchHandler, BatchLimits, BatchMessage, Batched, BoxError, Consumer,
    ConsumerError, Failure, Gate, Handler, MemoryStore, Message, OnStoreLoss, OrPermanent,
    Ordering, Transactional, TransactionalBatchHandler, TransactionalHandler, shutdown_signal,
};
#[cfg(feature = "sqlite-system")]
pub use oncegate_sqlite::SqliteStore;
#[cfg(feature = "sqs")]
pub use oncegate_sqs::SqsSource;
