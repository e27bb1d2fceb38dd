//! `oncegate run`: consumes with a worker in any language.
//!
//! `flags` has the settings of the command line, `build` builds the library's parts from a configuration, `worker`
//! turns a worker into a handler. Workers are called by `http` (`wire`, `request`, `answer`), by JSON lines (`exec`,
//! `session`, `lines`), or are started for each message (`command`). `process` starts and ends their processes.

pub(crate) mod answer;
mod attributes;
pub(crate) mod build;
mod command;
pub(crate) mod conformance;
mod exec;
mod flags;
pub(crate) mod http;
mod lines;
mod origin;
pub(crate) mod process;
mod request;
mod session;
mod status;
pub(crate) mod wire;
mod worker;

use std::future::Future;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use hyper::header::HeaderValue;
use oncegate::telemetry::Telemetry;
use oncegate::{Consumer, ConsumerError, Gate};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::config::shape;
use crate::config::values::{Size, Time};
use crate::config::{self, LISTEN, Loaded, Secrets};
use crate::exit::{Exit, Problem, not_opened};
use crate::store;
use build::AnySource;
use exec::{Crew, Foreman};
use status::Served;
use worker::{Limited, Worker};

/// The time between two checks whether a worker is ready.
const READY_INTERVAL: Duration = Duration::from_millis(200);
/// The time between two log lines that a worker is not ready.
const READY_REMINDER: u32 = 50;

/// Run a consumer of topics or queues: a worker in any language handles each key once
///
/// The worker is called by HTTP (--handler), exchanges JSON lines on its standard streams (--handler-exec), or is
/// started for each message (--handler-command). docs/RUN.md describes its input and what its answers mean.
///
/// Settings come from a file, from variables such as ONCEGATE_CONSUMER__BILLING__LEASE over it, and from flags over
/// both. For one consumer the flags are enough. SIGTERM lets running work end; a second signal does not wait for it.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The configuration
    #[arg(long = "config", value_name = "FILE", env = "ONCEGATE_CONFIG")]
    config: Option<PathBuf>,

    /// Refuse secrets that are written in the configuration itself
    #[arg(long)]
    strict: bool,

    #[command(flatten)]
    flags: flags::Flags,
}

/// A consumer, its worker, and what must be stopped after it.
struct Assembled {
    name: String,
    consumer: Consumer,
    worker: Arc<Worker>,
    concurrency: u32,
    foreman: Option<Foreman>,
}

pub(crate) async fn run(args: &Args) -> Result<Exit, Problem> {
    let secrets = if args.strict { Secrets::MustBeElsewhere } else { Secrets::MayBeLiteral };
    let loaded = config::load(args.config.as_deref(), |known| args.flags.settings(known), secrets)?;
    if !loaded.findings.all.is_empty() {
        eprintln!("{}", loaded.render());
    }
    if loaded.findings.has_errors() {
        return Err(Problem::new(Exit::Configuration, "the configuration has errors"));
    }
    let stop = CancellationToken::new();
    let consuming = consume_all(&loaded, &stop);
    until_ended(consuming, &stop).await.map(|()| Exit::Yes)
}

/// Resolves at the first signal, which lets running work end; the second signal does not wait for it.
async fn until_ended(
    consuming: impl Future<Output = Result<(), Problem>> + Send,
    stop: &CancellationToken,
) -> Result<(), Problem> {
    let mut consuming = std::pin::pin!(consuming);
    tokio::select! {
        biased;
        ended = &mut consuming => return ended,
        () = oncegate::shutdown_signal() => {}
    }
    info!("stopping: running work may end; another signal does not wait for it");
    stop.cancel();
    tokio::select! {
        biased;
        ended = consuming => ended,
        () = oncegate::shutdown_signal() => Err(Problem::new(Exit::Interrupted, "interrupted while stopping")),
    }
}

async fn consume_all(loaded: &Loaded, stop: &CancellationToken) -> Result<(), Problem> {
    let telemetry = Telemetry::prometheus().map_err(|error| Problem::new(Exit::Bug, error.to_string()))?;
    let mut assembled = Vec::new();
    for (name, settings) in loaded.consumers() {
        let mut ready = assemble(loaded, name, &settings).await?;
        ready.consumer = telemetry.watch(ready.consumer);
        assembled.push(ready);
    }
    let listen = loaded.config.status.clone().unwrap_or_default().listen.unwrap_or_else(|| LISTEN.to_owned());
    let served = Served::start(&listen, &telemetry).await?;
    let (mut consumers, mut foremen) = (JoinSet::new(), Vec::new());
    for Assembled { name, consumer, worker, concurrency, foreman } in assembled {
        foremen.extend(foreman);
        let stop = stop.clone();
        consumers.spawn(async move {
            // Nothing is consumed before the worker is ready.
            let room = tokio::select! {
                biased;
                () = stop.cancelled() => return (name, Ok(())),
                room = until_ready(&name, &worker) => room,
            };
            // A claimed message runs at once: no more messages are claimed than the workers take.
            let consumer = consumer.concurrency(concurrency.min(room));
            let ended = consumer.run_until(stop.cancelled()).await;
            (name, ended)
        });
    }
    let ended = join(consumers, stop).await;
    dismiss(foremen).await;
    served.stop().await;
    ended
}

