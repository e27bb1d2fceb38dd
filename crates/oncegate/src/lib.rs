//! oncegate makes consumers of Kafka, SQS and RabbitMQ safe against duplicates: a handler runs once
//! for messages that mean the same, its result is stored, later deliveries get that result, and a
//! message is acknowledged only after that.
//!
//! Start with [`Handler`] (the work), [`Key`] (what "the same message" means), [`Gate`] (scope, key
//! and store, leases and retention) and [`Consumer`] (a source, a gate and a handler). Loops of
//! your own use the gate alone: [`Gate::enter`]. The README of the repository has a complete
//! program, `docs/GUIDE.md` the reasons behind each setting.
//!
//! ```
//! use oncegate::{Attempt, Failure, Gate, Handler, Key, MemoryStore, Message};
//!
//! struct Billing;
//!
//! impl Handler for Billing {
//!     type Output = String;
//!
//!     async fn handle(&self, message: &Message, attempt: &Attempt) -> Result<String, Failure> {
//!         Ok(format!("charged under {}", attempt.idempotency_key("charge")))
//!     }
//! }
//!
//! let gate = Gate::new("billing", Key::json(["order_id"]), MemoryStore::new());
//! // Consumer::new(source, gate, Billing).run_until(shutdown).await?;
//! # let _ = (gate, Billing);
//! ```
//!
//! # What is promised
//!
//! Nothing is lost; a stale owner cannot write; completed is final for the retention; no two
//! different messages share a record; and a handler runs once, plus once for each counted fault
//! ([`observe::ExtraRunCause`]) and for each retry it requests. With an SQL store and the effect in
//! the same transaction ([`Attempt::commit_with`]), exactly one effect is committed. Never
//! exactly-once delivery, and not exactly-once for effects outside the store: a crash between the
//! effect and its completion leads to a second run, which is flagged by [`Attempt::recovered`].
//!
//! # The path of a message
//!
//! A message takes one path:
//!
//! ```text
//! source (kafka | sqs | amqp)  →  lanes (order, permits)  →  key  →  gate (claim … complete)  →  handler
//!        ↑ ack only from here: settle  ←───────────────────────────────────┘ outcome
//! ```
//!
//! # Features
//!
//! | feature | what | default |
//! |---|---|---|
//! | `kafka` | [`kafka`]: source, dead letters, topic reader, over librdkafka | yes |
//! | `kafka-tls` | TLS and SASL (PLAIN, SCRAM) for it, over the system's OpenSSL | no |
//! | `kafka-oauth`, `kafka-msk-iam` | SASL OAUTHBEARER with tokens of an OAuth 2.0 server, and with those for Amazon MSK | no |
//! | `redis` | [`redis`]: the store in Redis or Valkey: one server, Sentinel or Cluster | yes |
//! | `redis-tls` | TLS for it (`rediss://`) | no |
//! | `sqlite` | [`sqlite`]: the store in one SQLite file, SQLite built in | yes |
//! | `sqlite-system` | the same, linked to the system's SQLite | no |
//! | `postgres` | `postgres`: the store in PostgreSQL | no |
//! | `dynamodb` | `dynamodb`: the store in a table of Amazon DynamoDB | no |
//! | `http` | `http`: `Idempotency-Key` for tower and axum | no |
//! | `sqs` | `sqs`: source and dead letters on Amazon SQS | no |
//! | `sqs-s3` | payloads that Amazon's extended clients have put into S3 | no |
//! | `amqp` | `amqp`: source and dead letters on RabbitMQ | no |
//! | `amqp-tls` | TLS for it (`amqps://`) | no |
//! | `sqlx` | [`Attempt::commit_with`] takes sqlx's transactions on PostgreSQL | no |
//! | `schema` | `schema`: keys of Avro, Protobuf and compressed payloads, with a schema registry or a file | no |
//! | `lambda` | `lambda`: handlers as AWS Lambda functions | no |
//! | `results-fs` | [`results`]: large results in files, or behind a client of `object_store` | no |
//! | `results-s3` | the same in S3 | no |
//! | `metrics` | [`telemetry`]: metrics through the `metrics` facade | no |
//! | `status` | the same as a router with `/metrics`, `/healthz`, `/readyz` and a status page | no |
//! | `otel` | spans of handlers join their producers' traces | no |
//! | `config` | settings can be read from files, and have a JSON schema | no |
//! | `messagepack` | [`Codec`] has MessagePack besides JSON | no |
//! | `testing` | for the project's own tests; no promise about its names | no |

