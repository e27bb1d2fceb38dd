//! The effect and its record are one commit of SQLite: whatever dies, both are there or neither.
//! `cargo run --example transaction`, without a server.

use oncegate::MemorySource;
use oncegate::prelude::*;
use oncegate::sqlite::SqliteTransaction;

#[derive(serde::Deserialize)]
struct Order {
    amount: i64,
}

struct Ledger;

impl TransactionalHandler<SqliteTransaction> for Ledger {
    type Output = ();

    async fn handle(
        &self,
        message: &Message,
        _: &Attempt,
        transaction: &mut SqliteTransaction,
    ) -> Result<(), Failure> {
        let order: Order = message.json()?;
        transaction.execute("INSERT INTO charges (amount) VALUES (?1)", [order.amount])?;
        Ok(())
    }
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("billing.db");
    let store = SqliteStore::open(&file).await?;
    let ledger = rusqlite::Connection::open(&file)?;
    ledger.execute("CREATE TABLE charges (amount INTEGER NOT NULL)", [])?;

    let orders = [
        r#"{"order_id":1,"amount":10}"#,
        r#"{"order_id":2,"amount":7}"#,
        r#"{"amount":10,"order_id":1}"#,
    ];
    let handler = Transactional::new(store.transactions(), Ledger);
    let gate = Gate::new("billing", Key::json(["order_id"]), store);
    Consumer::new(MemorySource::new("orders", orders), gate, handler)
        .run_until(shutdown_signal())
        .await?;

    let count = "SELECT count(*), sum(amount) FROM charges";
    let (rows, sum): (i64, i64) =
        ledger.query_row(count, [], |row| Ok((row.get(0)?, row.get(1)?)))?;
    println!("{rows} charges of {sum} in all");
    Ok(())
}
