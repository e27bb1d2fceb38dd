//! The `oncegate` command: runs a consumer with a worker in any language, and inspects and repairs
//! its records.
//!
//! The answer goes to standard output, progress and logs to standard error. `run` consumes, `serve`
//! answers requests,
//! `replay --run` runs what is missing, `outbox relay` publishes, `init` writes files,
//! `topics create` creates topics, `migrate` creates tables, `sweep` deletes large results, `reset`
//! and `dead-letters redrive` reopen records, `complete` and `give-up` end them, and `accept` lets
//! a scope continue that has stopped.
//! `pause` and `resume` write into the store whether the consumers of a scope may begin anything.
//! No other command changes anything: neither the store, nor the topic, nor what a consumer
//! receives. `replay --queue` and `dead-letters` use up receives of a queue's messages, and require
//! a flag for that.

use std::io::IsTerminal;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;

use clap::{CommandFactory, FromArgMatches as _, Parser, Subcommand, ValueEnum};
use tokio::runtime::Runtime;
use tracing::{debug, error, warn};
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;
use tracing_subscriber::{EnvFilter, Layer as _};

mod accept;
mod args;
mod at;
mod audit;
mod change;
mod check;
mod complete;
mod config;
mod configured;
mod confirm;
mod dead_letters;
mod decide;
mod doctor;
mod environment;
mod estimate;
mod examined;
mod exit;
mod generate;
mod give_up;
mod help;
mod init;
mod inspect;
mod key;
mod migrate;
mod outbox;
mod output;
mod parse;
mod pause;
mod promise;
mod prove;
mod record;
mod replay;
mod reset;
mod run;
mod serve;
mod signals;
mod sources;
mod status;
mod stores;
mod sweep;
mod topics;
#[cfg(feature = "otlp")]
mod traces;

use exit::{Exit, Problem};

/// Consumers allocate on one thread what another one frees. There, the system's allocator has them
/// wait for each other's locks.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Exit codes: 0 yes, 1 the answer is no, 2 usage, 3 answered in part, 65 bad input data, 69 store
/// or broker unreachable, 70 a bug, 75 timed out, 78 configuration, 130 interrupted.
#[derive(Debug, Parser)]
#[command(
    name = "oncegate",
    version,
    about = "Run consumers that are safe against duplicates, with a worker in any language"
)]
#[command(arg_required_else_help = true, after_help = EXIT_CODES)]
struct Cli {
    /// The format of logs on standard error
    #[arg(
        long,
        value_name = "FORMAT",
        env = "ONCEGATE_LOG_FORMAT",
        default_value = "text",
        global = true
    )]
    log_format: LogFormat,

    #[command(subcommand)]
    command: Command,
}

/// The format of logs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum LogFormat {
    /// Lines for people
    Text,
    /// One JSON object a line
    Json,
}

const EXIT_CODES: &str = "\
Exit codes: 0 yes or done, 1 the answer is no, 2 usage, 3 answered in part, 65 bad input,
69 store or broker unreachable, 70 a bug, 75 timed out, 78 configuration, 130 interrupted.
The answer is on standard output, everything else on standard error. ONCEGATE_LOG=debug logs more,
and --log-format json logs one JSON object a line.";

#[derive(Debug, Subcommand)]
enum Command {
    Init(Box<init::InitArgs>),
    Check(check::CheckArgs),
    WorkerTest(run::conformance::WorkerTestArgs),
    Prove(Box<prove::ProveArgs>),
    Estimate(estimate::EstimateArgs),
    Run(Box<run::RunArgs>),
    Serve(serve::ServeArgs),
    #[command(subcommand)]
    Outbox(outbox::OutboxCommand),
    Status(status::StatusArgs),
    Inspect(inspect::InspectArgs),
    Key(key::KeyArgs),
    Replay(Box<replay::ReplayArgs>),
    Audit(Box<audit::AuditArgs>),
    Doctor(doctor::DoctorArgs),
    Reset(reset::ResetArgs),
    Complete(Box<complete::CompleteArgs>),
    GiveUp(give_up::GiveUpArgs),
    #[command(subcommand)]
    DeadLetters(dead_letters::DeadLettersCommand),
    #[command(subcommand)]
    Accept(accept::AcceptCommand),
    Pause(pause::PauseArgs),
    Resume(pause::ResumeArgs),
    #[command(subcommand)]
    Topics(topics::TopicsCommand),
    Migrate(migrate::MigrateArgs),
    Sweep(sweep::SweepArgs),
    #[command(subcommand)]
    Generate(generate::GenerateCommand),
}

fn main() -> ExitCode {
    if let Some(failed) = oncegate_worker::become_worker() {
        return failed;
    }
    let runtime = match tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
    {
        Ok(runtime) => runtime,
        Err(error) => return Problem::new(Exit::Bug, format!("no runtime: {error}")).report(),
    };
    // First of all: a signal at the start must not end it in any other way than later ones.
    signals::watch(&runtime);
    let cli = match parse() {
        Ok(cli) => cli,
        Err(error) => return usage(&error),
    };
    // Dropped at the end: the remaining traces are sent then.
    let _traces = match start_logging(&cli.command, cli.log_format) {
        Ok(traces) => traces,
        Err(problem) => return problem.report(),
    };
    for (unknown, meant) in environment::misspelt(&Cli::command()) {
        warn!("the variable {unknown} is not known, and ignored; did you mean {meant}?");
    }
    let answered = catch_unwind(AssertUnwindSafe(|| answer(runtime, &cli.command)));
    match answered {
        Ok(Ok(exit)) => exit.into(),
        Ok(Err(problem)) if cli.log_format == LogFormat::Json => {
            error!(exit_code = problem.exit() as u8, "{problem}");
            problem.exit().into()
        }
        Ok(Err(problem)) => problem.report(),
        // The panic hook has printed the panic already.
        Err(_) => Exit::Bug.into(),
    }
}