pub mod prelude;

pub use oncegate_admin as admin;
pub use oncegate_core as core;
pub use oncegate_core::key::{Field, FingerprintSpec, Key, TenantSource};
pub use oncegate_outbox as outbox;
pub use oncegate_runtime::{
    AfterUnknown, Attempt, Backoff, BatchHandler, BatchLimits, BatchMessage, Batched,
    BlockingSqlTransaction, BoxError, Broker, CheckedSource, Codec, Completing, Completion,
    Consumer, ConsumerError, ConsumerSettings, Counters, Documents, Entry, Event, Failure, Gate,
    GateError, GateSettings, Handler, Header, Health, Lease, MemorySource, MemoryStore, Message,
    Monitor, NotCommitted, Observer, OnStoreLoss, OrPermanent, Ordering, Origin, OtherBroker, Raw,
    SqlTransaction, Status, Transactional, TransactionalBatchHandler, TransactionalHandler,
    Transactions, shutdown_signal,
};
pub use oncegate_runtime::{
    attempt, backoff, batch, codec, consumer, dead_letters, failure, gate, handler, health,
    journal, message, observe, running, source, transaction, transactional,
};

#[cfg(feature = "amqp")]
pub use oncegate_amqp as amqp;
#[cfg(feature = "dynamodb")]
pub use oncegate_dynamodb as dynamodb;
#[cfg(feature = "http")]
pub use oncegate_http as http;
#[cfg(feature = "kafka")]
pub use oncegate_kafka as kafka;
#[cfg(feature = "lambda")]
pub use oncegate_lambda as lambda;
#[cfg(feature = "postgres")]
pub use oncegate_postgres as postgres;
#[cfg(feature = "redis")]
pub use oncegate_redis as redis;
#[cfg(feature = "schema")]
pub use oncegate_schema as schema;
#[cfg(feature = "sqlite-system")]
pub use oncegate_sqlite as sqlite;
#[cfg(feature = "sqs")]
pub use oncegate_sqs as sqs;
#[cfg(any(feature = "sqlite-system", feature = "postgres"))]
pub use oncegate_store_toolkit::archive;
#[cfg(feature = "metrics")]
pub use oncegate_telemetry as telemetry;

/// Results that are too large for a record.
pub mod results {
    #[cfg(feature = "results-fs")]
    pub use oncegate_object_store::ObjectResults;
    pub use oncegate_runtime::results::*;
}

/// The program of the tutorial, compiled as a documentation test.
#[cfg(all(doctest, feature = "kafka", feature = "redis"))]
#[doc = include_str!("../../../docs/tutorials/rust.md")]
pub mod tutorial {}

/// The program of the Redis document, compiled as a documentation test.
#[cfg(all(doctest, feature = "redis"))]
#[doc = include_str!("../../../docs/REDIS.md")]
pub mod guide_to_redis {}

/// The programs of the HTTP document, compiled as documentation tests.
#[cfg(all(doctest, feature = "http", feature = "postgres", feature = "sqlite"))]
#[doc = include_str!("../../../docs/HTTP.md")]
pub mod guide_to_http {}

/// The program of the document about Lambda, compiled as a documentation test.
#[cfg(all(doctest, feature = "lambda", feature = "redis"))]
#[doc = include_str!("../../../docs/LAMBDA.md")]
pub mod guide_to_lambda {}

/// The programs of the observability document, compiled as documentation tests.
#[cfg(all(doctest, feature = "kafka", feature = "status"))]
#[doc = include_str!("../../../docs/OBSERVABILITY.md")]
pub mod observability {}
