//! Completing a key inside a transaction of the user's own: business rows and COMPLETED commit together, or
//! neither does.
//!
//! [`Attempt::commit_with`] takes the transaction by value, [`Attempt::completing`] is for what has no adapter.
//! Neither is believed: the one who decides about the ack reads the record back from the gate's store.

use std::fmt;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use oncegate_core::key::{Fingerprint, StoreKey};
use oncegate_core::record::{Record, State, StoreTime, Token};
use oncegate_core::rules::{Operation, Reply, apply};

use crate::attempt::Attempt;
use crate::codec::{Codec, ToStored, not_kept};
use crate::failure::{BoxError, Failure};

/// A transaction of a database in which a gate's store keeps its records.
///
/// Implemented for the transactions of tokio-postgres, deadpool-postgres (feature `postgres`) and sqlx on
/// PostgreSQL (feature `sqlx`). For SQLite see [`Attempt::blocking_commit_with`](Attempt#method.blocking_commit_with),
/// for everything else [`Attempt::completing`].
pub trait SqlTransaction: Send {
    /// Locks the key's record, completes it as [`Completing::apply`] says, and commits.
    ///
    /// # Errors
    /// When the record is not this run's to complete, or anything else failed: then the transaction must
    /// have been rolled back, unless its commit was sent and not answered. Callers do not tell these
    /// apart: they read the record back.
    fn complete_and_commit(
        self,
        completing: &Completing,
    ) -> impl Future<Output = Result<(), BoxError>> + Send;
}

/// A completion to be written inside a transaction of the caller's own; made by [`Attempt::completing`].
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

    /// What the record must hold as its owner. Never log it: whoever shows it can complete the key.
    pub fn token(&self) -> Token {
        self.token
    }

    /// The result as it is stored.
    pub fn result(&self) -> &Bytes {
        &self.result
    }

    /// How long the record is kept from now on.
    pub fn retention(&self) -> Duration {
        self.retention
    }

    /// How long the rest of the transaction may take: the gate's lease. While it lasts the record is locked,
    /// and nobody else gets an answer about the key.
    pub fn limit(&self) -> Duration {
        self.lease
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

    /// What the record holds afterwards, by the [rules](oncegate_core::rules), if it is this run's to complete.
    ///
    /// `record` must have been read at `now` under a lock that is held until the transaction ends.
    ///
    /// # Errors
    /// When there is no record, it belongs to somebody else, or it is completed. Then roll back: what this
    /// transaction has written must not be committed, not even when it was this very run that has completed
    /// the key, in an earlier transaction.
    pub fn apply(&self, now: StoreTime, record: Option<Record>) -> Result<Record, BoxError> {
        let before = record.filter(|record| record.kept(now));
        let completed = matches!(before, Some(Record { state: State::Completed { .. }, .. }));
        match apply(now, before, &self.operation()) {
            _ if completed => Err("the key is completed already: the transaction was rolled back".into()),
            (Some(after), Reply::Applied { recreated: false }) => Ok(after),
            (_, Reply::Applied { .. }) => {
                Err("there is no record of the key where the transaction is, so it was \
                                            rolled back: use the database of the gate's store"
                    .into())
            }
            _ => Err(
                "the lease was lost, and the key belongs to somebody else: the transaction was rolled back"
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
    /// Completes the message inside `transaction` and commits it: what the handler has written there and
    /// COMPLETED become visible together, or not at all. Call it last, and return `Ok` with the same output.
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
    /// - The stored result is `output`; what the handler returns afterwards is not looked at.
    /// - From here on the transaction runs under the gate's lease as its `statement_timeout` and
    ///   `idle_in_transaction_session_timeout` (half of it as its `lock_timeout`), and never with
    ///   `synchronous_commit = off`.
    /// - On a **crash**, or when the future is **dropped** or **cancelled**, either both or neither are there;
    ///   the record tells, and the message is acknowledged or runs again accordingly.
    /// - A transaction that is **forgotten** or rolled back is never acknowledged.
    ///
    /// # Errors
    /// When the lease was lost to another attempt, the record is not there, or the database failed. The
    /// transaction was rolled back then, unless the connection broke during the commit. Pass it on with `?`
    /// and do nothing else about it: the runtime reads the record, acknowledges if it is completed, and
    /// tries again if not.
    pub fn commit_with<Tx: SqlTransaction, T: ToStored + ?Sized>(
        &self,
        transaction: Tx,
        output: &T,
    ) -> impl Future<Output = Result<(), Failure>> + Send + use<Tx, T> {
        let (completing, attempt) = (self.completing(output), self.clone());
        async move {
            let limit = completing.limit();
            let committed = tokio::time::timeout(limit, transaction.complete_and_commit(&completing)).await;
            let silence = || Err(format!("the transaction was not confirmed within {limit:?}").into());
            committed.unwrap_or_else(|_| silence()).map_err(|error| not_confirmed(&attempt, error))
        }
    }

    /// The completion of this message with this result, for a transaction that
    /// [`commit_with`](Self::commit_with) has no adapter for.
    ///
    /// Write it with the store's own statement (`PostgresStore::complete_sql`) as the last one before the commit, and
    /// roll back if that does not change exactly one row. The runtime reads the record back when the handler
    /// has returned: from this call on, what the handler returns decides nothing about the ack.
    pub fn completing<T: ToStored + ?Sized>(&self, output: &T) -> Completing {
        self.unit().completing(output)
    }
}

/// Keeps what went wrong for the runtime, in case the handler does not pass it on.
pub(crate) fn not_confirmed(attempt: &Attempt, error: BoxError) -> Failure {
    let failure = Failure::retry(error);
    if let Some(attempted) = attempt.unit().lock().as_mut() {
        attempted.trouble = Some(failure.reason());
    }
    failure
}

/// What a run needs to be completed in a transaction, and whether that was tried.
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
    /// How large the result is that it stores.
    pub(crate) result_bytes: u64,
    /// Why the stored result is not the handler's.
    pub(crate) not_kept: Option<BoxError>,
    /// What went wrong, as far as the handler was told.
    pub(crate) trouble: Option<String>,
}

impl Unit {
    fn completing<T: ToStored + ?Sized>(&self, output: &T) -> Completing {
        let (result, not_kept) = self.encode(output);
        *self.lock() = Some(Attempted { result_bytes: result.len() as u64, not_kept, trouble: None });
        Completing {
            key: self.key.clone(),
            token: self.token,
            fingerprint: self.fingerprint,
            result,
            retention: self.retention,
            lease: self.lease,
        }
    }

    /// The result as the record will hold it, and why it is not in there if it is not. A transaction does not
    /// wait for a result store.
    fn encode<T: ToStored + ?Sized>(&self, output: &T) -> (Bytes, Option<BoxError>) {
        let most = self.max_result_bytes;
        match output.to_stored(self.codec) {
            Ok(stored) if stored.len() <= most => (stored, None),
            Ok(stored) => {
                let why = format!("the result has {} bytes, `max_result_bytes` is {most}", stored.len());
                (not_kept(), Some(why.into()))
            }
            Err(error) => (not_kept(), Some(error)),
        }
    }

    /// Whether a completion in a transaction was tried.
    pub(crate) fn is_attempted(&self) -> bool {
        self.lock().is_some()
    }

    pub(crate) fn lock(&self) -> std::sync::MutexGuard<'_, Option<Attempted>> {
        self.attempted.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
