//! An order that comes three times is charged once: `cargo run --example hello`, without a server.

use oncegate::MemorySource;
use oncegate::prelude::*;

#[derive(serde::Deserialize)]
struct Order {
    order_id: String,
    amount: f64,
}

struct Billing;

impl Handler for Billing {
    type Output = String;

    async fn handle(&self, message: &Message, _: &Attempt) -> Result<String, Failure> {
        let order: Order = message.json()?;
        println!("charging {} for {}", order.amount, order.order_id);
        Ok(format!("receipt of {}", order.order_id))
    }

    async fn duplicate(&self, _: &Message, receipt: String) -> Result<(), Failure> {
        println!("charged before: {receipt}");
        Ok(())
    }
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let orders = [
        r#"{"order_id":"A-1","amount":10}"#,
        r#"{"amount":10.00,"order_id":"A-1"}"#,
        r#"{"order_id":"A-1","amount":1e1,"sent_at":"12:01"}"#,
    ];
    let source = MemorySource::new("orders", orders);
    let key = Key::json([Field::from("order_id"), Field::from("amount")]);
    let gate = Gate::new("billing", key, MemoryStore::new());
    Consumer::new(source, gate, Billing)
        .run_until(shutdown_signal())
        .await?;
    Ok(())
}
