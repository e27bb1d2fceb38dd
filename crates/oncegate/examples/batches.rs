//! Up to a hundred orders a call: one write for all of them, and each order is written once.
//! `cargo run --example batches`, without a server.

use std::time::Duration;

use oncegate::MemorySource;
use oncegate::prelude::*;

struct Ledger;

impl BatchHandler for Ledger {
    type Output = ();

    async fn handle(&self, batch: &[BatchMessage]) -> Result<Vec<Result<(), Failure>>, Failure> {
        // Your one statement with a row for each of them. An error here would split the batch.
        println!("writing {} orders", batch.len());
        Ok(batch.iter().map(|_| Ok(())).collect())
    }
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    // Each order comes twice.
    let orders = (0..400).map(|n| format!(r#"{{"order_id":{}}}"#, n / 2));
    let gate = Gate::new("ledger", Key::json(["order_id"]), MemoryStore::new());
    let limits = BatchLimits::new(100).wait(Duration::from_millis(50));
    Consumer::new(
        MemorySource::new("orders", orders),
        gate,
        Batched::new(limits, Ledger),
    )
    .run_until(shutdown_signal())
    .await?;
    Ok(())
}
