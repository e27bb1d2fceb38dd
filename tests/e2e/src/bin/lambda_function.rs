//! A Lambda function for the tests that kill and freeze its environments.

use std::time::Duration;

use oncegate::lambda::Function;
use oncegate::sqlite::SqliteStore;
use oncegate::{Attempt, Backoff, BoxError, Failure, Gate, Key, Message};
use oncegate_testkit::Ledger;
use serde::Deserialize;

#[derive(Deserialize)]
struct Order {
    id: String,
    does: String,
}

/// Arguments: the file with the records, the ledger's path, the lease in milliseconds. The address
/// of the runtime API is in `AWS_LAMBDA_RUNTIME_API`, as in an environment of Lambda.
#[tokio::main]
async fn main() -> Result<(), BoxError> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [records, ledger, lease_ms] = arguments.as_slice() else {
        return Err("lambda_function RECORDS LEDGER LEASE_MS".into());
    };
    let store = SqliteStore::open(records).await?;
    let lease = Duration::from_millis(lease_ms.parse()?);
    let gate = Gate::new("orders", Key::json(["id"]), store).lease(lease);
    let ledger = std::sync::Arc::new(Ledger::open(ledger));
    let handler = move |message: Message, attempt: Attempt| {
        let ledger = std::sync::Arc::clone(&ledger);
        async move {
            let order: Order = message.json()?;
            let is_first = attempt.number() == 1;
            if order.does == "hangs" && is_first {
                std::future::pending::<()>().await;
            }
            if order.does == "fails" && is_first {
                return Err(Failure::retry("told to fail"));
            }
            let recovered = attempt.recovered();
            ledger.append(&format!("{} {recovered}", order.id));
            if order.does == "lingers" {
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
            Ok(order.id)
        }
    };
    let at_once = Backoff::new(Duration::from_millis(1), Duration::from_millis(10));
    Function::new(gate, handler)
        .reports_item_failures()
        .at_least(Duration::from_millis(50))
        .max_attempts(50)
        .backoff(at_once)
        .run()
        .await
}
