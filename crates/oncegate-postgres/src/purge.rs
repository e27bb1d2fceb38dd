//! Removes the rows of expired records, in small steps that do not wait for locks.
//!
//! A purge reads the table page by page, in the order on the disk: keys are digests, so the order
//! of the primary key would read the whole table once for every few rows. A row that moves to a
//! page that was already read is found by the next purge. Partitions are read in parallel: a step
//! covers the same pages of all of them. [`Pace`] decides how often a purge runs and how long it
//! pauses.

use std::sync::Arc;
use std::time::{Duration, Instant};

use deadpool_postgres::Object;
use futures_util::TryFutureExt as _;
use futures_util::future::join3;
use oncegate_core::store::StoreError;
use tokio_postgres::Row;
use tokio_postgres::types::ToSql;
use tracing::{debug, warn};

use super::errors::{self, Trouble};
use super::row;
use super::shared::{Shared, within};

use oncegate_store_toolkit::archive::{Expired, SharedArchive};
use oncegate_store_toolkit::purge::{Backlog, Pace, PurgeStep};

/// The number of pages, of all partitions together, that one step reads.
const STEP_PAGES: i64 = 64;

/// The most rows that one step removes: about as many as these pages hold.
const STEP_ROWS: i64 = 4_096;

/// The most records that are passed to an archive at once.
const ARCHIVE_ROWS: i64 = 256;

/// The wait after an error, unless the purge interval is longer or the operator's setting is
/// shorter.
const RETRY_REST: Duration = Duration::from_secs(1);

/// Reads the pages of the longest partition, and the number of partitions. A parent has no rows and
/// no pages.
const PAGES: &str = "\
SELECT coalesce(max(pg_relation_size(relid)), 0) / current_setting('block_size')::bigint AS pages, count(*) AS parts, \
bool_or(is_partition) AS partitioned FROM (SELECT relid, true AS is_partition \
FROM pg_partition_tree('oncegate_records') WHERE isleaf \
UNION ALL SELECT oid, false FROM pg_class WHERE oid = 'oncegate_records'::regclass AND relkind <> 'p') AS parts";

/// Counts the rows in the pages from `$1` to `$2`.
const LOOK: &str = "\
SELECT count(*) AS met, count(*) FILTER (WHERE expires_at_ms < c.now_ms) AS expired, \
max(c.now_ms) - greatest(min(expires_at_ms), 0) AS age_ms \
FROM (SELECT floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint AS now_ms) AS c, oncegate_records \
WHERE ctid >= $1::text::tid AND ctid < $2::text::tid";

/// Removes the expired rows in the pages from `$1` to `$2`, at most `$3` rows.
///
/// A row that another transaction has locked stays: its claim is about to make a live record of it.
/// The others are locked by the read, so they cannot move before they are deleted.
const REMOVE: &str = "\
DELETE FROM oncegate_records WHERE ctid = ANY(ARRAY(SELECT ctid FROM oncegate_records \
WHERE ctid >= $1::text::tid AND ctid < $2::text::tid \
AND expires_at_ms < floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint LIMIT $3 FOR UPDATE SKIP LOCKED))";

/// The same for partitions, where a `ctid` is not unique: there the key identifies a row.
const REMOVE_FROM_PARTITIONS: &str = "\
WITH expired AS (SELECT key FROM oncegate_records WHERE ctid >= $1::text::tid AND ctid < $2::text::tid \
AND expires_at_ms < floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint LIMIT $3 FOR UPDATE SKIP LOCKED) \
DELETE FROM oncegate_records AS r USING expired WHERE r.key = expired.key";

/// Reads the expired rows in the pages from `$1` to `$2`, at most `$3` rows. It locks nothing.
const READ: &str = "\
SELECT key, state, expires_at_ms, owner, attempt, recovery, fencing_token, fingerprint, handed_over, reason, result \
FROM oncegate_records WHERE ctid >= $1::text::tid AND ctid < $2::text::tid \
AND expires_at_ms < floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint LIMIT $3";

