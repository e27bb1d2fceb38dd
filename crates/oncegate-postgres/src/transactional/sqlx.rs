//! Transactions of sqlx that the runtime opens for handlers.

use std::error::Error as StdError;
use std::fmt;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Duration;

use oncegate_core::key::Scope;
use oncegate_core::store::StoreError;
use oncegate_runtime::transaction::Completing;
use oncegate_runtime::transactional::{
    BatchBegun, Begun, CommitError, Excuse, Ground, Sessions, Transactions,
};
use sqlx::postgres::{PgPool, Postgres};
use sqlx::{AssertSqlSafe, Error, Row as _, Transaction};
use tokio::time::error::Elapsed;

use super::super::commit::sqlx::{self as sqlx_commit, complete, in_doubt, not_executed, state};
use super::batch::{Results, begin_batch_sql, holds, written, xid};
use super::begin::{ASSIGN_NUMBER, begin_sql, set_lock_timeout};
use super::commit::{DIVISION_BY_ZERO, ENDED_BY_HANDLER, INTERFERES};
use super::confirm::{GUARD, Waits, read_back};
use super::{Hold, Isolation, PostgresStore, Tries};
use crate::errors::{self, Trouble};
use crate::row::{self, Completions};

/// The transactions of a pool of sqlx, for
/// [`TransactionalHandler`](oncegate_runtime::TransactionalHandler)s of `sqlx::Transaction<'static,
/// Postgres>`; made by [`PostgresStore::sqlx_transactions`].
#[derive(Clone)]
pub struct SqlxTransactions {
    store: PostgresStore,
    pool: PgPool,
    isolation: Isolation,
}

impl PostgresStore {
    /// Returns the transactions of a pool of sqlx on this database, for a
    /// [`TransactionalHandler`](oncegate_runtime::TransactionalHandler). A handler waits for a
    /// connection of the pool.
    pub fn sqlx_transactions(&self, pool: PgPool) -> SqlxTransactions {
        SqlxTransactions {
            store: self.clone(),
            pool,
            isolation: Isolation::default(),
        }
    }
}

impl SqlxTransactions {
    /// The isolation of the transactions: READ COMMITTED by default. Serialisation failures are
    /// repeated, and cost no attempt.
    ///
    /// A transaction under a claim (after a failed attempt, or in a fenced gate) must be shorter
    /// than a third of the lease in REPEATABLE READ and SERIALIZABLE: a heartbeat changes the
    /// record, and the commit fails.
    #[must_use]
    pub fn isolation(self, isolation: Isolation) -> Self {
        Self { isolation, ..self }
    }

    async fn try_begin(
        &self,
        completing: &Completing,
        ground: Ground,
        limit: Duration,
    ) -> Result<Begun<Transaction<'static, Postgres>, Hold>, Error> {
        // Only numbers are inserted into it.
        let begin = AssertSqlSafe(begin_sql(self.isolation, Some(limit)));
        let mut transaction = self.pool.begin_with(begin).await?;
        if ground == Ground::Claimed {
            let number = sqlx::query_scalar(ASSIGN_NUMBER)
                .fetch_one(&mut *transaction)
                .await?;
            return Ok(Begun::Open(transaction, Hold::Claim { xid: number }));
        }
        let fingerprint = completing.fingerprint();
        let fingerprint = fingerprint
            .as_ref()
            .map(|fingerprint| fingerprint.as_bytes().as_slice());
        let insert = sqlx::query(row::COMPLETE_ABSENT)
            .bind(completing.key().as_str())
            .bind(row::retention_ms(completing))
            .bind(completing.token().tag().0.to_vec())
            .bind(fingerprint);
        let Some(row) = insert.fetch_optional(&mut *transaction).await? else {
            return Ok(Begun::RecordExists);
        };
        let hold = Hold::Record {
            xid: row.try_get("xid")?,
            ctid: row.try_get("ctid")?,
        };
        if row.try_get("asynchronous")? {
            sqlx::raw_sql("SET LOCAL synchronous_commit = on")
                .execute(&mut *transaction)
                .await?;
        }
        Ok(Begun::Open(transaction, hold))
    }

    async fn try_begin_batch(
        &self,
        batch: &[Completing],
        limit: Duration,
    ) -> Result<BatchBegun<Transaction<'static, Postgres>, Hold>, Error> {
        // Only numbers are inserted into these.
        let begin = AssertSqlSafe(begin_batch_sql(self.isolation, limit));
        let other_waits = sqlx::raw_sql(AssertSqlSafe(set_lock_timeout(limit / 2)));
        let mut transaction = self.pool.begin_with(begin).await?;
        let Completions {
            keys,
            retentions_ms,
            tags,
            fingerprints,
        } = Completions::of(batch);
        let insert = sqlx::query(row::COMPLETE_ALL_ABSENT);
        let insert = insert
            .bind(keys)
            .bind(retentions_ms)
            .bind(tags)
            .bind(fingerprints);
        let row = insert.fetch_one(&mut *transaction).await?;
        other_waits.execute(&mut *transaction).await?;
        let keys: Option<Vec<String>> = row.try_get("keys")?;
        let places: Option<Vec<String>> = row.try_get("places")?;
        let taken = keys
            .unwrap_or_default()
            .into_iter()
            .zip(places.unwrap_or_default());
        let Some(holds) = holds(batch, row.try_get("xid")?, taken) else {
            return Ok(Begun::RecordExists);
        };
        if row.try_get("asynchronous")? {
            sqlx::raw_sql("SET LOCAL synchronous_commit = on")
                .execute(&mut *transaction)
                .await?;
        }
        Ok(Begun::Open(transaction, holds))
    }

    /// Confirms a commit that the server has reported. `written` is a record that it contains. sqlx
    /// does not return the warning of a wait that was interrupted, so after every commit that waits
    /// for standbys the record is read back.
    async fn finish(&self, waits: Waits, written: Option<&Completing>) -> Result<(), CommitError> {
        match (waits, written) {
            (Waits::ForStandbys, Some(written)) => read_back(&self.store, written).await,
            _ => Ok(()),
        }
    }
}

