//! Payments from an SQS queue, each charged once: with duplicates, several worker processes, a
//! kill, and everything sent a second time.
//!
//! `cargo run --example payments_sqs --features sqs` starts an ElasticMQ, which
//! `scripts/fetch-servers` fetches, and keeps its records in one SQLite file. `--endpoint
//! http://127.0.0.1:9324 --redis redis://localhost:6379` does the same on servers that run already.
//! It prints what happened as a table, and exits with 1 when the proof fails.

#[path = "../payments/billing.rs"]
mod billing;
mod queue;
mod worker;

use std::process::ExitCode;

use clap::Parser;
use oncegate::BoxError;
use oncegate_examples::queue as queue_proof;
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
    /// An SQS server of your own, `http://host:port`; without it an ElasticMQ is started.
    #[arg(long)]
    endpoint: Option<String>,
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

/// Sends, consumes, kills, sends again, and returns whether the proof holds.
fn run(args: &Args) -> Result<bool, BoxError> {
    let stage = Stage::new(&args.stage);
    queue_proof::prove(&stage, args.redis.as_deref(), |run| {
        Queue::create(args.endpoint.as_deref(), run)
    })
}
