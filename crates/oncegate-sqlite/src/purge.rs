//! The thread that removes expired records, in small steps.
//!
//! It reads the rows in the order of their insertion, on a separate connection, so that no claim
//! waits for its reads or for an archive. Only the removal goes through the writing thread:
//! transactions of [`STEP_AIM`] each, between those of the callers. [`Pace`] decides how often it
//! runs and how long it pauses.

use std::sync::Arc;
use std::time::{Duration, Instant};

use oncegate_core::key::StoreKey;
use oncegate_core::store::StoreError;
use rusqlite::{Connection, params};
use tracing::warn;

use super::errors::{self, Trouble};
use super::expired_row::ExpiredRow;
use super::file::{self, Settings};
use super::opened_file::OpenedFile;
use super::queue::{Job, JobClass, Queue, Turn};
use super::row::{self, Rows};
use super::thread::Worker;
use super::writer::Removals;
use oncegate_store_toolkit::archive::{Expired, SharedArchive};
use oncegate_store_toolkit::purge::{Backlog, Pace, PurgeStep};

/// The most rows that one step reads, and removes.
const STEP_ROWS: usize = 4_000;

/// The most rows that the first step removes, and the minimum of this limit.
const LEAST_REMOVES: usize = 250;

/// Target time of the removals of one step on the writing thread, without its commit.
const STEP_AIM: Duration = Duration::from_millis(5);

/// The wait after an error, unless the purge interval is longer or the operator's setting is
/// shorter.
const RETRY_REST: Duration = Duration::from_secs(1);

/// The thread takes no jobs: it works by itself until it is dropped.
pub(super) enum Nothing {}

impl Job for Nothing {
    fn class(&self) -> JobClass {
        match *self {}
    }

    fn size(&self) -> usize {
        match *self {}
    }

    fn alone(&self) -> bool {
        match *self {}
    }
}

/// Starts the thread, if the settings enable the purge.
pub(super) async fn start(
    settings: Settings,
    removals: Removals,
    backlog: Arc<Backlog>,
) -> Result<Option<Worker<Nothing>>, StoreError> {
    let Some(rest) = settings.purge_rest else {
        return Ok(None);
    };
    let worker = Worker::start(
        "oncegate-sqlite-purge",
        move || {
            let now = Instant::now();
            Ok(Purge {
                connection: file::open_for_reading(&settings)?,
                place: OpenedFile::of(&settings.path),
                pace: Pace::new(rest),
                archive: settings.archive,
                removals,
                backlog,
                walk: Walk::begun(now, now),
                step_removes: LEAST_REMOVES,
            })
        },
        Purge::run,
    );
    worker.await.map(Some)
}

struct Purge {
    connection: Connection,
    place: OpenedFile,
    pace: Pace,
    archive: Option<SharedArchive>,
    removals: Removals,
    backlog: Arc<Backlog>,
    walk: Walk,
    /// The most rows that the next step removes.
    step_removes: usize,
}

/// The progress of one pass through the file.
struct Walk {
    began: Instant,
    /// The beginning of the previous pass.
    last_began: Instant,
    /// The last row that was read; 0 at the beginning.
    after: i64,
    work: PurgeStep,
    /// The expiry of the oldest record that could not be removed, in the store's time.
    left_ms: Option<i64>,
}

impl Walk {
    fn begun(began: Instant, last_began: Instant) -> Self {
        Self {
            began,
            last_began,
            after: 0,
            work: PurgeStep::default(),
            left_ms: None,
        }
    }
}

/// The result of one read.
struct ScanResult {
    now_ms: i64,
    last: i64,
    met: u64,
    more: bool,
    expired: Vec<ExpiredRow>,
}

impl Purge {
    fn run(mut self, queue: &Queue<Nothing>) {
        let mut pause = self.pace.interval();
        while let Turn::Idle | Turn::Jobs(_) = queue.take(1, pause) {
            pause = self.step().unwrap_or_else(|error| {
                let error = self.place.name(error);
                warn!(%error, "expired records were not removed from the SQLite file; the purge tries again");
                self.pace.after_error(RETRY_REST)
            });
        }
    }

