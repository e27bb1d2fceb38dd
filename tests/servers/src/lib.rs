//! Processes that end with their owner, places for their files and ports, and a PostgreSQL: what
//! tests and examples start, without any client of oncegate's.
//!
//! Everything here panics with a clear text instead of returning an error.

mod disk;
mod dynamodb;
mod pgbouncer;
pub mod place;
mod postgres;
mod postgres_server;
pub mod process;

pub use disk::SmallDisk;
pub use dynamodb::DynamoDbServer;
pub use pgbouncer::PgBouncer;
pub use place::Port;
pub use postgres::{Postgres, VARIABLE as POSTGRES_VARIABLE};
pub use postgres_server::{PostgresServer, version as postgres_version};
pub use process::{Process, run_servers_on};

/// A name that no other test, process or earlier run has used: `prefix-` and 16 hex digits.
///
/// It fits Kafka's topic and group names, SQS's queues and oncegate's scopes, if the prefix does.
#[must_use]
pub fn unique(prefix: &str) -> String {
    format!("{prefix}-{:016x}", fastrand::u64(..))
}
