//! A worker process: what you would write yourself, except that it stops in one payment to be
//! killed there.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use oncegate::sqs::SqsSource;
use oncegate::{BoxError, Consumer, Gate};
use oncegate_examples::crew::{start_logging, until_told_to_stop};
use oncegate_examples::hang::Hang;
use oncegate_examples::payments::{Bank, LEASE, Ledger, open_store};
use oncegate_testkit::Sqs;

use crate::billing::{self, Billing};

const VISIBILITY: Duration = Duration::from_secs(4);
/// Short, so that a worker that waits for messages stops soon.
const WAIT: Duration = Duration::from_secs(2);

#[derive(Debug, Args)]
pub(crate) struct Worker {
    #[arg(long)]
    endpoint: String,
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
        // `SqsSource::new("orders")` finds credentials and region in the usual places; another
        // server has neither.
        let source = SqsSource::from_client(Sqs::at(self.endpoint).client().clone(), self.queue)
            .visibility(VISIBILITY)
            .wait(WAIT);
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
