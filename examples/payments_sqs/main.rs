//! Payments from an SQS queue, each charged once: with duplicates, several worker processes, a kill, and everything
//! sent a second time.
//!
//! `cargo run --example payments_sqs --features sqs` starts an ElasticMQ, which `scripts/fetch-servers` fetches, and
//! keeps its records in one SQLite file. `--endpoint http://127.0.0.1:9324 --redis redis://localhost:6379` does the
//! same on servers that run already. It prints what happened as a table, and exits with 1 when the proof fails.

#[path = "../payments/billing.rs"]
mod billing;
mod queue;
mod worker;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Parser;
use indicatif::ProgressBar;
use oncegate::BoxError;
use oncegate_examples::crew::{Crew, Progress};
use oncegate_examples::payments::{Ledger, Payments, Proof};
use oncegate_examples::show::{Show, exit_code};

use queue::Queue;

const WORKERS: usize = 3;
/// The bank hangs on the payment at this share of all, and its worker is killed meanwhile.
const KILL_AT: f64 = 0.4;

#[derive(Debug, Parser)]
#[command(
    about = "Consumes payments with duplicates from a queue, kills a worker, sends everything again, and proves that each was charged once"
)]
struct Args {
    /// How many messages to send; about a third of them are duplicates.
    #[arg(long, default_value_t = 6_000)]
    messages: u32,
    /// An SQS server of your own, `http://host:port`; without it an ElasticMQ is started.
    #[arg(long)]
    endpoint: Option<String>,
    /// A Redis server, `redis://host:port`; without it the records are in one SQLite file.
    #[arg(long)]
    redis: Option<String>,
    #[command(flatten)]
    show: Show,
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
    exit_code(match args.role {
        Some(Role::Worker(worker)) => worker.run().map(|()| true),
        None => run(&args),
    })
}

/// Sends, consumes, kills, sends again, and returns whether the proof holds.
fn run(args: &Args) -> Result<bool, BoxError> {
    let folder = tempfile::tempdir()?;
    let seed = args.seed.unwrap_or_else(|| fastrand::u64(..));
    let run = format!("payments-{seed:x}");
    let stages = args.show.stages();

    let bar = stages.begin("sending", args.messages.into());
    let queue = Queue::create(args.endpoint.as_deref(), &run)?;
    let payments = Payments::new(args.messages, seed);
    queue.send(&payments.payloads, bar);
    let store =
        args.redis.clone().unwrap_or_else(|| folder.path().join("records.sqlite").display().to_string());
    let slow_order = format!("order-{}", (payments.distinct() as f64 * KILL_AT) as u64);
    let stage_set = Stage { queue: &queue, store, run, slow_order, folder: folder.path() };

    let bar = stages.begin("consuming; one worker is killed on the way", payments.distinct());
    let mut first = stage_set.start("first")?;
    let killed = first.kill_who_has_begun(bar)?;
    first.finish(&queue, bar)?;

    let bar = stages.begin("everything comes a second time", payments.messages());
    queue.send(&payments.payloads, bar);
    let mut second = stage_set.start("replay")?;
    second.finish(&queue, bar)?;
    stages.end();

    let proof = Proof::new(&payments, killed, &first.ledger.read()?, &second.ledger.read()?);
    args.show.proof(&proof)?;
    Ok(proof.holds())
}

/// What all workers share.
struct Stage<'a> {
    queue: &'a Queue,
    store: String,
    run: String,
    slow_order: String,
    folder: &'a Path,
}

/// One pass over everything: worker processes, and their ledger.
struct Pass {
    ledger: Ledger,
    crew: Crew,
    /// Holds the process that has begun with the slow order.
    begun: PathBuf,
}

impl Stage<'_> {
    fn start(&self, pass: &str) -> Result<Pass, BoxError> {
        let path = self.folder.join(format!("{pass}.ledger"));
        let ledger = Ledger::open(&path)?;
        let begun = self.folder.join(format!("{pass}.begun"));
        let (path, begun_path) = (path.display().to_string(), begun.display().to_string());
        let arguments = ["worker", "--endpoint", self.queue.endpoint(), "--queue", self.queue.url()];
        let arguments = arguments.into_iter().chain(["--store", &self.store, "--scope", &self.run]);
        let arguments = arguments.chain(["--ledger", &path, "--slow-order", &self.slow_order]);
        let arguments = arguments.chain(["--begun", &begun_path]).map(str::to_owned);
        let crew = Crew::start(WORKERS, &arguments.collect::<Vec<_>>())?;
        Ok(Pass { ledger, crew, begun })
    }
}

impl Pass {
    /// Waits until the bank hangs on a payment, and kills the worker that waits for it.
    fn kill_who_has_begun(&mut self, bar: &ProgressBar) -> Result<u32, BoxError> {
        let who = || fs::read_to_string(&self.begun).ok()?.trim().parse::<u32>().ok();
        let progress = || self.ledger.progress();
        let progress = self.crew.wait_for(bar, progress, |_| who().is_some())?;
        let last_pid = who().ok_or("no worker has started a message")?;
        self.crew.kill_one(Progress { last_pid, ..progress })
    }

    /// Waits until the queue is empty, and stops the workers.
    fn finish(&mut self, queue: &Queue, bar: &ProgressBar) -> Result<(), BoxError> {
        self.crew.wait_for(bar, || self.ledger.progress(), |_| queue.is_empty())?;
        self.crew.stop()
    }
}
