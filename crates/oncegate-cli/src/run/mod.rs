//! `oncegate run`: consumes with a worker in any language.
//!
//! `flags` has the settings of the command line, and `build` builds the library's parts from a
//! configuration. `workers` starts the worker that a configuration names; the crate
//! `oncegate-worker` calls it. `start` checks the servers that a consumer needs before it starts.
//! `status` serves the status page, and `summary` is the answer of a run on standard input.

pub(crate) mod build;
pub(crate) mod conformance;
pub(crate) mod flags;
mod operator;
mod start;
pub(crate) mod status;
mod summary;
pub(crate) mod workers;

use std::error::Error as _;
use std::future::Future;
use std::io::IsTerminal as _;
use std::sync::Arc;
use std::time::Duration;

use oncegate::core::store::Store;
use oncegate::observe::Observer;
use oncegate::source::Source;
use oncegate::telemetry::Telemetry;
use oncegate::{Batched, Consumer, ConsumerError, Monitor};
use oncegate_worker::{BeforeRun, Supervisor, Worker, WorkerHandler};
use parking_lot::Mutex;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tracing::info;

use crate::config::shape;
use crate::config::values::{KeySetting, Time};
use crate::config::{self, Loaded, Secrets};
use crate::configured::ConfigArgs;
use crate::confirm::confirm;
use crate::exit::{Exit, Problem, dead_letters_not_opened, not_opened};
use crate::output::counted;
use crate::sources::ConfiguredSource;
use crate::sources::input::{BadInput, Input};
use crate::sources::kafka::Topics;
use crate::{signals, stores};
use start::Servers;
use status::Served;
use summary::Account;

/// The time after which a stop says again what it waits for.
const STILL_WAITING: Duration = Duration::from_secs(10);

/// Run a consumer of topics or queues: a worker in any language handles each key once
///
/// The worker is called by HTTP (--handler), exchanges JSON lines on its standard streams
/// (--handler-exec), or is started for each message (--handler-command). docs/RUN.md describes its
/// input and what its answers mean.
///
/// Settings come from a file, from variables such as ONCEGATE_CONSUMER__BILLING__LEASE over it, and
/// from flags over both. For one consumer the flags are enough. SIGTERM lets running work end; a
/// second signal, a second later, does not wait for it. With --source stdin it ends by itself at
/// the end of standard input; exit code 130 when lines are unfinished.
#[derive(Debug, clap::Args)]
pub(crate) struct RunArgs {
    #[command(flatten)]
    config: ConfigArgs,

    /// Refuse secrets that are written in the configuration itself
    #[arg(long)]
    strict: bool,

    /// When standard input has ended, print what became of its lines as one JSON document
    #[arg(long)]
    json: bool,

    /// Do not ask on a terminal whether a new group may begin with the history of its topics
    #[arg(long)]
    yes: bool,

    #[command(flatten)]
    flags: flags::Flags,
}

/// A consumer, its worker, and what must be stopped after it.
struct Assembled {
    name: String,
    servers: Servers,
    /// Standard input, if the consumer reads it.
    input: Option<Input>,
    consumer: Consumer,
    worker: Arc<Worker>,
    /// The time for which the worker may end before it is ready.
    patience: Duration,
    concurrency: u32,
    supervisor: Option<Supervisor>,
}

impl Assembled {
    /// The name of its scope, and its store.
    fn store(&self) -> (String, Arc<dyn Store>) {
        (self.name.clone(), Arc::clone(&self.servers.store))
    }
}

pub(crate) async fn run(args: &RunArgs) -> Result<Exit, Problem> {
    let secrets = if args.strict {
        Secrets::MustBeElsewhere
    } else {
        Secrets::MayBeLiteral
    };
    // Flags change what the file says.
    let file = args.config.file(false);
    if let Some(words) = args.config.unnamed().filter(|_| file.is_some()) {
        info!("{words}");
    }
    let mut known = Vec::new();
    let loaded = config::load(
        file,
        |layers| {
            known = layers.names("consumer");
            args.flags.settings(&known)
        },
        secrets,
    )?;
    let has_settings = args.flags.are_about_a_consumer();
    let scope = args.flags.scope();
    args.config.fits("--scope", scope, &known, has_settings)?;
    if !loaded.findings.all.is_empty() {
        eprintln!("{}", loaded.render());
    }
    if loaded.findings.has_errors() {
        return Err(Problem::configuration("the configuration has errors"));
    }
    if loaded.config.consumer.is_empty() {
        let text = "there is no consumer: name one by a table as [consumer.billing], or by --scope";
        return Err(Problem::configuration(text));
    }
    let stop = CancellationToken::new();
    let monitors = Monitors::default();
    let consuming = consume_all(&loaded, &stop, args, &monitors);
    Box::pin(until_ended(consuming, &stop, || {
        counted(monitors.running(), "run")
    }))
    .await
    .map(|()| Exit::Yes)
}

