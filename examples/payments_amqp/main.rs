//! Payments from a queue of RabbitMQ, each charged once: with duplicates, several worker processes, a kill, and everything
//! published a second time.
//!
//! `cargo run --example payments_amqp --features amqp` starts a RabbitMQ, which `scripts/fetch-servers` installs, and
//! keeps its records in one SQLite file. `--broker 127.0.0.1:5672,127.0.0.1:15672 --redis redis://localhost:6379` does the
//! same on servers that run already. It prints what happened as a table, and exits with 1 when the proof fails.

#[path = "../payments/billing.rs"]
mod billing;
mod queue;
mod worker;

use std::path::Path;
use std::process::ExitCode;

use clap::Parser;
use indicatif::ProgressBar;
use oncegate::BoxError;
use oncegate_examples::crew::Crew;
use oncegate_examples::hang::Hang;
use oncegate_examples::payments::{Bank, Ledger, Proof, bank_place, store_place};
use oncegate_examples::show::exit_code;
use oncegate_examples::stage::{Stage, StageArgs};

use queue::Queue;

#[derive(Debug, Parser)]
#[command(
    about = "Consumes payments with duplicates from a queue, kills a worker, sends everything again, and proves that each was charged once"
)]
struct Args {
    #[command(flatten)]
    stage: StageArgs,
    /// A RabbitMQ of your own with the user `guest`, by its addresses for AMQP and for its management plugin:
    /// `127.0.0.1:5672,127.0.0.1:15672`; without it one is started.
    #[arg(long)]
    broker: Option<String>,
    /// A Redis server, `redis://host:port`; without it the records are in one SQLite file.
    #[arg(long)]
    redis: Option<String>,
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
    let stage = Stage::new(&args.stage);

    let bar = stage.sending("sending");
    let queue = Queue::create(args.broker.as_deref(), &stage.name)?;
    queue.send(&stage.payments.payloads, bar);
    let store = store_place(args.redis.as_deref(), folder.path());
    let bank = Bank::open(&bank_place(folder.path()))?;
    let hang = stage.hang(folder.path());
    let shared = Shared { queue: &queue, store, run: &stage.name, hang, folder: folder.path() };

    let bar = stage.charging("consuming; one worker is killed on the way");
    let mut first = shared.start("first")?;
    let killed = first.crew.kill_in(&shared.hang, bar, || first.ledger.progress())?;
    first.finish(&queue, bar)?;

    let bar = stage.sending("everything comes a second time");
    queue.send(&stage.payments.payloads, bar);
    let mut second = shared.start("replay")?;
    second.finish(&queue, bar)?;
    stage.end();

    let (first, second) = (first.ledger.read()?, second.ledger.read()?);
    let proof = Proof::new(&stage.payments, killed, &bank.charges()?, &first, &second);
    stage.print(&proof)?;
    Ok(proof.holds())
}

/// What all workers share.
struct Shared<'a> {
    queue: &'a Queue,
    store: String,
    run: &'a str,
    hang: Hang,
    folder: &'a Path,
}

/// One pass over everything: worker processes, and their ledger.
struct Pass {
    ledger: Ledger,
    crew: Crew,
}

impl Shared<'_> {
    fn start(&self, pass: &str) -> Result<Pass, BoxError> {
        let path = self.folder.join(format!("{pass}.ledger"));
        let ledger = Ledger::open(&path)?;
        let (path, hang) = (path.display().to_string(), self.hang.arguments());
        let arguments = ["--uri", self.queue.uri(), "--queue", self.queue.name()];
        let arguments = arguments.into_iter().chain(["--store", &self.store, "--scope", self.run]);
        let arguments = arguments.chain(["--ledger", &path]).chain(hang.iter().map(String::as_str));
        let bank = bank_place(self.folder).display().to_string();
        let crew = Crew::start_workers(arguments.chain(["--bank", &bank]))?;
        Ok(Pass { ledger, crew })
    }
}

impl Pass {
    /// Waits until the queue is empty, and stops the workers.
    fn finish(&mut self, queue: &Queue, bar: &ProgressBar) -> Result<(), BoxError> {
        self.crew.finish(bar, || self.ledger.progress(), || queue.is_empty())
    }
}
