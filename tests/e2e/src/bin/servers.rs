//! `servers COMMAND [ARGUMENT…]`: starts the servers of a run, passes their addresses to the
//! command, and stops them when it ends. Its exit code is the command's.
//!
//! A server that the environment names already is used, and not started or stopped.

use std::any::Any;
use std::process::{Command, ExitCode};

use oncegate_testkit::{
    ElasticmqServer, KAFKA_VARIABLE, KafkaBroker, MOTO_VARIABLE, MotoServer, POSTGRES_VARIABLE,
    PostgresServer, Process, RABBITMQ_VARIABLE, REDIS_VARIABLE, RabbitMqServer, RedisServer,
    SQS_VARIABLE, process,
};

/// A server of the run: its address, and its handle if this process started it.
struct Server {
    variable: &'static str,
    address: String,
    own: Option<Box<dyn Any>>,
}

impl Server {
    /// The one that the variable names, or one that is started.
    async fn of<S: 'static>(
        variable: &'static str,
        start: impl Future<Output = S>,
        address: impl FnOnce(&S) -> String,
    ) -> Self {
        if let Ok(address) = std::env::var(variable) {
            return Self {
                variable,
                address,
                own: None,
            };
        }
        let server = start.await;
        Self {
            variable,
            address: address(&server),
            own: Some(Box::new(server)),
        }
    }
}

#[tokio::main]
async fn main() -> ExitCode {
    let mut arguments = std::env::args_os().skip(1);
    let Some(program) = arguments.next() else {
        eprintln!("usage: servers COMMAND [ARGUMENT…]");
        return ExitCode::from(2);
    };
    let (redis, postgres, kafka, sqs, moto, rabbitmq) = tokio::join!(
        Server::of(REDIS_VARIABLE, RedisServer::start(), |server| server
            .url()
            .to_owned()),
        Server::of(POSTGRES_VARIABLE, PostgresServer::start(), |server| server
            .url()
            .to_owned()),
        Server::of(KAFKA_VARIABLE, KafkaBroker::start_for_long(), |server| {
            server.bootstrap().to_owned()
        }),
        Server::of(SQS_VARIABLE, ElasticmqServer::start(), |server| server
            .endpoint()
            .to_owned()),
        Server::of(MOTO_VARIABLE, MotoServer::start(), |server| server
            .endpoint()
            .to_owned()),
        Server::of(RABBITMQ_VARIABLE, RabbitMqServer::start(), |server| server
            .addresses()),
    );
    // They stay in here until the end of main, which drops and so stops them.
    let servers = [redis, postgres, kafka, sqs, moto, rabbitmq];
    for server in &servers {
        // A URL from the environment may hold a password.
        let place = server.address.rsplit('@').next().unwrap_or_default();
        let by_whom = if server.own.is_some() {
            "started"
        } else {
            "found"
        };
        eprintln!("==> {}: {place} ({by_whom})", server.variable);
    }

    // A signal that ends this process ends the command too.
    let mut command: Command = process::bound_to_parent(&program, "TERM");
    command.args(arguments);
    command.envs(
        servers
            .iter()
            .map(|server| (server.variable, &server.address)),
    );
    let status = Process::spawn("the command", command).end().await;
    // Ended by a signal: no code. Shells return 128 and more then.
    let code = status.code().and_then(|code| u8::try_from(code).ok());
    ExitCode::from(code.unwrap_or(128))
}
