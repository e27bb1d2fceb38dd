//! Completes a key inside the user's own transaction: business rows and COMPLETED commit together,
//! or neither does.
//!
//! [`Attempt::commit_with`] takes the transaction by value, [`Attempt::completing`] is for
//! transactions without an adapter. Neither result decides about the ack: the runtime reads the
//! record back from the gate's store.
//!
//! # Not obvious
//!
//! Implementation notes: facts about transactions of users that this code depends on.
//!
//! - `complete` by the token that completed is Applied again, and a missing record is written anew.
//!   Both are right after an effect and wrong before its commit. In a transaction only PENDING
//!   under this token may become COMPLETED; otherwise a second transaction of the same run would
//!   succeed because of the first one's completion.
//! - A commit whose connection broke may still arrive. A read does not wait for it, a write does:
//!   the row is locked before COMMIT is sent, so a write waits for that lock. `extend` answers
//!   Applied about a record that its token has completed, so only the read after it shows the
//!   state.
//! - The record is the transaction's last lock, and only COMMIT follows it. So handlers and batches
//!   cannot deadlock, except through deferred constraints, which PostgreSQL's deadlock detection
//!   ends.
//! - Claims of a locked row are answered Busy. If they were answered "unavailable", one stalled
//!   owner would pause whole consumers.

use crate::attempt::Attempt;
use crate::codec::ToStored;
pub use crate::completing::Completing;
use crate::failure::{BoxError, Failure};

/// A transaction of a database in which the store `S` keeps its records.
///
/// Implemented with `PostgresStore` as `S` for the transactions of tokio-postgres,
/// deadpool-postgres (feature `postgres`) and sqlx on PostgreSQL (feature `sqlx`). For clients that
/// block, SQLite's, see [`BlockingSqlTransaction`]; for everything else [`Attempt::completing`].
pub trait SqlTransaction<S>: Send {
    /// Locks the key's record, completes it by [`Completing::apply`], and commits.
    ///
    /// # Errors
    /// Returns an error when the record does not belong to this run, or anything else failed: then
    /// the transaction must have been rolled back, unless its commit was sent and not answered.
    /// Callers do not distinguish these cases: they read the record back.
    fn complete_and_commit(
        self,
        completing: &Completing,
    ) -> impl Future<Output = Result<(), BoxError>> + Send;
}

/// A transaction of a client that blocks its thread; otherwise the same as [`SqlTransaction`].
///
/// Implemented with `SqliteStore` as `S` for the transactions of rusqlite.
pub trait BlockingSqlTransaction<S> {
    /// Completes the key by [`Completing::apply`], and commits.
    ///
    /// # Errors
    /// As in [`SqlTransaction::complete_and_commit`].
    fn complete_and_commit(self, completing: &Completing) -> Result<(), BoxError>;
}