    /// Removes the expired rows among the next rows. Returns how long to wait before the next step.
    fn step(&mut self) -> Result<Duration, StoreError> {
        self.place.check()?;
        let began = Instant::now();
        if self.walk.after == 0 {
            self.walk = Walk::begun(began, self.walk.began);
        }
        let ScanResult {
            now_ms,
            last,
            met,
            more,
            mut expired,
        } = self.look().map_err(|error| errors::not_executed(&error))?;
        let found = expired.len() as u64;
        let age =
            |expires_at_ms: i64| Duration::from_millis((now_ms - expires_at_ms).unsigned_abs());
        if let Some(oldest_ms) = expired.iter().map(|row| row.expires_at_ms).min() {
            self.backlog.met(age(oldest_ms));
        }
        if let Some(archive) = self.archive.clone() {
            let records = self.records(&mut expired)?;
            archive.keep(&records).map_err(|error| {
                StoreError::unavailable(format_args!("the archive failed: {error}"))
            })?;
        }
        if !expired.is_empty() {
            self.remove(expired)?;
        }
        let step = PurgeStep {
            took: began.elapsed(),
            met,
            expired: found,
        };
        self.walk.work.met += met;
        self.walk.work.expired += found;
        self.walk.after = if more { last } else { 0 };
        if more {
            return Ok(self.pace.pause(step));
        }
        let walk = &self.walk;
        self.backlog
            .walked(walk.began, walk.work.expired > 0, walk.left_ms.map(age));
        let work = PurgeStep {
            took: walk.began.elapsed(),
            ..walk.work
        };
        Ok(self
            .pace
            .walked(work, walk.began.duration_since(walk.last_began)))
    }

    fn remove(&mut self, expired: Vec<ExpiredRow>) -> Result<(), StoreError> {
        let rows = expired.len();
        let took = self.removals.remove(expired)?;
        if rows == self.step_removes {
            let fitting = rows as f64 * STEP_AIM.as_secs_f64() / took.as_secs_f64().max(1e-6);
            self.step_removes = (fitting as usize)
                .clamp(rows / 2, rows * 2)
                .clamp(LEAST_REMOVES, STEP_ROWS);
        }
        Ok(())
    }

    /// The next rows, up to as many expired ones as a step removes.
    fn look(&self) -> rusqlite::Result<ScanResult> {
        let now_ms = i64::try_from(row::now(&self.connection, false)?.millis()).unwrap_or(i64::MAX);
        let look = "SELECT id, expires_at_ms FROM records WHERE id > ?1 ORDER BY id LIMIT ?2";
        let mut statement = self.connection.prepare_cached(look)?;
        let mut rows = statement.query(params![self.walk.after, STEP_ROWS as i64])?;
        let mut found = ScanResult {
            now_ms,
            last: self.walk.after,
            met: 0,
            more: false,
            expired: Vec::new(),
        };
        while let Some(row) = rows.next()? {
            let row = ExpiredRow {
                id: row.get(0)?,
                expires_at_ms: row.get(1)?,
            };
            found.met += 1;
            found.last = row.id;
            // No record expires before 1970: such a row is damaged, and must not make its key new.
            if (0..now_ms).contains(&row.expires_at_ms) {
                found.expired.push(row);
            }
            found.more = found.met == STEP_ROWS as u64 || found.expired.len() == self.step_removes;
            if found.more {
                break;
            }
        }
        Ok(found)
    }

    /// Reads the records of the rows for the archive; leaves out rows that cannot be read or have
    /// changed.
    fn records(&mut self, rows: &mut Vec<ExpiredRow>) -> Result<Vec<Expired>, StoreError> {
        let mut records = Vec::with_capacity(rows.len());
        let mut kept = Vec::with_capacity(rows.len());
        let mut key = self
            .connection
            .prepare_cached("SELECT key FROM records WHERE id = ?1")
            .map_err(|error| errors::not_executed(&error))?;
        let mut read = Rows::of(&self.connection).map_err(|error| errors::not_executed(&error))?;
        let mut left_ms = self.walk.left_ms;
        for row in rows.drain(..) {
            let text: Result<String, _> = key.query_row([row.id], |row| row.get(0));
            let Some(key) = text.ok().and_then(|text| text.parse::<StoreKey>().ok()) else {
                continue;
            };
            match read.read(&key) {
                Ok(Some(record))
                    if i64::try_from(record.expires_at.millis()) == Ok(row.expires_at_ms) =>
                {
                    records.push(Expired { key, record });
                    kept.push(row);
                }
                // The key was claimed again meanwhile.
                Ok(_) => {}
                Err(Trouble::Unreadable { key, reason }) => {
                    warn!(%key, reason, "an expired record cannot be read, and stays");
                    left_ms = left_ms.into_iter().chain([row.expires_at_ms]).min();
                }
                Err(Trouble::Sqlite(error)) => return Err(errors::not_executed(&error)),
            }
        }
        self.walk.left_ms = left_ms;
        *rows = kept;
        Ok(records)
    }
}
