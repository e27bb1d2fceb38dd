//! The history of a key, entry by entry: for audits, and to find out why a message ran twice.
//!
//! An entry contains nothing of a payload.
//!
//! - A gate writes to a [`Journal`] after the store has answered
//!   ([`Gate::journal`](crate::Gate::journal)): a crash between the two loses the entry, never the
//!   record. Such an entry is marked as a best effort.
//! - The SQL stores can keep their own journal, in the transaction of each change
//!   (`SqliteBuilder::journaled`, `PostgresBuilder::journaled`).
//! - An operator's command writes what it is about to do before it does it, and the result
//!   afterwards.

use std::fs::{File, OpenOptions};
use std::io::{self, BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::{SystemTime, UNIX_EPOCH};

use oncegate_core::record::TokenTag;
use oncegate_core::rules::cut_reason;
use serde::{Deserialize, Serialize};

/// The reason of a claim that was granted after its last owner had ended without an outcome.
pub(crate) const TAKEOVER: &str = "takeover";

/// The longest line of a journal that is read, in bytes; longer lines are not entries.
const LINE_MAX_BYTES: usize = 64 * 1024;

/// The most entries that wait for the disk; further ones are dropped and counted.
const WAITING_MOST: usize = 8_192;

/// A log of what happens to a gate's keys ([`Gate::journal`](crate::Gate::journal)).
pub trait Journal: Send + Sync + std::fmt::Debug {
    /// Takes an entry, and returns how many were dropped since the last call. It is called for
    /// every message: it must not block.
    fn note(&self, entry: JournalEntry) -> u64;
}

/// A shared journal is a journal.
impl<J: Journal + ?Sized> Journal for Arc<J> {
    fn note(&self, entry: JournalEntry) -> u64 {
        (**self).note(entry)
    }
}

/// A journal in a file, written by its own thread.
///
/// Entries that come faster than the disk writes them are dropped, and so are those that cannot be
/// written; both are counted. Dropping the journal writes the waiting entries, and blocks until
/// that is done.
#[derive(Debug)]
pub struct FileJournal {
    by: Option<String>,
    waiting: Option<SyncSender<JournalEntry>>,
    dropped: Arc<Dropped>,
    writing: Option<JoinHandle<()>>,
}

impl FileJournal {
    /// Opens the file as [`JournalFile::open`] does.
    ///
    /// # Errors
    /// Returns an error when the file cannot be written.
    pub fn open(path: impl Into<PathBuf>) -> io::Result<Self> {
        let file = JournalFile::open(path)?;
        let (waiting, entries) = sync_channel(WAITING_MOST);
        let dropped = Arc::new(Dropped::default());
        let counting = Arc::clone(&dropped);
        let thread = std::thread::Builder::new().name("oncegate-journal".to_owned());
        let writing = thread.spawn(move || write(&file, &entries, &counting))?;
        Ok(Self {
            by: None,
            waiting: Some(waiting),
            dropped,
            writing: Some(writing),
        })
    }

    /// The name of this worker, written into each entry.
    #[must_use]
    pub fn by(mut self, worker: impl Into<String>) -> Self {
        self.by = Some(worker.into());
        self
    }

    /// Returns the number of entries that were not written.
    pub fn dropped(&self) -> u64 {
        self.dropped.total.load(Relaxed)
    }
}

/// Entries that were not written.
#[derive(Debug, Default)]
struct Dropped {
    total: AtomicU64,
    unreported: AtomicU64,
}

impl Dropped {
    fn count(&self) {
        self.total.fetch_add(1, Relaxed);
        self.unreported.fetch_add(1, Relaxed);
    }
}

impl Journal for FileJournal {
    fn note(&self, entry: JournalEntry) -> u64 {
        let entry = JournalEntry {
            by: self.by.clone(),
            ..entry
        };
        if self
            .waiting
            .as_ref()
            .is_none_or(|waiting| waiting.try_send(entry).is_err())
        {
            self.dropped.count();
        }
        self.dropped.unreported.swap(0, Relaxed)
    }
}

impl Drop for FileJournal {
    fn drop(&mut self) {
        drop(self.waiting.take());
        if let Some(writing) = self.writing.take() {
            // A thread that has panicked has nothing more to write.
            let _ = writing.join();
        }
    }
}

fn write(file: &JournalFile, entries: &Receiver<JournalEntry>, dropped: &Dropped) {
    let mut failing = false;
    for entry in entries {
        let failed = file.append(&entry).err();
        if let Some(error) = &failed {
            dropped.count();
            if !failing {
                tracing::warn!(%error, path = %file.path().display(), "the journal cannot be written; entries are dropped");
            }
        }
        failing = failed.is_some();
    }
    if let Err(error) = file.sync() {
        tracing::warn!(%error, path = %file.path().display(), "the end of the journal may not be on the disk");
    }
}

/// Something that happened to a key.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(default)]
pub struct JournalEntry {
    /// The time, in milliseconds since 1970, by the writer's wall clock.
    pub at_ms: u64,
    /// The event, in one lower-case word: `claimed`, `completed`, `released`, `failed`,
    /// `handed_over` or `lost` from a gate; also `reopened` from the SQL stores; `reset`,
    /// `redriven` and their beginnings and ends from an operator.
    pub event: String,
    /// The key as the store has it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
    /// The number of the attempt, from 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub attempt: Option<u32>,
    /// The fencing token of the attempt, if there is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fencing_token: Option<u64>,
    /// The run, in eight hexadecimal digits: the same for a claim and its end.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub run: Option<String>,
    /// The duration of the run from its claim to this end, in milliseconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub took_ms: Option<u64>,
    /// The origin of the message, or the position of the dead letter.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub origin: Option<String>,
    /// The author: a worker's name, or an operator's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub by: Option<String>,
    /// The reason, at most 256 bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// `true` when it was written after the change without waiting for it, so that other entries
    /// may be missing.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub best_effort: bool,
}

impl JournalEntry {
    /// An entry of this moment.
    pub fn now(event: impl Into<String>) -> Self {
        let since_1970 = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default();
        let at_ms = u64::try_from(since_1970.as_millis()).unwrap_or(u64::MAX);
        Self {
            at_ms,
            event: event.into(),
            ..Self::default()
        }
    }

    /// The entry with this key.
    #[must_use]
    pub fn key(mut self, key: impl ToString) -> Self {
        self.key = Some(key.to_string());
        self
    }

    /// The entry with this origin.
    #[must_use]
    pub fn origin(mut self, origin: impl ToString) -> Self {
        self.origin = Some(origin.to_string());
        self
    }

    /// The entry with this attempt.
    #[must_use]
    pub fn attempt(mut self, attempt: u32) -> Self {
        self.attempt = Some(attempt);
        self
    }

    /// The entry with this run.
    pub(crate) fn run(mut self, tag: TokenTag) -> Self {
        self.run = Some(format!("{:08x}", u32::from_be_bytes(tag.0)));
        self
    }

    /// The entry with this reason, unless it is empty.
    pub(crate) fn why(self, reason: &str) -> Self {
        if reason.is_empty() {
            self
        } else {
            self.reason(reason)
        }
    }

    /// The entry with this author.
    #[must_use]
    pub fn by(mut self, by: impl Into<String>) -> Self {
        self.by = Some(by.into());
        self
    }

    /// The entry with this reason, cut off after 256 bytes.
    #[must_use]
    pub fn reason(mut self, reason: &str) -> Self {
        self.reason = Some(cut_reason(reason));
        self
    }
}

/// A journal in a file: one JSON object per line, append-only. Several processes may write the same
/// file.
#[derive(Debug)]
pub struct JournalFile {
    path: PathBuf,
    file: File,
}

impl JournalFile {
    /// Opens the file, or creates it readable only for its owner, with its folder.
    ///
    /// # Errors
    /// Returns an error when the file cannot be written.
    pub fn open(path: impl Into<PathBuf>) -> io::Result<Self> {
        let path = path.into();
        if let Some(folder) = path
            .parent()
            .filter(|folder| !folder.as_os_str().is_empty())
        {
            std::fs::create_dir_all(folder)?;
        }
        let mut options = OpenOptions::new();
        options.append(true).create(true);
        #[cfg(unix)]
        std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
        let file = options.open(&path)?;
        Ok(Self { path, file })
    }

    /// The path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Appends an entry, in one write.
    ///
    /// # Errors
    /// Returns an error when the line cannot be written.
    pub fn append(&self, entry: &JournalEntry) -> io::Result<()> {
        let mut line = serde_json::to_vec(entry)?;
        line.push(b'\n');
        (&self.file).write_all(&line)
    }

    /// Waits until all appended entries are on the disk.
    ///
    /// # Errors
    /// Returns an error when the disk reports that they are not.
    pub fn sync(&self) -> io::Result<()> {
        self.file.sync_data()
    }

    /// The entries about `key`, the oldest first, at most the last `most` of them. Lines that are
    /// not entries are skipped: a power cut may have cut one short.
    ///
    /// # Errors
    /// Returns an error when the file cannot be read.
    pub fn about(path: &Path, key: &str, most: usize) -> io::Result<Vec<JournalEntry>> {
        let mut found = std::collections::VecDeque::new();
        let mut lines = BufReader::new(File::open(path)?);
        let mut line = Vec::new();
        loop {
            line.clear();
            if lines.read_until(b'\n', &mut line)? == 0 {
                return Ok(found.into());
            }
            let entry = (line.len() <= LINE_MAX_BYTES)
                .then(|| serde_json::from_slice::<JournalEntry>(&line).ok());
            if let Some(entry) = entry
                .flatten()
                .filter(|entry| entry.key.as_deref() == Some(key))
            {
                if found.len() == most {
                    found.pop_front();
                }
                found.push_back(entry);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

    use super::*;

    #[test]
    fn a_dropped_journal_writes_what_waits_and_counts_what_it_lost() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("journal.jsonl");
        let journal = FileJournal::open(&path).unwrap().by("worker-3");
        for attempt in 1..=100 {
            assert_eq!(
                journal.note(
                    JournalEntry::now("claimed")
                        .key("billing:a")
                        .attempt(attempt)
                ),
                0
            );
        }
        drop(journal);
        let found = JournalFile::about(&path, "billing:a", 1_000).unwrap();
        assert_eq!(found.len(), 100);
        assert!(
            found
                .iter()
                .all(|entry| entry.by.as_deref() == Some("worker-3"))
        );

        // A full disk takes no entry.
        let full = FileJournal::open("/dev/full").unwrap();
        let dropped = Arc::clone(&full.dropped);
        let reported: u64 = (0..3)
            .map(|_| full.note(JournalEntry::now("claimed")))
            .sum();
        drop(full);
        assert_eq!(dropped.total.load(Relaxed), 3);
        assert_eq!(
            reported + dropped.unreported.load(Relaxed),
            3,
            "each is reported once"
        );
    }

    #[test]
    fn entries_are_found_by_their_key_beside_torn_lines() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("new folder").join("journal.jsonl");
        let journal = JournalFile::open(&path).unwrap();
        fn entry(key: &str, attempt: u32) -> JournalEntry {
            JournalEntry::now("reset")
                .key(key)
                .attempt(attempt)
                .by("ada")
                .reason(&"é".repeat(200))
        }
        for attempt in 1..=5 {
            journal.append(&entry("billing:a", attempt)).unwrap();
            journal.append(&entry("billing:b", attempt)).unwrap();
            (&journal.file)
                .write_all(b"{\"at_ms\":1,\"key\":\"billing:a\n")
                .unwrap();
        }
        journal.sync().unwrap();
        // Opening it again continues at its end.
        JournalFile::open(&path)
            .unwrap()
            .append(&entry("billing:a", 6))
            .unwrap();

        let found = JournalFile::about(&path, "billing:a", 3).unwrap();
        let attempts: Vec<_> = found.iter().map(|entry| entry.attempt).collect();
        assert_eq!(attempts, [Some(4), Some(5), Some(6)]);
        assert_eq!(
            found.first().unwrap().reason.as_deref().map(str::len),
            Some(256)
        );
    }
}
