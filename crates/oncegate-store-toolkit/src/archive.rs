//! Archives expired records before they are deleted, for audits.
//!
//! A purge passes expired records to an [`Archive`], a few hundred at a time, and deletes them only
//! after the archive has confirmed them. A purge that ends between the two repeats both steps: **a
//! record can be archived twice**, and is never deleted without being archived. Drop repeats by key
//! and expiry.
//!
//! Stores that purge by themselves have a setting for it. Redis removes expired records by itself,
//! so it has none. If a key is claimed again after its expiry and before the next purge, the claim
//! replaces its old row, and the old record is not archived.

use std::fmt;
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use oncegate_core::key::StoreKey;
use oncegate_core::record::{Record, State};
use serde::Serialize;

use oncegate_core::BoxError;

/// Stores expired records durably.
///
/// [`ArchiveFile`] appends them to a file. A closure is an archive too:
///
/// ```
/// use oncegate::archive::Expired;
///
/// let archive = |expired: &[Expired]| {
///     for Expired { key, record } in expired {
///         println!("{key} expired at {} ms", record.expires_at.millis());
///     }
///     Ok(())
/// };
/// # fn is_archive(_: impl oncegate::archive::Archive) {}
/// # is_archive(archive);
/// ```
pub trait Archive: Send + Sync {
    /// Stores these records durably: they are deleted from the source store when this returns.
    ///
    /// It is called on a thread that may block, one call at a time in each process. No lock of the
    /// source store is held in the meantime.
    ///
    /// # Errors
    /// Any error. The records then stay in the store, still expired, and the next purge passes them
    /// again.
    fn keep(&self, expired: &[Expired]) -> Result<(), BoxError>;
}

impl<F> Archive for F
where
    F: Fn(&[Expired]) -> Result<(), BoxError> + Send + Sync,
{
    fn keep(&self, expired: &[Expired]) -> Result<(), BoxError> {
        self(expired)
    }
}

/// An expired record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Expired {
    /// Scope and digest. It contains nothing of the payload.
    pub key: StoreKey,
    /// The record. Its expiry is in milliseconds since 1970.
    pub record: Record,
}

/// An archive that appends one line of JSON for each record to a file, and syncs it to the disk.
///
/// ```json
/// {"key":"billing:eMT5oSC2v1zTz8Nw5IO50A","state":"completed","result_bytes":42,"expired_at_ms":1760000000000}
/// {"key":"billing:9iZAnGMjJDlZhpsoTpGmFg","state":"failed","attempts":5,"handed_over":true,"expired_at_ms":1760000000001}
/// ```
///
/// `state` is `pending`, `released`, `completed` or `failed`. `attempts` is missing for
/// `completed`, whose record does not count them; `result_bytes` and `handed_over` are present
/// where they apply. Results and reasons are not written, because they may contain personal data:
/// your own archive receives them.
///
/// The file may be moved away at any time: the next records begin a new one. Several processes may
/// append to one file on a local disk. A crash can cut a line off; its records follow again on
/// their own lines.
#[derive(Clone, Debug)]
pub struct ArchiveFile {
    path: PathBuf,
}

impl ArchiveFile {
    /// An archive in the file at `path`, which is created with the first record.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into() }
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    fn append(&self, expired: &[Expired]) -> io::Result<()> {
        let mut lines = Vec::new();
        let (mut file, new) = self.open()?;
        if !ends_with_a_line(&mut file)? {
            lines.push(b'\n');
        }
        for expired in expired {
            serde_json::to_writer(&mut lines, &Line::of(expired))?;
            lines.push(b'\n');
        }
        // One write at the end of the file: lines of two processes do not mix.
        file.write_all(&lines)?;
        file.sync_data()?;
        if new {
            sync_folder_of(&self.path)
        } else {
            Ok(())
        }
    }

    /// Opens the file, and returns whether it was created just now.
    fn open(&self) -> io::Result<(File, bool)> {
        let mut options = OpenOptions::new();
        options.read(true).append(true);
        // Keys are in the file, so only its owner may read it. A file that exists keeps its mode.
        #[cfg(unix)]
        std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
        match options.open(&self.path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                Ok((options.create(true).open(&self.path)?, true))
            }
            opened => Ok((opened?, false)),
        }
    }
}

impl Archive for ArchiveFile {
    fn keep(&self, expired: &[Expired]) -> Result<(), BoxError> {
        self.append(expired)
            .map_err(|error| format!("{}: {error}", self.path.display()).into())
    }
}

/// Returns whether the last line is complete.
fn ends_with_a_line(file: &mut File) -> io::Result<bool> {
    if file.seek(SeekFrom::End(0))? == 0 {
        return Ok(true);
    }
    file.seek(SeekFrom::End(-1))?;
    let mut last = [0];
    file.read_exact(&mut last)?;
    Ok(last == *b"\n")
}

/// Syncs the folder: a new file is only as durable as its name in the folder.
fn sync_folder_of(path: &Path) -> io::Result<()> {
    let folder = path
        .parent()
        .filter(|folder| !folder.as_os_str().is_empty());
    let folder = folder.unwrap_or(Path::new("."));
    if cfg!(unix) {
        File::open(folder)?.sync_all()
    } else {
        Ok(())
    }
}

/// A record as a line of the file.
#[derive(Serialize)]
struct Line<'a> {
    key: &'a str,
    state: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    attempts: Option<u8>,
    #[serde(skip_serializing_if = "Option::is_none")]
    result_bytes: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    handed_over: Option<bool>,
    expired_at_ms: u64,
}

