//! What happened to a key, entry by entry: for audits, and for whoever asks why a message ran twice.
//!
//! An entry holds nothing of a payload.
//!
//! - A gate tells a [`Journal`] of what it does, after the store has answered ([`Gate::journal`](crate::Gate::journal)): a crash
//!   between the two loses the entry, never the record. Such an entry says that it is a best effort.
//! - The SQL stores can keep a journal of their own, in the transaction of each change (`SqliteBuilder::journaled`,
//!   `PostgresBuilder::journaled`).
//! - Operators write down what they are about to do before they do it, and what came of it.

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

/// Why a claim was granted whose owner before had ended without a word.
pub(crate) const TAKEOVER: &str = "takeover";

/// The longest line of a journal that is read, in bytes; longer ones are nobody's.
const LINE_MAX_BYTES: usize = 64 * 1024;

/// How many entries wait for the disk at the most; further ones are dropped and counted.
const WAITING_MOST: usize = 8_192;

/// Where a gate writes down what happens to its keys ([`Gate::journal`](crate::Gate::journal)).
pub trait Journal: Send + Sync + std::fmt::Debug {
    /// Takes an entry, and returns how many were dropped since it was last asked. Called for every message: it must not
    /// block.
    fn note(&self, entry: Entry) -> u64;
}

/// A shared journal is a journal.
impl<J: Journal + ?Sized> Journal for Arc<J> {
    fn note(&self, entry: Entry) -> u64 {
        (**self).note(entry)
    }
}

/// A journal in a file that a thread of its own writes.
///
/// Entries that come faster than the disk takes them are dropped, and so are those of a disk that takes none; both are
/// counted. Dropping it writes what is waiting, and waits for that.
#[derive(Debug)]
pub struct FileJournal {
    by: Option<String>,
    waiting: Option<SyncSender<Entry>>,
    dropped: Arc<Dropped>,
    writing: Option<JoinHandle<()>>,
}

impl FileJournal {
    /// Opens the file as [`JournalFile::open`] does.
    ///
    /// # Errors
    /// When it cannot be written to.
    pub fn open(path: impl Into<PathBuf>) -> io::Result<Self> {
        let file = JournalFile::open(path)?;
        let (waiting, entries) = sync_channel(WAITING_MOST);
        let dropped = Arc::new(Dropped::default());
        let counting = Arc::clone(&dropped);
        let thread = std::thread::Builder::new().name("oncegate-journal".to_owned());
        let writing = thread.spawn(move || write(&file, &entries, &counting))?;
        Ok(Self { by: None, waiting: Some(waiting), dropped, writing: Some(writing) })
    }

    /// The name of this worker, written into each entry.
    #[must_use]
    pub fn by(mut self, worker: impl Into<String>) -> Self {
        self.by = Some(worker.into());
        self
    }

    /// How many entries were not written.
    pub fn dropped(&self) -> u64 {
        self.dropped.total.load(Relaxed)
    }
}

/// Entries that were not written.
#[derive(Debug, Default)]
struct Dropped {
    total: AtomicU64,
    untold: AtomicU64,
}

impl Dropped {
    fn count(&self) {
        self.total.fetch_add(1, Relaxed);
        self.untold.fetch_add(1, Relaxed);
    }
}