type OpenedBy<H> = Begun<Transaction<'static, Postgres>, H>;

/// The consequence of a try to begin: an end, or another try.
fn after_try<H>(
    begun: Result<Result<OpenedBy<H>, Error>, Elapsed>,
    tries: &mut Tries,
) -> ControlFlow<Result<OpenedBy<H>, StoreError>> {
    let error = match begun {
        Ok(Ok(begun)) => return ControlFlow::Break(Ok(begun)),
        Ok(Err(error)) => error,
        Err(_) => {
            return ControlFlow::Break(Err(StoreError::unavailable(
                "the server did not answer in time",
            )));
        }
    };
    let trouble = match state(&error) {
        Some(state) => errors::answered_with(&state, ""),
        None => Trouble {
            passing: true,
            ..not_executed(&error).into()
        },
    };
    if trouble.row_held {
        return ControlFlow::Break(Ok(Begun::Held));
    }
    tries.after(trouble)
}

impl fmt::Debug for SqlxTransactions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SqlxTransactions")
            .field("isolation", &self.isolation)
            .finish_non_exhaustive()
    }
}

impl Transactions for SqlxTransactions {
    type Transaction = Transaction<'static, Postgres>;
    type Hold = Hold;

    async fn descriptor(&self, scope: &Scope) -> Result<Option<String>, StoreError> {
        let read = sqlx::query_as(row::DESCRIPTOR)
            .bind(scope.as_str())
            .fetch_one(&self.pool)
            .await;
        match read.map_err(|error| not_executed(&error))? {
            (_, true) => Err(errors::standby()),
            (descriptor, false) => Ok(descriptor),
        }
    }

    fn sessions(&self) -> Arc<dyn Sessions> {
        Arc::new(self.store.clone())
    }

    async fn begin(
        &self,
        completing: &Completing,
        ground: Ground,
        limit: Duration,
    ) -> Result<Begun<Self::Transaction, Hold>, StoreError> {
        let mut tries = Tries::within(limit);
        loop {
            let begun =
                tokio::time::timeout(limit, self.try_begin(completing, ground, limit)).await;
            if let ControlFlow::Break(begun) = after_try(begun, &mut tries) {
                return begun;
            }
        }
    }

    async fn begin_batch(
        &self,
        batch: &[Completing],
        limit: Duration,
    ) -> Result<BatchBegun<Self::Transaction, Hold>, StoreError> {
        let mut tries = Tries::within(limit);
        loop {
            let begun = tokio::time::timeout(limit, self.try_begin_batch(batch, limit)).await;
            if let ControlFlow::Break(begun) = after_try(begun, &mut tries) {
                return begun;
            }
        }
    }

    async fn commit(
        &self,
        transaction: Self::Transaction,
        hold: Hold,
        completing: &Completing,
    ) -> Result<(), CommitError> {
        let committing = commit(transaction, &hold, completing);
        let waits = within(completing.limit(), committing).await?;
        self.finish(waits, hold.written(completing)).await
    }