impl Attempt {
    /// Completes the message inside `transaction` and commits it: the handler's writes and
    /// COMPLETED become visible together, or not at all. Call it last, and return `Ok` with the
    /// same output.
    ///
    /// The transaction must be one of the database in which the gate's store keeps its records.
    ///
    /// ```no_run
    /// # #[cfg(feature = "postgres")] mod example {
    /// use oncegate::{Attempt, Failure, Handler, Message};
    ///
    /// struct Billing {
    ///     pool: deadpool_postgres::Pool,
    /// }
    ///
    /// impl Handler for Billing {
    ///     type Output = String;
    ///
    ///     async fn handle(&self, _: &Message, attempt: &Attempt) -> Result<String, Failure> {
    ///         let mut client = self.pool.get().await?;
    ///         let transaction = client.transaction().await?;
    ///         let account = "4711";
    ///         transaction.execute("UPDATE accounts SET balance = balance - 10 WHERE id = $1", &[&account]).await?;
    ///         let receipt = format!("charged {account}");
    ///         attempt.commit_with(transaction, &receipt).await?;
    ///         Ok(receipt)
    ///     }
    /// }
    /// # }
    /// ```
    ///
    /// - The stored result is `output`; what the handler returns afterwards is ignored.
    /// - From here on the transaction runs under the gate's lease as its `statement_timeout` and
    ///   `idle_in_transaction_session_timeout` (half of it as its `lock_timeout`), and never with
    ///   `synchronous_commit = off`.
    /// - On a **crash**, or when the future is **dropped** or **cancelled**, either both or neither
    ///   are committed; the record decides whether the message is acknowledged or runs again.
    /// - The message of a transaction that is **forgotten** or rolled back is never acknowledged.
    ///
    /// # Errors
    /// Returns an error when the lease was lost to another attempt, the record does not exist, or
    /// the database failed. The transaction was then rolled back, unless the connection broke
    /// during the commit. Return the error with `?` and do nothing else: the runtime reads the
    /// record, acknowledges if it is completed, and tries again if not.
    pub fn commit_with<S, Tx: SqlTransaction<S>, T: ToStored + ?Sized>(
        &self,
        transaction: Tx,
        output: &T,
    ) -> impl Future<Output = Result<(), Failure>> + Send + use<S, Tx, T> {
        let completing = self.completing(output);
        let attempt = self.clone();
        async move {
            let limit = completing.limit();
            let committed =
                tokio::time::timeout(limit, transaction.complete_and_commit(&completing)).await;
            committed
                .unwrap_or_else(|_| {
                    Err(format!("the transaction was not confirmed within {limit:?}").into())
                })
                .map_err(|error| not_confirmed(&attempt, error))
        }
    }

    /// Completes the message inside a transaction on the SQLite file of the gate's store, and
    /// commits it.
    ///
    /// The handler's writes in the transaction and COMPLETED become visible together, or not at
    /// all. Call it last.
    ///
    /// It blocks, as all of rusqlite does: run the transaction on a thread that may block. Begin
    /// the transaction as `IMMEDIATE`, and keep it short: while it is open, no other connection can
    /// write to the file.
    ///
    /// ```no_run
    /// # #[cfg(feature = "sqlite-system")] mod example {
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
    /// The stored result is `output`. After a **crash**, either both exist or neither. A message
    /// whose transaction was **not committed** or rolled back is never acknowledged. When the
    /// handler's future is dropped meanwhile, the thread continues, and the record shows the
    /// outcome later.
    ///
    /// # Errors
    /// When the lease was lost to another attempt, the record is not in this file, or SQLite
    /// failed; then the transaction was rolled back. Pass it on with `?`: the runtime reads the
    /// record, acknowledges if it is completed, and tries again if not.
    pub fn blocking_commit_with<S, Tx: BlockingSqlTransaction<S>, T: ToStored + ?Sized>(
        &self,
        transaction: Tx,
        output: &T,
    ) -> Result<(), Failure> {
        let completing = self.completing(output);
        transaction
            .complete_and_commit(&completing)
            .map_err(|error| not_confirmed(self, error))
    }

    /// Returns the completion of this message with this result, for a transaction without an
    /// adapter for [`commit_with`](Self::commit_with).
    ///
    /// Write it with the store's own statement (`PostgresStore::complete_sql`) as the last one
    /// before the commit, and roll back if that does not change exactly one row. The runtime reads
    /// the record back when the handler has returned: from this call on, the handler's return value
    /// does not decide about the ack.
    pub fn completing<T: ToStored + ?Sized>(&self, output: &T) -> Completing {
        self.completion().completing(output)
    }
}

/// Keeps the error for the runtime, in case the handler does not return it.
fn not_confirmed(attempt: &Attempt, error: BoxError) -> Failure {
    let failure = Failure::retry(error);
    if let Some(attempted) = attempt.completion().lock().as_mut() {
        attempted.trouble = Some(failure.reason());
    }
    failure
}
