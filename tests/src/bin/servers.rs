//! `servers COMMAND [ARGUMENT…]`: starts the servers of a run, tells the command where they are, and
//! stops them when it ends. Its exit code is the command's.
//!
//! A server that the environment names already is used, and not started or stopped.

use std::process::{Command, ExitCode};

use oncegate_tests::{
    KAFKA_VARIABLE, Kafka, KafkaBroker, POSTGRES_VARIABLE, Postgres, PostgresServer, Process, REDIS_VARIABLE,
    Redis, RedisServer, process,
};

#[tokio::main]
async fn main() -> ExitCode {
    let mut arguments = std::env::args_os().skip(1);
    let Some(program) = arguments.next() else {
        eprintln!("usage: servers COMMAND [ARGUMENT…]");
        return ExitCode::from(2);
    };
    // The servers stay in these three until the end of main, which drops and so stops them.
    let own_redis = match std::env::var_os(REDIS_VARIABLE) {
        Some(_) => None,
        None => Some(RedisServer::start().await),
    };
    let own_postgres = match std::env::var_os(POSTGRES_VARIABLE) {
        Some(_) => None,
        None => Some(PostgresServer::start().await),
    };
    let own_kafka = match std::env::var_os(KAFKA_VARIABLE) {
        Some(_) => None,
        None => Some(KafkaBroker::start().await),
    };
    let redis = match &own_redis {
        Some(server) => (**server).clone(),
        None => Redis::shared().await,
    };
    let postgres = match &own_postgres {
        Some(server) => (**server).clone(),
        None => Postgres::shared().await,
    };
    let kafka = match &own_kafka {
        Some(broker) => (**broker).clone(),
        None => Kafka::shared().await,
    };
    let by_whom = |own: bool| if own { "started" } else { "found" };
    eprintln!("==> Redis {} ({})", redis.url(), by_whom(own_redis.is_some()));
    // Its URL may hold a password when somebody else named it.
    let postgres_place = postgres.url().rsplit('@').next().unwrap_or_default();
    eprintln!("==> PostgreSQL {postgres_place} ({})", by_whom(own_postgres.is_some()));
    eprintln!("==> Kafka {} ({})", kafka.bootstrap(), by_whom(own_kafka.is_some()));

    // Whoever ends this process with a signal means the command too.
    let mut command: Command = process::bound_to_parent(&program, "TERM");
    command
        .args(arguments)
        .env(REDIS_VARIABLE, redis.url())
        .env(POSTGRES_VARIABLE, postgres.url())
        .env(KAFKA_VARIABLE, kafka.bootstrap());
    let status = Process::spawn("the command", command).end().await;
    // Ended by a signal: no code. Shells say 128 and more then.
    let code = status.code().and_then(|code| u8::try_from(code).ok());
    ExitCode::from(code.unwrap_or(128))
}
