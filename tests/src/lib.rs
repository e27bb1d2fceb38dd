//! Real servers, and witnesses that are not oncegate's own code, for the tests and the benchmarks.
//!
//! Everything here panics with a clear text instead of returning an error, and nothing skips: a test
//! that cannot have its server has failed.
//!
//! Two ways to a server:
//!
//! - [`Redis::shared`], [`Postgres::shared`], [`Kafka::shared`], [`Sqs::shared`] and [`Moto::shared`] give
//!   the one server of the whole run. `scripts/test` starts it and names it in [`REDIS_VARIABLE`] and its
//!   like; without the variable, the test process starts its own on first use. Tests keep apart by
//!   [`unique`] scopes, topics, groups and queues.
//! - [`RedisServer::start`], [`PostgresServer::start`], [`KafkaBroker::start`], [`ElasticmqServer::start`]
//!   and [`MotoServer::start`] give a server of one's own, for the tests that stop it, kill it or change its
//!   settings. [`SqsProxy`] stands before a server of SQS that is shared, and lets calls go wrong.

pub mod process;

mod broker;
mod elasticmq;
mod http;
mod kafka;
mod ledger;
mod moto;
mod place;
mod postgres;
mod redis;
mod sqs;
mod sqs_proxy;
mod watched;
mod workers;

pub use broker::KafkaBroker;
pub use elasticmq::ElasticmqServer;
pub use kafka::{Kafka, Record, VARIABLE as KAFKA_VARIABLE};
pub use ledger::{Effect, Ledger};
pub use moto::{Moto, MotoServer, VARIABLE as MOTO_VARIABLE};
pub use postgres::{Postgres, PostgresServer, VARIABLE as POSTGRES_VARIABLE};
pub use process::Process;
pub use redis::{Redis, RedisServer, VARIABLE as REDIS_VARIABLE};
pub use sqs::{Depth, Queue, Sqs, VARIABLE as SQS_VARIABLE};
pub use sqs_proxy::{Fault, SqsProxy};
pub use watched::Watched;
pub use workers::Workers;

/// A name that no other test, process or earlier run has used: `prefix-` and 16 hex digits.
///
/// It fits Kafka's topic and group names, SQS's queues and oncegate's scopes, if the prefix does.
#[must_use]
pub fn unique(prefix: &str) -> String {
    format!("{prefix}-{:016x}", fastrand::u64(..))
}