impl<'a> Line<'a> {
    fn of(Expired { key, record }: &'a Expired) -> Self {
        let (state, attempts, result_bytes, handed_over) = match &record.state {
            State::Pending { attempt, .. } => ("pending", Some(*attempt), None, None),
            State::Released { attempt, .. } => ("released", Some(*attempt), None, None),
            State::Completed { result, .. } => ("completed", None, Some(result.len()), None),
            State::Failed {
                attempt,
                handed_over,
                ..
            } => ("failed", Some(*attempt), None, Some(*handed_over)),
        };
        Self {
            key: key.as_str(),
            state,
            attempts,
            result_bytes,
            handed_over,
            expired_at_ms: record.expires_at.millis(),
        }
    }
}

/// A shared archive, as a store's settings hold it.
#[derive(Clone)]
pub struct SharedArchive(Arc<dyn Archive>);

impl SharedArchive {
    /// Shares `archive`.
    pub fn new(archive: impl Archive + 'static) -> Self {
        Self(Arc::new(archive))
    }

    /// Calls [`Archive::keep`], but not when nothing has expired.
    pub fn keep(&self, expired: &[Expired]) -> Result<(), BoxError> {
        if expired.is_empty() {
            Ok(())
        } else {
            self.0.keep(expired)
        }
    }
}

impl fmt::Debug for SharedArchive {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an archive")
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use bytes::Bytes;
    use oncegate_core::key::{Digest, Scope};
    use oncegate_core::record::{StoreTime, TokenTag};

    use super::*;

    fn expired(number: u8, state: State) -> Expired {
        let key = StoreKey::new(
            &Scope::new("billing").unwrap(),
            Digest::from_bytes([number; 16]),
        );
        let expires_at = StoreTime::from_millis(1_760_000_000_000 + u64::from(number));
        Expired {
            key,
            record: Record {
                expires_at,
                fingerprint: None,
                state,
            },
        }
    }

    fn completed(number: u8) -> Expired {
        let result = Bytes::from_static(b"\"a card number\"");
        expired(
            number,
            State::Completed {
                by: TokenTag::NONE,
                result,
            },
        )
    }

    #[cfg(unix)]
    #[test]
    fn only_its_owner_reads_a_new_file() {
        use std::os::unix::fs::PermissionsExt as _;
        let folder = tempfile::tempdir().unwrap();
        let archive = ArchiveFile::new(folder.path().join("expired.jsonl"));
        archive.open().unwrap();
        assert_eq!(
            fs::metadata(archive.path()).unwrap().permissions().mode() & 0o777,
            0o600
        );
    }

    #[test]
    fn each_record_is_a_line_without_its_result_and_reason() {
        let folder = tempfile::tempdir().unwrap();
        let archive = ArchiveFile::new(folder.path().join("expired.jsonl"));
        let reason = "of a card number".to_owned();
        let failed = State::Failed {
            by: TokenTag::NONE,
            attempt: 5,
            handed_over: true,
            reason,
        };
        SharedArchive::new(archive.clone())
            .keep(&[completed(1), expired(2, failed)])
            .unwrap();
        let text = fs::read_to_string(archive.path()).unwrap();
        assert_eq!(
            text,
            "{\"key\":\"billing:AQEBAQEBAQEBAQEBAQEBAQ\",\"state\":\"completed\",\"result_bytes\":15,\
             \"expired_at_ms\":1760000000001}\n\
             {\"key\":\"billing:AgICAgICAgICAgICAgICAg\",\"state\":\"failed\",\"attempts\":5,\
             \"handed_over\":true,\"expired_at_ms\":1760000000002}\n"
        );
    }

    #[test]
    fn a_line_that_was_cut_off_spoils_no_other() {
        let folder = tempfile::tempdir().unwrap();
        let archive = ArchiveFile::new(folder.path().join("expired.jsonl"));
        archive.keep(&[completed(1), completed(2)]).unwrap();
        let whole = fs::read(archive.path()).unwrap();
        fs::write(archive.path(), whole.get(..whole.len() - 7).unwrap()).unwrap();
        archive.keep(&[completed(2), completed(3)]).unwrap();
        let text = fs::read_to_string(archive.path()).unwrap();
        let whole: Vec<bool> = text
            .lines()
            .map(|line| serde_json::from_str::<serde_json::Value>(line).is_ok())
            .collect();
        assert_eq!(whole, [true, false, true, true]);
    }

    #[test]
    fn a_file_that_was_moved_away_is_begun_anew() {
        let folder = tempfile::tempdir().unwrap();
        let archive = ArchiveFile::new(folder.path().join("expired.jsonl"));
        archive.keep(&[completed(1)]).unwrap();
        fs::rename(archive.path(), folder.path().join("expired.jsonl.1")).unwrap();
        archive.keep(&[completed(2)]).unwrap();
        assert_eq!(
            fs::read_to_string(archive.path()).unwrap().lines().count(),
            1
        );
    }

    #[test]
    fn what_cannot_be_kept_says_where() {
        let folder = tempfile::tempdir().unwrap();
        let error = ArchiveFile::new(folder.path())
            .keep(&[completed(1)])
            .unwrap_err()
            .to_string();
        assert!(
            error.contains(&folder.path().display().to_string()),
            "{error}"
        );
        let nothing = SharedArchive::new(|_: &[Expired]| panic!("nothing has expired")).keep(&[]);
        assert!(nothing.is_ok());
    }
}
