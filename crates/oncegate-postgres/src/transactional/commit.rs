//! Commits a transaction, with the result of its key.

use deadpool_postgres::ClientWrapper;
use futures_util::future::{join, join3};
use oncegate_core::store::StoreError;
use oncegate_runtime::transaction::Completing;
use oncegate_runtime::transactional::CommitError;
use tokio_postgres::types::ToSql;

use super::begin::Hold;
use super::confirm::{GUARD, Waits};
use crate::commit::complete;
use crate::errors::{self, Trouble};
use crate::row;

/// Stores the result and commits, in one round trip.
pub(super) async fn commit(
    client: &ClientWrapper,
    hold: &Hold,
    completing: &Completing,
) -> Result<Waits, CommitError> {
    let (Hold::Record { xid, .. } | Hold::Claim { xid }) = hold;
    let failed = |error| not_committed(&error);
    let guard = client.prepare_cached(GUARD).await.map_err(failed)?;
    let numbers: [&(dyn ToSql + Sync); 1] = [xid];
    // Of each of these, in this order on the wire. After a failed statement the server rolls back
    // instead of committing.
    let (guarded, added, committed) = match hold {
        Hold::Claim { .. } => {
            let guarded = client.query_one(&guard, &numbers).await;
            let guarded = guarded.map_err(failed)?;
            complete(&**client, completing).await?;
            (Ok(guarded), Ok(1), client.batch_execute("COMMIT").await)
        }
        Hold::Record { .. } if completing.result().is_empty() => {
            let sent = join(
                client.query_one(&guard, &numbers),
                client.batch_execute("COMMIT"),
            )
            .await;
            (sent.0, Ok(1), sent.1)
        }
        Hold::Record { ctid, .. } => {
            let add = client
                .prepare_cached(row::ADD_RESULT)
                .await
                .map_err(failed)?;
            let key = completing.key().as_str();
            let result = completing.result().as_ref();
            let row: [&(dyn ToSql + Sync); 3] = [ctid, &key, &result];
            let guarding = client.query_one(&guard, &numbers);
            join3(
                guarding,
                client.execute(&add, &row),
                client.batch_execute("COMMIT"),
            )
            .await
        }
    };
    let guarded = guarded.map_err(failed)?;
    let added = added.map_err(failed)?;
    committed.map_err(failed)?;
    match added {
        1 => Ok(Waits::of(guarded.try_get("waits").unwrap_or(true))),
        _ => Err(CommitError::Unknown(StoreError::unknown(INTERFERES))),
    }
}

/// The error of [`GUARD`] in a transaction that the handler has ended.
pub(super) const ENDED_BY_HANDLER: &str = "the handler has ended the transaction itself, by COMMIT or ROLLBACK: leave that to the runtime";

/// The error of a statement that did not change the rows that the transaction has inserted.
pub(super) const INTERFERES: &str = "oncegate_records did not take the result: a trigger, rule or policy on it interferes; remove it";

/// The SQLSTATE of [`GUARD`] in such a transaction.
pub(super) const DIVISION_BY_ZERO: &str = "22012";

/// Converts an error of the last message, which commits if nothing before it has failed.
pub(super) fn not_committed(error: &tokio_postgres::Error) -> CommitError {
    let state = error.code().map(tokio_postgres::error::SqlState::code);
    if state == Some(DIVISION_BY_ZERO) {
        return CommitError::RolledBack(ENDED_BY_HANDLER.into());
    }
    match errors::in_doubt(error) {
        Trouble {
            error: unknown @ StoreError::Unknown { .. },
            ..
        } => CommitError::Unknown(unknown),
        answered => answered.rolled_back(),
    }
}
