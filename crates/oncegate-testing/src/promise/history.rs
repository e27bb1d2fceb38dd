//! A history: one JSON line per event, written by several processes that may be killed at any
//! moment.
//!
//! All of them append to one file, and the kernel puts appended lines into one order. So an event
//! that was written before another one began stands before it: the order of the lines is the order
//! of time, for every process. The file must be on a local file system, because others do not
//! append whole lines.

use std::collections::BTreeMap;
use std::fmt;
use std::fs::{File, OpenOptions};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use super::operation::{Op, StoreAnswer};

/// The name of the fault that makes a store lose all records: the judge counts it, and expects it
/// to be noticed.
pub const STORE_LOSS: &str = "store-loss";

/// A line of a history.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Entry {
    /// The time, in microseconds of the machine's wall clock since 1970.
    pub at_us: u64,
    /// The number of the process; 0 for what concerns all of them.
    pub pid: u32,
    /// The event itself.
    pub what: Occurrence,
}

/// Something that happened. The recorders write most of it; the handler writes
/// [`Begun`](Self::Begun), [`Ended`](Self::Ended) and [`Duplicate`](Self::Duplicate), and the
/// program that causes the faults writes those.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "is", rename_all = "snake_case")]
pub enum Occurrence {
    /// A process is about to call its store; the outcome is unknown until a later line has it.
    Invoke {
        /// The number of the call in its process.
        call: u64,
        /// The store key.
        key: String,
        /// The operation.
        op: Op,
    },
    /// The store has answered that call.
    Ok {
        /// The number of the call.
        call: u64,
        /// The answer.
        answer: StoreAnswer,
    },
    /// The store has not executed that call.
    Fail {
        /// The number of the call.
        call: u64,
        /// The [class](oncegate_core::store::StoreError::class) of the error.
        class: String,
    },
    /// The store's answer to that call was lost: it may have happened, or may still happen.
    Info {
        /// The number of the call.
        call: u64,
    },
    /// A read has found the key completed.
    Found {
        /// The store key.
        key: String,
        /// The stored result.
        result: String,
    },
    /// A delivery came.
    Received {
        /// The position of the message, such as `orders/3@42`.
        origin: String,
        /// The store key of the message; `None` when none can be derived.
        key: Option<String>,
    },
    /// A handler has begun.
    Begun {
        /// The store key.
        key: String,
        /// The message.
        origin: String,
        /// The number of the attempt, from 1.
        attempt: u32,
        /// The fencing token of the attempt.
        fencing_token: Option<u64>,
        /// The content beside the key, as [`EffectName::content`].
        content: String,
    },
    /// A handler has ended.
    Ended {
        /// The store key.
        key: String,
        /// The message.
        origin: String,
        /// The number of the attempt.
        attempt: u32,
        /// The outcome: [`SUCCEEDED`], or any other word.
        outcome: String,
    },
    /// A handler was told of a duplicate, with the stored result.
    Duplicate {
        /// The store key.
        key: String,
        /// The message.
        origin: String,
        /// The content of the message beside the key.
        content: String,
        /// The result as JSON, or the text if it is one.
        result: String,
        /// The effect that the result is of.
        of: EffectName,
    },
    /// A message is durably with the dead letters.
    StoredDeadLetter {
        /// The store key; `None` when none can be derived.
        key: Option<String>,
        /// The message.
        origin: String,
        /// The cause, in one word.
        cause: String,
    },
    /// A delivery is acknowledged to its source.
    Ack {
        /// The message.
        origin: String,
        /// The store key of the message.
        key: Option<String>,
    },
    /// A process ends as it should, and has counted this.
    Counted {
        /// The counts, by name and label: `claims granted`.
        counts: BTreeMap<String, u64>,
    },
    /// A process has noticed that its store has lost records.
    LossNoticed,
    /// A fault begins. The number of the entry is that of the process that it hits, or 0.
    FaultBegins {
        /// The name of the fault; [`STORE_LOSS`] for one that empties the store.
        fault: String,
    },
    /// A fault is over.
    FaultEnds {
        /// The name of the fault.
        fault: String,
    },
}

/// The outcome of a handler that had its effect, in [`Occurrence::Ended`].
pub const SUCCEEDED: &str = "succeeded";

/// The effect that a message asks for.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct EffectName {
    /// The business event, which the idempotency key stands for: the number of an order.
    pub event: String,
    /// The rest of the message about it: the amount. Messages of one event with other content are
    /// no duplicates.
    pub content: String,
}

impl EffectName {
    /// Names the effect of `event` with `content`.
    pub fn new(event: impl Into<String>, content: impl Into<String>) -> Self {
        Self {
            event: event.into(),
            content: content.into(),
        }
    }
}

impl fmt::Display for EffectName {
    /// Writes `event/content`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.event, self.content)
    }
}

/// A file of [entries](Entry) that several processes append to.
#[derive(Debug)]
pub struct History {
    file: File,
    path: PathBuf,
    pid: u32,
}

impl History {
    /// Opens the file, and creates it if it does not exist. What is noted has the number of this
    /// process.
    ///
    /// # Errors
    /// When the file cannot be opened.
    pub fn open(path: impl Into<PathBuf>) -> io::Result<Self> {
        let path = path.into();
        let file = OpenOptions::new().create(true).append(true).open(&path)?;
        Ok(Self {
            file,
            path,
            pid: std::process::id(),
        })
    }

    /// Notes under this number from now on, for a program that stands for several processes.
    #[must_use]
    pub fn as_process(mut self, pid: u32) -> Self {
        self.pid = pid;
        self
    }

    /// Returns the path, for the processes that share it.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Notes what this process does. Call it before what others can see, and after what is
    /// answered.
    ///
    /// # Panics
    /// When the file cannot be written: a history with a gap proves nothing.
    pub fn note(&self, what: Occurrence) {
        self.note_all([what]);
    }

    /// Notes several things in one piece.
    pub(super) fn note_all(&self, what: impl IntoIterator<Item = Occurrence>) {
        self.write(what.into_iter().map(|what| Entry {
            at_us: now_us(),
            pid: self.pid,
            what,
        }));
    }

    /// Notes what happens to the process with this number, or to all with 0.
    ///
    /// # Panics
    /// As [`note`](Self::note).
    pub fn note_of(&self, pid: u32, what: Occurrence) {
        self.write([Entry {
            at_us: now_us(),
            pid,
            what,
        }]);
    }

    fn write(&self, entries: impl IntoIterator<Item = Entry>) {
        // The first line end closes what a killed process may have left half written.
        let mut lines = vec![b'\n'];
        for entry in entries {
            serde_json::to_writer(&mut lines, &entry).expect("an entry is plain data");
            lines.push(b'\n');
        }
        // One write is appended in one piece; `write_all` would hide a short one.
        let written = (&self.file)
            .write(&lines)
            .expect("the history can be written");
        assert_eq!(written, lines.len(), "a line was not written in one piece");
    }

    /// Returns every entry so far, in order. What a killed process has half written is left out.
    ///
    /// # Errors
    /// When the file cannot be read.
    pub fn read(&self) -> io::Result<Vec<Entry>> {
        let bytes = std::fs::read(&self.path)?;
        Ok(bytes
            .split(|byte| *byte == b'\n')
            .filter_map(|line| serde_json::from_slice(line).ok())
            .collect())
    }
}

fn now_us() -> u64 {
    let now = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    u64::try_from(now.as_micros()).unwrap_or(u64::MAX)
}
