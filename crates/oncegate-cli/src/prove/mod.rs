//! `oncegate prove`: tries to make a worker lose an effect or have it twice, without a server.
//!
//! `tried` is what is tried, from flags or a configuration; `workers` starts its worker for each
//! process of a trial, and `stores` opens the store of each round, and `brokers` makes its topic on
//! a real broker. `witness` lists effects elsewhere. `repeat` has the command that plays a round
//! again.

mod args;
mod brokers;
mod repeat;
mod stores;
mod tried;
mod witness;
mod workers;

use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};
use oncegate::core::reason::counted;
use oncegate_testing::{Fault, Finding, Progress, Service, Trial, TrialError, Verdict, report};

use crate::exit::{Exit, Problem};
use crate::output::{self, plain, span};
pub(crate) use args::ProveArgs;
use brokers::{Brokers, TRIAL};
use stores::Stores;
use tried::TriedConsumer;
use witness::{SharedWitness, WitnessCommand};
use workers::Workers;

/// The largest file of samples, in bytes.
const SAMPLES_MAX_BYTES: u64 = 64 * 1024 * 1024;
/// The port of the downstream service for workers behind HTTP, which are started before the trial.
const DOWNSTREAM_PORT: u16 = 9797;

pub(crate) async fn run(args: &ProveArgs) -> Result<Exit, Problem> {
    let tried = TriedConsumer::of(args)?;
    let samples = read_samples(args.samples.clone()).await?;
    if let Some(folder) = &args.report {
        // Before the trial, so that a mistake costs no minute.
        std::fs::create_dir_all(folder).map_err(|error| unwritable(folder, &error))?;
    }
    let service = Arc::new(downstream(args, &tried).await?);
    let seed = args.seed.unwrap_or_else(oncegate_testing::random_seed);
    // Removed when it is dropped: at the end.
    let folder = tempfile::Builder::new()
        .prefix("oncegate-prove-")
        .tempdir()
        .map_err(|error| {
            Problem::configuration(format!(
                "no folder can be created in {}: {error}; set TMPDIR",
                std::env::temp_dir().display()
            ))
        })?;
    // Other trials may use the servers at the same time.
    let name = format!("{TRIAL}-{:012x}", oncegate_testing::random_seed() >> 16);
    let stores = interruptible(Stores::of(args.store.as_deref(), &name, folder.path())).await?;
    let brokers = interruptible(Brokers::of(args, &tried)).await?;
    let witness = args
        .witness_command
        .as_deref()
        .map(|command| WitnessCommand::new(command, folder.path()));
    let witness = witness.map(Arc::new);
    let workers = Workers::of(args, &tried, Arc::clone(&service), witness.clone());
    let trial = stores.of_trial(trial(args, &tried, workers).messages(samples).seed(seed));
    let trial = match &brokers {
        Some(brokers) => brokers.of_trial(trial.scope(&name)),
        None => trial,
    };
    let trial = match witness {
        Some(witness) => trial.witness(SharedWitness(witness)),
        None => trial,
    };
    // Dropping the trial kills its workers.
    let verdict = interruptible(async { trial.run().await.map_err(problem) }).await;
    service.stop().await;
    let removed = match &brokers {
        Some(brokers) => brokers.remove().await,
        None => Ok(()),
    };
    let left = [removed, stores.remove().await]
        .into_iter()
        .filter_map(Result::err);
    let problems = verdict.as_ref().err().cloned().into_iter().chain(left);
    if let Some(problem) = problems.reduce(|first, next| first.and(&next)) {
        return Err(problem);
    }
    let verdict = verdict?;
    let repeat = |finding: &Finding| repeat::command(args, seed, finding);
    if let Some(folder) = &args.report {
        write_reports(folder, &verdict, &repeat)?;
    }
    if args.json {
        output::answer_json(&report::json(&verdict, repeat))?;
    } else {
        output::answer(&text(&verdict))?;
        explain(&verdict, &repeat);
    }
    Ok(if !verdict.is_clean() {
        Exit::No
    } else if verdict.is_complete() {
        Exit::Yes
    } else {
        Exit::Incomplete
    })
}

