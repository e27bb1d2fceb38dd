//! A worker process: what you would write yourself.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use oncegate::core::store::Store;
use oncegate::kafka::KafkaSource;
use oncegate::redis::RedisStore;
use oncegate::sqlite::SqliteStore;
use oncegate::{BoxError, Consumer, Failure, Field, Gate, Handler, Key, Message};
use oncegate_examples::crew::{start_logging, told_to_stop};
use serde::{Deserialize, Serialize};

use crate::ledger::{Entry, Ledger};

/// The fields that make two payments the same, whatever else the messages say.
fn key() -> Key {
    Key::json([Field::from("order_id"), Field::path("amount").decimal()])
}

/// How long the bank takes.
const BANK_TAKES: Duration = Duration::from_millis(2);
/// Short, so that the payments of the killed worker are taken over soon.
const LEASE: Duration = Duration::from_secs(3);

#[derive(Debug, Args)]
pub(crate) struct Worker {
    #[arg(long)]
    bootstrap: String,
    #[arg(long)]
    topic: String,
    #[arg(long)]
    group: String,
    #[arg(long)]
    store: String,
    #[arg(long)]
    scope: String,
    #[arg(long)]
    ledger: PathBuf,
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
}

impl Handler for Billing {
    type Output = Receipt;

    async fn handle(&self, message: Message) -> Result<Receipt, Failure> {
        let payment: Payment = message.json()?;
        tokio::time::sleep(BANK_TAKES).await;
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
        let source =
            KafkaSource::new(self.bootstrap, self.group, [self.topic]).property("session.timeout.ms", "6000");
        let ledger = Ledger::open(&self.ledger)?;
        Consumer::new(source, gate, Billing { ledger }).concurrency(16).run_until(told_to_stop()).await?;
        Ok(())
    }
}
