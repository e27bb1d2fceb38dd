//! The ledger: an append-only file that does not depend on oncegate. A line is a request to the
//! bank or an answer.

use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::UNIX_EPOCH;

use oncegate::BoxError;
use serde::{Deserialize, Serialize};

use crate::crew::Progress;

/// A line of the ledger.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Entry {
    /// The order.
    pub order: String,
    /// The idempotency key of the charge that the bank was asked for, or that a duplicate got back.
    pub charge: String,
    /// `true` if the bank was asked for a charge; otherwise a duplicate was answered.
    pub asked: bool,
    /// `true` if an earlier attempt had crashed.
    pub recovered: bool,
    /// The process that wrote the line.
    pub pid: u32,
    /// The milliseconds from the Unix epoch to this line.
    pub at: u64,
}

impl Entry {
    /// The bank is asked for a charge. Written before it is asked, so that no charge is without its
    /// line.
    pub fn request(order: String, charge: &str, recovered: bool) -> Self {
        Self {
            order,
            charge: charge.to_owned(),
            asked: true,
            recovered,
            pid: std::process::id(),
            at: now(),
        }
    }

    /// A duplicate was answered.
    pub fn answer(order: String, charge: &str) -> Self {
        Self {
            order,
            charge: charge.to_owned(),
            asked: false,
            recovered: false,
            pid: std::process::id(),
            at: now(),
        }
    }
}

/// The file.
#[derive(Debug)]
pub struct Ledger {
    path: PathBuf,
    file: Mutex<File>,
    seen: Mutex<(u64, Progress)>,
}

impl Ledger {
    /// Opens it, or makes it.
    ///
    /// # Errors
    /// When it cannot be opened.
    pub fn open(path: &Path) -> Result<Self, BoxError> {
        let file = OpenOptions::new().create(true).append(true).open(path)?;
        Ok(Self {
            path: path.to_owned(),
            file: Mutex::new(file),
            seen: Mutex::default(),
        })
    }

    /// Appends a line in one write: the system appends it whole beside other writers, and keeps it
    /// when this process is killed right after.
    ///
    /// # Errors
    /// When the line cannot be written.
    pub fn append(&self, entry: &Entry) -> Result<(), BoxError> {
        // The line ends what a killed process may have left half written before it.
        let mut line = vec![b'\n'];
        serde_json::to_writer(&mut line, entry)?;
        line.push(b'\n');
        self.file
            .lock()
            .map_err(|_| "the ledger is broken")?
            .write_all(&line)?;
        Ok(())
    }

    /// Every line so far.
    ///
    /// # Errors
    /// When the file cannot be read.
    pub fn read(&self) -> Result<Vec<Entry>, BoxError> {
        let lines = BufReader::new(File::open(&self.path)?)
            .lines()
            .collect::<Result<Vec<String>, _>>()?;
        lines
            .iter()
            .filter(|line| is_whole(line))
            .map(|line| Ok(serde_json::from_str(line)?))
            .collect()
    }

    /// Counts what came since the last call.
    ///
    /// # Errors
    /// When the file cannot be read.
    pub fn progress(&self) -> Result<Progress, BoxError> {
        let mut seen = self.seen.lock().map_err(|_| "the ledger is broken")?;
        let (position, progress) = &mut *seen;
        let mut file = File::open(&self.path)?;
        file.seek(SeekFrom::Start(*position))?;
        let mut fresh = String::new();
        file.read_to_string(&mut fresh)?;
        let whole = fresh.rfind('\n').map_or(0, |end| end + 1);
        for line in fresh
            .get(..whole)
            .unwrap_or_default()
            .lines()
            .filter(|line| is_whole(line))
        {
            let entry: Entry = serde_json::from_str(line)?;
            if entry.asked {
                progress.charges += 1;
            } else {
                progress.answers += 1;
            }
        }
        *position += whole as u64;
        Ok(*progress)
    }
}

fn now() -> u64 {
    UNIX_EPOCH
        .elapsed()
        .map_or(0, |since| since.as_millis() as u64)
}

/// Returns whether a line is whole: a killed process may have left it half written.
fn is_whole(line: &str) -> bool {
    line.ends_with('}')
}
