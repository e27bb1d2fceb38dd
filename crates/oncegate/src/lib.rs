//! oncegate makes Kafka and SQS consumers safe against duplicates: a handler runs once for messages that mean the same,
//! its result is stored, later deliveries get that result, and a message is acknowledged only after that.
//!
//! Start with [`Handler`] (the work), [`Key`] (what "the same message" means), [`Gate`] (scope, key and store, leases
//! and retention) and [`Consumer`] (a source, a gate and a handler). Loops of your own use the gate alone:
//! [`Gate::enter`]. The README of the repository has a complete program, `docs/GUIDE.md` the reasons behind each
//! setting.
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
//! Nothing is lost; a stale owner cannot write; completed is final for the retention; no two different messages share
//! a record; and a handler runs once, plus once for each counted fault ([`observe::ExtraRunCause`]) and for each retry
//! it requests. With an SQL store and the effect in the same transaction ([`Attempt::commit_with`]), exactly one effect
//! is committed. Never exactly-once delivery, and not exactly-once for effects outside the store: a crash between the
//! effect and its completion leads to a second run, which is flagged by [`Attempt::recovered`].
//!
//! # The path of a message
//!
//! A message takes one path through this crate, and the modules are listed in that order:
//!
//! ```text
//! source (kafka | sqs)  →  lanes (order, permits)  →  key  →  gate (claim … complete)  →  handler
//!        ↑ ack only from here: settle  ←────────────────────────────┘ outcome
//! ```
//!
//! # Features
//!
//! | feature | what | default |
//! |---|---|---|
//! | `kafka` | [`kafka`]: source, dead letters, topic reader, over librdkafka | yes |
//! | `redis` | [`redis`]: the store in Redis or Valkey: one server, Sentinel or Cluster | yes |
//! | `redis-tls` | TLS for it (`rediss://`) | no |
//! | `sqlite` | [`sqlite`]: the store in one SQLite file, SQLite built in | yes |
//! | `sqlite-system` | the same, linked to the system's SQLite | no |
//! | `postgres` | `postgres`: the store in PostgreSQL | no |
//! | `http` | `http`: `Idempotency-Key` for tower and axum | no |
//! | `sqs` | `sqs`: source and dead letters on Amazon SQS | no |
//! | `sqlx` | [`Attempt::commit_with`] takes sqlx's transactions on PostgreSQL | no |
//! | `results-fs` | [`results`]: large results in files, or behind a client of `object_store` | no |
//! | `results-s3` | the same in S3 | no |
//! | `metrics` | [`telemetry`]: metrics through the `metrics` facade | no |
//! | `status` | the same as a router with `/metrics`, `/healthz`, `/readyz` and a status page | no |
//! | `otel` | spans of handlers join their producers' traces | no |
//! | `messagepack` | [`Codec`] has MessagePack besides JSON | no |
//! | `testing` | for the project's own tests; no promise about its names | no |

#[cfg(any(feature = "sqlite-system", feature = "postgres"))]
pub mod archive;
pub mod attempt;
pub mod backoff;
pub mod codec;
pub mod consumer;
pub mod dead_letter_reader;
pub mod dead_letters;
pub mod dry_run;
mod entropy;
pub mod failure;
pub mod gate;
pub mod handler;
pub mod health;
pub mod journal;
mod memory;
pub mod message;
pub mod observe;
pub mod operate;
pub mod prelude;
#[cfg(any(feature = "sqlite-system", feature = "postgres"))]
mod purge;
pub mod results;
mod shutdown;
pub mod source;
pub mod transaction;

#[cfg(any(feature = "redis", feature = "postgres"))]
mod batch;
#[cfg(any(feature = "redis", feature = "postgres"))]
mod clock;

#[cfg(feature = "metrics")]
pub mod telemetry;

#[cfg(feature = "http")]
pub mod http;
#[cfg(feature = "kafka")]
pub mod kafka;
#[cfg(feature = "postgres")]
pub mod postgres;
#[cfg(feature = "redis")]
pub mod redis;
#[cfg(feature = "sqlite-system")]
pub mod sqlite;
#[cfg(feature = "sqs")]
pub mod sqs;

pub use attempt::Attempt;
pub use backoff::Backoff;
pub use codec::{Codec, Raw};
pub use consumer::{Consumer, ConsumerError, Monitor, Ordering};
pub use failure::{BoxError, Failure, OrPermanent};
pub use gate::{Completion, Entry, Gate, GateError, Lease, NotCommitted, OnStoreLoss};
pub use handler::Handler;
pub use health::{Health, Status};
pub use memory::MemoryStore;
pub use message::{Header, Message, Origin};
pub use observe::{Counters, Event, Observer};
pub use oncegate_core as core;
pub use oncegate_core::key::{Field, FingerprintSpec, Key, TenantSource};
pub use shutdown::shutdown_signal;
pub use transaction::{Completing, SqlTransaction};

/// The README's programs, compiled as documentation tests.
#[cfg(all(doctest, feature = "kafka", feature = "redis"))]
#[doc = include_str!("../README.md")]
pub mod readme {}

/// The program of the Redis document, compiled as a documentation test.
#[cfg(all(doctest, feature = "redis"))]
#[doc = include_str!("../../../docs/REDIS.md")]
pub mod guide_to_redis {}

/// The guide's programs, compiled as documentation tests.
#[cfg(all(doctest, feature = "kafka", feature = "redis", feature = "sqlite", feature = "postgres"))]
#[doc = include_str!("../../../docs/GUIDE.md")]
pub mod guide {}

/// The programs of the observability document, compiled as documentation tests.
#[cfg(all(doctest, feature = "kafka", feature = "status"))]
#[doc = include_str!("../../../docs/OBSERVABILITY.md")]
pub mod observability {}