/// Removes rows that have been archived, unless they have been claimed since or are locked.
const REMOVE_ARCHIVED: &str = "\
WITH archived AS (SELECT r.key FROM oncegate_records AS r JOIN unnest($1::text[], $2::bigint[]) \
AS n(key, expires_at_ms) ON r.key = n.key AND r.expires_at_ms = n.expires_at_ms FOR UPDATE OF r SKIP LOCKED) \
DELETE FROM oncegate_records AS r USING archived WHERE r.key = archived.key";

/// Moves the time of the last purge forward. The process that succeeds runs the next purge, and
/// gets the time since the last one began.
///
/// The clock is read in the comparison. A process that waited for the row compares again; with a
/// clock that was read earlier, the time that another process has just set would be in the future.
const TAKE_TURN: &str = "\
WITH was AS (SELECT purged_at_ms AS ms FROM oncegate_schema) \
UPDATE oncegate_schema SET purged_at_ms = floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint \
WHERE purged_at_ms <= floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint - $1 \
OR purged_at_ms > floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint \
RETURNING greatest(purged_at_ms - (SELECT ms FROM was), 0) AS since_last_ms";

/// Settings and state of the purge.
#[derive(Clone, Debug, Default)]
pub(super) struct Purge {
    /// The longest time between two purges in the background; `None` leaves them to the operator.
    pub(super) rest: Option<Duration>,
    pub(super) archive: Option<SharedArchive>,
    pub(super) backlog: Arc<Backlog>,
}

impl Purge {
    /// Purges again and again, in turns with the other processes. It ends by being dropped.
    pub(super) async fn walk_in_the_background(&self, shared: &Shared) {
        let Some(longest) = self.rest else {
            return std::future::pending().await;
        };
        let mut pace = Pace::new(longest);
        let mut rest = pace.interval();
        loop {
            // Jitter, so that processes that started together do not send this together.
            tokio::time::sleep(rest + rest.mul_f64(fastrand::f64() / 10.0)).await;
            rest = match self.take_turn(shared, pace.interval()).await {
                Ok(Some(since_last)) => self.take_walk(shared, &mut pace, since_last).await,
                Ok(None) => {
                    self.backlog.not_ours();
                    pace.interval()
                }
                Err(error) => failed(&error, &pace),
            };
        }
    }

    async fn take_walk(&self, shared: &Shared, pace: &mut Pace, since_last: Duration) -> Duration {
        match self.walk(shared, Some(pace)).await {
            Ok((work, removed)) => {
                debug!(removed, met = work.met, took = ?work.took, "expired records were removed");
                pace.walked(work, since_last)
            }
            Err(error) => failed(&error, pace),
        }
    }

    /// The time since the last purge began, if it is this process's turn for the next one.
    async fn take_turn(
        &self,
        shared: &Shared,
        interval: Duration,
    ) -> Result<Option<Duration>, StoreError> {
        let interval_ms = i64::try_from(interval.as_millis()).unwrap_or(i64::MAX / 2);
        let taken = with_client(shared, async |client| {
            let taken = client.query_opt(TAKE_TURN, &[&interval_ms]).await;
            taken.map_err(|error| errors::not_executed(&error))
        });
        let taken = taken.await?;
        Ok(taken
            .map(|row| Duration::from_millis(row.get::<_, i64>("since_last_ms").unsigned_abs())))
    }

