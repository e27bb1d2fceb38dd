//! A worker process: what you would write yourself, except for the bank that hangs.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use oncegate::sqs::SqsSource;
use oncegate::{Attempt, BoxError, Consumer, Failure, Gate, Handler, Message};
use oncegate_examples::crew::{start_logging, told_to_stop};
use oncegate_examples::payments::{Bank, Ledger, open_store};
use oncegate_testkit::Sqs;

use crate::billing::{self, Billing, Payment, Receipt};

/// Duration of the one payment during which a worker is killed.
const BANK_HANGS: Duration = Duration::from_secs(60);
/// Short, so that the payments of the killed worker are taken over soon.
const LEASE: Duration = Duration::from_secs(3);
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
    /// The order on which the bank hangs.
    #[arg(long)]
    slow_order: String,
    /// The file that tells the main process which worker waits for the bank.
    #[arg(long)]
    begun: PathBuf,
}

/// The billing of the example `payments`, with a bank that hangs on one payment.
struct SlowBilling {
    billing: Billing,
    slow_order: String,
    begun: PathBuf,
}

impl Handler for SlowBilling {
    type Output = Receipt;

    async fn handle(&self, message: &Message, attempt: &Attempt) -> Result<Receipt, Failure> {
        let payment: Payment = message.json()?;
        if payment.order_id == self.slow_order && !attempt.recovered() {
            std::fs::write(&self.begun, std::process::id().to_string())?;
            tokio::time::sleep(BANK_HANGS).await;
        }
        self.billing.handle(message, attempt).await
    }

    async fn duplicate(&self, message: &Message, receipt: Receipt) -> Result<(), Failure> {
        self.billing.duplicate(message, receipt).await
    }
}

impl Worker {
    #[tokio::main]
    pub(crate) async fn run(self) -> Result<(), BoxError> {
        start_logging();
        let store = open_store(&self.store).await?;
        let gate = Gate::new(self.scope, billing::key(), store).lease(LEASE);
        // `SqsSource::new("orders")` finds credentials and region in the usual places; another server has
        // neither.
        let source = SqsSource::from_client(Sqs::at(self.endpoint).client().clone(), self.queue)
            .visibility(VISIBILITY)
            .wait(WAIT);
        let billing = Billing { bank: Bank::open(&self.bank)?, ledger: Ledger::open(&self.ledger)? };
        let billing = SlowBilling { billing, slow_order: self.slow_order, begun: self.begun };
        Consumer::new(source, gate, billing).concurrency(16).run_until(told_to_stop()).await?;
        Ok(())
    }
}
