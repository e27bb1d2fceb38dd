//! Payments from a Kafka topic, each charged once: with duplicates, several worker processes, a kill, and a replay.
//!
//! `cargo run --example payments` needs no server: it starts a Kafka-speaking broker in this process and keeps its
//! records in one SQLite file. `--bootstrap localhost:9092 --redis redis://localhost:6379` does the same on real
//! servers. It prints what happened as a table, and exits with 1 when the proof fails.

mod billing;
mod worker;

use std::path::Path;
use std::process::ExitCode;

use clap::Parser;
use indicatif::ProgressBar;
use oncegate::BoxError;
use oncegate_examples::broker::Broker;
use oncegate_examples::crew::Crew;
use oncegate_examples::payments::{Ledger, Payments, Proof};
use oncegate_examples::show::{Show, exit_code};

const WORKERS: usize = 3;
/// The kill comes when this share of the payments is charged.
const KILL_AT: f64 = 0.4;

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

/// Produces, consumes, kills, replays, and returns whether the proof holds.
fn run(args: &Args) -> Result<bool, BoxError> {
    let folder = tempfile::tempdir()?;
    let seed = args.seed.unwrap_or_else(|| fastrand::u64(..));
    let run = format!("payments-{seed:x}");
    let topic = format!("{run}-topic");
    let stages = args.show.stages();

    let bar = stages.begin("producing", args.messages.into());
    let broker = Broker::start(args.bootstrap.as_deref())?;
    broker.create_topic(&topic)?;
    let payments = Payments::new(args.messages, seed);
    broker.produce(&topic, &payments.payloads, bar)?;
    let store =
        args.redis.clone().unwrap_or_else(|| folder.path().join("records.sqlite").display().to_string());
    let start = |pass: &str| Pass::start(&broker, &topic, &store, &run, folder.path(), pass);

    let bar = stages.begin("consuming; one worker is killed on the way", payments.distinct());
    let mut first = start("first")?;
    let some = (payments.distinct() as f64 * KILL_AT) as u64;
    let progress = || first.ledger.progress();
    let charged = first.crew.wait_for(bar, progress, |progress| progress.charges >= some)?;
    let killed = first.crew.kill_one(charged)?;
    first.finish(&broker, &topic, bar)?;

    let bar = stages.begin("replaying the whole topic", payments.messages());
    let mut second = start("replay")?;
    second.finish(&broker, &topic, bar)?;
    stages.end();

    let proof = Proof::new(&payments, killed, &first.ledger.read()?, &second.ledger.read()?);
    args.show.proof(&proof)?;
    Ok(proof.holds())
}

/// One pass over the topic: worker processes, and what they write down.
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
    ) -> Result<Self, BoxError> {
        let group = format!("{run}-{pass}");
        let path = folder.join(format!("{pass}.ledger"));
        let ledger = Ledger::open(&path)?;
        let path = path.display().to_string();
        let arguments = ["worker", "--bootstrap", broker.bootstrap(), "--topic", topic, "--group", &group];
        let arguments = arguments.into_iter().chain(["--store", store, "--scope", run, "--ledger", &path]);
        let crew = Crew::start(WORKERS, &arguments.map(str::to_owned).collect::<Vec<_>>())?;
        Ok(Self { group, ledger, crew })
    }

    /// Waits until every message of the topic is acknowledged, and stops the workers.
    fn finish(&mut self, broker: &Broker, topic: &str, bar: &ProgressBar) -> Result<(), BoxError> {
        let asker = broker.asker(&self.group)?;
        let progress = || self.ledger.progress();
        // A question that fails is asked again; that nothing moves any more is noticed all the same.
        self.crew.wait_for(bar, progress, |_| broker.is_consumed(&asker, topic).unwrap_or(false))?;
        self.crew.stop()
    }
}
