//! The thread that removes expired records, in small steps.
//!
//! It walks over the rows in the order of their arrival, on a connection of its own, so that no claim waits for its
//! looks or for an archive. Only the removal goes through the writing thread: a transaction of at most
//! [`STEP_REMOVES`] rows between those of the callers.

use std::time::Duration;

use oncegate_core::key::StoreKey;
use oncegate_core::store::StoreError;
use rusqlite::{Connection, params};
use tracing::warn;

use super::errors::{self, Trouble};
use super::file::{self, Settings};
use super::place::Place;
use super::queue::{Job, Lane, Queue, Turn};
use super::row::{self, Rows};
use super::thread::Worker;
use super::writer::Removals;
use crate::archive::{Expired, SharedArchive};

/// The most rows that one step looks at.
const STEP_ROWS: i64 = 1_000;

/// The most rows that one step removes: about two milliseconds of the writing thread.
const STEP_REMOVES: usize = 250;

/// How long a walk rests between two steps, so that it takes a small part of the writing thread's time.
const STEP_PAUSE: Duration = Duration::from_millis(20);

/// Nothing is asked of the thread: it works by itself until it is dropped.
pub(super) enum Nothing {}

impl Job for Nothing {
    fn lane(&self) -> Lane {
        match *self {}
    }

    fn size(&self) -> usize {
        match *self {}
    }

    fn alone(&self) -> bool {
        match *self {}
    }
}

/// A row that has expired, by what tells it from one that was claimed again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ExpiredRow {
    id: i64,
    expires_at_ms: i64,
}

/// Starts the thread, if the settings want one.
pub(super) async fn start(
    settings: Settings,
    removals: Removals,
) -> Result<Option<Worker<Nothing>>, StoreError> {
    let Some(rest) = settings.purge_rest else { return Ok(None) };
    let open = move || {
        let connection = file::open_for_reading(&settings)?;
        let place = Place::of(&settings.path);
        Ok(Walk { connection, place, rest, archive: settings.archive, removals, after: 0 })
    };
    Worker::start("oncegate-sqlite-purge", open, Walk::run).await.map(Some)
}

/// The walk through the file.
struct Walk {
    connection: Connection,
    place: Place,
    rest: Duration,
    archive: Option<SharedArchive>,
    removals: Removals,
    /// The last row that was looked at; 0 at the beginning.
    after: i64,
}

/// What a look found.
struct Found {
    last: i64,
    more: bool,
    expired: Vec<ExpiredRow>,
}

impl Walk {
    fn run(mut self, queue: &Queue<Nothing>) {
        let mut pause = self.rest;
        while let Turn::Idle | Turn::Jobs(_) = queue.take(1, pause) {
            pause = match self.step() {
                Ok(true) => STEP_PAUSE,
                Ok(false) => self.rest.max(STEP_PAUSE),
                Err(error) => {
                    let error = self.place.name(error);
                    warn!(%error, "expired records stay in the SQLite file for now");
                    self.rest.max(STEP_PAUSE)
                }
            };
        }
    }

    /// Removes what has expired among the next rows; returns whether more rows follow.
    fn step(&mut self) -> Result<bool, StoreError> {
        self.place.check()?;
        let sqlite = |error: rusqlite::Error| errors::not_executed(&error);
        let Found { last, more, mut expired } = self.look().map_err(sqlite)?;
        if let Some(archive) = &self.archive {
            let records = self.records(&mut expired)?;
            archive.keep(&records).map_err(|error| {
                StoreError::unavailable(format_args!("the archive does not take them: {error}"))
            })?;
        }
        if !expired.is_empty() {
            self.removals.remove(expired)?;
        }
        self.after = if more { last } else { 0 };
        Ok(more)
    }

    /// The next rows, up to as many expired ones as a step removes.
    fn look(&self) -> rusqlite::Result<Found> {
        let now_ms = i64::try_from(row::now(&self.connection, false)?.millis()).unwrap_or(i64::MAX);
        let look = "SELECT id, expires_at_ms FROM records WHERE id > ?1 ORDER BY id LIMIT ?2";
        let mut statement = self.connection.prepare_cached(look)?;
        let mut rows = statement.query(params![self.after, STEP_ROWS])?;
        let mut found = Found { last: self.after, more: false, expired: Vec::new() };
        let mut looked = 0;
        while let Some(row) = rows.next()? {
            let row = ExpiredRow { id: row.get(0)?, expires_at_ms: row.get(1)? };
            looked += 1;
            found.last = row.id;
            if row.expires_at_ms < now_ms {
                found.expired.push(row);
            }
            found.more = looked == STEP_ROWS || found.expired.len() == STEP_REMOVES;
            if found.more {
                break;
            }
        }
        Ok(found)
    }

    /// The records of the rows, for the archive; leaves out rows that cannot be read or have changed.
    fn records(&self, rows: &mut Vec<ExpiredRow>) -> Result<Vec<Expired>, StoreError> {
        let mut records = Vec::with_capacity(rows.len());
        let mut kept = Vec::with_capacity(rows.len());
        let sqlite = |error: rusqlite::Error| errors::not_executed(&error);
        let mut key =
            self.connection.prepare_cached("SELECT key FROM records WHERE id = ?1").map_err(sqlite)?;
        let mut read = Rows::of(&self.connection).map_err(sqlite)?;
        for row in rows.drain(..) {
            let text: Result<String, _> = key.query_row([row.id], |row| row.get(0));
            let Some(key) = text.ok().and_then(|text| text.parse::<StoreKey>().ok()) else { continue };
            match read.read(&key) {
                Ok(Some(record)) if i64::try_from(record.expires_at.millis()) == Ok(row.expires_at_ms) => {
                    records.push(Expired { key, record });
                    kept.push(row);
                }
                Ok(_) => {}
                Err(Trouble::Unreadable { key, reason }) => {
                    warn!(%key, reason, "an expired record cannot be read, and stays");
                }
                Err(Trouble::Sqlite(error)) => return Err(sqlite(error)),
            }
        }
        *rows = kept;
        Ok(records)
    }
}

/// Removes rows that still are what they were when they were looked at.
pub(super) fn remove(connection: &Connection, rows: &[ExpiredRow]) -> rusqlite::Result<usize> {
    let mut remove = connection.prepare_cached("DELETE FROM records WHERE id = ?1 AND expires_at_ms = ?2")?;
    rows.iter().map(|row| remove.execute([row.id, row.expires_at_ms])).sum()
}
