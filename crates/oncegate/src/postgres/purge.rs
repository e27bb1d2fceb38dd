//! Removes the rows of expired records, in small steps.

use deadpool_postgres::Object;
use oncegate_core::store::StoreError;

use super::errors;
use super::link::Link;

/// How many rows one step walks over.
const STEP_ROWS: i64 = 1_000;

/// One step: walks over the next rows in the order of their keys, and removes those that have expired.
///
/// A row that somebody has locked stays: its claim is about to make a live record of it.
const STEP: &str = "\
WITH walked AS (SELECT key FROM oncegate_records WHERE key > $1 ORDER BY key LIMIT $2), \
locked AS (SELECT r.key FROM oncegate_records AS r JOIN walked USING (key) \
WHERE r.expires_at_ms < floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint \
FOR UPDATE OF r SKIP LOCKED), \
gone AS (DELETE FROM oncegate_records AS r USING locked WHERE r.key = locked.key RETURNING 1) \
SELECT (SELECT max(key) FROM walked) AS last, (SELECT count(*) FROM gone) AS removed";

pub(super) async fn all(link: &Link) -> Result<u64, StoreError> {
    let mut removed = 0;
    let mut after = String::new();
    loop {
        let from = after;
        let step = move |client: Object| async move {
            let stepped = client.query_one(STEP, &[&from, &STEP_ROWS]).await;
            let stepped = stepped.map(|row| (row.get::<_, Option<String>>(0), row.get::<_, i64>(1)));
            (client, stepped.map_err(|error| errors::not_executed(&error)))
        };
        let (last, gone) = link.run(step).await?;
        removed += u64::try_from(gone).unwrap_or_default();
        let Some(last) = last else { return Ok(removed) };
        after = last;
    }
}