/// Drops the work at the first signal.
async fn interruptible<T: Send>(
    work: impl Future<Output = Result<T, Problem>> + Send,
) -> Result<T, Problem> {
    tokio::select! {
        biased;
        () = crate::signals::stop() => Err(Problem::new(Exit::Interrupted, "interrupted")),
        done = work => done,
    }
}

/// Starts the service whose effects the workers cause.
async fn downstream(args: &ProveArgs, tried: &TriedConsumer) -> Result<Service, Problem> {
    // A worker that was started before the trial knows the address already.
    let is_shared = tried.handler.http.is_some();
    let port = if is_shared { DOWNSTREAM_PORT } else { 0 };
    let listen = args
        .listen
        .unwrap_or(SocketAddr::from((Ipv4Addr::LOCALHOST, port)));
    Service::start(listen).await.map_err(|error| {
        Problem::configuration(format!(
            "the downstream service cannot listen on {listen}: {error}; choose another with --listen"
        ))
    })
}

fn trial(args: &ProveArgs, tried: &TriedConsumer, workers: Workers) -> Trial {
    let parallel = if tried.takes_turns(args) {
        1
    } else {
        args.parallel.unwrap_or(4)
    };
    let bar = match args.rounds {
        Some(rounds) => progress(rounds, "rounds"),
        None => progress(args.seconds, "seconds"),
    };
    let began = Instant::now();
    let counts_rounds = args.rounds.is_some();
    let of_gate = tried.clone();
    let of_consumer = tried.settings.runtime;
    let mut trial = Trial::new(workers)
        .key(tried.key.clone())
        .route(&tried.route)
        .gate_with(move |gate| of_gate.gate(gate))
        .consumer_with(move |consumer| consumer.settings(of_consumer))
        .volatile(args.volatile.iter().cloned())
        .lease(args.lease)
        .parallel(parallel.into())
        .progress(move |progress: &Progress| {
            let Progress {
                rounds,
                faults,
                defects,
                ..
            } = progress;
            bar.set_position(if counts_rounds {
                *rounds
            } else {
                began.elapsed().as_secs()
            });
            bar.set_message(format!(
                "{}, {}, {}",
                counted(*rounds, "round"),
                counted(*faults, "fault"),
                counted(*defects as u64, "defect")
            ));
        });
    if !args.faults.is_empty() {
        trial = trial.faults(args.faults.iter().copied());
    }
    match (args.round, args.rounds) {
        (Some(round), _) => {
            let trial = trial
                .only_round(round)
                .leave_out(args.leave_out.iter().copied());
            trial.only_samples(args.only_samples.iter().copied())
        }
        (None, Some(rounds)) => trial.rounds(rounds),
        (None, None) => trial.for_time(Duration::from_secs(args.seconds)),
    }
}

/// A progress bar on standard error; hidden unless that is a terminal.
fn progress(length: u64, unit: &str) -> ProgressBar {
    let style =
        ProgressStyle::with_template(&format!("{{bar:30}} {{pos}} of {{len}} {unit}  {{msg}}"));
    let style = style.unwrap_or_else(|_| ProgressStyle::default_bar());
    ProgressBar::new(length).with_style(style)
}

/// Reads the lines that are not empty.
async fn read_samples(path: PathBuf) -> Result<Vec<String>, Problem> {
    let name = path.clone();
    let reading = tokio::task::spawn_blocking(move || {
        let bytes = std::fs::metadata(&path)?.len();
        if bytes > SAMPLES_MAX_BYTES {
            let what = format!("it has {bytes} bytes; at most {SAMPLES_MAX_BYTES} are read");
            return Err(std::io::Error::other(what));
        }
        std::fs::read_to_string(&path)
    });
    let read = reading
        .await
        .map_err(|error| Problem::new(Exit::Bug, error.to_string()))?;
    let text = read.map_err(|error| {
        Problem::new(
            Exit::BadData,
            format!("cannot read the samples from {}: {error}", name.display()),
        )
    })?;
    Ok(text
        .lines()
        .map(str::trim)
        .filter(|line| !line.is_empty())
        .map(str::to_owned)
        .collect())
}

