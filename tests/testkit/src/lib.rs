//! Real servers, and witnesses that are not oncegate's own code, for the tests and the benchmarks.
//!
//! Everything here panics with a clear text instead of returning an error, and nothing skips: a
//! test that cannot have its server has failed.
//!
//! Two ways to a server:
//!
//! - [`Redis::shared`], [`Postgres::shared`], [`Kafka::shared`], [`Sqs::shared`],
//!   [`RabbitMq::shared`] and [`Moto::shared`] give the one server of the whole run. `scripts/test`
//!   starts it and names it in [`REDIS_VARIABLE`] and its like; without the variable, the test
//!   process starts its own on first use. Tests keep apart by [`unique`] scopes, topics, groups and
//!   queues.
//! - [`RedisServer::start`], [`PostgresServer::start`], [`KafkaBroker::start`],
//!   [`KafkaCluster::start`], [`ElasticmqServer::start`], [`RabbitMqServer::start`],
//!   [`SchemaRegistry::start`] and [`MotoServer::start`] give a server for one test, for tests that
//!   stop it, kill it or change its settings. [`SqsProxy`] is a proxy before a shared SQS server,
//!   and makes calls fail.

pub mod fire;

use oncegate_servers::place;
pub use oncegate_servers::{
    DynamoDbServer, POSTGRES_VARIABLE, PgBouncer, Port as LoopbackPort, Postgres, PostgresServer,
    Process, SmallDisk, postgres_version, process, run_servers_on, unique,
};

mod acls;
mod broker;
mod bucket;
mod certificates;
mod consuming;
mod elasticmq;
mod http;
mod kafka;
mod kafka_cluster;
mod kafka_topics;
mod ledger;
mod moto;
mod proxy;
mod rabbitmq;
mod rabbitmq_queue;
mod rabbitmq_raw;
mod rabbitmq_server;
mod record;
mod redis;
mod redis_cluster;
mod redis_pair;
mod redis_sentinel;
mod registry;
mod secured_broker;
mod sqs;
mod sqs_proxy;
mod till;
mod token_server;
mod until;
mod watched;
mod web;
mod wire;
mod workers;

pub use acls::{On, Right};
pub use broker::KafkaBroker;
pub use bucket::Bucket;
pub use certificates::Certificates;
pub use consuming::Consuming;
pub use elasticmq::ElasticmqServer;
pub use kafka::{Kafka, VARIABLE as KAFKA_VARIABLE};
pub use kafka_cluster::KafkaCluster;
pub use ledger::{Effect, Ledger};
pub use moto::{Moto, MotoServer, VARIABLE as MOTO_VARIABLE, aws_python};
pub use proxy::{Mode as ProxyMode, Proxy};
pub use rabbitmq::{RabbitMq, VARIABLE as RABBITMQ_VARIABLE};
pub use rabbitmq_queue::{QueueKind, RabbitQueue};
pub use rabbitmq_raw::{RawMessage, long, publish_raw, short};
pub use rabbitmq_server::{RabbitMqServer, RabbitRelease};
pub use record::Record;
pub use redis::{Redis, RedisServer, VARIABLE as REDIS_VARIABLE};
pub use redis_cluster::RedisCluster;
pub use redis_pair::RedisPair;
pub use redis_sentinel::RedisSentinels;
pub use registry::{SchemaRegistry, schema_python};
pub use secured_broker::SecuredKafka;
pub use sqs::{Depth, Queue, Sqs, VARIABLE as SQS_VARIABLE};
pub use sqs_proxy::{Fault, SqsProxy};
pub use till::{CLIENTS, Client, End, Payment, Till};
pub use token_server::{TokenFlaw, TokenServer};
pub use until::until;
pub use watched::Watched;
pub use web::{HttpAnswer, HttpClient, HttpServer, Sent};
pub use wire::{Step, Then, Wire};
pub use workers::Workers;

/// The number of random sequences of operations by which a port is compared with the rules:
/// `ONCEGATE_SEQUENCES`, or 5,000.
///
/// # Panics
/// When the variable is no number.
#[must_use]
pub fn sequences() -> usize {
    std::env::var("ONCEGATE_SEQUENCES").map_or(5_000, |number| {
        number.parse().expect("ONCEGATE_SEQUENCES must be a number")
    })
}
