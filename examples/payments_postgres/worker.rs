//! A worker process: what you would write yourself, except that it stops in one transaction to be
//! killed there.

use std::str::FromStr as _;
use std::time::Duration;

use clap::Args;
use deadpool_postgres::{Manager, ManagerConfig, Pool, RecyclingMethod};
use oncegate::kafka::KafkaSource;
use oncegate::postgres::{PostgresStore, PostgresTransaction};
use oncegate::{
    Attempt, BoxError, Consumer, Failure, Field, Gate, Key, Message, Transactional,
    TransactionalHandler,
};
use oncegate_examples::crew::{start_logging, until_told_to_stop};
use oncegate_examples::hang::Hang;
use oncegate_examples::payments::LEASE;
use serde::{Deserialize, Serialize};
use tokio_postgres::NoTls;

/// The fields that make two payments the same, whatever else the messages contain.
fn key() -> Key {
    Key::json([Field::from("order_id"), Field::path("amount").decimal()])
}

const CONCURRENCY: u32 = 16;
/// The time that the rest of the work in the transaction takes.
const BOOKING_TAKES: Duration = Duration::from_millis(2);

#[derive(Debug, Args)]
pub(crate) struct Worker {
    #[arg(long)]
    bootstrap: String,
    #[arg(long)]
    topic: String,
    #[arg(long)]
    group: String,
    #[arg(long)]
    postgres: String,
    #[arg(long)]
    run: String,
    #[command(flatten)]
    hang: Hang,
}

#[derive(Debug, Deserialize)]
struct Payment {
    order_id: String,
    amount: serde_json::Number,
}

#[derive(Debug, Serialize, Deserialize)]
struct Receipt {
    charge: String,
}

struct Billing {
    /// For the answers to duplicates, which need no transaction.
    pool: Pool,
    run: String,
    /// The payment in whose transaction this worker may be killed; yours has none.
    hang: Hang,
}

impl TransactionalHandler<PostgresTransaction> for Billing {
    type Output = Receipt;

    async fn handle(
        &self,
        message: &Message,
        attempt: &Attempt,
        transaction: &mut PostgresTransaction,
    ) -> Result<Receipt, Failure> {
        let payment: Payment = message.json()?;
        let receipt = Receipt {
            charge: attempt.idempotency_key("charge"),
        };
        let insert =
            "INSERT INTO charges (run, order_id, amount, charge, pid) VALUES ($1, $2, $3, $4, $5)";
        let amount = payment.amount.to_string();
        let pid = i32::try_from(std::process::id())?;
        transaction
            .execute(
                insert,
                &[&self.run, &payment.order_id, &amount, &receipt.charge, &pid],
            )
            .await?;
        // A kill here takes the charge back.
        self.hang.here(&payment.order_id).await?;
        tokio::time::sleep(BOOKING_TAKES).await;
        Ok(receipt)
    }

    async fn duplicate(&self, message: &Message, receipt: Receipt) -> Result<(), Failure> {
        let payment: Payment = message.json()?;
        let client = self.pool.get().await?;
        let insert = "INSERT INTO answers (run, order_id, charge) VALUES ($1, $2, $3)";
        client
            .execute(insert, &[&self.run, &payment.order_id, &receipt.charge])
            .await?;
        Ok(())
    }
}

impl Worker {
    #[tokio::main]
    pub(crate) async fn run(self) -> Result<(), BoxError> {
        start_logging();
        let store = PostgresStore::connect(&self.postgres).await?;
        let transactions = store.transactions()?.connections(CONCURRENCY as usize);
        let gate = Gate::new(&*self.run, key(), store).lease(LEASE);
        let source = KafkaSource::new(self.bootstrap, self.group, [self.topic])
            .property("session.timeout.ms", "6000");
        let billing = Billing {
            pool: pool(&self.postgres)?,
            run: self.run,
            hang: self.hang,
        };
        let billing = Transactional::new(transactions, billing);
        Consumer::new(source, gate, billing)
            .concurrency(CONCURRENCY)
            .run_until(until_told_to_stop())
            .await?;
        Ok(())
    }
}

/// The connections for answers to duplicates; the store and its transactions have their own.
fn pool(url: &str) -> Result<Pool, BoxError> {
    let config = tokio_postgres::Config::from_str(url)?;
    let recycling = ManagerConfig {
        recycling_method: RecyclingMethod::Fast,
    };
    let manager = Manager::from_config(config, NoTls, recycling);
    Ok(Pool::builder(manager)
        .max_size(CONCURRENCY as usize)
        .build()?)
}
