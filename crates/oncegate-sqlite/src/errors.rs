//! Maps SQLite's errors to what they mean for the caller.

use std::fmt;
use std::path::Path;

use oncegate_core::key::StoreKey;
use oncegate_core::store::StoreError;
use rusqlite::{Error, ErrorCode};

/// The reason why a transaction, or one command of it, failed.
#[derive(Debug)]
pub(super) enum Trouble {
    /// An error of SQLite, which concerns the whole transaction.
    Sqlite(Error),
    /// The data of this key is not a record of a known format. The other commands continue.
    Unreadable {
        /// The key.
        key: StoreKey,
        /// The reason why it is not a record.
        reason: String,
    },
}

impl From<Error> for Trouble {
    fn from(error: Error) -> Self {
        Self::Sqlite(error)
    }
}

impl From<Trouble> for StoreError {
    fn from(trouble: Trouble) -> Self {
        match trouble {
            Trouble::Sqlite(error) => not_executed(&error),
            Trouble::Unreadable { key, reason } => Self::unreadable(key, reason),
        }
    }
}

/// Returns whether another process held a lock, so that trying again a little later may succeed.
pub(super) fn is_busy(error: &Error) -> bool {
    matches!(
        error.sqlite_error_code(),
        Some(ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked)
    )
}

/// Returns whether a page of the file is damaged. The records on other pages may be read and
/// written.
pub(super) fn is_damage(error: &Error) -> bool {
    error.sqlite_error_code() == Some(ErrorCode::DatabaseCorrupt)
}

/// The error of a key whose record is on a damaged page.
pub(super) fn of_damaged_page(key: &StoreKey) -> StoreError {
    StoreError::unreadable(key.clone(), DAMAGED)
}

/// Classifies an error of a transaction that was rolled back.
pub(super) fn not_executed(error: &Error) -> StoreError {
    use ErrorCode as Code;
    match error.sqlite_error_code() {
        Some(Code::DatabaseBusy | Code::DatabaseLocked) => StoreError::unavailable(
            "other processes hold the lock of the SQLite file (busy_timeout)",
        ),
        Some(Code::DiskFull) => StoreError::unavailable(
            "the disk or quota under the SQLite file is full; make room on it",
        ),
        Some(Code::SystemIoFailure) => StoreError::unavailable(Explained(
            "reading or writing the SQLite file failed",
            error,
        )),
        Some(Code::OutOfMemory | Code::OperationInterrupted | Code::FileLockingProtocolFailed) => {
            StoreError::unavailable(error)
        }
        Some(Code::DatabaseCorrupt | Code::NotADatabase) => {
            StoreError::refused(Explained(DAMAGED, error))
        }
        Some(Code::ReadOnly | Code::PermissionDenied | Code::AuthorizationForStatementDenied) => {
            StoreError::refused(Explained(
                "the SQLite file and its directory must be writable",
                error,
            ))
        }
        Some(Code::CannotOpen) => StoreError::refused(Explained(
            "the SQLite file cannot be opened; see its path and directory",
            error,
        )),
        Some(Code::TooBig) => StoreError::refused("the result is too large for SQLite"),
        _ => StoreError::refused(error),
    }
}

/// Classifies an error of a COMMIT.
///
/// A full disk or a lock is reported before anything is in the log. When writing or syncing fails,
/// the commit may have reached the disk or not: the process that reads the log after a crash
/// decides.
pub(super) fn not_committed(error: &Error) -> StoreError {
    match error.sqlite_error_code() {
        Some(ErrorCode::SystemIoFailure) => {
            StoreError::unknown(Explained("the commit to the SQLite file failed", error))
        }
        _ => not_executed(error),
    }
}

/// Adds the path of the file to an error.
pub(super) fn of_file(path: &Path, error: StoreError) -> StoreError {
    let path = path.display();
    match error {
        StoreError::Unavailable { reason } => {
            StoreError::unavailable(format_args!("{path}: {reason}"))
        }
        StoreError::Unknown { reason } => StoreError::unknown(format_args!("{path}: {reason}")),
        StoreError::Refused { reason } => StoreError::refused(format_args!("{path}: {reason}")),
        other => other,
    }
}

const DAMAGED: &str =
    "the SQLite file is damaged; restore it or move it away, it is not read as empty";

/// The meaning of an error, and SQLite's own text.
struct Explained<'a>(&'a str, &'a Error);

impl fmt::Display for Explained<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.0, self.1)
    }
}

/// The file is damaged in the way that SQLite's check describes.
pub(super) fn damaged(finding: &str) -> StoreError {
    StoreError::refused(format_args!("{DAMAGED} ({finding})"))
}
