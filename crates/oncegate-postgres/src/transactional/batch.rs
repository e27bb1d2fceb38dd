//! A transaction for many keys at once.
//!
//! As for one key, the first round trip begins and writes the records, and the last one stores the
//! results and commits.

use std::collections::HashMap;
use std::time::Duration;

use deadpool_postgres::ClientWrapper;
use futures_util::future::{join, join3};
use oncegate_core::store::StoreError;
use oncegate_runtime::transaction::Completing;
use oncegate_runtime::transactional::{BatchBegun, CommitError, KEY_WAIT};
use tokio_postgres::types::{ToSql, Type};

use super::begin::{begin_sql, set_lock_timeout};
use super::commit::{INTERFERES, not_committed};
use super::confirm::{GUARD, Waits};
use super::{Hold, Isolation, PostgresTransaction, PostgresTransactions};
use crate::errors::{self, Trouble};
use crate::row::{self, Completions};

impl PostgresTransactions {
    pub(super) async fn begin_batch_once(
        &self,
        batch: &[Completing],
        limit: Duration,
    ) -> Result<BatchBegun<PostgresTransaction, Hold>, Trouble> {
        let transaction = PostgresTransaction::on(self.client().await?);
        let begin = begin_batch_sql(self.isolation, limit);
        let begun =
            tokio::time::timeout(limit, try_begin(&transaction, batch, &begin, limit)).await;
        transaction.begun(begun).await
    }
}

/// The statement that begins the transaction of a batch, which waits less long for its keys than
/// for other rows.
pub(super) fn begin_batch_sql(isolation: Isolation, limit: Duration) -> String {
    begin_sql(isolation, Some(limit)) + "; " + &set_lock_timeout(KEY_WAIT.min(limit / 2))
}

/// Begins, and takes the keys without a record. `None`: there are none.
async fn try_begin(
    client: &ClientWrapper,
    batch: &[Completing],
    begin: &str,
    limit: Duration,
) -> Result<Option<Vec<Option<Hold>>>, Trouble> {
    let not_executed = |error| errors::not_executed(&error);
    let insert = client
        .prepare_cached(row::COMPLETE_ALL_ABSENT)
        .await
        .map_err(not_executed)?;
    let Completions {
        keys,
        retentions_ms,
        tags,
        fingerprints,
    } = Completions::of(batch);
    let parameters: [&(dyn ToSql + Sync); 4] = [&keys, &retentions_ms, &tags, &fingerprints];
    let other_waits = set_lock_timeout(limit / 2);
    // In this order on the wire, and in one round trip. Without its BEGIN the second one fails, and
    // the third one does nothing.
    let begun = join3(
        client.batch_execute(begin),
        client.query_one(&insert, &parameters),
        client.batch_execute(&other_waits),
    );
    let (begun, inserted, set) = begun.await;
    let row = begun.and(inserted).map_err(not_executed)?;
    set.map_err(not_executed)?;
    // Null when there are none.
    let taken: Option<Vec<String>> = row.try_get("keys").map_err(not_executed)?;
    let places: Option<Vec<String>> = row.try_get("places").map_err(not_executed)?;
    let holds = holds(
        batch,
        row.try_get("xid").map_err(not_executed)?,
        taken
            .unwrap_or_default()
            .into_iter()
            .zip(places.unwrap_or_default()),
    );
    if holds.is_some() && row.try_get("asynchronous").unwrap_or(true) {
        client
            .batch_execute("SET LOCAL synchronous_commit = on")
            .await
            .map_err(not_executed)?;
    }
    Ok(holds)
}

/// The hold on each key of the batch of the transaction of this number, given the keys that it has
/// taken and their places. `None`: it has taken none.
pub(super) fn holds(
    batch: &[Completing],
    xid: &str,
    taken: impl Iterator<Item = (String, String)>,
) -> Option<Vec<Option<Hold>>> {
    let mut places: HashMap<String, String> = taken.collect();
    if places.is_empty() {
        return None;
    }
    let holds = batch.iter().map(|one| {
        let ctid = places.remove(one.key().as_str())?;
        Some(Hold::Record {
            xid: xid.to_owned(),
            ctid,
        })
    });
    Some(holds.collect())
}

/// The parameters of [`row::ADD_RESULTS`]: one array for each column, without results that are
/// empty.
#[derive(Default)]
pub(super) struct Results<'a> {
    pub(super) places: Vec<&'a str>,
    pub(super) keys: Vec<&'a str>,
    pub(super) results: Vec<&'a [u8]>,
}

impl<'a> Results<'a> {
    pub(super) fn of(batch: &'a [(Hold, Completing)]) -> Self {
        let mut all = Self::default();
        for (hold, completing) in batch {
            if let Hold::Record { ctid, .. } = hold
                && !completing.result().is_empty()
            {
                all.places.push(ctid);
                all.keys.push(completing.key().as_str());
                all.results.push(completing.result());
            }
        }
        all
    }

    /// The number of rows that they change.
    pub(super) fn count(&self) -> u64 {
        self.keys.len() as u64
    }
}

/// The number of the transaction of a batch.
pub(super) fn xid(batch: &[(Hold, Completing)]) -> &str {
    let (Hold::Record { xid, .. } | Hold::Claim { xid }) = match batch.first() {
        Some((hold, _)) => hold,
        // The guard fails.
        None => return "",
    };
    xid
}

/// A record that the transaction of a batch has written, if there is one: all are in one commit.
pub(super) fn written(batch: &[(Hold, Completing)]) -> Option<&Completing> {
    batch
        .iter()
        .find_map(|(hold, completing)| hold.written(completing))
}

/// Stores the results and commits, in one round trip.
pub(super) async fn commit(
    client: &ClientWrapper,
    batch: &[(Hold, Completing)],
) -> Result<Waits, CommitError> {
    let failed = |error| not_committed(&error);
    let guard = client.prepare_cached(GUARD).await.map_err(failed)?;
    let xid = xid(batch);
    let results = Results::of(batch);
    let numbers: [&(dyn ToSql + Sync); 1] = [&xid];
    // In this order on the wire. After a failed statement the server rolls back instead of
    // committing.
    let (guarded, added, committed) = if results.count() == 0 {
        let (guarded, committed) = join(
            client.query_one(&guard, &numbers),
            client.batch_execute("COMMIT"),
        )
        .await;
        (guarded, Ok(0), committed)
    } else {
        let rows: [(&(dyn ToSql + Sync), Type); 3] = [
            (&results.places, Type::TEXT_ARRAY),
            (&results.keys, Type::TEXT_ARRAY),
            (&results.results, Type::BYTEA_ARRAY),
        ];
        let adding = client.execute_typed(row::ADD_RESULTS, &rows);
        join3(
            client.query_one(&guard, &numbers),
            adding,
            client.batch_execute("COMMIT"),
        )
        .await
    };
    let guarded = guarded.map_err(failed)?;
    let added = added.map_err(failed)?;
    committed.map_err(failed)?;
    if added == results.count() {
        return Ok(Waits::of(guarded.try_get("waits").unwrap_or(true)));
    }
    Err(CommitError::Unknown(StoreError::unknown(INTERFERES)))
}
