//! Removes the rows of expired records, in small steps that wait for nobody.
//!
//! A walk goes through the table page by page, in the order in which it lies on the disk: keys are digests, so
//! the order of the primary key would read the whole table once for every few rows. A row that moves to a
//! page behind the walk is met by the next one.

use std::time::{Duration, Instant};

use deadpool_postgres::Object;
use futures_util::TryFutureExt as _;
use oncegate_core::store::StoreError;
use tokio_postgres::Row;
use tracing::{debug, warn};

use super::errors::{self, Trouble};
use super::link::Shared;
use super::row;
use super::transaction::within;
use crate::archive::{Expired, SharedArchive};
use crate::entropy::Entropy;

/// How many pages of the table one step looks at.
const STEP_PAGES: i64 = 32;

/// How many rows one step removes at most.
const STEP_ROWS: i64 = 256;

/// How many times as long as a step has taken a walk in the background rests before the next one.
const REST_FACTOR: u32 = 4;

/// The shortest rest between two walks in the background.
const SHORTEST_REST: Duration = Duration::from_millis(10);

const PAGES: &str =
    "SELECT pg_relation_size('oncegate_records') / current_setting('block_size')::bigint AS pages";

/// Removes what has expired in the pages from `$1` to `$2`, but `$3` rows at most.
///
/// A row that somebody has locked stays: its claim is about to make a live record of it.
const REMOVE: &str = "\
WITH expired AS (SELECT key FROM oncegate_records WHERE ctid >= $1::text::tid AND ctid < $2::text::tid \
AND expires_at_ms < floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint LIMIT $3 FOR UPDATE SKIP LOCKED) \
DELETE FROM oncegate_records AS r USING expired WHERE r.key = expired.key";

/// Reads what has expired in the pages from `$1` to `$2`, but `$3` rows at most. It locks nothing.
const READ: &str = "\
SELECT key, state, expires_at_ms, owner, attempt, recovery, fence, fingerprint, handed_over, reason, result \
FROM oncegate_records WHERE ctid >= $1::text::tid AND ctid < $2::text::tid \
AND expires_at_ms < floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint LIMIT $3";

/// Removes rows that have been archived, unless somebody has claimed them since, or is about to.
const REMOVE_ARCHIVED: &str = "\
WITH archived AS (SELECT r.key FROM oncegate_records AS r JOIN unnest($1::text[], $2::bigint[]) \
AS n(key, expires_at_ms) ON r.key = n.key AND r.expires_at_ms = n.expires_at_ms FOR UPDATE OF r SKIP LOCKED) \
DELETE FROM oncegate_records AS r USING archived WHERE r.key = archived.key";

/// Of all processes, the one that moves this time forward does the next walk.
///
/// The clock is read where it is compared: one that waited for the row looks at it again, and a clock that was read
/// before would take the time that another has just set for one that lies in the future.
const TAKE_TURN: &str = "\
UPDATE oncegate_schema SET purged_at_ms = floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint \
WHERE purged_at_ms <= floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint - $1 \
OR purged_at_ms > floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint";

/// How expired records are removed.
#[derive(Clone, Debug, Default)]
pub(super) struct Purge {
    /// The rest between two walks in the background; `None` leaves them to the operator.
    pub(super) rest: Option<Duration>,
    pub(super) archive: Option<SharedArchive>,
}

impl Purge {
    /// Walks again and again, in turns with the other processes. It ends by being dropped.
    pub(super) async fn walk_in_the_background(&self, shared: &Shared) {
        let Some(rest) = self.rest else { return std::future::pending().await };
        let (rest, entropy) = (rest.max(SHORTEST_REST), Entropy::default());
        loop {
            // Processes that started together do not ask together.
            tokio::time::sleep(rest + rest.mul_f64(entropy.fraction() / 10.0)).await;
            let walked = match self.take_turn(shared, rest).await {
                Ok(true) => self.walk(shared, REST_FACTOR).await,
                Ok(false) => continue,
                Err(error) => Err(error),
            };
            match walked {
                Ok(removed) => debug!(removed, "expired records were removed"),
                Err(error) => warn!(%error, "expired records were not removed; the next walk tries again"),
            }
        }
    }

