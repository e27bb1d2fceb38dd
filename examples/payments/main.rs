//! Payments from a Kafka topic, each charged once: with duplicates, several worker processes, a
//! kill, and a replay.
//!
//! `cargo run --example payments` needs no server: it starts a Kafka-speaking broker in this
//! process and keeps its records in one SQLite file. `--bootstrap localhost:9092 --redis
//! redis://localhost:6379` does the same on real servers. It prints what happened as a table, and
//! exits with 1 when the proof fails.

mod billing;
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

#[derive(Debug, Parser)]
#[command(
    about = "Consumes payments with duplicates, kills a worker, replays the topic, and proves that each was charged once"
)]
struct Args {
    #[command(flatten)]
    stage: StageArgs,
    /// A Kafka broker, `host:port`; without it one is started in this process.
    #[arg(long)]
    bootstrap: Option<String>,
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
    let folder = tempfile::tempdir()?;
    let stage = Stage::new(&args.stage);
    let topic = format!("{}-topic", stage.name);

    let bar = stage.sending("producing");
    let broker = Broker::start(args.bootstrap.as_deref())?;
    broker.create_topic(&topic)?;
    broker.produce(&topic, &stage.payments.payloads, bar)?;
    let store = store_place(args.redis.as_deref(), folder.path());
    let bank = Bank::open(&bank_place(folder.path()))?;
    let hang = stage.hang(folder.path());
    let start = |pass: &str| {
        Pass::start(
            &broker,
            &topic,
            &store,
            &stage.name,
            folder.path(),
            pass,
            &hang,
        )
    };

    let bar = stage.charging("consuming; one worker is killed on the way");
    let mut first = start("first")?;
    let killed = first.crew.kill_in(&hang, bar, || first.ledger.progress())?;
    first.finish(&broker, &topic, bar)?;

    let bar = stage.sending("replaying the whole topic");
    let mut second = start("replay")?;
    second.finish(&broker, &topic, bar)?;
    stage.end();

    let first = first.ledger.read()?;
    let second = second.ledger.read()?;
    let proof = Proof::new(&stage.payments, killed, &bank.charges()?, &first, &second);
    stage.print(&proof)?;
    Ok(proof.holds())
}

/// A pass over the topic: worker processes, and their ledger.
struct Pass {
    group: String,
    ledger: Ledger,
    crew: Crew,
}

impl Pass {
    fn start(
        broker: &Broker,
        topic: &str,
        store: &str,
        run: &str,
        folder: &Path,
        pass: &str,
        hang: &Hang,
    ) -> Result<Self, BoxError> {
        let group = format!("{run}-{pass}");
        let path = folder.join(format!("{pass}.ledger"));
        let ledger = Ledger::open(&path)?;
        let path = path.display().to_string();
        let bank = bank_place(folder).display().to_string();
        let arguments = [
            "--bootstrap",
            broker.bootstrap(),
            "--topic",
            topic,
            "--group",
            &group,
        ];
        let arguments = arguments
            .into_iter()
            .chain(["--store", store, "--scope", run, "--ledger", &path]);
        let hang = hang.arguments();
        let arguments = arguments
            .chain(["--bank", &bank])
            .chain(hang.iter().map(String::as_str));
        let crew = Crew::start_workers(arguments)?;
        Ok(Self {
            group,
            ledger,
            crew,
        })
    }

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
