//! What happened, one JSON line per event, written by several processes that may be killed at any moment.
//!
//! All of them append to one file, and the kernel puts appended lines into one order. So an event that was written
//! before another one began stands before it: the order of the lines is the order of time, for every process.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use oncegate::core::key::Fingerprint;
use oncegate::core::record::{FencingToken, Recovery, Token, TokenTag};
use oncegate::core::rules::{Grant, Operation, ReleaseCause, Reply, Verdict};
use serde::{Deserialize, Serialize};

/// One line.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Entry {
    /// When, in microseconds of the machine's wall clock since 1970.
    pub at_us: u64,
    /// Which process.
    pub pid: u32,
    /// What happened.
    pub what: What,
}

/// What happened.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the fields are named as everywhere: key, origin, attempt, fencing token")]
#[serde(tag = "is", rename_all = "snake_case")]
pub enum What {
    /// A worker is about to ask its store; the outcome is unknown until a later line has it.
    Invoke { call: u64, key: String, op: Op },
    /// The store has answered that call.
    Ok { call: u64, answer: Answer },
    /// The store has not executed that call.
    Fail { call: u64, class: String },
    /// The store's answer to that call was lost: it may have happened, or may still happen.
    Info { call: u64 },
    /// A read found the key completed.
    Found { key: String, result: String },
    /// A delivery came; without a key when none can be made of it.
    Received { origin: String, key: Option<String> },
    /// The handler begins.
    Begun { key: String, origin: String, attempt: u32, fencing_token: Option<u64>, content: String },
    /// The handler ends.
    Ended { key: String, origin: String, attempt: u32, outcome: String },
    /// A duplicate has got this result.
    Duplicate { key: String, origin: String, content: String, result: String },
    /// The message is durably with the dead letters.
    StoredDeadLetter { key: Option<String>, origin: String, cause: String },
    /// The delivery is acknowledged to the source.
    Ack { origin: String, key: Option<String> },
    /// A worker ends as it should, and has counted this.
    Counted { counts: BTreeMap<String, u64> },
    /// A worker noticed a loss of the store's data.
    LossNoticed,
    /// A fault begins; `pid` of the entry is the process that it hits, or 0.
    FaultBegins { fault: String },
    /// A fault is over.
    FaultEnds { fault: String },
}

/// One operation on a key, as far as it decides anything.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "as in `Operation`")]
#[serde(rename_all = "snake_case")]
pub enum Op {
    Claim {
        token: String,
        lease_ms: u64,
        fingerprint: Option<String>,
        fenced: bool,
    },
    Extend {
        token: String,
        lease_ms: u64,
    },
    Complete {
        token: String,
        fingerprint: Option<String>,
        result: String,
        retention_ms: u64,
    },
    Release {
        token: String,
        delay_ms: u64,
        /// A word of `ReleaseCause`.
        end: String,
    },
    Fail {
        token: String,
        reason: String,
        retention_ms: u64,
    },
    HandOver {
        by: String,
    },
    Reopen,
    /// The store loses all records: the effect of a fault, not an operation.
    Forget,
}

/// The answer to an [`Op`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "as in `Reply` and `Verdict`")]
#[serde(rename_all = "snake_case")]
pub enum Answer {
    Granted { attempt: u8, takeover: bool, recovered: bool, fencing_token: Option<u64> },
    Completed { result: String },
    Busy { retry_in_ms: u64 },
    Failed { reason: String, handed_over: bool, by: String },
    Mismatch,
    Held { recreated: bool },
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

fn token_of(text: &str) -> Token {
    Token::from_bits(u128::from_str_radix(text, 16).expect("a token is hexadecimal"))
}

fn tag_of(text: &str) -> TokenTag {
    TokenTag(u32::from_str_radix(text, 16).expect("a tag is hexadecimal").to_be_bytes())
}

fn fingerprint_text(fingerprint: Option<Fingerprint>) -> Option<String> {
    fingerprint.map(|fingerprint| hex(fingerprint.as_bytes()))
}

fn fingerprint_of(text: Option<&str>) -> Option<Fingerprint> {
    let bits = u64::from_str_radix(text?, 16).expect("a fingerprint is hexadecimal");
    let [_, bytes @ ..] = bits.to_be_bytes();
    Some(Fingerprint::from_bytes(bytes))
}

/// Results are JSON or MessagePack of tests, so text.
pub(super) fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

impl Op {
    pub(super) fn of(operation: &Operation) -> Self {
        match operation {
            Operation::Claim { token, lease, fingerprint, fenced, .. } => Self::Claim {
                token: token_text(*token),
                lease_ms: millis(*lease),
                fingerprint: fingerprint_text(*fingerprint),
                fenced: *fenced,
            },
            Operation::Extend { token, lease } => {
                Self::Extend { token: token_text(*token), lease_ms: millis(*lease) }
            }
            Operation::Complete { token, fingerprint, result, retention } => Self::Complete {
                token: token_text(*token),
                fingerprint: fingerprint_text(*fingerprint),
                result: text(result),
                retention_ms: millis(*retention),
            },
            Operation::Release { token, delay, end, .. } => {
                let end = end.as_str().to_owned();
                Self::Release { token: token_text(*token), delay_ms: millis(*delay), end }
            }
            Operation::Fail { token, reason, retention } => Self::Fail {
                token: token_text(*token),
                reason: reason.clone(),
                retention_ms: millis(*retention),
            },
            Operation::HandOver { by } => Self::HandOver { by: hex(&by.0) },
            Operation::Reopen { .. } => Self::Reopen,
        }
    }