    async fn commit_batch(
        &self,
        transaction: Self::Transaction,
        batch: Vec<(Hold, Completing)>,
    ) -> Result<(), CommitError> {
        let limit = batch
            .first()
            .map_or(Duration::ZERO, |(_, completing)| completing.limit());
        let waits = within(limit, commit_batch(transaction, &batch)).await?;
        self.finish(waits, written(&batch)).await
    }

    async fn roll_back(&self, transaction: Self::Transaction) {
        // An error closes the connection, and the server rolls back.
        drop(transaction.rollback().await);
    }

    fn excuse(&self, error: &(dyn StdError + 'static)) -> Option<Excuse> {
        let error = error.downcast_ref::<Error>()?;
        match (state(error), error) {
            (Some(state), _) => errors::excuse(&state),
            (None, Error::Io(_)) => Some(Excuse::ConnectionLost),
            (None, _) => None,
        }
    }
}

/// Stores the result and commits.
async fn commit(
    mut transaction: Transaction<'static, Postgres>,
    hold: &Hold,
    completing: &Completing,
) -> Result<Waits, CommitError> {
    let (Hold::Record { xid, .. } | Hold::Claim { xid }) = hold;
    let waits = guard(&mut transaction, xid).await?;
    match hold {
        Hold::Claim { .. } => {
            complete(&mut transaction, completing).await?;
        }
        Hold::Record { .. } if completing.result().is_empty() => {}
        Hold::Record { ctid, .. } => {
            let add = sqlx::query(row::ADD_RESULT)
                .bind(ctid)
                .bind(completing.key().as_str())
                .bind(completing.result().as_ref());
            let added = add
                .execute(&mut *transaction)
                .await
                .map_err(|error| rolled_back(&error))?;
            if added.rows_affected() != 1 {
                return Err(CommitError::RolledBack(INTERFERES.into()));
            }
        }
    }
    send_commit(transaction).await?;
    Ok(waits)
}

/// Stores the results of a batch and commits.
async fn commit_batch(
    mut transaction: Transaction<'static, Postgres>,
    batch: &[(Hold, Completing)],
) -> Result<Waits, CommitError> {
    let waits = guard(&mut transaction, xid(batch)).await?;
    let results = Results::of(batch);
    let count = results.count();
    if count > 0 {
        let Results {
            places,
            keys,
            results,
        } = results;
        let add = sqlx::query(row::ADD_RESULTS)
            .bind(places)
            .bind(keys)
            .bind(results)
            .persistent(false);
        let added = add
            .execute(&mut *transaction)
            .await
            .map_err(|error| rolled_back(&error))?;
        if added.rows_affected() != count {
            return Err(CommitError::RolledBack(INTERFERES.into()));
        }
    }
    send_commit(transaction).await?;
    Ok(waits)
}

/// Fails unless the transaction of this number is open and has not failed.
async fn guard(
    transaction: &mut Transaction<'static, Postgres>,
    xid: &str,
) -> Result<Waits, CommitError> {
    let guard = sqlx::query(GUARD)
        .bind(xid)
        .fetch_one(&mut **transaction)
        .await;
    let row = guard.map_err(|error| rolled_back(&error))?;
    Ok(Waits::of(row.try_get("waits").unwrap_or(true)))
}

/// Waits for a commit within a limit.
async fn within(
    limit: Duration,
    committing: impl Future<Output = Result<Waits, CommitError>> + Send,
) -> Result<Waits, CommitError> {
    tokio::time::timeout(limit, committing).await.map_err(|_| {
        CommitError::Unknown(StoreError::unknown(
            "the server did not answer the commit in time",
        ))
    })?
}

async fn send_commit(transaction: Transaction<'static, Postgres>) -> Result<(), CommitError> {
    transaction
        .commit()
        .await
        .map_err(|error| match state(&error) {
            Some(state) if errors::excuse(&state) == Some(Excuse::Conflict) => {
                CommitError::Conflict(in_doubt(&error).into())
            }
            _ => match in_doubt(&error) {
                unknown @ StoreError::Unknown { .. } => CommitError::Unknown(unknown),
                error => CommitError::RolledBack(error.into()),
            },
        })
}

/// Converts an error from before the commit.
fn rolled_back(error: &Error) -> CommitError {
    match state(error).as_deref() {
        Some(DIVISION_BY_ZERO) => CommitError::RolledBack(ENDED_BY_HANDLER.into()),
        _ => sqlx_commit::rolled_back(error),
    }
}
