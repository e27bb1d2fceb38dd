//! The record of effects: an append-only file that does not depend on oncegate.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

/// The longest line. One write of this size to a file opened for appending is never mixed with
/// another process's.
const LINE_BYTES_MAX: usize = 4_096;

/// One effect that happened.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Effect {
    /// What was done, for example the id of the payment that was charged.
    pub effect: String,
    /// The process that did it, to find the kill that explains a second effect.
    pub pid: u32,
    /// When, in microseconds of the wall clock since 1970.
    pub at_us: u64,
}

/// An append-only file of effects, one JSON line each, that several processes can share.
///
/// An effect is on the disk once [`Ledger::append`] returns. A process that is killed in between
/// leaves a whole line, none, or a part of one that readers leave out.
#[derive(Debug)]
pub struct Ledger {
    file: File,
    path: PathBuf,
}

impl Ledger {
    /// Opens the ledger, creating it when it is not there.
    ///
    /// # Panics
    /// When the file cannot be opened.
    #[must_use]
    pub fn open(path: impl Into<PathBuf>) -> Self {
        let path = path.into();
        let file = OpenOptions::new().create(true).append(true).open(&path);
        let file = file.unwrap_or_else(|error| panic!("ledger {}: {error}", path.display()));
        Self { file, path }
    }

    /// Where it is, for the processes that share it.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Records an effect of this process. Blocks until it is on the disk.
    ///
    /// # Panics
    /// When the line is longer than 4,096 bytes, or was not written in one piece.
    pub fn append(&self, effect: &str) {
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let now = now.expect("the clock stands after 1970");
        let entry = Effect {
            effect: effect.to_owned(),
            pid: std::process::id(),
            at_us: u64::try_from(now.as_micros()).expect("the year is below 586,000"),
        };
        // The line ends what a killed process may have left half written before it.
        let mut line = vec![b'\n'];
        serde_json::to_writer(&mut line, &entry).expect("an effect is plain data");
        line.push(b'\n');
        assert!(
            line.len() <= LINE_BYTES_MAX,
            "effect of {} bytes",
            line.len()
        );
        // `write_all` would hide a short write behind a second one, and other lines could come
        // between.
        let written = (&self.file)
            .write(&line)
            .expect("the ledger can be written");
        assert_eq!(written, line.len(), "the line was not written in one piece");
        self.file.sync_data().expect("the ledger can be synced");
    }

    /// All effects so far, of all processes, in the order in which they were written.
    ///
    /// A line that is half written is left out: its writer is at it, or was killed, so
    /// [`Ledger::append`] has not returned.
    ///
    /// # Panics
    /// When the file cannot be read, or a line is not an effect.
    #[must_use]
    pub fn read(&self) -> Vec<Effect> {
        let text = fs::read_to_string(&self.path)
            .unwrap_or_else(|error| panic!("ledger {}: {error}", self.path.display()));
        let whole = |line: &&str| !line.is_empty() && line.ends_with('}');
        text.lines()
            .filter(whole)
            .map(|line| {
                serde_json::from_str(line)
                    .unwrap_or_else(|error| panic!("not an effect: {line:?}: {error}"))
            })
            .collect()
    }

    /// How often each effect happened.
    ///
    /// # Panics
    /// As [`Ledger::read`].
    #[must_use]
    pub fn counts(&self) -> BTreeMap<String, u64> {
        let mut counts = BTreeMap::new();
        for effect in self.read() {
            *counts.entry(effect.effect).or_default() += 1;
        }
        counts
    }
}