    async fn take_turn(&self, shared: &Shared, rest: Duration) -> Result<bool, StoreError> {
        let rest_ms = i64::try_from(rest.as_millis()).unwrap_or(i64::MAX / 2);
        let taken = with_client(shared, async |client| {
            client.execute(TAKE_TURN, &[&rest_ms]).await.map_err(|error| errors::not_executed(&error))
        });
        Ok(taken.await? > 0)
    }

    /// Walks through the table once, and returns how many rows it has removed.
    pub(super) async fn walk(&self, shared: &Shared, rest_factor: u32) -> Result<u64, StoreError> {
        let pages = with_client(shared, async |client| {
            let row = client.query_one(PAGES, &[]).await.map_err(|error| errors::not_executed(&error))?;
            Ok(row.get::<_, i64>("pages"))
        });
        let (pages, mut removed) = (pages.await?, 0);
        let mut page = 0;
        while page < pages {
            let started = Instant::now();
            let step = self.step(shared, page).await?;
            removed += step.removed;
            // When it was as much as a step takes, there may be more in these pages.
            if step.found < STEP_ROWS.unsigned_abs() || step.removed == 0 {
                page += STEP_PAGES;
            }
            if rest_factor > 0 {
                tokio::time::sleep(started.elapsed() * rest_factor).await;
            }
        }
        Ok(removed)
    }

    async fn step(&self, shared: &Shared, page: i64) -> Result<Step, StoreError> {
        let (from, to) = (format!("({page},0)"), format!("({},0)", page + STEP_PAGES));
        let Some(archive) = &self.archive else {
            let removed = with_client(shared, async |client| {
                let removed = client.execute(REMOVE, &[&from, &to, &STEP_ROWS]).await;
                removed.map_err(|error| errors::in_doubt(&error))
            });
            let removed = removed.await?;
            return Ok(Step { found: removed, removed });
        };
        let expired = with_client(shared, async |client| {
            let rows = client.query(READ, &[&from, &to, &STEP_ROWS]).await;
            Ok(readable(&rows.map_err(|error| errors::not_executed(&error))?))
        });
        let expired = expired.await?;
        if expired.is_empty() {
            return Ok(Step::default());
        }
        let found = expired.len() as u64;
        let keys: Vec<String> = expired.iter().map(|expired| expired.key.as_str().to_owned()).collect();
        let expiries_ms: Vec<i64> = expired.iter().map(|expired| row::expiry_ms(&expired.record)).collect();
        let archive = archive.clone();
        let kept = tokio::task::spawn_blocking(move || archive.keep(&expired));
        let kept = kept.map_err(|_| "the archive panicked".into()).await.and_then(|kept| kept);
        kept.map_err(|error| StoreError::unavailable(format!("the archive keeps nothing: {error}")))?;
        let removed = with_client(shared, async |client| {
            let removed = client.execute(REMOVE_ARCHIVED, &[&keys, &expiries_ms]).await;
            removed.map_err(|error| errors::in_doubt(&error))
        });
        Ok(Step { found, removed: removed.await? })
    }
}

/// What a step came to.
#[derive(Clone, Copy, Default)]
struct Step {
    found: u64,
    /// Less when somebody works on a row.
    removed: u64,
}

/// The records of these rows. A row that is no record is not archived, and so not removed.
fn readable(rows: &[Row]) -> Vec<Expired> {
    let read = |row: &Row| {
        let key = row.try_get::<_, &str>("key").ok()?.parse().ok()?;
        Some(Expired { key, record: row::decode(row).ok()? })
    };
    let expired: Vec<Expired> = rows.iter().filter_map(read).collect();
    if expired.len() < rows.len() {
        let rows = rows.len() - expired.len();
        warn!(rows, "expired rows of oncegate_records that cannot be read are not archived, and stay");
    }
    expired
}

/// One question on a connection of its own, within the time limit.
async fn with_client<T>(
    shared: &Shared,
    ask: impl AsyncFnOnce(&Object) -> Result<T, Trouble>,
) -> Result<T, StoreError> {
    let client = shared.client().await?;
    let outcome = within(shared.response_timeout, ask(&client)).await;
    shared.settle(client, outcome).map_err(|trouble| trouble.error)
}
