//! Payments in Avro from a Kafka topic, each charged once: written by another implementation with a
//! schema registry, with a schema that changes in the middle of the topic, consumed in Rust and by
//! a Python worker.
//!
//! `cargo run --example payments_avro --features avro` starts a registry, which
//! `scripts/fetch-servers` fetches together with confluent-kafka for Python, and a Kafka-speaking
//! broker in this process. `--bootstrap localhost:9092 --registry http://localhost:8081` does the
//! same on servers that run already. The Python worker runs under `oncegate run`. It prints what
//! happened as a table, and exits with 1 when the proof fails.

mod billing;
mod proof;
mod python;
mod registry;
mod worker;

use std::path::Path;
use std::process::ExitCode;

use clap::Parser;
use indicatif::ProgressBar;
use oncegate::BoxError;
use oncegate_examples::broker::Broker;
use oncegate_examples::crew::Crew;
use oncegate_examples::hang::Hang;
use oncegate_examples::payments::{Bank, Ledger, Proof, bank_place, store_place};
use oncegate_examples::show::exit_code;
use oncegate_examples::stage::{Stage, StageArgs};

use proof::ProofWithPython;
use python::PythonWorker;
use registry::RegistryPlace;

#[derive(Debug, Parser)]
#[command(
    about = "Consumes payments in Avro with duplicates, kills a worker, replays the topic, and proves that each was charged once"
)]
struct Args {
    #[command(flatten)]
    stage: StageArgs,
    /// A Kafka broker, `host:port`; without it one is started in this process.
    #[arg(long)]
    bootstrap: Option<String>,
    /// A schema registry with Confluent's API, `http://host:port`; without it one is started.
    #[arg(long)]
    registry: Option<String>,
    /// A Redis server, `redis://host:port`; without it the records are in one SQLite file.
    #[arg(long)]
    redis: Option<String>,
    #[command(subcommand)]
    role: Option<Role>,
}

#[derive(Debug, clap::Subcommand)]
enum Role {
    /// A worker process; started by the main one.
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

/// Produces, consumes, kills, replays, and returns whether the proof holds.
fn run(args: &Args) -> Result<bool, BoxError> {
    let oncegate = python::oncegate()?;
    let folder = tempfile::tempdir()?;
    let stage = Stage::new(&args.stage);
    let topic = format!("{}-topic", stage.name);

    let bar = stage.sending("producing, in two schemas");
    let broker = Broker::start(args.bootstrap.as_deref())?;
    broker.create_topic(&topic)?;
    let registry = RegistryPlace::start(args.registry.as_deref())?;
    python::produce(
        broker.bootstrap(),
        registry.url(),
        &topic,
        &stage.payments.payloads,
    )?;
    bar.inc(stage.payments.messages());
    let store = store_place(args.redis.as_deref(), folder.path());
    let bank = Bank::open(&bank_place(folder.path()))?;
    let hang = stage.hang(folder.path());
    let place = Place {
        broker: &broker,
        registry: registry.url(),
        topic: &topic,
        store: &store,
        folder: folder.path(),
    };

    let bar = stage.charging("consuming; one worker is killed on the way");
    let mut first = place.start(&stage.name, "first", &hang)?;
    let killed = first.crew.kill_in(&hang, bar, || first.ledger.progress())?;
    first.finish(&broker, &topic, bar)?;

    let bar = stage.sending("replaying the whole topic");
    let mut second = place.start(&stage.name, "replay", &hang)?;
    second.finish(&broker, &topic, bar)?;

    let python = PythonWorker::new(&place, &stage.name, oncegate)?;
    let bar = stage.charging("consuming in Python, under `oncegate run`");
    let charged = python.consume(&place, "python-first", bar)?;
    let bar = stage.sending("replaying in Python");
    let charged_again = python.consume(&place, "python-replay", bar)?;
    stage.end();

    let first = first.ledger.read()?;
    let second = second.ledger.read()?;
    let rust = Proof::new(&stage.payments, killed, &bank.charges()?, &first, &second);
    let proof = ProofWithPython::new(rust, &stage.payments, &charged, &charged_again);
    stage.print(&proof)?;
    Ok(proof.holds())
}

/// The things that all workers share.
struct Place<'a> {
    broker: &'a Broker,
    registry: &'a str,
    topic: &'a str,
    store: &'a str,
    folder: &'a Path,
}

/// A pass over the topic: worker processes, and their ledger.
struct Pass {
    group: String,
    ledger: Ledger,
    crew: Crew,
}

impl Place<'_> {
    fn start(&self, run: &str, pass: &str, hang: &Hang) -> Result<Pass, BoxError> {
        let group = format!("{run}-{pass}");
        let path = self.folder.join(format!("{pass}.ledger"));
        let ledger = Ledger::open(&path)?;
        let path = path.display().to_string();
        let bank = bank_place(self.folder).display().to_string();
        let arguments = [
            "--bootstrap",
            self.broker.bootstrap(),
            "--registry",
            self.registry,
        ];
        let arguments = arguments
            .into_iter()
            .chain(["--topic", self.topic, "--group", &group]);
        let arguments = arguments.chain(["--store", self.store, "--scope", run, "--ledger", &path]);
        let hang = hang.arguments();
        let arguments = arguments
            .chain(["--bank", &bank])
            .chain(hang.iter().map(String::as_str));
        let crew = Crew::start_workers(arguments)?;
        Ok(Pass {
            group,
            ledger,
            crew,
        })
    }
}

impl Pass {
    /// Waits until every message of the topic is acknowledged, and stops the workers.
    fn finish(&mut self, broker: &Broker, topic: &str, bar: &ProgressBar) -> Result<(), BoxError> {
        let asker = broker.asker(&self.group)?;
        self.crew.finish(
            bar,
            || self.ledger.progress(),
            || broker.is_consumed(&asker, topic),
        )
    }
}
