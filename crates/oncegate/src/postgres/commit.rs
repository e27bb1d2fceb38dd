//! A record completed inside a transaction of the user's own.
//!
//! Three steps, on whatever client the transaction belongs to: set limits, so that a stalled process blocks
//! nobody's key for longer than its lease; lock and read the row, which is the last lock that the transaction
//! takes; run the rules and write what came out. The row is locked from the second step to the end.

use futures_util::future::join;
use oncegate_core::record::{Record, StoreTime};
use oncegate_core::store::StoreError;
use tokio_postgres::types::Type;

use super::errors;
use super::row::{self, Columns};
use crate::failure::BoxError;
use crate::transaction::{Completing, SqlTransaction};

#[cfg(feature = "sqlx")]
mod sqlx;

/// The longest time limit that the server takes, in milliseconds.
const LONGEST_LIMIT_MS: u128 = i32::MAX as u128;

/// The types of [`row::WRITE`]'s parameters.
const WRITE_TYPES: [Type; 12] = [
    Type::TEXT_ARRAY,
    Type::TEXT_ARRAY,
    Type::INT8_ARRAY,
    Type::BYTEA_ARRAY,
    Type::INT2_ARRAY,
    Type::TEXT_ARRAY,
    Type::INT8_ARRAY,
    Type::BYTEA_ARRAY,
    Type::BOOL_ARRAY,
    Type::TEXT_ARRAY,
    Type::BYTEA_ARRAY,
    Type::TEXT_ARRAY,
];

impl SqlTransaction for tokio_postgres::Transaction<'_> {
    async fn complete_and_commit(self, completing: &Completing) -> Result<(), BoxError> {
        complete(&self, completing).await?;
        self.commit().await.map_err(|error| errors::in_doubt(&error).error.into())
    }
}

impl SqlTransaction for deadpool_postgres::Transaction<'_> {
    async fn complete_and_commit(self, completing: &Completing) -> Result<(), BoxError> {
        complete(&self, completing).await?;
        self.commit().await.map_err(|error| errors::in_doubt(&error).error.into())
    }
}

/// Completes the record; the transaction goes on.
///
/// Its statements are not prepared ahead: that would cost a round trip each, and does not work behind every
/// pooler.
async fn complete(
    transaction: &tokio_postgres::Transaction<'_>,
    completing: &Completing,
) -> Result<(), BoxError> {
    let key = completing.key().as_str();
    let limits = limits(completing);
    // In this order on the wire, and in one round trip.
    let (limited, row) = join(
        transaction.batch_execute(&limits),
        transaction.query_typed_opt(row::LOCK_ONE, &[(&key, Type::TEXT)]),
    )
    .await;
    let row = limited.and(row).map_err(|error| errors::not_executed(&error).error)?;
    let read = |row| Ok::<_, String>((row::now(row)?, row::decode(row)?));
    let columns = changed(completing, row.as_ref().map(read))?;
    let parameters: Vec<_> = columns.parameters().into_iter().zip(WRITE_TYPES).collect();
    let written = transaction.execute_typed(row::WRITE, &parameters).await;
    confirm(written.map_err(|error| errors::not_executed(&error).error)?)
}

/// Limits for the rest of the transaction, and no commit that is answered before it is durable.
fn limits(completing: &Completing) -> String {
    let limit_ms = completing.limit().as_millis().clamp(2, LONGEST_LIMIT_MS);
    format!(
        "SET LOCAL lock_timeout = {}; SET LOCAL statement_timeout = {limit_ms}; \
         SET LOCAL idle_in_transaction_session_timeout = {limit_ms}; \
         SELECT set_config('synchronous_commit', 'on', true) WHERE current_setting('synchronous_commit') = 'off'",
        limit_ms / 2
    )
}

/// What the row must hold at the end, given what it held when it was locked; `None` if there is no row.
fn changed(
    completing: &Completing,
    row: Option<Result<(StoreTime, Record), String>>,
) -> Result<Columns, BoxError> {
    let row = row.transpose().map_err(|reason| StoreError::unreadable(completing.key().clone(), reason))?;
    let (now, record) = row.map_or((StoreTime::default(), None), |(now, record)| (now, Some(record)));
    let mut columns = Columns::default();
    columns.put(completing.key(), &completing.apply(now, record)?);
    Ok(columns)
}

/// The one row was written.
fn confirm(written: u64) -> Result<(), BoxError> {
    match written {
        1 => Ok(()),
        _ => Err(
            "oncegate_records did not take the row: a trigger, rule or policy on it interferes; remove it"
                .into(),
        ),
    }
}
