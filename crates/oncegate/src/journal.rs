//! What happened to a key, entry by entry: for audits, and for whoever asks why a message ran twice.
//!
//! An entry holds nothing of a payload. It is written beside the record, not with it: a crash between the two loses the
//! entry, never the record.

use std::fs::{File, OpenOptions};
use std::io::{self, BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use oncegate_core::rules::cut_reason;
use serde::{Deserialize, Serialize};

/// The longest line of a journal that is read, in bytes; longer ones are nobody's.
const LINE_MAX_BYTES: usize = 64 * 1024;

/// Something that happened to a key.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(default)]
pub struct Entry {
    /// When, in milliseconds since 1970, on the wall clock of whoever wrote it.
    pub at_ms: u64,
    /// What, in one lower-case word: `reset`, `redriven`.
    pub event: String,
    /// The key as the store has it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
    /// Which attempt, from 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub attempt: Option<u32>,
    /// Where the message came from, or the dead letter lies.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub origin: Option<String>,
    /// Who did it: a person, where an operator did.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub by: Option<String>,
    /// Why, at most 256 bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
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
