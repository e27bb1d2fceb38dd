//! The stage of the programs about payments: their options, the run's name and messages, and its
//! stages on the screen.

use std::path::Path;

use clap::Args;
use indicatif::ProgressBar;
use oncegate::BoxError;
use serde::Serialize;

use crate::hang::Hang;
use crate::payments::Payments;
use crate::show::{Show, Stages};

/// A worker is killed in the payment after this share of them.
const KILL_AT: f64 = 0.4;

/// The options of every program about payments.
#[derive(Debug, Args)]
pub struct StageArgs {
    /// The number of messages to send; about a third of them are duplicates.
    #[arg(long, default_value_t = 6_000)]
    messages: u32,
    #[command(flatten)]
    show: Show,
    /// Makes the same messages again.
    #[arg(long)]
    seed: Option<u64>,
}

/// A run of a program: its name, its messages, and what it shows.
#[derive(Debug)]
pub struct Stage {
    /// The name of this run, for whatever must not be shared with another run.
    pub name: String,
    /// The messages.
    pub payments: Payments,
    show: Show,
    stages: Stages,
}

impl Stage {
    /// A run with these options.
    pub fn new(args: &StageArgs) -> Self {
        let seed = args.seed.unwrap_or_else(|| fastrand::u64(..));
        Self {
            name: format!("payments-{seed:x}"),
            payments: Payments::new(args.messages, seed),
            show: args.show,
            stages: args.show.stages(),
        }
    }

    /// Begins to send all messages. Returns the bar of this stage.
    pub fn sending(&self, name: &'static str) -> &ProgressBar {
        self.stages.begin(name, self.payments.messages())
    }

    /// Begins to charge all payments. Returns the bar of this stage.
    pub fn charging(&self, name: &'static str) -> &ProgressBar {
        self.stages.begin(name, self.payments.distinct())
    }

    /// The payment in which a worker is killed. That worker says so in a file in `folder`.
    pub fn hang(&self, folder: &Path) -> Hang {
        let order = (self.payments.distinct() as f64 * KILL_AT) as u64;
        Hang::on(format!("order-{order}"), folder)
    }

    /// Ends the last stage.
    pub fn end(&self) {
        self.stages.end();
    }

    /// Prints the proof.
    ///
    /// # Errors
    /// When it cannot be written as JSON.
    pub fn print(&self, proof: &(impl Serialize + std::fmt::Display)) -> Result<(), BoxError> {
        self.show.proof(proof)
    }
}
