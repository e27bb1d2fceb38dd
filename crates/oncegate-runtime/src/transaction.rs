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

use std::fmt;
use std::time::Duration;

use bytes::Bytes;
use oncegate_core::key::{Fingerprint, StoreKey};
use oncegate_core::record::{Record, State, StoreTime, Token};
use oncegate_core::rules::{Operation, Reply, apply};
use parking_lot::Mutex;

use crate::attempt::Attempt;
use crate::codec::{Codec, ToStored, not_kept};
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

/// A completion to be written inside the caller's own transaction; created by
/// [`Attempt::completing`].
#[derive(Clone)]
pub struct Completing {
    key: StoreKey,
    token: Token,
    fingerprint: Option<Fingerprint>,
    result: Bytes,
    retention: Duration,
    lease: Duration,
}

impl Completing {
    /// The key of the record.
    pub fn key(&self) -> &StoreKey {
        &self.key
    }

    /// The owner token that the record must hold. Never log it: anyone who has it can complete the
    /// key.
    pub fn token(&self) -> Token {
        self.token
    }

    /// Digest of the rest of the payload, if the gate uses fingerprints.
    pub fn fingerprint(&self) -> Option<Fingerprint> {
        self.fingerprint
    }

    /// The result as it is stored.
    pub fn result(&self) -> &Bytes {
        &self.result
    }

    /// Returns how long the record is kept from now on.
    pub fn retention(&self) -> Duration {
        self.retention
    }

    /// Returns how long the rest of the transaction may take: the gate's lease. In the meantime the
    /// record is locked, and no other claim of the key is granted.
    pub fn limit(&self) -> Duration {
        self.lease
    }

    /// The claim of a key without a record, in the transaction that also completes it.
    pub fn claim(&self) -> Operation {
        Operation::Claim {
            token: self.token,
            lease: self.lease,
            fingerprint: self.fingerprint,
            fenced: false,
            // No other owner's lease can be left over in a record that does not exist.
            longest_lease: Duration::MAX,
        }
    }

    /// The completion as an operation on the record.
    pub fn operation(&self) -> Operation {
        Operation::Complete {
            token: self.token,
            fingerprint: self.fingerprint,
            result: self.result.clone(),
            retention: self.retention,
        }
    }

    /// Returns what the record holds afterwards, by the [rules](oncegate_core::rules), if it
    /// belongs to this run.
    ///
    /// `record` must have been read at `now` under a lock that is held until the transaction ends.
    ///
    /// # Errors
    /// Returns an error when there is no record, it belongs to another owner, or it is completed.
    /// Then roll back: what this transaction has written must not be committed, not even when this
    /// same run has completed the key in an earlier transaction.
    pub fn apply(&self, now: StoreTime, record: Option<Record>) -> Result<Record, BoxError> {
        let before = record.filter(|record| record.kept(now));
        let completed = matches!(
            before,
            Some(Record {
                state: State::Completed { .. },
                ..
            })
        );
        match apply(now, before, &self.operation()) {
            _ if completed => Err("the key is completed already: the transaction was rolled back".into()),
            (Some(after), Reply::Applied { recreated: false }) => Ok(after),
            (_, Reply::Applied { .. }) => {
                Err("there is no record of the key where the transaction is, so it was \
                                            rolled back: use the database of the gate's store"
                    .into())
            }
            _ => Err(
                "the lease was lost, and the key belongs to another owner: the transaction was rolled back"
                    .into(),
            ),
        }
    }
}

impl fmt::Debug for Completing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Completing")
            .field("key", &self.key)
            .field("token", &self.token)
            .field("result_bytes", &self.result.len())
            .finish_non_exhaustive()
    }
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
        self.unit().completing(output)
    }
}

/// Keeps the error for the runtime, in case the handler does not return it.
fn not_confirmed(attempt: &Attempt, error: BoxError) -> Failure {
    let failure = Failure::retry(error);
    if let Some(attempted) = attempt.unit().lock().as_mut() {
        attempted.trouble = Some(failure.reason());
    }
    failure
}

/// The data that completes a run in a transaction, and whether a completion was tried.
#[derive(Debug)]
pub(crate) struct Unit {
    pub(crate) key: StoreKey,
    pub(crate) token: Token,
    pub(crate) fingerprint: Option<Fingerprint>,
    pub(crate) retention: Duration,
    pub(crate) lease: Duration,
    pub(crate) codec: Codec,
    pub(crate) max_result_bytes: usize,
    pub(crate) attempted: Mutex<Option<Attempted>>,
}

/// A completion in a transaction was tried; only the store knows whether it was committed.
#[derive(Debug, Default)]
pub(crate) struct Attempted {
    /// The size of the result that it stores.
    pub(crate) result_bytes: u64,
    /// The reason why the stored result is not the handler's.
    pub(crate) not_kept: Option<BoxError>,
    /// The error that the handler received.
    pub(crate) trouble: Option<String>,
}

impl Unit {
    /// The completion without a result, for the beginning of a transaction that the runtime opens.
    pub(crate) fn beginning(&self) -> Completing {
        self.with_result(Bytes::new())
    }

    pub(crate) fn completing<T: ToStored + ?Sized>(&self, output: &T) -> Completing {
        let (result, not_kept) = self.encode(output);
        *self.lock() = Some(Attempted {
            result_bytes: result.len() as u64,
            not_kept,
            trouble: None,
        });
        self.with_result(result)
    }

    fn with_result(&self, result: Bytes) -> Completing {
        Completing {
            key: self.key.clone(),
            token: self.token,
            fingerprint: self.fingerprint,
            result,
            retention: self.retention,
            lease: self.lease,
        }
    }

    /// Returns the result for the record, and the reason if it is not kept. A transaction does not
    /// wait for a result store.
    fn encode<T: ToStored + ?Sized>(&self, output: &T) -> (Bytes, Option<BoxError>) {
        let most = self.max_result_bytes;
        match output.to_stored(self.codec) {
            Ok(stored) if stored.len() <= most => (stored, None),
            Ok(stored) => {
                let why = format!(
                    "the result has {} bytes, `max_result_bytes` is {most}",
                    stored.len()
                );
                (not_kept(), Some(why.into()))
            }
            Err(error) => (not_kept(), Some(error)),
        }
    }

    /// Returns whether a completion in a transaction was tried.
    pub(crate) fn is_attempted(&self) -> bool {
        self.lock().is_some()
    }

    pub(crate) fn lock(&self) -> parking_lot::MutexGuard<'_, Option<Attempted>> {
        self.attempted.lock()
    }
}
