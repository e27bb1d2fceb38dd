//! Opens a file, and refuses files that are damaged or not ours.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use oncegate_core::store::StoreError;
use rusqlite::{Connection, OpenFlags, TransactionBehavior};
use tracing::warn;

use super::errors;
use super::journal;
use super::log;
use super::row::SCHEMA;
use super::settings::SqliteSettings;
use oncegate_store_toolkit::archive::SharedArchive;

/// The application id of our files: `once` in ASCII.
const APPLICATION_ID: i32 = 0x6f6e_6365;

/// The version of the table format. A release reads a format before any release writes it.
const SCHEMA_VERSION: i32 = 1;

/// After this many pages the log is copied into the file: 16 MiB. A page that was written several
/// times is copied once, so a longer log means less copying. But the log is read again when the
/// file is opened after a crash.
const LOG_PAGES: i64 = 4_096;

/// The page cache of a connection, in KiB.
const CACHE_KIB: i64 = 16 * 1024;

/// The options with which a file is opened.
#[derive(Clone, Debug)]
pub(super) struct Settings {
    pub(super) path: PathBuf,
    pub(super) busy_timeout: Duration,
    pub(super) synchronous: Synchronous,
    pub(super) purge_rest: Option<Duration>,
    pub(super) archive: Option<SharedArchive>,
    pub(super) must_exist: bool,
    pub(super) check_up_to_bytes: u64,
    pub(super) chosen: SqliteSettings,
}

/// The failures that a confirmed write survives.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Synchronous {
    /// A power cut: the disk confirms every commit before the store answers.
    #[default]
    Full,
    /// The end of the process, but not a power cut, which may undo the last commits. A message
    /// whose completion was undone after its ack runs again if it is delivered again.
    Normal,
}

impl Settings {
    pub(super) fn new(path: PathBuf) -> Self {
        Self {
            path,
            busy_timeout: Duration::from_secs(5),
            synchronous: Synchronous::default(),
            purge_rest: Some(Duration::from_secs(60)),
            archive: None,
            must_exist: false,
            check_up_to_bytes: 256 * 1024 * 1024,
            chosen: SqliteSettings::DEFAULT,
        }
    }
}

/// Opens the file for writing, and creates its tables if it is new.
pub(super) fn open(settings: &Settings) -> Result<Connection, StoreError> {
    try_open(settings).map_err(|error| errors::of_file(&settings.path, error))
}

/// Opens a second connection to a file that [`open`] has accepted.
pub(super) fn open_for_reading(settings: &Settings) -> Result<Connection, StoreError> {
    open_again(settings, |connection| {
        connection.pragma_update(None, "cache_size", -CACHE_KIB)?;
        connection.pragma_update(None, "query_only", true)
    })
}

/// Opens a connection for the user's own transactions to a file that [`open`] has accepted.
pub(super) fn open_for_effects(settings: &Settings) -> Result<Connection, StoreError> {
    open_again(settings, |connection| tune(connection, Synchronous::Full))
}

fn open_again(
    settings: &Settings,
    set_up: impl FnOnce(&Connection) -> rusqlite::Result<()>,
) -> Result<Connection, StoreError> {
    Connection::open_with_flags(&settings.path, flags(false))
        .and_then(|connection| {
            connection.busy_timeout(settings.busy_timeout)?;
            set_up(&connection)?;
            Ok(connection)
        })
        .map_err(|error| errors::of_file(&settings.path, errors::not_executed(&error)))
}

/// Returns whether a connection's main file holds records of this format.
pub(super) fn is_ours(connection: &Connection) -> rusqlite::Result<bool> {
    let FileContent {
        application_id,
        version,
        ..
    } = identify(connection)?;
    Ok((application_id, version) == (APPLICATION_ID, SCHEMA_VERSION))
}

fn try_open(settings: &Settings) -> Result<Connection, StoreError> {
    refuse_a_lost_file(settings)?;
    make_private(settings);
    let sqlite = |error| errors::not_executed(&error);
    let mut connection =
        Connection::open_with_flags(&settings.path, flags(!settings.must_exist)).map_err(sqlite)?;
    // The store waits by itself: SQLite's own waiting starves one of several busy processes.
    connection.busy_timeout(Duration::ZERO).map_err(sqlite)?;

    // In one transaction: another process may be creating the tables at this moment.
    let found = patiently(settings.busy_timeout, || {
        identify(&*connection.unchecked_transaction()?)
    });
    let new = is_new(found.map_err(sqlite)?)?;
    if !new {
        check_for_damage(&connection, settings)?;
    }
    // Only after the check that the file is ours.
    let journal = patiently(settings.busy_timeout, || {
        connection
            .pragma_update_and_check(None, "journal_mode", "WAL", |row| row.get::<_, String>(0))
    });
    let journal = journal.map_err(sqlite)?;
    if !journal.eq_ignore_ascii_case("wal") {
        return Err(StoreError::refused(format_args!(
            "write-ahead logging is not possible here (journal mode {journal}); use a file on a local disk"
        )));
    }
    tune(&connection, settings.synchronous).map_err(sqlite)?;
    if new {
        let found = patiently(settings.busy_timeout, || create(&mut connection)).map_err(sqlite)?;
        is_new(found)?;
        // With a path that means another file than before, every message would run again.
        let file = settings.path.display();
        warn!(%file, "a new store was made: no message is known to it, and each one runs");
    }
    if settings.chosen.journal {
        patiently(settings.busy_timeout, || journal::create(&mut connection)).map_err(sqlite)?;
    }
    Ok(connection)
}

fn flags(create: bool) -> OpenFlags {
    let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    if create {
        flags | OpenFlags::SQLITE_OPEN_CREATE
    } else {
        flags
    }
}