    /// Purges the table once, at full speed without a `pace`. Returns what it read, and how many
    /// rows it has removed.
    pub(super) async fn walk(
        &self,
        shared: &Shared,
        pace: Option<&Pace>,
    ) -> Result<(PurgeStep, u64), StoreError> {
        let began = Instant::now();
        let Table {
            pages,
            step_pages,
            partitioned,
        } = table(shared).await?;
        let mut walk = PurgeStep::default();
        let mut removed = 0;
        let mut left = None;
        let mut page = 0;
        while page < pages {
            let started = Instant::now();
            let place = PageRange {
                from: format!("({page},0)"),
                to: format!("({},0)", page + step_pages),
                partitioned,
            };
            let step = self.step(shared, &place).await?;
            page += step_pages;
            removed += step.removed;
            left = left.max(step.left);
            let work = PurgeStep {
                took: started.elapsed(),
                ..step.work
            };
            walk.met += work.met;
            walk.expired += work.expired;
            if let Some(pace) = pace {
                tokio::time::sleep(pace.pause(work)).await;
            }
        }
        self.backlog.walked(began, walk.expired > 0, left);
        Ok((
            PurgeStep {
                took: began.elapsed(),
                ..walk
            },
            removed,
        ))
    }

    /// Removes the expired rows in some pages.
    async fn step(&self, shared: &Shared, place: &PageRange) -> Result<Step, StoreError> {
        let PageRange { from, to, .. } = place;
        let look = with_client(shared, async |client| {
            let look = client
                .prepare_cached(LOOK)
                .await
                .map_err(|error| errors::not_executed(&error))?;
            client
                .query_one(&look, &[from, to])
                .await
                .map_err(|error| errors::not_executed(&error))
        });
        let look = look.await?;
        let work = PurgeStep {
            took: Duration::ZERO,
            met: look.get::<_, i64>("met").unsigned_abs(),
            expired: look.get::<_, i64>("expired").unsigned_abs(),
        };
        if work.expired == 0 {
            return Ok(Step {
                work,
                removed: 0,
                left: None,
            });
        }
        let age = look
            .get::<_, Option<i64>>("age_ms")
            .map(|ms| Duration::from_millis(ms.unsigned_abs()));
        self.backlog.met(age.unwrap_or_default());
        let mut removed = 0;
        let most = if self.archive.is_some() {
            ARCHIVE_ROWS
        } else {
            STEP_ROWS
        };
        loop {
            let part = match &self.archive {
                None => remove(shared, place).await?,
                Some(archive) => remove_archived(shared, place, archive).await?,
            };
            removed += part.removed;
            // If the limit of rows was reached, there may be more in these pages.
            if part.found < most.unsigned_abs() || part.removed == 0 {
                break;
            }
        }
        let left = if removed < work.expired { age } else { None };
        Ok(Step {
            work,
            removed,
            left,
        })
    }
}

/// The pause after an error.
fn failed(error: &StoreError, pace: &Pace) -> Duration {
    warn!(%error, "expired records were not removed; the next purge tries again");
    pace.after_error(RETRY_REST)
}

/// The extent of the table.
struct Table {
    /// The pages of the longest partition.
    pages: i64,
    /// The pages of each partition that one step reads.
    step_pages: i64,
    partitioned: bool,
}

/// A range of pages in each partition of the table.
struct PageRange {
    from: String,
    to: String,
    partitioned: bool,
}

/// The outcome of a step.
#[derive(Clone, Copy, Debug)]
struct Step {
    work: PurgeStep,
    removed: u64,
    /// Upper limit of the time since the expiry of the oldest expired row that stays.
    left: Option<Duration>,
}

/// The result of one removal.
#[derive(Clone, Copy, Default)]
struct Part {
    found: u64,
    /// Smaller than the number found if another transaction holds a row.
    removed: u64,
}

async fn table(shared: &Shared) -> Result<Table, StoreError> {
    let asked = with_client(shared, async |client| {
        client
            .query_one(PAGES, &[])
            .await
            .map_err(|error| errors::not_executed(&error))
    });
    let row = asked.await?;
    let parts = row.get::<_, i64>("parts").max(1);
    Ok(Table {
        pages: row.get("pages"),
        step_pages: (STEP_PAGES / parts).max(1),
        partitioned: row
            .get::<_, Option<bool>>("partitioned")
            .unwrap_or_default(),
    })
}

