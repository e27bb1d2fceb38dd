//! The same consumer on a queue of SQS:
//! `cargo run --example sqs --features sqs -- QUEUE DEAD_LETTERS`, with the credentials and the
//! region of the AWS SDK, or `AWS_ENDPOINT_URL` for another server.

use oncegate::prelude::*;
use oncegate::sqs::SqsDeadLetters;

struct Billing;

impl Handler for Billing {
    type Output = ();

    async fn handle(&self, message: &Message, attempt: &Attempt) -> Result<(), Failure> {
        println!(
            "charging {} under {}",
            message.origin(),
            attempt.idempotency_key("charge")
        );
        Ok(())
    }
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let mut names = std::env::args().skip(1);
    let (Some(queue), Some(dead_letters)) = (names.next(), names.next()) else {
        anyhow::bail!("name the queue, and the one for dead letters");
    };
    let store = SqliteStore::open("billing.db").await?;
    let gate = Gate::new("billing", Key::json(["order_id"]), store);
    Consumer::new(SqsSource::new(queue), gate, Billing)
        .dead_letters(SqsDeadLetters::new(dead_letters))
        .run_until(shutdown_signal())
        .await?;
    Ok(())
}
