//! What happened, one JSON line per event, written by several processes that may be killed at any
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
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use oncegate_core::key::Fingerprint;
use oncegate_core::record::{FencingToken, Recovery, Token, TokenTag};
use oncegate_core::rules::{Grant, Operation, ReleaseCause, Reply, Verdict};
use serde::{Deserialize, Serialize};

/// The name of the fault that makes a store lose all records: the judge counts it, and expects it
/// to be noticed.
pub const STORE_LOSS: &str = "store-loss";

/// One line of a history.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Entry {
    /// When, in microseconds of the machine's wall clock since 1970.
    pub at_us: u64,
    /// The number of the process; 0 for what concerns all of them.
    pub pid: u32,
    /// What happened.
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
        /// What it asks for.
        op: Op,
    },
    /// The store has answered that call.
    Ok {
        /// The number of the call.
        call: u64,
        /// What it answered.
        answer: Answer,
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
        /// Where the message is, such as `orders/3@42`.
        origin: String,
        /// Its store key; `None` when none can be derived.
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
        /// How: [`SUCCEEDED`], or any other word.
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
        /// Why, in one word.
        cause: String,
    },
    /// A delivery is acknowledged to its source.
    Ack {
        /// The message.
        origin: String,
        /// Its store key.
        key: Option<String>,
    },
    /// A process ends as it should, and has counted this.
    Counted {
        /// How often, by name and label: `claims granted`.
        counts: BTreeMap<String, u64>,
    },
    /// A process has noticed that its store has lost records.
    LossNoticed,
    /// A fault begins. The number of the entry is that of the process that it hits, or 0.
    FaultBegins {
        /// Its name; [`STORE_LOSS`] for one that empties the store.
        fault: String,
    },
    /// A fault is over.
    FaultEnds {
        /// Its name.
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
    /// What else the message says of it: the amount. Messages of one event with other content are
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

/// One operation on a key, as far as it decides anything: [`Operation`] as plain data. Tokens are
/// hexadecimal, times are milliseconds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the fields are those of `Operation`")]
#[serde(rename_all = "snake_case")]
pub enum Op {
    /// Asks for the key.
    Claim {
        token: String,
        lease_ms: u64,
        fingerprint: Option<String>,
        fenced: bool,
    },
    /// Renews a lease.
    Extend { token: String, lease_ms: u64 },
    /// Stores the result.
    Complete {
        token: String,
        fingerprint: Option<String>,
        result: String,
        retention_ms: u64,
    },
    /// Gives the key back; `end` is a word of [`ReleaseCause`].
    Release {
        token: String,
        delay_ms: u64,
        end: String,
    },
    /// Gives the message up.
    Fail {
        token: String,
        reason: String,
        retention_ms: u64,
    },
    /// Notes that the dead letter is written.
    HandOver { by: String },
    /// Lets a finished key run again.
    Reopen,
    /// The store loses all records: the effect of a fault, not an operation.
    Forget,
}

/// The answer to an [`Op`]: [`Reply`] as plain data.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the fields are those of `Reply` and `Verdict`")]
#[serde(rename_all = "snake_case")]
pub enum Answer {
    /// The claim was granted.
    Granted {
        attempt: u8,
        takeover: bool,
        recovered: bool,
        fencing_token: Option<u64>,
    },
    /// The key is completed.
    Completed { result: String },
    /// Another owner has the key, or a retry waits.
    Busy { retry_in_ms: u64 },
    /// The key was given up.
    Failed {
        reason: String,
        handed_over: bool,
        by: String,
    },
    /// The record is of another content.
    Mismatch,
    /// The change is in the record.
    Held { recreated: bool },
    /// Another owner has the key, so nothing was changed.
    Lost,
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn token_text(token: Token) -> String {
    hex(token.as_bytes())
}

fn token_of(text: &str) -> Option<Token> {
    u128::from_str_radix(text, 16).ok().map(Token::from_bits)
}

fn tag_of(text: &str) -> Option<TokenTag> {
    u32::from_str_radix(text, 16)
        .ok()
        .map(|bits| TokenTag(bits.to_be_bytes()))
}

fn fingerprint_text(fingerprint: Option<Fingerprint>) -> Option<String> {
    fingerprint.map(|fingerprint| hex(fingerprint.as_bytes()))
}

fn fingerprint_of(text: &str) -> Option<Fingerprint> {
    let [_, bytes @ ..] = u64::from_str_radix(text, 16).ok()?.to_be_bytes();
    Some(Fingerprint::from_bytes(bytes))
}

/// A result as text: what is not UTF-8 is replaced.
pub(super) fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

impl Op {
    pub(super) fn of(operation: &Operation) -> Self {
        match operation {
            Operation::Claim {
                token,
                lease,
                fingerprint,
                fenced,
                ..
            } => Self::Claim {
                token: token_text(*token),
                lease_ms: millis(*lease),
                fingerprint: fingerprint_text(*fingerprint),
                fenced: *fenced,
            },
            Operation::Extend { token, lease } => Self::Extend {
                token: token_text(*token),
                lease_ms: millis(*lease),
            },
            Operation::Complete {
                token,
                fingerprint,
                result,
                retention,
            } => Self::Complete {
                token: token_text(*token),
                fingerprint: fingerprint_text(*fingerprint),
                result: text(result),
                retention_ms: millis(*retention),
            },
            Operation::Release {
                token, delay, end, ..
            } => {
                let end = end.as_str().to_owned();
                Self::Release {
                    token: token_text(*token),
                    delay_ms: millis(*delay),
                    end,
                }
            }
            Operation::Fail {
                token,
                reason,
                retention,
            } => Self::Fail {
                token: token_text(*token),
                reason: reason.clone(),
                retention_ms: millis(*retention),
            },
            Operation::HandOver { by } => Self::HandOver { by: hex(&by.0) },
            Operation::Reopen { .. } => Self::Reopen,
        }
    }

    /// The operation of the rules; `None` for those that have none, and where a text is not what
    /// [`Op::of`] writes.
    pub(super) fn operation(&self) -> Option<Operation> {
        let duration = |millis: &u64| Duration::from_millis(*millis);
        let fingerprint = |text: &Option<String>| match text {
            None => Some(None),
            Some(text) => fingerprint_of(text).map(Some),
        };
        Some(match self {
            Self::Claim {
                token,
                lease_ms,
                fingerprint: of,
                fenced,
            } => Operation::Claim {
                token: token_of(token)?,
                lease: duration(lease_ms),
                fingerprint: fingerprint(of)?,
                fenced: *fenced,
                longest_lease: Duration::MAX,
            },
            Self::Extend { token, lease_ms } => Operation::Extend {
                token: token_of(token)?,
                lease: duration(lease_ms),
            },
            Self::Complete {
                token,
                fingerprint: of,
                result,
                retention_ms,
            } => Operation::Complete {
                token: token_of(token)?,
                fingerprint: fingerprint(of)?,
                result: result.clone().into(),
                retention: duration(retention_ms),
            },
            Self::Release {
                token,
                delay_ms,
                end,
            } => Operation::Release {
                token: token_of(token)?,
                delay: duration(delay_ms),
                end: ReleaseCause::ALL
                    .into_iter()
                    .find(|known| known.as_str() == end)?,
                reason: String::new(),
            },
            Self::Fail {
                token,
                reason,
                retention_ms,
            } => Operation::Fail {
                token: token_of(token)?,
                reason: reason.clone(),
                retention: duration(retention_ms),
            },
            Self::HandOver { by } => Operation::HandOver { by: tag_of(by)? },
            Self::Reopen | Self::Forget => return None,
        })
    }

    /// Whether it reports that the handler has succeeded.
    pub fn completes(&self) -> bool {
        matches!(self, Self::Complete { .. })
    }

    pub(super) fn token(&self) -> Option<&str> {
        match self {
            Self::Claim { token, .. }
            | Self::Extend { token, .. }
            | Self::Complete { token, .. }
            | Self::Release { token, .. }
            | Self::Fail { token, .. } => Some(token),
            Self::HandOver { .. } | Self::Reopen | Self::Forget => None,
        }
    }
}

impl Answer {
    /// Whether the change is in the record.
    pub fn is_held(&self) -> bool {
        matches!(self, Self::Held { .. })
    }

    /// Whether it reports that the key is final.
    pub fn is_settled(&self) -> bool {
        matches!(
            self,
            Self::Completed { .. }
                | Self::Failed {
                    handed_over: true,
                    ..
                }
        )
    }

    pub(super) fn of(reply: &Reply) -> Self {
        match reply {
            Reply::Applied { recreated } => Self::Held {
                recreated: *recreated,
            },
            Reply::NotOwner => Self::Lost,
            Reply::Verdict { verdict, .. } => match verdict {
                Verdict::Granted(Grant {
                    attempt,
                    recovery,
                    fencing_token,
                    reopened: _,
                }) => Self::Granted {
                    attempt: *attempt,
                    takeover: *recovery == Recovery::Takeover,
                    recovered: recovery.recovered(),
                    fencing_token: fencing_token.map(|FencingToken(number)| number),
                },
                Verdict::Completed { result } => Self::Completed {
                    result: text(result),
                },
                Verdict::Busy { retry_in } => Self::Busy {
                    retry_in_ms: millis(*retry_in),
                },
                Verdict::Failed {
                    reason,
                    handed_over,
                    by,
                } => Self::Failed {
                    reason: reason.clone(),
                    handed_over: *handed_over,
                    by: hex(&by.0),
                },
                Verdict::Mismatch => Self::Mismatch,
            },
        }
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