impl Journal for FileJournal {
    fn note(&self, entry: Entry) -> u64 {
        let entry = Entry { by: self.by.clone(), ..entry };
        if self.waiting.as_ref().is_none_or(|waiting| waiting.try_send(entry).is_err()) {
            self.dropped.count();
        }
        self.dropped.untold.swap(0, Relaxed)
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

fn write(file: &JournalFile, entries: &Receiver<Entry>, dropped: &Dropped) {
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
pub struct Entry {
    /// When, in milliseconds since 1970, on the wall clock of whoever wrote it.
    pub at_ms: u64,
    /// What, in one lower-case word: `claimed`, `completed`, `released`, `failed`, `handed_over` or `lost` by a gate;
    /// `reopened` by the SQL stores, too; `reset`, `redriven` and their beginnings and ends by an operator.
    pub event: String,
    /// The key as the store has it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
    /// Which attempt, from 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub attempt: Option<u32>,
    /// The fence of the attempt, where there is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fence: Option<u64>,
    /// Which run, in eight hexadecimal digits: the same for a claim and its end.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub run: Option<String>,
    /// How long the run took from its claim to this end, in milliseconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub took_ms: Option<u64>,
    /// Where the message came from, or the dead letter lies.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub origin: Option<String>,
    /// Who did it: a worker's name, or an operator's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub by: Option<String>,
    /// Why, at most 256 bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Whether it was written after the change and not waited for, so that others may be missing.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub best_effort: bool,
}

impl Entry {
    /// An entry of this moment.
    pub fn now(event: impl Into<String>) -> Self {
        let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let at_ms = u64::try_from(since_1970.as_millis()).unwrap_or(u64::MAX);
        Self { at_ms, event: event.into(), ..Self::default() }
    }

    /// The same about this key.
    #[must_use]
    pub fn key(mut self, key: impl ToString) -> Self {
        self.key = Some(key.to_string());
        self
    }

    /// The same about a message from there.
    #[must_use]
    pub fn origin(mut self, origin: impl ToString) -> Self {
        self.origin = Some(origin.to_string());
        self
    }

    /// The same by this attempt.
    #[must_use]
    pub fn attempt(mut self, attempt: u32) -> Self {
        self.attempt = Some(attempt);
        self
    }

    /// The same of this run.
    pub(crate) fn run(mut self, tag: TokenTag) -> Self {
        self.run = Some(format!("{:08x}", u32::from_be_bytes(tag.0)));
        self
    }

    /// The same for this reason, unless it is empty.
    pub(crate) fn why(self, reason: &str) -> Self {
        if reason.is_empty() { self } else { self.reason(reason) }
    }

    /// The same, done by somebody.
    #[must_use]
    pub fn by(mut self, by: impl Into<String>) -> Self {
        self.by = Some(by.into());
        self
    }

    /// The same for this reason; what is beyond 256 bytes is cut off.
    #[must_use]
    pub fn reason(mut self, reason: &str) -> Self {
        self.reason = Some(cut_reason(reason));
        self
    }
}

/// A journal in a file: one JSON object per line, only ever appended to. Several processes may write the same file.
#[derive(Debug)]
pub struct JournalFile {
    path: PathBuf,
    file: File,
}

impl JournalFile {
    /// Opens the file, or makes it, readable for its owner alone; its folder is made too.
    ///
    /// # Errors
    /// When it cannot be written to.
    pub fn open(path: impl Into<PathBuf>) -> io::Result<Self> {
        let path = path.into();
        if let Some(folder) = path.parent().filter(|folder| !folder.as_os_str().is_empty()) {
            std::fs::create_dir_all(folder)?;
        }
        let mut options = OpenOptions::new();
        options.append(true).create(true);
        #[cfg(unix)]
        std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
        let file = options.open(&path)?;
        Ok(Self { path, file })
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Appends an entry, in one write.
    ///
    /// # Errors
    /// When the disk does not take it.
    pub fn append(&self, entry: &Entry) -> io::Result<()> {
        let mut line = serde_json::to_vec(entry)?;
        line.push(b'\n');
        (&self.file).write_all(&line)
    }

    /// Waits until what was appended is on the disk.
    ///
    /// # Errors
    /// When the disk says that it is not.
    pub fn sync(&self) -> io::Result<()> {
        self.file.sync_data()
    }

    /// The entries about `key`, the oldest first, at most the last `most` of them. Lines that are no entries are skipped:
    /// a power cut may have cut one short.
    ///
    /// # Errors
    /// When the file cannot be read.
    pub fn about(path: &Path, key: &str, most: usize) -> io::Result<Vec<Entry>> {
        let mut found = std::collections::VecDeque::new();
        let mut lines = BufReader::new(File::open(path)?);
        let mut line = Vec::new();
        loop {
            line.clear();
            if lines.read_until(b'\n', &mut line)? == 0 {
                return Ok(found.into());
            }
            let entry = (line.len() <= LINE_MAX_BYTES).then(|| serde_json::from_slice::<Entry>(&line).ok());
            if let Some(entry) = entry.flatten().filter(|entry| entry.key.as_deref() == Some(key)) {
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
    fn what_waits_is_written_when_the_journal_goes_and_what_cannot_be_is_counted() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("journal.jsonl");
        let journal = FileJournal::open(&path).unwrap().by("worker-3");
        for attempt in 1..=100 {
            assert_eq!(journal.note(Entry::now("claimed").key("billing:a").attempt(attempt)), 0);
        }
        drop(journal);
        let found = JournalFile::about(&path, "billing:a", 1_000).unwrap();
        assert_eq!(found.len(), 100);
        assert!(found.iter().all(|entry| entry.by.as_deref() == Some("worker-3")));

        // A disk that is full takes nothing.
        let full = FileJournal::open("/dev/full").unwrap();
        let dropped = Arc::clone(&full.dropped);
        let told: u64 = (0..3).map(|_| full.note(Entry::now("claimed"))).sum();
        drop(full);
        assert_eq!(dropped.total.load(Relaxed), 3);
        assert_eq!(told + dropped.untold.load(Relaxed), 3, "each is told once");
    }

    #[test]
    fn entries_are_found_by_their_key_beside_torn_lines() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("new folder").join("journal.jsonl");
        let journal = JournalFile::open(&path).unwrap();
        let entry = |key: &str, attempt| {
            Entry::now("reset").key(key).attempt(attempt).by("ada").reason(&"é".repeat(200))
        };
        for attempt in 1..=5 {
            journal.append(&entry("billing:a", attempt)).unwrap();
            journal.append(&entry("billing:b", attempt)).unwrap();
            (&journal.file).write_all(b"{\"at_ms\":1,\"key\":\"billing:a\n").unwrap();
        }
        journal.sync().unwrap();
        // Whoever opens it again goes on at its end.
        JournalFile::open(&path).unwrap().append(&entry("billing:a", 6)).unwrap();

        let found = JournalFile::about(&path, "billing:a", 3).unwrap();
        let attempts: Vec<_> = found.iter().map(|entry| entry.attempt).collect();
        assert_eq!(attempts, [Some(4), Some(5), Some(6)]);
        assert_eq!(found.first().unwrap().reason.as_deref().map(str::len), Some(256));
    }
}
