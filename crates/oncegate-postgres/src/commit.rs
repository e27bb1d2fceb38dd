//! Completes a record inside the user's transaction.
//!
//! The steps are the same for every client. Set limits, so that a stalled process blocks the key no
//! longer than its lease. Complete the record with one statement, which takes the transaction's
//! last lock. Commit. If the statement completes no row, the rules give the reason.

use futures_util::future::join;
use oncegate_core::record::{Record, StoreTime};
use oncegate_core::store::StoreError;
use tokio_postgres::GenericClient;
use tokio_postgres::types::Type;

use crate::{PostgresStore, errors, row};
use oncegate_runtime::failure::BoxError;
use oncegate_runtime::transaction::{Completing, SqlTransaction};
use oncegate_runtime::transactional::CommitError;

#[cfg(feature = "sqlx")]
pub(super) mod sqlx;

/// The longest time limit that the server accepts, in milliseconds.
const LONGEST_LIMIT_MS: u128 = i32::MAX as u128;

impl SqlTransaction<PostgresStore> for tokio_postgres::Transaction<'_> {
    async fn complete_and_commit(self, completing: &Completing) -> Result<(), BoxError> {
        let completed = complete(&self, completing).await;
        completed.map_err(CommitError::into_error)?;
        self.commit()
            .await
            .map_err(|error| errors::in_doubt(&error).error.into())
    }
}

impl SqlTransaction<PostgresStore> for deadpool_postgres::Transaction<'_> {
    async fn complete_and_commit(self, completing: &Completing) -> Result<(), BoxError> {
        let completed = complete(&*self, completing).await;
        completed.map_err(CommitError::into_error)?;
        self.commit()
            .await
            .map_err(|error| errors::in_doubt(&error).error.into())
    }
}

/// Completes the record; the transaction stays open.
///
/// Its statements are not prepared: that would cost a round trip each, and does not work behind
/// every pooler.
pub(super) async fn complete(
    transaction: &(impl GenericClient + Sync),
    completing: &Completing,
) -> Result<(), CommitError> {
    let limits = limits(completing);
    let key = completing.key().as_str();
    let retention_ms = retention_ms(completing);
    let token = completing.token();
    let result = completing.result().as_ref();
    let token = token.as_bytes().as_slice();
    // In this order on the wire, and in one round trip.
    let (limited, completed) = join(
        transaction.batch_execute(&limits),
        transaction.execute_typed(
            row::COMPLETE,
            &[
                (&key, Type::TEXT),
                (&token, Type::BYTEA),
                (&result, Type::BYTEA),
                (&retention_ms, Type::INT8),
            ],
        ),
    )
    .await;
    let completed = limited
        .and(completed)
        .map_err(|error| errors::not_executed(&error).rolled_back())?;
    if completed == 1 {
        return Ok(());
    }
    let row = transaction
        .query_typed_opt(row::READ_ONE, &[(&key, Type::TEXT)])
        .await
        .map_err(|error| errors::not_executed(&error).rolled_back())?;
    let found = row
        .as_ref()
        .map(|row| Ok((row::now(row)?, row::decode(row)?)));
    Err(CommitError::RolledBack(why_not(completing, found)))
}

/// Sets limits for the rest of the transaction, and a durable commit.
fn limits(completing: &Completing) -> String {
    let limit_ms = completing.limit().as_millis().clamp(2, LONGEST_LIMIT_MS);
    format!(
        "SET LOCAL lock_timeout = {}; SET LOCAL statement_timeout = {limit_ms}; \
         SET LOCAL idle_in_transaction_session_timeout = {limit_ms}; \
         SELECT set_config('synchronous_commit', 'on', true) WHERE current_setting('synchronous_commit') = 'off'",
        limit_ms / 2
    )
}

fn retention_ms(completing: &Completing) -> i64 {
    i64::try_from(completing.retention().as_millis()).unwrap_or(i64::MAX)
}

/// Returns why the statement completed nothing, given the record of the key; `None` if there is no
/// row.
fn why_not(completing: &Completing, row: Option<Result<(StoreTime, Record), String>>) -> BoxError {
    let (now, record) = match row {
        Some(Ok((now, record))) => (now, Some(record)),
        Some(Err(reason)) => {
            return StoreError::unreadable(completing.key().clone(), reason).into();
        }
        None => (StoreTime::default(), None),
    };
    match completing.apply(now, record) {
        Err(why) => why,
        Ok(_) => {
            "oncegate_records did not take the row, and the transaction was rolled back: a trigger, rule or policy \
             on it interferes; remove it"
                .into()
        }
    }
}
