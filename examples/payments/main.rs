//! Payments from a Kafka topic, each charged once: with duplicates, several worker processes, a kill, and a replay.
//!
//! `cargo run --example payments` needs no server: it starts a Kafka-speaking broker in this process and keeps its
//! records in one SQLite file. `--bootstrap localhost:9092 --redis redis://localhost:6379` does the same on real
//! servers. It prints what happened as a table, and exits with 1 when the proof fails.

mod broker;
mod ledger;
mod proof;
mod worker;

use std::path::PathBuf;
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use clap::Parser;
use indicatif::{ProgressBar, ProgressStyle};
use oncegate::BoxError;

use broker::Broker;
use ledger::Ledger;
use proof::Proof;

const WORKERS: usize = 3;
/// The kill comes when this share of the payments is charged.
const KILL_AT: f64 = 0.4;
/// When nothing moves for this long, something is wrong.
const STUCK_AFTER: Duration = Duration::from_secs(60);

#[derive(Debug, Parser)]
#[command(
    about = "Consumes payments with duplicates, kills a worker, replays the topic, and proves that each was charged once"
)]
struct Args {
    /// How many messages to produce; about a third of them are duplicates.
    #[arg(long, default_value_t = 6_000)]
    messages: u32,
    /// A Kafka broker, `host:port`; without it one is started in this process.
    #[arg(long)]
    bootstrap: Option<String>,
    /// A Redis server, `redis://host:port`; without it the records are in one SQLite file.
    #[arg(long)]
    redis: Option<String>,
    /// Print the proof as JSON.
    #[arg(long)]
    json: bool,
    /// Makes the same messages again.
    #[arg(long)]
    seed: Option<u64>,
    #[command(subcommand)]
    role: Option<Role>,
}

#[derive(Debug, clap::Subcommand)]
enum Role {
    /// One of the worker processes; started by the main one.
    #[command(hide = true)]
    Worker(worker::Worker),
}

fn main() -> ExitCode {
    let args = Args::parse();
    let outcome = match args.role {
        Some(Role::Worker(worker)) => worker.run().map(|()| true),
        None => run(&args),
    };
    match outcome {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Produces, consumes, kills, replays, and says whether the proof holds.
fn run(args: &Args) -> Result<bool, BoxError> {
    let folder = tempfile::tempdir()?;
    let seed = args.seed.unwrap_or_else(|| fastrand::u64(..));
    let run = format!("payments-{seed:x}");
    let bar = progress(args.json);
    let stage = |name: &'static str, length: u64| {
        bar.reset();
        bar.set_length(length);
        bar.set_message(name);
    };

    stage("producing", args.messages.into());
    let broker = Broker::start(args.bootstrap.as_deref(), &run)?;
    let produced = broker.produce(args.messages, seed, &bar)?;
    let store =
        args.redis.clone().unwrap_or_else(|| folder.path().join("records.sqlite").display().to_string());
    let crew = Crew { broker: &broker, store, run: &run, folder: folder.path().to_owned() };

    stage("consuming; one worker is killed on the way", produced.payments);
    let mut first = crew.start("first")?;
    let charged =
        first.wait_for(&bar, |progress| progress.charges as f64 >= produced.payments as f64 * KILL_AT)?;
    let killed = first.kill_one(charged)?;
    first.wait_until_consumed(&broker, &bar)?;
    first.stop()?;

    stage("replaying the whole topic", produced.messages);
    let mut second = crew.start("replay")?;
    second.wait_until_consumed(&broker, &bar)?;
    second.stop()?;
    bar.finish_and_clear();

    let proof = Proof::new(&produced, killed, &first.ledger.read()?, &second.ledger.read()?);
    if args.json {
        println!("{}", serde_json::to_string_pretty(&proof)?);
    } else {
        println!("{proof}");
    }
    Ok(proof.holds())
}

fn progress(json: bool) -> ProgressBar {
    let bar = if json { ProgressBar::hidden() } else { ProgressBar::new(0) };
    let style = ProgressStyle::with_template("{msg:44} {bar:30} {pos}/{len} {elapsed}");
    bar.with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}

/// What all worker processes share.
struct Crew<'a> {
    broker: &'a Broker,
    store: String,
    run: &'a str,
    folder: PathBuf,
}

