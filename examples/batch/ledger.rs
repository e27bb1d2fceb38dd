//! The book as a table in the file of the records: the orders of a batch and their records are one
//! transaction.

use oncegate::prelude::*;
use oncegate::sqlite::SqliteTransaction;
use rusqlite::ErrorCode;

use crate::Order;

/// Nothing here prevents that an order is booked twice: oncegate must.
const BOOK: &str =
    "CREATE TABLE book (order_id TEXT NOT NULL, amount INTEGER NOT NULL CHECK (amount > 0)) STRICT";

/// Writes orders to the table.
pub(crate) struct Ledger;

/// Makes the table.
pub(crate) fn open(store: &SqliteStore) -> Result<Ledger, BoxError> {
    store.open_connection()?.execute_batch(BOOK)?;
    Ok(Ledger)
}

/// Every order that was booked, as often as it was.
pub(crate) fn booked(store: &SqliteStore) -> Result<Vec<String>, BoxError> {
    let connection = store.open_connection()?;
    let mut orders = connection.prepare("SELECT order_id FROM book")?;
    let orders = orders.query_map([], |row| row.get(0))?;
    Ok(orders.collect::<Result<_, _>>()?)
}

impl TransactionalBatchHandler<SqliteTransaction> for Ledger {
    type Output = ();

    async fn handle(
        &self,
        batch: &[BatchMessage],
        transaction: &mut SqliteTransaction,
    ) -> Result<Vec<Result<(), Failure>>, Failure> {
        let mut insert = transaction.prepare_cached("INSERT INTO book VALUES (?1, ?2)")?;
        for one in batch {
            let Order { order_id, amount } = one.message().json()?;
            insert.execute((order_id, amount)).map_err(|error| {
                match error.sqlite_error_code() {
                    // Another attempt would be refused as well.
                    Some(ErrorCode::ConstraintViolation) => Failure::permanent(error),
                    _ => Failure::from(error),
                }
            })?;
        }
        Ok(batch.iter().map(|_| Ok(())).collect())
    }
}
