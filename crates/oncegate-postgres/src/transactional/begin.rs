//! Begins a transaction, and takes its key.

use std::time::Duration;

use deadpool_postgres::ClientWrapper;
use futures_util::future::join;
use oncegate_core::store::StoreError;
use oncegate_runtime::transaction::Completing;
use oncegate_runtime::transactional::Ground;
use tokio_postgres::Row;
use tokio_postgres::types::ToSql;

use crate::errors::{self, Trouble};
use crate::row;
use crate::session::limit_ms;

/// The isolation of a transaction, as in SQL.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Isolation {
    /// The default of PostgreSQL.
    #[default]
    ReadCommitted,
    /// Every statement sees the same snapshot.
    RepeatableRead,
    /// As if the transactions ran one after another.
    Serializable,
}

/// The hold of a transaction on its key.
#[derive(Debug)]
pub enum Hold {
    /// The transaction has inserted the record.
    Record {
        /// The number of the transaction.
        xid: String,
        /// The place of the record.
        ctid: String,
    },
    /// The key is claimed.
    Claim {
        /// The number of the transaction.
        xid: String,
    },
}

impl Hold {
    fn of(row: &Row) -> Result<Self, String> {
        Ok(Self::Record {
            xid: row.try_get("xid").map_err(|_| "no column xid")?,
            ctid: row.try_get("ctid").map_err(|_| "no column ctid")?,
        })
    }

    /// The completion, if its record depends on this transaction alone. The runtime reads back what
    /// completes a claim.
    pub(super) fn written<'a>(&self, completing: &'a Completing) -> Option<&'a Completing> {
        matches!(self, Self::Record { .. }).then_some(completing)
    }
}

/// Begins, and takes the key. `None`: there is a record of the key.
pub(super) async fn try_begin(
    client: &ClientWrapper,
    completing: &Completing,
    ground: Ground,
    begin: &str,
) -> Result<Option<Hold>, Trouble> {
    let not_executed = |error| errors::not_executed(&error);
    if ground == Ground::Claimed {
        client.batch_execute(begin).await.map_err(not_executed)?;
        let number = client.query_one(ASSIGN_NUMBER, &[]).await;
        return Ok(Some(Hold::Claim {
            xid: number.map_err(not_executed)?.get(0),
        }));
    }
    let insert = client
        .prepare_cached(row::COMPLETE_ABSENT)
        .await
        .map_err(not_executed)?;
    let key = completing.key().as_str();
    let tag = completing.token().tag();
    let fingerprint = completing.fingerprint();
    let fingerprint = fingerprint
        .as_ref()
        .map(|fingerprint| fingerprint.as_bytes().as_slice());
    let retention_ms = row::retention_ms(completing);
    let parameters: [&(dyn ToSql + Sync); 4] =
        [&key, &retention_ms, &tag.0.as_slice(), &fingerprint];
    // In this order on the wire, and in one round trip. Without its BEGIN the other one fails.
    let (begun, inserted) = join(
        client.batch_execute(begin),
        client.query_opt(&insert, &parameters),
    )
    .await;
    let Some(row) = begun.and(inserted).map_err(not_executed)? else {
        return Ok(None);
    };
    let hold = Hold::of(&row).map_err(StoreError::refused)?;
    if row.try_get("asynchronous").unwrap_or(true) {
        client
            .batch_execute("SET LOCAL synchronous_commit = on")
            .await
            .map_err(not_executed)?;
    }
    Ok(Some(hold))
}

/// The limits of a transaction, by the server's names, in milliseconds.
pub(super) fn limits(limit: Duration) -> [(&'static str, u128); 3] {
    let limit_ms = limit_ms(limit);
    [
        ("lock_timeout", limit_ms / 2),
        ("statement_timeout", limit_ms),
        ("idle_in_transaction_session_timeout", limit_ms),
    ]
}

/// The statement that begins a transaction, with limits unless its session has them.
pub(super) fn begin_sql(isolation: Isolation, limit: Option<Duration>) -> String {
    let isolation = match isolation {
        Isolation::ReadCommitted => "READ COMMITTED",
        Isolation::RepeatableRead => "REPEATABLE READ",
        Isolation::Serializable => "SERIALIZABLE",
    };
    let mut begin = format!("BEGIN ISOLATION LEVEL {isolation}, {}", row::MARK);
    for (name, limit_ms) in limit.map(limits).into_iter().flatten() {
        begin += &format!("; SET LOCAL {name} = {limit_ms}");
    }
    begin
}

/// The statement that limits the wait of the rest of a transaction for each row.
pub(super) fn set_lock_timeout(limit: Duration) -> String {
    format!("SET LOCAL lock_timeout = {}", limit_ms(limit))
}

/// Gives a transaction its number, and returns it.
pub(super) const ASSIGN_NUMBER: &str = "SELECT pg_current_xact_id()::text";