/// Lets running work end at the first signal; another one, a second or more later, does not wait
/// for it. `running` says what may end, for a person who waits.
pub(crate) async fn until_ended<T>(
    consuming: impl Future<Output = Result<T, Problem>> + Send,
    stop: &CancellationToken,
    running: impl Fn() -> String + Send,
) -> Result<T, Problem> {
    let mut consuming = std::pin::pin!(consuming);
    tokio::select! {
        biased;
        ended = &mut consuming => return ended,
        () = signals::stop() => {}
    }
    let mut words = "stopping";
    stop.cancel();
    loop {
        info!(
            "{words}: {} may end; another signal, a second from now, does not wait",
            running()
        );
        tokio::select! {
            biased;
            ended = &mut consuming => return ended,
            () = signals::at_once() => {
                return Err(Problem::new(Exit::Interrupted, "interrupted while stopping"));
            }
            () = tokio::time::sleep(STILL_WAITING) => words = "still stopping",
        }
    }
}

/// The consumers of this process.
#[derive(Default)]
struct Monitors(Mutex<Vec<Monitor>>);

impl Monitors {
    fn running(&self) -> u64 {
        let monitors = self.0.lock();
        let permits = monitors.iter().map(|monitor| monitor.status().permits);
        permits
            .map(|permits| u64::from(permits.total.saturating_sub(permits.free)))
            .sum()
    }
}

async fn consume_all(
    loaded: &Loaded,
    stop: &CancellationToken,
    args: &RunArgs,
    monitors: &Monitors,
) -> Result<(), Problem> {
    let telemetry =
        Telemetry::prometheus().map_err(|error| Problem::new(Exit::Bug, error.to_string()))?;
    let mut assembled: Vec<Assembled> = Vec::new();
    let mut accounts = Vec::new();
    for (name, settings) in loaded.consumers() {
        let mut ready = tokio::select! {
            biased;
            () = stop.cancelled() => {
                stop_workers(assembled.into_iter().filter_map(|ready| ready.supervisor).collect()).await;
                return stopped_early(loaded);
            }
            ready = assemble(loaded, name, settings, None) => ready.map_err(|problem| problem.of(name))?,
        };
        ready.consumer = telemetry.watch(ready.consumer);
        monitors.0.lock().push(ready.consumer.monitor());
        if let Some(input) = ready.input.take() {
            Input::prompt();
            let account = Account::of(name, input, &telemetry);
            ready.consumer = account.watch(ready.consumer);
            accounts.push(account);
        }
        assembled.push(ready);
    }
    let sources = assembled
        .iter()
        .map(|ready| &*ready.servers.source)
        .collect();
    if let Err(declined) = ask_about_history(sources, args.yes, stop).await {
        stop_workers(
            assembled
                .into_iter()
                .filter_map(|ready| ready.supervisor)
                .collect(),
        )
        .await;
        return Err(declined);
    }
    let status = loaded.config.status.clone().unwrap_or_default();
    // A run that ends with its input needs no page, and several may run at the same time.
    let listen = (accounts.len() == assembled.len()).then_some(status::OFF);
    let stores = assembled.iter().map(Assembled::store);
    let operator = operator::operated(loaded, &status, stores, &telemetry)?;
    let served = Served::start(&status, listen, &telemetry).await?;
    let mut consumers = JoinSet::new();
    let mut supervisors = Vec::new();
    for mut ready in assembled {
        supervisors.extend(ready.supervisor.take());
        let stop = stop.clone();
        consumers.spawn(async move {
            let name = ready.name.clone();
            Box::pin(consume(ready, &stop))
                .await
                .map_err(|problem| problem.of(&name))
        });
    }
    let ended = join(consumers, stop).await;
    stop_workers(supervisors).await;
    served.stop().await;
    operator.stop().await;
    let summaries: Vec<_> = accounts.iter().map(Account::summary).collect();
    if !summaries.is_empty() {
        summary::answer(&summaries, args.json)?;
    }
    match (ended, summary::verdict(&summaries)) {
        (Err(problem), Err(unfinished)) => Err(problem.and(&unfinished)),
        (ended, verdict) => ended.and(verdict),
    }
}

