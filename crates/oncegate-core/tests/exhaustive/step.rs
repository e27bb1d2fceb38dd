//! The steps of a history, and the operation of each.

use std::time::Duration;

use bytes::Bytes;
use oncegate_core::key::Fingerprint;
use oncegate_core::record::{Record, State, Token};
use oncegate_core::rules::{Operation, ReleaseCause, Resolution};

use crate::history::History;

pub(crate) const LEASE_MS: u64 = 2;
pub(crate) const RETENTION_MS: u64 = 3;

/// The properties of one attempt.
#[derive(Clone, Debug)]
pub(crate) struct Attempt {
    /// The specification and the content.
    pub(crate) fingerprint: Option<(u8, u8)>,
    pub(crate) fenced: bool,
}

/// Something that happens. Attempts are named by their number.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Step {
    Tick,
    /// As long as a record outlives its lease.
    Sleep,
    Claim(usize),
    Extend(usize),
    Complete(usize),
    Release {
        by: usize,
        delay_ms: u64,
        end: ReleaseCause,
    },
    Fail(usize),
    HandOver(usize),
    Reopen,
    /// An operator has seen something else.
    ReopenAnother,
    /// The operator with this number knows that the effect has happened.
    ResolveCompleted(usize),
    /// The operator with this number wants no further attempt.
    ResolveFailed(usize),
    /// The operator has seen something else.
    ResolveAnother,
}

/// The number of the operator's token: no attempt has it.
pub(crate) const OPERATOR: usize = 6;

impl Step {
    /// Returns all steps of so many attempts.
    pub(crate) fn all(attempts: usize) -> Vec<Self> {
        let mut steps = vec![Self::Tick, Self::Sleep, Self::Reopen, Self::ReopenAnother];
        steps.extend([
            Self::ResolveCompleted(OPERATOR),
            Self::ResolveFailed(OPERATOR),
            Self::ResolveAnother,
        ]);
        for by in 0..attempts {
            steps.extend([
                Self::Claim(by),
                Self::Extend(by),
                Self::Complete(by),
                Self::Fail(by),
            ]);
            steps.push(Self::HandOver(by));
            for (delay_ms, end) in [
                (0, ReleaseCause::Failed),
                (2, ReleaseCause::Interrupted),
                (2, ReleaseCause::Failed),
                (0, ReleaseCause::NotStarted),
                (2, ReleaseCause::Discarded),
                (2, ReleaseCause::Abandoned),
            ] {
                steps.push(Self::Release { by, delay_ms, end });
            }
        }
        steps
    }

    /// The operation of a step, if it can be made now: attempts come into play in their order, and
    /// only one that has asked can do anything else.
    pub(crate) fn operation(
        &self,
        attempts: &[Attempt],
        history: &History,
        record: Option<&Record>,
    ) -> Option<Operation> {
        let asked = |by: usize| by < history.asked;
        let lease = Duration::from_millis(LEASE_MS);
        let retention = Duration::from_millis(RETENTION_MS);
        let operation = match *self {
            Self::Tick | Self::Sleep => return None,
            Self::Claim(by) if by <= history.asked => Operation::Claim {
                token: token(by),
                lease,
                fingerprint: print(&attempts[by]),
                fenced: attempts[by].fenced,
                longest_lease: lease,
            },
            Self::Extend(by) if asked(by) => Operation::Extend {
                token: token(by),
                lease,
            },
            Self::Complete(by) if asked(by) => Operation::Complete {
                token: token(by),
                fingerprint: print(&attempts[by]),
                result: result(by),
                retention,
            },
            Self::Release { by, delay_ms, end } if asked(by) => {
                let delay = Duration::from_millis(delay_ms);
                Operation::Release {
                    token: token(by),
                    delay,
                    end,
                    reason: reason(by),
                }
            }
            Self::Fail(by) if asked(by) => Operation::Fail {
                token: token(by),
                reason: reason(by),
                retention,
            },
            Self::HandOver(by) if asked(by) => Operation::HandOver {
                by: token(by).tag(),
            },
            Self::Reopen => Operation::Reopen {
                expected: record?.clone(),
            },
            Self::ReopenAnother => Operation::Reopen {
                expected: another(record?),
            },
            Self::ResolveCompleted(by) => Operation::Resolve {
                expected: record?.clone(),
                token: token(by),
                resolution: Resolution::Completed { result: result(by) },
                retention,
            },
            Self::ResolveFailed(by) => Operation::Resolve {
                expected: record?.clone(),
                token: token(by),
                resolution: Resolution::Failed { reason: reason(by) },
                retention,
            },
            Self::ResolveAnother => Operation::Resolve {
                expected: another(record?),
                token: token(9),
                resolution: Resolution::Completed { result: result(9) },
                retention,
            },
            _ => return None,
        };
        Some(operation)
    }
}

/// A record that the key does not have.
fn another(record: &Record) -> Record {
    Record {
        state: State::Failed {
            by: token(8).tag(),
            attempt: 1,
            handed_over: true,
            reason: "another".to_owned(),
        },
        ..record.clone()
    }
}

pub(crate) fn token(by: usize) -> Token {
    Token::from_bits((by as u128 + 1) << 96)
}

pub(crate) fn print(attempt: &Attempt) -> Option<Fingerprint> {
    attempt.fingerprint.map(|(specification, content)| {
        Fingerprint::from_bytes([
            specification,
            content,
            content,
            content,
            content,
            content,
            content,
        ])
    })
}

pub(crate) fn result(by: usize) -> Bytes {
    Bytes::from(format!("result {by}"))
}

pub(crate) fn reason(by: usize) -> String {
    format!("reason {by}")
}