/// The worker processes of one pass over the topic.
struct Pass {
    group: String,
    ledger: Ledger,
    workers: Vec<Child>,
}

impl Crew<'_> {
    fn start(&self, pass: &str) -> Result<Pass, BoxError> {
        let group = format!("{}-{pass}", self.run);
        let path = self.folder.join(format!("{pass}.ledger"));
        let ledger = Ledger::open(&path)?;
        let start = |_| {
            let mut worker = Command::new(std::env::current_exe()?);
            worker.args(["worker", "--bootstrap", self.broker.bootstrap(), "--topic", self.broker.topic()]);
            worker.args(["--group", &group, "--store", &self.store, "--scope", self.run]);
            worker.arg("--ledger").arg(&path).stdin(Stdio::piped()).stdout(Stdio::null());
            worker.spawn()
        };
        let workers = (0..WORKERS).map(start).collect::<Result<Vec<Child>, std::io::Error>>()?;
        Ok(Pass { group, ledger, workers })
    }
}

impl Pass {
    /// Waits until `enough`, showing progress; gives up when nothing moves.
    fn wait_for(
        &mut self,
        bar: &ProgressBar,
        enough: impl Fn(&ledger::Progress) -> bool,
    ) -> Result<ledger::Progress, BoxError> {
        let mut last = (self.ledger.progress()?, Instant::now());
        loop {
            let progress = self.ledger.progress()?;
            bar.set_position(progress.charges.max(progress.answers));
            if enough(&progress) {
                return Ok(progress);
            }
            if progress != last.0 {
                last = (progress, Instant::now());
            } else if last.1.elapsed() > STUCK_AFTER {
                return Err(format!("nothing has moved for {STUCK_AFTER:?}").into());
            }
            for worker in &mut self.workers {
                if let Some(status) = worker.try_wait()? {
                    return Err(format!("a worker has ended by itself: {status}").into());
                }
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Waits until every message of the topic is acknowledged.
    fn wait_until_consumed(&mut self, broker: &Broker, bar: &ProgressBar) -> Result<(), BoxError> {
        let asker = broker.asker(&self.group)?;
        // A question that fails is asked again; that nothing moves any more is noticed all the same.
        self.wait_for(bar, |_| broker.is_consumed(&asker).unwrap_or(false)).map(drop)
    }

    /// SIGKILL for the worker that charged last: it is in the middle of its handlers.
    fn kill_one(&mut self, progress: ledger::Progress) -> Result<u32, BoxError> {
        let busiest =
            self.workers.iter().position(|worker| worker.id() == progress.last_pid).unwrap_or_default();
        // It stays among the workers until it is dead, so that it is waited for whatever happens.
        let worker = self.workers.get_mut(busiest).ok_or("no worker is left")?;
        worker.kill()?;
        worker.wait()?;
        Ok(self.workers.swap_remove(busiest).id())
    }

    /// Closing a worker's standard input asks it to stop; it finishes what it has started, commits and leaves.
    fn stop(&mut self) -> Result<(), BoxError> {
        self.workers.iter_mut().for_each(|worker| drop(worker.stdin.take()));
        for worker in &mut self.workers {
            let status = worker.wait()?;
            if !status.success() {
                return Err(format!("a worker did not stop cleanly: {status}").into());
            }
        }
        self.workers.clear();
        Ok(())
    }
}

impl Drop for Pass {
    fn drop(&mut self) {
        for worker in &mut self.workers {
            _ = worker.kill();
            _ = worker.wait();
        }
    }
}