    /// The operation that the rules know; `None` where they know none, or not enough was written down.
    pub(super) fn operation(&self) -> Option<Operation> {
        let duration = |millis: &u64| Duration::from_millis(*millis);
        Some(match self {
            Self::Claim { token, lease_ms, fingerprint, fenced } => Operation::Claim {
                token: token_of(token),
                lease: duration(lease_ms),
                fingerprint: fingerprint_of(fingerprint.as_deref()),
                fenced: *fenced,
                longest_lease: Duration::MAX,
            },
            Self::Extend { token, lease_ms } => {
                Operation::Extend { token: token_of(token), lease: duration(lease_ms) }
            }
            Self::Complete { token, fingerprint, result, retention_ms } => Operation::Complete {
                token: token_of(token),
                fingerprint: fingerprint_of(fingerprint.as_deref()),
                result: result.clone().into(),
                retention: duration(retention_ms),
            },
            Self::Release { token, delay_ms, end } => Operation::Release {
                token: token_of(token),
                delay: duration(delay_ms),
                end: ReleaseCause::ALL.into_iter().find(|known| known.as_str() == end)?,
                reason: String::new(),
            },
            Self::Fail { token, reason, retention_ms } => Operation::Fail {
                token: token_of(token),
                reason: reason.clone(),
                retention: duration(retention_ms),
            },
            Self::HandOver { by } => Operation::HandOver { by: tag_of(by) },
            Self::Reopen | Self::Forget => return None,
        })
    }

    /// Whether it reports that the handler has succeeded.
    #[must_use]
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
    #[must_use]
    pub fn is_held(&self) -> bool {
        matches!(self, Self::Held { .. })
    }

    /// Whether it reports that the key is final.
    #[must_use]
    pub fn is_settled(&self) -> bool {
        matches!(self, Self::Completed { .. } | Self::Failed { handed_over: true, .. })
    }

    pub(super) fn of(reply: &Reply) -> Self {
        match reply {
            Reply::Applied { recreated } => Self::Held { recreated: *recreated },
            Reply::NotOwner => Self::Lost,
            Reply::Verdict { verdict, .. } => match verdict {
                Verdict::Granted(Grant { attempt, recovery, fencing_token, reopened: _ }) => Self::Granted {
                    attempt: *attempt,
                    takeover: *recovery == Recovery::Takeover,
                    recovered: recovery.recovered(),
                    fencing_token: fencing_token.map(|FencingToken(number)| number),
                },
                Verdict::Completed { result } => Self::Completed { result: text(result) },
                Verdict::Busy { retry_in } => Self::Busy { retry_in_ms: millis(*retry_in) },
                Verdict::Failed { reason, handed_over, by } => {
                    Self::Failed { reason: reason.clone(), handed_over: *handed_over, by: hex(&by.0) }
                }
                Verdict::Mismatch => Self::Mismatch,
            },
        }
    }
}

/// The file that several processes append to.
#[derive(Debug)]
pub struct History {
    file: File,
    path: PathBuf,
}

impl History {
    /// Opens it, and makes it if it is not there.
    ///
    /// # Panics
    /// When that cannot be done.
    #[must_use]
    pub fn open(path: impl Into<PathBuf>) -> Self {
        let path = path.into();
        let file = OpenOptions::new().create(true).append(true).open(&path);
        let file = file.unwrap_or_else(|error| panic!("history {}: {error}", path.display()));
        Self { file, path }
    }

    /// Where it is, for the processes that share it.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// This process has done that.
    pub fn note(&self, what: What) {
        self.note_all([what]);
    }

    /// This process has done that, in one go.
    pub(super) fn note_all(&self, what: impl IntoIterator<Item = What>) {
        let pid = std::process::id();
        self.write(what.into_iter().map(|what| Entry { at_us: now_us(), pid, what }));
    }

    /// That has happened to the process, or to all.
    pub(super) fn note_of(&self, pid: u32, what: What) {
        self.write([Entry { at_us: now_us(), pid, what }]);
    }

    fn write(&self, entries: impl IntoIterator<Item = Entry>) {
        // The first line end closes what a killed process may have left half written.
        let mut lines = vec![b'\n'];
        for entry in entries {
            serde_json::to_writer(&mut lines, &entry).expect("an entry is plain data");
            lines.push(b'\n');
        }
        // One write is appended in one piece; `write_all` would hide a short one.
        let written = (&self.file).write(&lines).expect("the history can be written");
        assert_eq!(written, lines.len(), "a line was not written in one piece");
    }

    /// Every line so far, in order. What a killed process has half written is left out.
    ///
    /// # Panics
    /// When the file cannot be read.
    #[must_use]
    pub fn read(&self) -> Vec<Entry> {
        let bytes = std::fs::read(&self.path);
        let bytes = bytes.unwrap_or_else(|error| panic!("history {}: {error}", self.path.display()));
        bytes.split(|byte| *byte == b'\n').filter_map(|line| serde_json::from_slice(line).ok()).collect()
    }
}

fn now_us() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("the clock stands after 1970");
    u64::try_from(now.as_micros()).expect("the year is below 586,000")
}
