//! Completes a record inside the user's transaction on the same file.

use rusqlite::{Connection, Transaction};

use super::errors::{self, Trouble};
use super::{file, row};
use crate::attempt::Attempt;
use crate::codec::ToStored;
use crate::failure::{BoxError, Failure};
use crate::transaction::{Completing, not_confirmed};

/// The level of `PRAGMA synchronous` at which a commit survives a power cut.
const FULL: i64 = 2;

impl Attempt {
    /// Completes the message inside a transaction on the SQLite file of the gate's store, and commits it.
    ///
    /// The handler's writes in the transaction and COMPLETED become visible together, or not at all. Call it last.
    ///
    /// It blocks, as all of rusqlite does: run the transaction on a thread that may block. Begin the transaction as
    /// `IMMEDIATE`, and keep it short: while it is open, no other connection can write to the file.
    ///
    /// ```no_run
    /// # mod example {
    /// use oncegate::sqlite::SqliteStore;
    /// use oncegate::{Attempt, Failure, Handler, Message};
    /// use rusqlite::TransactionBehavior::Immediate;
    ///
    /// struct Billing {
    ///     store: SqliteStore,
    /// }
    ///
    /// impl Handler for Billing {
    ///     type Output = String;
    ///
    ///     async fn handle(&self, _: &Message, attempt: &Attempt) -> Result<String, Failure> {
    ///         let (store, attempt) = (self.store.clone(), attempt.clone());
    ///         tokio::task::spawn_blocking(move || {
    ///             let mut connection = store.open_connection()?;
    ///             let transaction = connection.transaction_with_behavior(Immediate)?;
    ///             transaction.execute("UPDATE accounts SET balance = balance - 10 WHERE id = 4711", [])?;
    ///             let receipt = "charged 4711".to_owned();
    ///             attempt.blocking_commit_with(transaction, &receipt)?;
    ///             Ok(receipt)
    ///         })
    ///         .await?
    ///     }
    /// }
    /// # }
    /// ```
    ///
    /// The stored result is `output`. After a **crash**, either both exist or neither. A message whose transaction was
    /// **not committed** or rolled back is never acknowledged. When the handler's future is dropped meanwhile, the
    /// thread continues, and the record shows the outcome later.
    ///
    /// # Errors
    /// When the lease was lost to another attempt, the record is not in this file, or SQLite failed; then the
    /// transaction was rolled back. Pass it on with `?`: the runtime reads the record, acknowledges if it is
    /// completed, and tries again if not.
    pub fn blocking_commit_with<T: ToStored + ?Sized>(
        &self,
        transaction: Transaction<'_>,
        output: &T,
    ) -> Result<(), Failure> {
        let completing = self.completing(output);
        complete_and_commit(transaction, &completing).map_err(|error| not_confirmed(self, error))
    }
}

fn complete_and_commit(transaction: Transaction<'_>, completing: &Completing) -> Result<(), BoxError> {
    check(&transaction)?;
    complete(&transaction, completing)?;
    transaction.commit().map_err(|error| errors::not_committed(&error).into())
}

/// Refuses a connection whose commits are not durable enough for an ack.
fn check(connection: &Connection) -> Result<(), BoxError> {
    let not_executed = |error| errors::not_executed(&error);
    if !file::is_ours(connection).map_err(not_executed)? {
        return Err(
            "the transaction is not on a file of oncegate's records: use SqliteStore::open_connection(), \
                    and keep the tables of the effects in that file"
                .into(),
        );
    }
    let synchronous: i64 =
        connection.pragma_query_value(None, "synchronous", |row| row.get(0)).map_err(not_executed)?;
    if synchronous < FULL {
        return Err("a power cut could take back the commit after its message was acknowledged: set PRAGMA \
                    synchronous = FULL on the connection, or use SqliteStore::open_connection()"
            .into());
    }
    Ok(())
}

fn complete(connection: &Connection, completing: &Completing) -> Result<(), BoxError> {
    let boxed = |trouble: Trouble| BoxError::from(oncegate_core::store::StoreError::from(trouble));
    let now = row::now(connection, true).map_err(|error| boxed(error.into()))?;
    let before = row::read(connection, completing.key()).map_err(boxed)?;
    let after = completing.apply(now, before)?;
    row::write(connection, completing.key(), &after).map_err(|error| boxed(error.into()))
}
