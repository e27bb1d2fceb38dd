//! A worker process: what you would write yourself. The handler is that of the example `payments`.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use oncegate::core::store::Store;
use oncegate::redis::RedisStore;
use oncegate::sqlite::SqliteStore;
use oncegate::sqs::SqsSource;
use oncegate::{BoxError, Consumer, Failure, Field, Gate, Handler, Key, Message};
use oncegate_examples::crew::{start_logging, told_to_stop};
use oncegate_tests::Sqs;
use serde::{Deserialize, Serialize};

use crate::ledger::{Entry, Ledger};

/// The fields that make two payments the same, whatever else the messages say.
fn key() -> Key {
    Key::json([Field::from("order_id"), Field::path("amount").decimal()])
}

/// How long the bank takes.
const BANK_TAKES: Duration = Duration::from_millis(2);
/// How long it takes over the one payment during which a worker is killed.
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
    ledger: PathBuf,
    /// The order over which the bank hangs.
    #[arg(long)]
    slow_order: String,
    /// The file that tells the main process who waits for the bank.
    #[arg(long)]
    begun: PathBuf,
}

#[derive(Debug, Deserialize)]
struct Payment {
    order_id: String,
}

#[derive(Debug, Serialize, Deserialize)]
struct Receipt {
    charge: String,
}

struct Billing {
    ledger: Ledger,
    slow_order: String,
    begun: PathBuf,
}

impl Handler for Billing {
    type Output = Receipt;

    async fn handle(&self, message: Message) -> Result<Receipt, Failure> {
        let payment: Payment = message.json()?;
        tokio::time::sleep(BANK_TAKES).await;
        if payment.order_id == self.slow_order && !message.recovered() {
            std::fs::write(&self.begun, std::process::id().to_string())?;
            tokio::time::sleep(BANK_HANGS).await;
        }
        let charge = message.downstream_key("charge");
        self.ledger.append(&Entry::charge(payment.order_id, &charge, message.recovered()))?;
        Ok(Receipt { charge })
    }

    async fn duplicate(&self, message: Message, receipt: Receipt) -> Result<(), Failure> {
        let payment: Payment = message.json()?;
        self.ledger.append(&Entry::answer(payment.order_id, &receipt.charge))?;
        Ok(())
    }
}

impl Worker {
    #[tokio::main]
    pub(crate) async fn run(self) -> Result<(), BoxError> {
        start_logging();
        let store: Arc<dyn Store> = match self.store.starts_with("redis://") {
            true => Arc::new(RedisStore::connect(&self.store).await?),
            false => Arc::new(SqliteStore::open(&self.store).await?),
        };
        let gate = Gate::new(self.scope, key(), store).lease(LEASE);
        // `SqsSource::new("orders")` finds credentials and region in the usual places; a server of one's own has
        // neither.
        let source = SqsSource::from_client(Sqs::at(self.endpoint).client().clone(), self.queue)
            .visibility(VISIBILITY)
            .wait(WAIT);
        let ledger = Ledger::open(&self.ledger)?;
        let billing = Billing { ledger, slow_order: self.slow_order, begun: self.begun };
        Consumer::new(source, gate, billing).concurrency(16).run_until(told_to_stop()).await?;
        Ok(())
    }
}