/// Removes expired rows, up to [`STEP_ROWS`].
async fn remove(shared: &Shared, place: &PageRange) -> Result<Part, StoreError> {
    let sql = if place.partitioned {
        REMOVE_FROM_PARTITIONS
    } else {
        REMOVE
    };
    let removed = delete(shared, sql, &[&place.from, &place.to, &STEP_ROWS]).await?;
    Ok(Part {
        found: removed,
        removed,
    })
}

/// Removes expired rows, up to [`ARCHIVE_ROWS`], after the archive has stored them.
async fn remove_archived(
    shared: &Shared,
    place: &PageRange,
    archive: &SharedArchive,
) -> Result<Part, StoreError> {
    let expired = with_client(shared, async |client| {
        let rows = client
            .query(READ, &[&place.from, &place.to, &ARCHIVE_ROWS])
            .await;
        Ok(readable(
            &rows.map_err(|error| errors::not_executed(&error))?,
        ))
    });
    let expired = expired.await?;
    if expired.is_empty() {
        return Ok(Part::default());
    }
    let found = expired.len() as u64;
    let keys: Vec<String> = expired
        .iter()
        .map(|expired| expired.key.as_str().to_owned())
        .collect();
    let expiries_ms: Vec<i64> = expired
        .iter()
        .map(|expired| row::expiry_ms(&expired.record))
        .collect();
    let archive = archive.clone();
    let kept = tokio::task::spawn_blocking(move || archive.keep(&expired));
    let kept = kept
        .map_err(|_| "the archive panicked".into())
        .await
        .and_then(|kept| kept);
    kept.map_err(|error| StoreError::unavailable(format!("the archive failed: {error}")))?;
    let removed = delete(shared, REMOVE_ARCHIVED, &[&keys, &expiries_ms]).await?;
    Ok(Part { found, removed })
}

/// Runs a statement that deletes, and returns how many rows it has deleted.
///
/// It waits for no disk and no standby: a crash may undo it, and then the expired rows are deleted
/// again.
async fn delete(
    shared: &Shared,
    sql: &str,
    parameters: &[&(dyn ToSql + Sync)],
) -> Result<u64, StoreError> {
    let deleted = with_client(shared, async |client| {
        let statement = client
            .prepare_cached(sql)
            .await
            .map_err(|error| errors::not_executed(&error))?;
        let begin = format!("{}; SET LOCAL synchronous_commit = off", shared.begin);
        // In this order on the wire, in one round trip. Without its BEGIN the statement removes the
        // same rows.
        let sent = join3(
            client.batch_execute(&begin),
            client.execute(&statement, parameters),
            client.batch_execute("COMMIT"),
        );
        let (begun, deleted, committed) = sent.await;
        let deleted = begun
            .and(deleted)
            .map_err(|error| errors::not_executed(&error))?;
        committed.map_err(|error| errors::in_doubt(&error))?;
        Ok(deleted)
    });
    deleted.await
}

/// The records of these rows. A row that cannot be decoded is not archived, and so not removed.
fn readable(rows: &[Row]) -> Vec<Expired> {
    let expired: Vec<Expired> = rows
        .iter()
        .filter_map(|row| {
            let key = row.try_get::<_, &str>("key").ok()?.parse().ok()?;
            let record = row::decode(row).ok()?;
            Some(Expired { key, record })
        })
        .collect();
    if expired.len() < rows.len() {
        let rows = rows.len() - expired.len();
        warn!(
            rows,
            "expired rows of oncegate_records that cannot be read are not archived, and stay"
        );
    }
    expired
}

/// Runs one query on a separate connection, within the time limit.
async fn with_client<T>(
    shared: &Shared,
    ask: impl AsyncFnOnce(&Object) -> Result<T, Trouble>,
) -> Result<T, StoreError> {
    let client = shared.client().await?;
    let outcome = within(shared.response_timeout, ask(&client)).await;
    shared
        .settle(client, outcome)
        .map_err(|trouble| trouble.error)
}