fn parse() -> Result<Cli, clap::Error> {
    let command = environment::without_empty(help::grouped(Cli::command()));
    let matches = command.try_get_matches()?;
    Cli::from_arg_matches(&matches)
}

/// Prints why the arguments cannot be used, or the help that they ask for.
fn usage(error: &clap::Error) -> ExitCode {
    // Without standard streams, the exit code alone says it.
    let _ = error.print();
    if let Some(origin) = environment::origin(error, &Cli::command()) {
        eprintln!("{origin}");
    }
    ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(Exit::Usage as u8))
}

fn answer(runtime: Runtime, command: &Command) -> Result<Exit, Problem> {
    let interruptible = !command.stops_by_itself();
    let answer = runtime.block_on(async {
        let command = async {
            debug!("started");
            match command {
                Command::Init(args) => init::run(args),
                Command::Check(args) => Box::pin(check::run(args)).await,
                Command::WorkerTest(args) => run::conformance::run(args).await,
                Command::Prove(args) => Box::pin(prove::run(args)).await,
                Command::Estimate(args) => estimate::run(args).await,
                Command::Run(args) => Box::pin(run::run(args)).await,
                Command::Serve(args) => Box::pin(serve::run(args)).await,
                Command::Outbox(command) => Box::pin(outbox::run(command)).await,
                Command::Status(args) => status::run(args).await,
                Command::Inspect(args) => inspect::run(args).await,
                Command::Key(args) => key::run(args).await,
                Command::Replay(args) => replay::run(args).await,
                Command::Audit(args) => audit::run(args).await,
                Command::Doctor(args) => doctor::run(args).await,
                Command::Reset(args) => reset::run(args).await,
                Command::Complete(args) => Box::pin(complete::run(args)).await,
                Command::GiveUp(args) => give_up::run(args).await,
                Command::DeadLetters(command) => dead_letters::run(command).await,
                Command::Accept(command) => accept::run(command).await,
                Command::Pause(args) => pause::pause(args).await,
                Command::Resume(args) => pause::resume(args).await,
                Command::Topics(command) => topics::run(command).await,
                Command::Migrate(args) => migrate::run(args).await,
                Command::Sweep(args) => sweep::run(args).await,
                Command::Generate(command) => generate::run(command, Cli::command()),
            }
        };
        tokio::select! {
            // First, so that an interrupt never ends the process without a message.
            biased;
            () = signals::stop(), if interruptible => Err(Problem::new(Exit::Interrupted, "interrupted")),
            answer = command => answer,
        }
    });
    // A thread that waits for a broker or for standard input must not hold up the exit.
    runtime.shutdown_background();
    answer
}

impl Command {
    /// Returns whether the command handles signals by itself.
    fn stops_by_itself(&self) -> bool {
        match self {
            Self::Run(_)
            | Self::Serve(_)
            | Self::Prove(_)
            | Self::Outbox(outbox::OutboxCommand::Relay(_)) => true,
            Self::Replay(args) => args.runs(),
            _ => false,
        }
    }

    /// The log level unless ONCEGATE_LOG sets another: commands that inspect log warnings only, and
    /// `prove` causes those itself.
    fn log_level(&self) -> tracing::Level {
        match self {
            Self::Prove(_) => tracing::Level::ERROR,
            _ if self.stops_by_itself() => tracing::Level::INFO,
            _ => tracing::Level::WARN,
        }
    }
}

#[cfg(feature = "otlp")]
type TraceExport = Option<traces::Traces>;
#[cfg(not(feature = "otlp"))]
type TraceExport = Option<std::convert::Infallible>;

fn start_logging(command: &Command, format: LogFormat) -> Result<TraceExport, Problem> {
    let filter = EnvFilter::builder()
        .with_env_var("ONCEGATE_LOG")
        .with_default_directive(command.log_level().into());
    let mut filter = filter.from_env_lossy();
    let wanted = std::env::var("ONCEGATE_LOG").unwrap_or_default();
    if matches!(command, Command::Prove(_)) && wanted.is_empty() {
        // What the faults of a trial lead to is judged, and printed if it is a defect.
        for target in ["oncegate_runtime=off", "oncegate_core=off"] {
            filter = filter.add_directive(target.parse().expect("it is a directive"));
        }
    }
    for library in sources::CHATTY {
        let quiet = (!wanted.contains(library.target)).then(|| format!("{}=off", library.target));
        for directive in quiet
            .into_iter()
            .chain(library.never.iter().map(|&never| never.to_owned()))
        {
            filter = filter.add_directive(directive.parse().expect("it is a directive"));
        }
    }
    let colours = std::io::stderr().is_terminal()
        && std::env::var_os("NO_COLOR").is_none_or(|no| no.is_empty());
    let lines = tracing_subscriber::fmt::layer()
        .with_writer(std::io::stderr)
        .with_ansi(colours);
    let lines = match format {
        LogFormat::Text => lines.boxed(),
        LogFormat::Json => lines.with_ansi(false).json().boxed(),
    };
    let subscriber = tracing_subscriber::registry().with(lines.with_filter(filter));
    #[cfg(feature = "otlp")]
    let traces = traces::Traces::start()?;
    #[cfg(feature = "otlp")]
    let subscriber = subscriber.with(traces.as_ref().map(traces::Traces::layer));
    subscriber.init();
    #[cfg(not(feature = "otlp"))]
    let traces = None;
    Ok(traces)
}