/// Asks on a terminal whether a group that has committed nothing may begin with the messages that
/// are there. Elsewhere the source warns when it opens.
///
/// # Errors
/// When the answer is no.
async fn ask_about_history(
    sources: Vec<&dyn ConfiguredSource>,
    yes: bool,
    stop: &CancellationToken,
) -> Result<(), Problem> {
    if yes || !std::io::stdin().is_terminal() {
        return Ok(());
    }
    for source in sources {
        // A start that the servers refuse, or are away for, reports that itself.
        for words in source.history().await.unwrap_or_default() {
            let question = format!("{words}. Begin?");
            let answer = stop.run_until_cancelled(confirm(&question, "begin", false));
            if answer.await.is_none_or(|answer| answer.is_err()) {
                return Err(Problem::new(Exit::No, "nothing was consumed"));
            }
        }
    }
    Ok(())
}

/// # Errors
/// When lines of standard input would have been read.
fn stopped_early(loaded: &Loaded) -> Result<(), Problem> {
    if loaded
        .consumers()
        .any(|(_, settings)| settings.reads_stdin())
    {
        return Err(Problem::new(
            Exit::Interrupted,
            "stopped before standard input was read",
        ));
    }
    Ok(())
}

/// Consumes until the stop, once the servers and the worker are ready.
async fn consume(ready: Assembled, stop: &CancellationToken) -> Result<(), Problem> {
    let Assembled {
        name,
        servers,
        consumer,
        worker,
        patience,
        concurrency,
        ..
    } = ready;
    let ready = async {
        servers.check(&name, patience).await?;
        worker
            .until_ready(&name, patience)
            .await
            .map_err(Problem::from)
    };
    let room = tokio::select! {
        biased;
        () = stop.cancelled() => return Ok(()),
        room = ready => room?,
    };
    // A claimed message runs at once: no more messages are claimed than the workers take.
    let at_a_time = concurrency.min(room.at_a_time);
    let ahead = room.ahead.min(concurrency - at_a_time);
    let consumer = consumer.concurrency(at_a_time).ahead(ahead);
    let stopped = async {
        tokio::select! {
            () = stop.cancelled() => {}
            () = worker.unfit() => {}
        }
        worker.rest();
    };
    consumer.run_until(stopped).await.map_err(problem)?;
    match worker.why_unfit() {
        Some(why) => Err(Problem::new(Exit::BadData, why)),
        None => Ok(()),
    }
}

/// Waits for all consumers; the first that fails stops the others.
async fn join(
    mut consumers: JoinSet<Result<(), Problem>>,
    stop: &CancellationToken,
) -> Result<(), Problem> {
    let mut result = Ok(());
    while let Some(ended) = consumers.join_next().await {
        let failed = match ended {
            Ok(Ok(())) => continue,
            Ok(Err(problem)) => problem,
            Err(bug) => Problem::new(Exit::Bug, bug.to_string()),
        };
        stop.cancel();
        result = result.and(Err(failed));
    }
    result
}

async fn stop_workers(supervisors: Vec<Supervisor>) {
    let mut leaving: JoinSet<bool> = supervisors.into_iter().map(Supervisor::stop).collect();
    while leaving.join_next().await.is_some() {}
}

fn problem(error: ConsumerError) -> Problem {
    match error {
        ConsumerError::Source(error)
            if error.source().is_some_and(|cause| cause.is::<BadInput>()) =>
        {
            Problem::caused(Exit::BadData, &error)
        }
        ConsumerError::Source(error) => not_opened(&error),
        ConsumerError::Gate(oncegate::GateError::Store(error)) => error.into(),
        ConsumerError::Settings(_) | ConsumerError::Gate(_) => {
            Problem::caused(Exit::Configuration, &error)
        }
        ConsumerError::NoDeadLetters { .. }
        | ConsumerError::DeadLetterRefused { .. }
        | ConsumerError::TooManyDeadLetters { .. }
        | ConsumerError::BadKey { .. } => Problem::caused(Exit::BadData, &error),
        ConsumerError::DeadLetters(error) => dead_letters_not_opened(&error),
        ConsumerError::Bug(_) => Problem::caused(Exit::Bug, &error),
        _ => Problem::caused(Exit::Unreachable, &error),
    }
}