fn write_reports(
    folder: &Path,
    verdict: &Verdict,
    repeat: &impl Fn(&Finding) -> String,
) -> Result<(), Problem> {
    let json = format!("{:#}\n", report::json(verdict, repeat));
    let files = [
        ("report.json", json),
        ("report.html", report::html(verdict, repeat)),
        ("junit.xml", report::junit(verdict, repeat)),
    ];
    for (name, text) in files {
        let path = folder.join(name);
        std::fs::write(&path, text).map_err(|error| unwritable(&path, &error))?;
    }
    Ok(())
}

fn unwritable(path: &Path, error: &std::io::Error) -> Problem {
    let what = format!(
        "the report cannot be written to {}: {error}; change --report",
        path.display()
    );
    Problem::configuration(what)
}

/// Returns a line for each defect, or one that nothing was found.
fn text(verdict: &Verdict) -> String {
    if verdict.is_clean() {
        return verdict.to_string();
    }
    let lines: Vec<String> = verdict
        .roots()
        .map(
            |Finding {
                 violation, round, ..
             }| {
                format!(
                    "{}: {} (round {round})",
                    violation.defect,
                    plain(&violation.what)
                )
            },
        )
        .collect();
    lines.join("\n")
}

/// Prints to standard error what the defects mean, how they are mended, and the commands that
/// repeat them.
fn explain(verdict: &Verdict, repeat: &impl Fn(&Finding) -> String) {
    for finding in verdict.roots() {
        let defect = finding.violation.defect;
        eprintln!(
            "\n{defect}\n  {}\n  {}\n  {}",
            defect.meaning(),
            defect.remedy(),
            repeat(finding)
        );
    }
    if !verdict.is_clean() {
        eprintln!();
    }
    let followers = verdict.findings.iter().filter_map(|finding| {
        Some(format!(
            "{} (from {})",
            finding.violation.defect, finding.follows?
        ))
    });
    let followers: Vec<String> = followers.collect();
    if !followers.is_empty() {
        eprintln!(
            "may only follow from these, and are in the report: {}",
            followers.join(", ")
        );
    }
    let faults: u64 = verdict.faults.values().sum();
    eprintln!(
        "{} in {}: {}, {}, {}, {} (seed {})",
        counted(verdict.rounds, "round"),
        span(verdict.took),
        counted(verdict.messages, "message"),
        counted(verdict.runs, "run"),
        counted(verdict.effects, "effect"),
        counted(faults, "fault"),
        verdict.seed
    );
    let untried: Vec<&str> = verdict.untried().into_iter().map(Fault::as_str).collect();
    if !untried.is_empty() {
        eprintln!(
            "{} of {} faults were not tried: {}; give the trial more --seconds (or --rounds), or a shorter --lease",
            untried.len(),
            verdict.asked_for.len(),
            untried.join(", ")
        );
    }
    if verdict.unassigned > 0 {
        eprintln!(
            "not judged, because their bodies have no value of a sample: {} of the downstream service; add a business field to them",
            counted(verdict.unassigned, "call")
        );
    }
}

fn problem(error: TrialError) -> Problem {
    let exit = match &error {
        TrialError::Samples(_) | TrialError::NoEffects | TrialError::Witness(_) => Exit::BadData,
        TrialError::Launch(_) | TrialError::Broker(_) => Exit::Unreachable,
        TrialError::Lease { .. } => Exit::Usage,
        _ => Exit::Configuration,
    };
    Problem::caused(exit, &error)
}