/// Creates a file that only its owner may read or write, because it will hold results.
///
/// SQLite gives its log and shared memory the same mode. An existing file keeps its mode.
fn make_private(settings: &Settings) {
    if settings.must_exist || !is_path(&settings.path) {
        return;
    }
    let mut options = fs::OpenOptions::new();
    options.write(true).create_new(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    // An error is ignored here: SQLite then cannot open the file either, and reports why.
    drop(options.open(&settings.path));
}

fn is_path(path: &Path) -> bool {
    // For SQLite, these two are not paths.
    !path.as_os_str().is_empty() && path.as_os_str() != ":memory:"
}

/// The path from the root: a later change of the working directory means no other file, and logs
/// say which file it is.
pub(super) fn absolute(path: PathBuf) -> PathBuf {
    if is_path(&path) {
        std::path::absolute(&path).unwrap_or(path)
    } else {
        path
    }
}

/// Refuses an empty file beside a log that is not empty: its records were cut off. SQLite would
/// delete the log.
fn refuse_a_lost_file(settings: &Settings) -> Result<(), StoreError> {
    // The log first: a process that creates the file at this moment writes the file before its log.
    let log_bytes = log::bytes(&settings.path);
    let file_bytes = fs::metadata(&settings.path)
        .map(|metadata| metadata.len())
        .unwrap_or_default();
    if file_bytes == 0 && log_bytes > 0 {
        return Err(errors::damaged(
            "the file is empty or missing, but its log is not",
        ));
    }
    if file_bytes == 0 && settings.must_exist {
        return Err(StoreError::refused(
            "there are no records (must_exist); check the path",
        ));
    }
    Ok(())
}

/// The identity of a file: application, version, and number of tables.
#[derive(Clone, Copy)]
struct FileContent {
    application_id: i32,
    version: i32,
    tables: i64,
}

fn identify(connection: &Connection) -> rusqlite::Result<FileContent> {
    Ok(FileContent {
        application_id: connection.pragma_query_value(None, "application_id", |row| row.get(0))?,
        version: connection.pragma_query_value(None, "user_version", |row| row.get(0))?,
        tables: connection.query_row("SELECT count(*) FROM sqlite_schema", [], |row| row.get(0))?,
    })
}

/// Returns whether the file has no tables yet; refuses a file that is not ours or cannot be read.
fn is_new(found: FileContent) -> Result<bool, StoreError> {
    match found {
        FileContent {
            application_id: 0,
            version: 0,
            tables: 0,
        } => Ok(true),
        FileContent {
            application_id: APPLICATION_ID,
            version: SCHEMA_VERSION,
            ..
        } => Ok(false),
        FileContent {
            application_id: APPLICATION_ID,
            version,
            ..
        } => Err(StoreError::refused(format_args!(
            "the file has format {version}, this release reads format {SCHEMA_VERSION}; use a newer release"
        ))),
        FileContent { .. } => Err(StoreError::refused(
            "the file belongs to another application",
        )),
    }
}

/// Creates the tables, unless another process has done so; returns the file's identity afterwards.
fn create(connection: &mut Connection) -> rusqlite::Result<FileContent> {
    let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    if identify(&transaction)?.tables == 0 {
        transaction.execute_batch(SCHEMA)?;
        transaction.pragma_update(None, "application_id", APPLICATION_ID)?;
        transaction.pragma_update(None, "user_version", SCHEMA_VERSION)?;
    }
    let found = identify(&transaction)?;
    transaction.commit()?;
    Ok(found)
}

fn tune(connection: &Connection, synchronous: Synchronous) -> rusqlite::Result<()> {
    let level = match synchronous {
        Synchronous::Full => "FULL",
        Synchronous::Normal => "NORMAL",
    };
    connection.pragma_update(None, "synchronous", level)?;
    // On macOS an fsync alone does not reach the disk; on other systems these two have no effect.
    connection.pragma_update(None, "fullfsync", synchronous == Synchronous::Full)?;
    connection.pragma_update(
        None,
        "checkpoint_fullfsync",
        synchronous == Synchronous::Full,
    )?;
    connection.pragma_update(None, "wal_autocheckpoint", LOG_PAGES)?;
    connection.pragma_update(None, "journal_size_limit", log::LOG_BYTES as i64)?;
    connection.pragma_update(None, "cache_size", -CACHE_KIB)?;
    connection.pragma_update(None, "trusted_schema", false)
}

/// Checks the whole file for damage, if it is not too large for that. Not with `quick_check`: it
/// would miss a damaged index, in which a key that has a row is not found.
fn check_for_damage(connection: &Connection, settings: &Settings) -> Result<(), StoreError> {
    let bytes = fs::metadata(&settings.path)
        .map(|metadata| metadata.len())
        .unwrap_or(u64::MAX);
    if bytes > settings.check_up_to_bytes {
        return Ok(());
    }
    let finding = patiently(settings.busy_timeout, || {
        connection.query_row("PRAGMA integrity_check(1)", [], |row| {
            row.get::<_, String>(0)
        })
    });
    let finding = finding.map_err(|error| errors::not_executed(&error))?;
    if finding == "ok" {
        Ok(())
    } else {
        Err(errors::damaged(&finding))
    }
}

/// Repeats `work` at short intervals with jitter, while other processes hold a lock.
pub(super) fn patiently<T>(
    timeout: Duration,
    mut attempt: impl FnMut() -> rusqlite::Result<T>,
) -> rusqlite::Result<T> {
    let deadline = Instant::now().checked_add(timeout);
    loop {
        match attempt() {
            Err(error)
                if errors::is_busy(&error) && deadline.is_none_or(|end| Instant::now() < end) =>
            {
                std::thread::sleep(Duration::from_micros(fastrand::u64(100..2_000)));
            }
            settled => return settled,
        }
    }
}
