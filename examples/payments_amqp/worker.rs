//! A worker process: what you would write yourself, except that it stops in one payment to be
//! killed there.

use std::path::PathBuf;

use clap::Args;
use oncegate::amqp::AmqpSource;
use oncegate::{BoxError, Consumer, Gate};
use oncegate_examples::crew::{start_logging, until_told_to_stop};
use oncegate_examples::hang::Hang;
use oncegate_examples::payments::{Bank, LEASE, Ledger, open_store};

use crate::billing::{self, Billing};

#[derive(Debug, Args)]
pub(crate) struct Worker {
    #[arg(long)]
    uri: String,
    #[arg(long)]
    queue: String,
    #[arg(long)]
    store: String,
    #[arg(long)]
    scope: String,
    #[arg(long)]
    bank: PathBuf,
    #[arg(long)]
    ledger: PathBuf,
    #[command(flatten)]
    hang: Hang,
}

impl Worker {
    #[tokio::main]
    pub(crate) async fn run(self) -> Result<(), BoxError> {
        start_logging();
        let store = open_store(&self.store).await?;
        let gate = Gate::new(self.scope, billing::key(), store).lease(LEASE);
        let source = AmqpSource::new(self.uri, self.queue).prefetch(32);
        let bank = Bank::open(&self.bank)?;
        let ledger = Ledger::open(&self.ledger)?;
        let billing = Billing {
            bank,
            ledger,
            hang: self.hang,
        };
        Consumer::new(source, gate, billing)
            .concurrency(16)
            .run_until(until_told_to_stop())
            .await?;
        Ok(())
    }
}