/// Waits for all consumers; the first that fails stops the others.
async fn join(
    mut consumers: JoinSet<(String, Result<(), ConsumerError>)>,
    stop: &CancellationToken,
) -> Result<(), Problem> {
    let mut result = Ok(());
    while let Some(ended) = consumers.join_next().await {
        let failed = match ended {
            Ok((_, Ok(()))) => continue,
            Ok((name, Err(error))) => problem(&name, error),
            Err(bug) => Problem::new(Exit::Bug, bug.to_string()),
        };
        stop.cancel();
        result = result.and(Err(failed));
    }
    result
}

async fn dismiss(foremen: Vec<Foreman>) {
    let mut leaving: JoinSet<()> = foremen.into_iter().map(Foreman::dismiss).collect();
    while leaving.join_next().await.is_some() {}
}

fn problem(name: &str, error: ConsumerError) -> Problem {
    let problem = match error {
        ConsumerError::Source(error) => not_opened(&error),
        ConsumerError::Gate(oncegate::GateError::Store(error)) => error.into(),
        ConsumerError::Settings(_) | ConsumerError::Gate(_) => Problem::caused(Exit::Configuration, &error),
        ConsumerError::NoDeadLetters { .. }
        | ConsumerError::TooManyDeadLetters { .. }
        | ConsumerError::BadKey { .. } => Problem::caused(Exit::BadData, &error),
        ConsumerError::Bug(_) => Problem::caused(Exit::Bug, &error),
        _ => Problem::caused(Exit::Unreachable, &error),
    };
    problem.of(name)
}

/// Connects to the store, and builds the consumer's parts.
async fn assemble(loaded: &Loaded, name: &str, settings: &shape::Consumer) -> Result<Assembled, Problem> {
    let refuse = |why: String| Problem::new(Exit::Configuration, why).of(name);
    let source = AnySource::of(name, &settings.source.clone().unwrap_or_default()).map_err(refuse)?;
    let dead_letters = settings.dead_letters.as_ref().and_then(|to| source.dead_letters(to));
    let store = loaded.config.store.clone().unwrap_or_default();
    let store = store::open_configured(&store).await.map_err(|problem| problem.of(name))?;
    let gate = build::gate(name, settings, store).ok_or_else(|| refuse("there is no key".to_owned()))?;
    let gate = build::with_files(gate, settings).map_err(refuse)?;
    let handler = settings.handler.clone().unwrap_or_default();
    let (worker, foreman) = worker(&handler, settings, &gate).map_err(refuse)?;
    let worker = Arc::new(worker);
    let limited = Limited {
        worker: Arc::clone(&worker),
        timeout: handler.timeout.map(|Time(timeout)| timeout),
        longest_delay: build::backoff(settings).most(),
    };
    let consumer = build::with_settings(Consumer::new(source.shared(), gate, limited), settings);
    let consumer = match dead_letters {
        Some(dead_letters) => consumer.dead_letters(dead_letters),
        None => consumer,
    };
    let concurrency = settings.concurrency.unwrap_or(Consumer::DEFAULT_CONCURRENCY);
    Ok(Assembled { name: name.to_owned(), consumer, worker, concurrency, foreman })
}

fn worker(
    handler: &shape::Handler,
    settings: &shape::Consumer,
    gate: &Gate,
) -> Result<(Worker, Option<Foreman>), String> {
    let most = settings.max_large_result.map_or(Gate::DEFAULT_MAX_LARGE_RESULT_BYTES, |Size(bytes)| bytes);
    if let Some(program) = &handler.exec {
        let (crew, foreman) = Crew::start(program, handler.workers.unwrap_or(1), gate.lease_period());
        return Ok((Worker::Exec(crew), Some(foreman)));
    }
    if let Some(program) = &handler.command {
        return Ok((Worker::Command(command::Commands::new(program.clone(), most)), None));
    }
    let content_type = handler.content_type.as_deref().unwrap_or("application/octet-stream");
    let told = request::Told {
        content_type: HeaderValue::try_from(content_type)
            .map_err(|_| format!("`content_type` is {content_type:?}, which is not a content type"))?,
        token: handler.token.as_ref().map(|token| http::bearer(&token.resolve()?)).transpose()?,
        lease_ms: gate.lease_period().as_millis(),
        cloudevents: handler.cloudevents.unwrap_or(false),
    };
    Ok((Worker::Http(http::Caller::of(handler, told, most)?), None))
}

/// Waits until the worker is ready. Returns the most messages that it takes at a time.
async fn until_ready(name: &str, worker: &Worker) -> u32 {
    let mut tries = 0_u32;
    loop {
        let ready = match worker {
            Worker::Http(caller) => caller.is_ready().await.map(|()| u32::MAX),
            Worker::Exec(crew) => Ok(crew.ready().await),
            Worker::Command(_) => Ok(u32::MAX),
        };
        let why = match ready {
            Ok(room) => {
                info!(consumer = name, "the worker is ready");
                return room;
            }
            Err(why) => why,
        };
        if tries.is_multiple_of(READY_REMINDER) {
            warn!(consumer = name, why, "the worker is not ready yet; nothing is consumed before it is");
        }
        tries = tries.wrapping_add(1);
        tokio::time::sleep(READY_INTERVAL).await;
    }
}
