//! Watches the size of the write-ahead log beside the file, and truncates it.
//!
//! SQLite copies the log into the file and restarts it, but never past the snapshot of an open read
//! transaction. One transaction that stays open, of a shell or a backup for example, lets the log
//! grow without limit, and only its end stops that. This module logs a warning then, and truncates
//! the log as soon as it can.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rusqlite::Connection;
use tracing::{info, warn};

/// The log is truncated to this size after it has grown, in bytes.
pub(super) const LOG_BYTES: u64 = 64 * 1024 * 1024;

/// The shortest time between two checks of the log.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// The path of the log of a file.
pub(super) fn path_of(file: &Path) -> PathBuf {
    let mut log = file.to_owned().into_os_string();
    log.push("-wal");
    log.into()
}

/// The size of the log of a file, in bytes; 0 when there is none.
pub(super) fn bytes(file: &Path) -> u64 {
    fs::metadata(path_of(file))
        .map(|metadata| metadata.len())
        .unwrap_or_default()
}

/// Checks the log periodically, and truncates it.
pub(super) struct LogWatch {
    file: PathBuf,
    next_look: Instant,
    /// The size in the last warning; 0 while the log is short.
    warned_bytes: u64,
}

impl LogWatch {
    pub(super) fn of(file: &Path) -> Self {
        Self {
            file: file.to_owned(),
            next_look: Instant::now(),
            warned_bytes: 0,
        }
    }

    /// Called after commits, outside of any transaction.
    pub(super) fn look(&mut self, connection: &Connection) {
        let now = Instant::now();
        if now < self.next_look {
            return;
        }
        self.next_look = now + LOOK_EVERY;
        if bytes(&self.file) > LOG_BYTES {
            // This does not wait for readers: if there is one, it copies what it can and truncates
            // nothing.
            let cut = connection.query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |_| Ok(()));
            if let Err(error) = cut {
                warn!(file = %self.file.display(), %error, "the write-ahead log could not be copied into the file");
            }
        }
        self.tell(bytes(&self.file));
    }

    /// Warns once when the log has grown, and again each time that it has doubled.
    fn tell(&mut self, bytes: u64) {
        let file = self.file.display();
        if bytes <= LOG_BYTES {
            if self.warned_bytes > 0 {
                info!(%file, bytes, "the write-ahead log was truncated");
            }
            self.warned_bytes = 0;
        } else if bytes >= self.warned_bytes.saturating_mul(2) {
            self.warned_bytes = bytes;
            warn!(
                %file, bytes,
                "the write-ahead log grows and cannot be cut back, because a read transaction on the file stays open; \
                 end it: look for shells, backups and other programs that have the file open"
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn opened(file: &Path) -> Connection {
        let connection = Connection::open(file).unwrap();
        let tune =
            "PRAGMA journal_mode = WAL; PRAGMA synchronous = OFF; PRAGMA wal_autocheckpoint = 4096";
        connection.execute_batch(tune).unwrap();
        connection
    }

    #[test]
    fn a_log_that_grows_is_warned_of_until_it_is_cut_back() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("records.db");
        let writer = opened(&file);
        writer
            .execute_batch("CREATE TABLE filler (bytes BLOB)")
            .unwrap();
        let reader = opened(&file);
        reader
            .execute_batch("BEGIN; SELECT count(*) FROM filler")
            .unwrap();
        let mut watch = LogWatch::of(&file);
        watch.look(&writer);
        assert_eq!(watch.warned_bytes, 0, "it is short");
        while bytes(&file) <= LOG_BYTES {
            writer
                .execute_batch("INSERT INTO filler VALUES (zeroblob(4194304))")
                .unwrap();
        }
        watch.next_look = Instant::now();
        watch.look(&writer);
        assert!(watch.warned_bytes > LOG_BYTES);
        reader.execute_batch("COMMIT").unwrap();
        watch.next_look = Instant::now();
        watch.look(&writer);
        assert_eq!((watch.warned_bytes, bytes(&file)), (0, 0));
    }
}
