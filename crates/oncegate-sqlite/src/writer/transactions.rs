//! The transactions of the writing thread.

use std::time::{Duration, Instant};

use oncegate_core::record::StoreTime;
use oncegate_core::store::StoreError;
use rusqlite::Connection;
use tokio::sync::watch;

use crate::file::{self, Settings};
use crate::log::LogWatch;
use crate::opened_file::OpenedFile;
use crate::{errors, row};

/// The connection that writes. It begins and ends transactions.
pub(super) struct Transactions {
    connection: Connection,
    place: OpenedFile,
    log: LogWatch,
    busy_timeout: Duration,
    /// `true` while a transaction of this thread waits for the file's lock.
    waits: watch::Sender<bool>,
    /// The duration of the last commit, with its sync of the disk: a wait up to this time for more
    /// commands pays.
    pub(super) last_commit: Duration,
}

impl Transactions {
    /// Opens the file of these settings.
    pub(super) fn open(
        settings: &Settings,
        waits: watch::Sender<bool>,
    ) -> Result<Self, StoreError> {
        Ok(Self {
            connection: file::open(settings)?,
            place: OpenedFile::of(&settings.path),
            log: LogWatch::of(&settings.path),
            busy_timeout: settings.busy_timeout,
            waits,
            last_commit: Duration::ZERO,
        })
    }

    /// Runs `work` in one transaction; `work` may run again when another process held the lock.
    pub(super) fn write<T>(
        &mut self,
        mut work: impl FnMut(&Connection, StoreTime) -> rusqlite::Result<T>,
    ) -> Result<T, StoreError> {
        self.place.check()?;
        let mut committing_since = None;
        let connection = &self.connection;
        let done = file::patiently(self.busy_timeout, || {
            committing_since = None;
            let settled = transaction(connection, &mut work, &mut committing_since);
            if !connection.is_autocommit() {
                // An error is ignored: if the rollback failed, the next BEGIN is refused.
                let _ = connection.execute_batch("ROLLBACK");
            }
            if settled.as_ref().is_err_and(errors::is_busy) {
                self.waits.send_replace(true);
            }
            settled
        });
        self.waits.send_if_modified(std::mem::take);
        if let Some(since) = committing_since {
            self.last_commit = since.elapsed();
            self.log.look(&self.connection);
        }
        done.map_err(|error| {
            let committing = committing_since.is_some();
            let classify = if committing {
                errors::not_committed
            } else {
                errors::not_executed
            };
            self.place.name(classify(&error))
        })
    }
}

fn transaction<T>(
    connection: &Connection,
    work: &mut impl FnMut(&Connection, StoreTime) -> rusqlite::Result<T>,
    committing_since: &mut Option<Instant>,
) -> rusqlite::Result<T> {
    connection.prepare_cached("BEGIN IMMEDIATE")?.execute([])?;
    let now = row::now(connection, true)?;
    let done = work(connection, now)?;
    *committing_since = Some(Instant::now());
    connection.prepare_cached("COMMIT")?.execute([])?;
    Ok(done)
}
