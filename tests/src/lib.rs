//! Real servers, and witnesses that are not oncegate's own code, for the tests and the benchmarks.
//!
//! Everything here panics with a clear text instead of returning an error, and nothing skips: a test
//! that cannot have its server has failed.
//!
//! Two ways to a server:
//!
//! - [`Redis::shared`], [`Postgres::shared`] and [`Kafka::shared`] give the one server of the whole run.
//!   `scripts/test` starts it and names it in [`REDIS_VARIABLE`], [`POSTGRES_VARIABLE`] and
//!   [`KAFKA_VARIABLE`]; without the variable, the test process starts its own on first use. Tests keep
//!   apart by [`unique`] scopes, topics and groups.
//! - [`RedisServer::start`], [`PostgresServer::start`] and [`KafkaBroker::start`] give a server of one's
//!   own, for the tests that stop it, kill it or change its settings.

pub mod process;

mod broker;
mod kafka;
mod ledger;
mod place;
mod postgres;
mod redis;
mod watched;
mod web;

pub use broker::KafkaBroker;
pub use kafka::{Kafka, Record, VARIABLE as KAFKA_VARIABLE};
pub use ledger::{Effect, Ledger};
pub use postgres::{Postgres, PostgresServer, VARIABLE as POSTGRES_VARIABLE};
pub use process::Process;
pub use redis::{Redis, RedisServer, VARIABLE as REDIS_VARIABLE};
pub use watched::Watched;
pub use web::{HttpAnswer, HttpClient, HttpServer, Sent};

/// A name that no other test, process or earlier run has used: `prefix-` and 16 hex digits.
///
/// It fits Kafka's topic and group names and oncegate's scopes, if the prefix does.
#[must_use]
pub fn unique(prefix: &str) -> String {
    format!("{prefix}-{:016x}", fastrand::u64(..))
}
