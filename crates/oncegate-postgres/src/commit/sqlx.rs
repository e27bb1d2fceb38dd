//! Completes a record inside a transaction of sqlx.

use oncegate_core::record::StoreTime;
use oncegate_core::store::StoreError;
use oncegate_runtime::transactional::CommitError;
use sqlx::postgres::{PgConnection, PgRow, Postgres};
use sqlx::{AssertSqlSafe, Error, Row as _, Transaction};

use super::super::errors;
use super::super::row::{self, Fields};
use super::{
    BoxError, Completing, PostgresStore, Record, SqlTransaction, limits, retention_ms, why_not,
};

impl SqlTransaction<PostgresStore> for Transaction<'_, Postgres> {
    async fn complete_and_commit(mut self, completing: &Completing) -> Result<(), BoxError> {
        let completed = complete(&mut self, completing).await;
        completed.map_err(CommitError::into_error)?;
        self.commit().await.map_err(|error| in_doubt(&error).into())
    }
}

/// Completes the record; the transaction stays open.
pub(crate) async fn complete(
    connection: &mut PgConnection,
    completing: &Completing,
) -> Result<(), CommitError> {
    // Only numbers are inserted into it.
    let limits = sqlx::raw_sql(AssertSqlSafe(limits(completing)));
    limits
        .execute(&mut *connection)
        .await
        .map_err(|error| rolled_back(&error))?;
    let complete = sqlx::query(row::COMPLETE)
        .bind(completing.key().as_str())
        .bind(completing.token().as_bytes().as_slice())
        .bind(completing.result().as_ref())
        .bind(retention_ms(completing));
    let completed = complete
        .execute(&mut *connection)
        .await
        .map_err(|error| rolled_back(&error))?;
    if completed.rows_affected() == 1 {
        return Ok(());
    }
    let read_one = sqlx::query(row::READ_ONE).bind(completing.key().as_str());
    let row = read_one
        .fetch_optional(connection)
        .await
        .map_err(|error| rolled_back(&error))?;
    let why = why_not(completing, row.as_ref().map(read));
    Err(CommitError::RolledBack(why))
}

/// Reads a row of [`row::READ_ONE`].
fn read(row: &PgRow) -> Result<(StoreTime, Record), String> {
    let now_us: i64 = column(row, "now_us")?;
    let fields = Fields {
        state: column(row, "state")?,
        expires_at_ms: column(row, "expires_at_ms")?,
        owner: column(row, "owner")?,
        attempt: column(row, "attempt")?,
        recovery: column(row, "recovery")?,
        fencing_token: column(row, "fencing_token")?,
        fingerprint: column(row, "fingerprint")?,
        handed_over: column(row, "handed_over")?,
        reason: column(row, "reason")?,
        result: column(row, "result")?,
    };
    Ok((
        StoreTime::from_micros(u64::try_from(now_us).unwrap_or_default()),
        fields.record()?,
    ))
}

fn column<'r, T: sqlx::Decode<'r, Postgres> + sqlx::Type<Postgres>>(
    row: &'r PgRow,
    name: &str,
) -> Result<T, String> {
    row.try_get(name)
        .map_err(|_| format!("column {name} holds something else"))
}

/// Converts an error from before a commit was sent to what it means to its transaction.
pub(crate) fn rolled_back(error: &Error) -> CommitError {
    match answered(error) {
        Some((state, message)) => errors::answered_with(&state, message).rolled_back(),
        None => CommitError::RolledBack(not_executed(error).into()),
    }
}

/// Converts an error from before a commit was sent.
pub(crate) fn not_executed(error: &Error) -> StoreError {
    match answered(error) {
        Some((state, message)) => errors::answered_with(&state, message).error,
        None => StoreError::unavailable("the exchange with the server broke"),
    }
}

/// Converts an error of a commit: an answer of the server settles the outcome, silence does not.
pub(crate) fn in_doubt(error: &Error) -> StoreError {
    match answered(error) {
        Some((state, message)) if !errors::is_about_the_session(&state) => {
            errors::answered_with(&state, message).error
        }
        _ => {
            StoreError::unknown("the connection was lost while the transaction was being committed")
        }
    }
}

/// The SQLSTATE of the error, if the server returned it.
pub(crate) fn state(error: &Error) -> Option<String> {
    answered(error).map(|(state, _)| state)
}

/// The SQLSTATE and text of the error, if the server returned it.
fn answered(error: &Error) -> Option<(String, &str)> {
    let answered = error.as_database_error()?;
    Some((answered.code()?.into_owned(), answered.message()))
}