/// Messages that go through a consumer instead of those of its own source.
pub(crate) struct Feed {
    pub(crate) source: Arc<dyn Source>,
    /// Called before each run of the worker.
    pub(crate) before: BeforeRun,
    pub(crate) observer: Arc<dyn Observer>,
}

/// Runs these messages through the gate and the worker of the consumer `name`, until they end or
/// `stop` is cancelled.
pub(crate) async fn feed(
    loaded: &Loaded,
    name: &str,
    settings: &shape::Consumer,
    feed: Feed,
    stop: &CancellationToken,
) -> Result<(), Problem> {
    let observer = Arc::clone(&feed.observer);
    let mut ready = tokio::select! {
        biased;
        () = stop.cancelled() => return Ok(()),
        ready = assemble(loaded, name, settings, Some(feed)) => ready?,
    };
    ready.consumer = ready.consumer.observer(observer);
    let supervisor = ready.supervisor.take();
    let ended = Box::pin(consume(ready, stop)).await;
    stop_workers(supervisor.into_iter().collect()).await;
    ended
}

/// Returns the topics of a consumer whose key is the broker's key of a message.
///
/// # Errors
/// When a secret cannot be read.
fn keyed_by_broker(name: &str, settings: &shape::Consumer) -> Result<Option<Topics>, String> {
    let by_message_key = settings
        .key
        .as_ref()
        .is_some_and(|KeySetting(key)| key.is_message_key());
    let kafka = settings
        .source
        .as_ref()
        .and_then(|source| source.kafka.as_ref())
        .filter(|_| by_message_key);
    kafka
        .map(|kafka| kafka.cluster(name, settings.dead_letters.as_ref()))
        .transpose()
}

/// Connects to the store, and builds the consumer's parts.
async fn assemble(
    loaded: &Loaded,
    name: &str,
    settings: &shape::Consumer,
    feed: Option<Feed>,
) -> Result<Assembled, Problem> {
    let patience = settings.runtime.start_patience;
    let given = settings.source.clone().unwrap_or_default();
    let source = given.open(name, patience).map_err(Problem::configuration)?;
    let examined = given.open(name, patience).map_err(Problem::configuration)?;
    let dead_letters = settings
        .dead_letters
        .as_ref()
        .and_then(|to| source.dead_letters(to));
    let store = loaded.config.store.clone().unwrap_or_default();
    let store = stores::open_configured(&store, patience).await?;
    let input = source.input();
    let servers = Servers {
        source: examined,
        dead_letters: dead_letters.clone(),
        store: Arc::clone(&store),
        by_message_key: keyed_by_broker(name, settings).map_err(Problem::configuration)?,
    };
    let gate = build::gate(name, settings, store).map_err(Problem::configuration)?;
    let gate = gate.ok_or_else(|| Problem::configuration("there is no key"))?;
    let gate = build::with_files(gate, settings).map_err(Problem::configuration)?;
    let handler = settings.handler.clone().unwrap_or_default();
    let limits = workers::limits(loaded, settings, &gate);
    let (worker, supervisor) = workers::start(&handler, &limits)?;
    let report = worker.report().clone();
    let worker = Arc::new(worker);
    let handler = WorkerHandler {
        worker: Arc::clone(&worker),
        timeout: handler.timeout.map(|Time(timeout)| timeout),
        longest_delay: settings.runtime.backoff.most(),
        before: feed.as_ref().map(|feed| feed.before.clone()),
        documents: build::documents(settings).map_err(Problem::configuration)?,
    };
    let source: Arc<dyn Source> = match feed {
        // Its messages are those of the broker that the consumer has read.
        Some(feed) => feed.source,
        None => source.into_source(),
    };
    let consumer = match settings.batch {
        None => Consumer::new(source, gate, handler),
        Some(limits) => Consumer::new(source, gate, Batched::new(limits, handler)),
    };
    let consumer = consumer
        .settings(settings.runtime)
        .worker_status(move || report.status());
    let consumer = match dead_letters {
        Some(dead_letters) => consumer.dead_letters(dead_letters),
        None => consumer,
    };
    let concurrency = settings.runtime.concurrency;
    let name = name.to_owned();
    Ok(Assembled {
        name,
        servers,
        input,
        consumer,
        worker,
        patience,
        concurrency,
        supervisor,
    })
}
