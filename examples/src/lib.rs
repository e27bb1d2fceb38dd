//! Shared parts of the examples: their stage, a broker, a database, and worker processes that are
//! killed in a payment.
//!
//! What you would write yourself is in `payments/{billing,worker}.rs`, `payments_sqs/worker.rs`,
//! `payments_amqp/worker.rs`, `payments_avro/{billing,worker}.rs`, `payments_http/`,
//! `payments_postgres/worker.rs`, `batch/` and `outbox/`.

pub mod broker;
pub mod crew;
pub mod database;
pub mod hang;
pub mod payments;
pub mod queue;
pub mod show;
pub mod stage;

/// The programs of the outbox document, compiled as documentation tests.
#[cfg(all(doctest, feature = "sqs"))]
#[doc = include_str!("../../docs/OUTBOX.md")]
pub mod outbox {}

/// The guide's programs, compiled and run as documentation tests.
#[cfg(all(doctest, feature = "sqs"))]
#[doc = include_str!("../../docs/GUIDE.md")]
pub mod guide {}

/// The programs of the manuals of SQLite and SQS, compiled as documentation tests.
#[cfg(all(doctest, feature = "sqs"))]
#[doc = include_str!("../../docs/SQLITE.md")]
#[doc = include_str!("../../docs/SQS.md")]
pub mod manuals {}

/// The program of the manual of RabbitMQ, compiled as a documentation test.
#[cfg(all(doctest, feature = "amqp"))]
#[doc = include_str!("../../docs/AMQP.md")]
pub mod amqp {}

/// The programs of the HTTP manual, compiled as documentation tests.
#[cfg(all(doctest, feature = "sqs"))]
#[doc = include_str!("../../docs/HTTP.md")]
pub mod http {}
