//! `oncegate replay`: reports what a replay of topics would run, without running or claiming
//! anything (`dry_run`); with `--queue`, what the messages of a queue would (`queue`); with
//! `--run`, runs what is missing (`repair`, with the source `missing`).

use crate::exit::{Exit, Problem};

mod args;
mod dry_run;
mod missing;
mod queue;
mod repair;
mod report;

pub(crate) use args::ReplayArgs;

pub(crate) async fn run(args: &ReplayArgs) -> Result<Exit, Problem> {
    if args.repair.run {
        return Box::pin(repair::run(args)).await;
    }
    if let Some(name) = &args.queue.name {
        return Box::pin(queue::run(args, name)).await;
    }
    Box::pin(dry_run::run(args)).await
}
