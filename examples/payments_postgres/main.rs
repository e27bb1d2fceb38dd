//! Payments from a Kafka topic, each charged exactly once: the charge and the mark that it is done
//! are rows of one PostgreSQL database, committed together.
//!
//! `cargo run --example payments_postgres` starts a Kafka-speaking broker in this process, and a
//! PostgreSQL server from the programs that are installed on this machine. `--bootstrap
//! localhost:9092 --postgres postgres://localhost/test` does the same on servers that are there. In
//! the middle, one worker is killed in a transaction that has made a charge, and the connections of
//! all others are cut; then the topic is replayed. It prints what happened as a table, and exits
//! with 1 when the proof fails.

mod proof;
mod worker;

use std::process::ExitCode;

use clap::Parser;
use indicatif::ProgressBar;
use oncegate::BoxError;
use oncegate_examples::broker::Broker;
use oncegate_examples::crew::{Crew, Progress};
use oncegate_examples::database::Database;
use oncegate_examples::hang::Hang;
use oncegate_examples::show::exit_code;
use oncegate_examples::stage::{Stage, StageArgs};

use proof::Proof;

/// No constraint here prevents a second charge of an order: oncegate must.
const TABLES: &str = "\
CREATE TABLE IF NOT EXISTS charges (
    run       text    NOT NULL,
    order_id  text    NOT NULL,
    amount    text    NOT NULL,
    charge    text    NOT NULL,
    pid       integer NOT NULL
);
CREATE TABLE IF NOT EXISTS answers (
    run      text NOT NULL,
    order_id text NOT NULL,
    charge   text NOT NULL
)";

#[derive(Debug, Parser)]
#[command(
    about = "Consumes payments with duplicates into PostgreSQL, kills a worker, replays the topic, and proves that each was charged exactly once"
)]
struct Args {
    #[command(flatten)]
    stage: StageArgs,
    /// A Kafka broker, `host:port`; without it one is started in this process.
    #[arg(long)]
    bootstrap: Option<String>,
    /// A PostgreSQL database, `postgres://user@host:port/database`; without it a server is started.
    #[arg(long)]
    postgres: Option<String>,
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
    let stage = Stage::new(&args.stage);
    let topic = format!("{}-topic", stage.name);

    let bar = stage.sending("producing");
    let database = Database::open(args.postgres.as_deref(), TABLES)?;
    let broker = Broker::start(args.bootstrap.as_deref())?;
    broker.create_topic(&topic)?;
    broker.produce(&topic, &stage.payments.payloads, bar)?;
    let folder = tempfile::tempdir()?;
    let hang = stage.hang(folder.path());
    let servers = Servers {
        broker: &broker,
        database: &database,
        topic: &topic,
        run: &stage.name,
        hang: &hang,
    };

    let bar = stage.charging("consuming; a kill and cut connections on the way");
    let mut first = servers.start("first")?;
    let killed = first.crew.kill_in(&hang, bar, || servers.progress())?;
    let cut = servers.cut_connections()?;
    servers.finish(&mut first, bar)?;
    let before_replay = servers.progress()?;

    let bar = stage.sending("replaying the whole topic");
    let mut second = servers.start("replay")?;
    servers.finish(&mut second, bar)?;
    stage.end();

    let taken_back = servers.taken_back(killed)?;
    let proof = Proof::new(
        &database,
        &stage.name,
        &stage.payments,
        before_replay,
        cut,
        taken_back,
    )?;
    stage.print(&proof)?;
    Ok(proof.holds())
}

/// The things that all workers share.
struct Servers<'a> {
    broker: &'a Broker,
    database: &'a Database,
    topic: &'a str,
    run: &'a str,
    hang: &'a Hang,
}

/// A pass over the topic.
struct Pass {
    group: String,
    crew: Crew,
}

impl Servers<'_> {
    fn start(&self, pass: &str) -> Result<Pass, BoxError> {
        let group = format!("{}-{pass}", self.run);
        let arguments = [
            "--bootstrap",
            self.broker.bootstrap(),
            "--topic",
            self.topic,
        ];
        let url = self.database.url_named(self.run);
        let arguments = arguments
            .into_iter()
            .chain(["--group", &group, "--postgres", &url]);
        let hang = self.hang.arguments();
        let arguments = arguments
            .chain(["--run", self.run])
            .chain(hang.iter().map(String::as_str));
        let crew = Crew::start_workers(arguments)?;
        Ok(Pass { group, crew })
    }

    /// Waits until every message of the topic is acknowledged, and stops the workers.
    fn finish(&self, pass: &mut Pass, bar: &ProgressBar) -> Result<(), BoxError> {
        let asker = self.broker.asker(&pass.group)?;
        pass.crew.finish(
            bar,
            || self.progress(),
            || self.broker.is_consumed(&asker, self.topic),
        )
    }

    fn progress(&self) -> Result<Progress, BoxError> {
        let question = "SELECT (SELECT count(*) FROM charges WHERE run = $1) AS charges, \
                        (SELECT count(*) FROM answers WHERE run = $1) AS answers";
        let row = self.database.ask(question, &[&self.run])?;
        Ok(Progress {
            charges: row.try_get::<_, i64>("charges")?.unsigned_abs(),
            answers: row.try_get::<_, i64>("answers")?.unsigned_abs(),
        })
    }

    /// Returns how often the charge that the killed worker had made in its transaction is there,
    /// made by another worker.
    fn taken_back(&self, killed: u32) -> Result<u64, BoxError> {
        let question =
            "SELECT count(*) FROM charges WHERE run = $1 AND order_id = $2 AND pid <> $3";
        self.database.count(
            question,
            &[&self.run, &self.hang.order(), &i32::try_from(killed)?],
        )
    }

    /// Cuts every connection of the workers that are left, and returns how many there were.
    fn cut_connections(&self) -> Result<u64, BoxError> {
        let cut = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE application_name = $1";
        self.database.count(cut, &[&self.run])
    }
}
