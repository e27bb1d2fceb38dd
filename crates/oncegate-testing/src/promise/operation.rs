//! Operations and their answers as plain data.

use std::num::ParseIntError;
use std::time::Duration;

use oncegate_core::key::Fingerprint;
use oncegate_core::record::{FencingToken, Record, Recovery, Token, TokenTag};
use oncegate_core::rules::{Grant, Operation, ReleaseCause, Reply, Resolution, Verdict};
use serde::{Deserialize, Serialize};

/// An operation on a key, as far as it decides anything: [`Operation`] as plain data. Tokens are
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
    /// Ends the key for an operator: as completed with this result, or as failed.
    Resolve {
        token: String,
        result: Option<String>,
    },
    /// The store loses all records: the effect of a fault, not an operation.
    Forget,
}

/// The answer to an [`Op`]: [`Reply`] as plain data.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the fields are those of `Reply` and `Verdict`")]
#[serde(rename_all = "snake_case")]
pub enum StoreAnswer {
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

fn fingerprint_of(text: &str) -> Result<Fingerprint, ParseIntError> {
    let [_, bytes @ ..] = u64::from_str_radix(text, 16)?.to_be_bytes();
    Ok(Fingerprint::from_bytes(bytes))
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
            Operation::Resolve {
                token, resolution, ..
            } => Self::Resolve {
                token: token_text(*token),
                result: match resolution {
                    Resolution::Completed { result } => Some(text(result)),
                    Resolution::Failed { .. } => None,
                },
            },
        }
    }

    /// The operation of the rules; `None` for those that have none, and where a text is not what
    /// [`Op::of`] writes.
    pub(super) fn operation(&self) -> Option<Operation> {
        Some(match self {
            Self::Claim {
                token,
                lease_ms,
                fingerprint,
                fenced,
            } => Operation::Claim {
                token: token_of(token)?,
                lease: Duration::from_millis(*lease_ms),
                fingerprint: fingerprint
                    .as_deref()
                    .map(fingerprint_of)
                    .transpose()
                    .ok()?,
                fenced: *fenced,
                longest_lease: Duration::MAX,
            },
            Self::Extend { token, lease_ms } => Operation::Extend {
                token: token_of(token)?,
                lease: Duration::from_millis(*lease_ms),
            },
            Self::Complete {
                token,
                fingerprint,
                result,
                retention_ms,
            } => Operation::Complete {
                token: token_of(token)?,
                fingerprint: fingerprint
                    .as_deref()
                    .map(fingerprint_of)
                    .transpose()
                    .ok()?,
                result: result.clone().into(),
                retention: Duration::from_millis(*retention_ms),
            },
            Self::Release {
                token,
                delay_ms,
                end,
            } => Operation::Release {
                token: token_of(token)?,
                delay: Duration::from_millis(*delay_ms),
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
                retention: Duration::from_millis(*retention_ms),
            },
            Self::HandOver { by } => Operation::HandOver { by: tag_of(by)? },
            Self::Reopen | Self::Resolve { .. } | Self::Forget => return None,
        })
    }

    /// The operation of an operator who has read this record, for [`Op::Resolve`] alone. The
    /// reason of a failure is not known.
    pub(super) fn resolve(&self, expected: &Record) -> Option<Operation> {
        let Self::Resolve { token, result } = self else {
            return None;
        };
        Some(Operation::Resolve {
            expected: expected.clone(),
            token: token_of(token)?,
            resolution: match result.clone() {
                Some(result) => Resolution::Completed {
                    result: result.into(),
                },
                None => Resolution::Failed {
                    reason: String::new(),
                },
            },
            retention: Duration::MAX,
        })
    }

    /// Returns whether it reports that the handler has succeeded.
    pub fn completes(&self) -> bool {
        matches!(
            self,
            Self::Complete { .. }
                | Self::Resolve {
                    result: Some(_),
                    ..
                }
        )
    }

    pub(super) fn token(&self) -> Option<&str> {
        match self {
            Self::Claim { token, .. }
            | Self::Extend { token, .. }
            | Self::Complete { token, .. }
            | Self::Release { token, .. }
            | Self::Fail { token, .. } => Some(token),
            Self::HandOver { .. } | Self::Reopen | Self::Resolve { .. } | Self::Forget => None,
        }
    }
}

impl StoreAnswer {
    /// Returns whether the change is in the record.
    pub fn is_held(&self) -> bool {
        matches!(self, Self::Held { .. })
    }

    /// Returns whether it reports that the key is final.
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
