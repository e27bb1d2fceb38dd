//! A bank that is busy at first: the message is tried again, under the same idempotency key, and
//! one that can never succeed is given up. `cargo run --example retry`, without a server.

use std::time::Duration;

use async_trait::async_trait;
use oncegate::MemorySource;
use oncegate::dead_letters::{DeadLetter, DeadLetters};
use oncegate::prelude::*;

struct Billing;

impl Handler for Billing {
    type Output = ();

    async fn handle(&self, message: &Message, attempt: &Attempt) -> Result<(), Failure> {
        if message.payload().ends_with(b"\"amount\":0}") {
            return Err(Failure::permanent("an order of 0 cannot be charged"));
        }
        let key = attempt.idempotency_key("charge");
        let number = attempt.number();
        println!("attempt {number} under {key}");
        if number < 3 {
            return Err(Failure::retry_after(
                Duration::from_millis(200),
                "the bank is busy",
            ));
        }
        Ok(())
    }
}

/// A place for what is given up; a consumer of Kafka has `KafkaSource::dead_letters` instead.
#[derive(Debug)]
struct Printed;

#[async_trait]
impl DeadLetters for Printed {
    async fn open(&self) -> Result<(), BoxError> {
        Ok(())
    }

    async fn send(&self, letter: &DeadLetter) -> Result<(), BoxError> {
        println!("given up: {}", letter.reason);
        Ok(())
    }
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let orders = [
        r#"{"order_id":1,"amount":10}"#,
        r#"{"order_id":2,"amount":0}"#,
    ];
    let gate = Gate::new("billing", Key::json(["order_id"]), MemoryStore::new());
    Consumer::new(MemorySource::new("orders", orders), gate, Billing)
        .dead_letters(Printed)
        .max_attempts(5)
        .run_until(shutdown_signal())
        .await?;
    Ok(())
}
