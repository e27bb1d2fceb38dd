//! The claims and completions of first attempts, and the replies that settle them without a script.

use bytes::Bytes;
use oncegate_core::key::StoreKey;
use oncegate_core::record::{Recovery, TAIL, Token};
use oncegate_core::rules::{Grant, Operation, Reply, Verdict};
use oncegate_core::store::{Command, StoreError};
use redis::Value;

use super::replies::RawReply;
use super::witnesses::Completed;
use super::{errors, layout};

/// Protocol overhead, in bytes, of the arguments of a plain command.
const OVERHEAD_BYTES: usize = 96;

/// A claim without a fencing token, or a completion, that may be of a first attempt.
#[derive(Debug)]
pub(super) struct FirstAttempt {
    pub(super) key: StoreKey,
    pub(super) token: Token,
    pub(super) fingerprint: [u8; 7],
    /// The time until the record expires.
    pub(super) millis: u64,
    pub(super) step: Step,
}

#[derive(Debug)]
pub(super) enum Step {
    Claim,
    Completion { result: Bytes },
}

impl FirstAttempt {
    pub(super) fn of(command: &Command) -> Option<Self> {
        let (token, fingerprint, millis, step) = match &command.operation {
            Operation::Claim {
                token,
                lease,
                fingerprint,
                fenced: false,
                ..
            } => (
                token,
                fingerprint,
                layout::millis(*lease + TAIL),
                Step::Claim,
            ),
            Operation::Complete {
                token,
                fingerprint,
                result,
                retention,
            } => {
                let step = Step::Completion {
                    result: result.clone(),
                };
                (token, fingerprint, layout::millis(*retention), step)
            }
            _ => return None,
        };
        Some(Self {
            key: command.key.clone(),
            token: *token,
            fingerprint: layout::fingerprint_bytes(*fingerprint),
            millis,
            step,
        })
    }

    /// The approximate number of bytes on the wire.
    pub(super) fn bytes(&self) -> usize {
        let result_bytes = match &self.step {
            Step::Claim => 0,
            Step::Completion { result } => result.len(),
        };
        OVERHEAD_BYTES + self.key.as_str().len() + result_bytes
    }

    /// The record of a first attempt.
    pub(super) fn record(&self) -> [u8; 25] {
        layout::first_attempt(self.token.as_bytes(), self.fingerprint)
    }

    /// The facts about the completed record; `None` for a claim.
    pub(super) fn completed(self) -> Option<Completed> {
        let retention_ms = self.millis;
        matches!(self.step, Step::Completion { .. }).then(|| Completed {
            key: self.key,
            tag: self.token.tag(),
            retention_ms,
        })
    }
}

/// The reply to the command of a first attempt; `None` when the script has to run.
///
/// With `durable`, the script handles a record that is already settled, because it must be written
/// once more.
pub(super) fn settled(
    command: &Command,
    answer: RawReply,
    durable: bool,
) -> Option<Result<Reply, StoreError>> {
    let granted = Grant {
        attempt: 1,
        recovery: Recovery::None,
        fencing_token: None,
        reopened: false,
    };
    match (&command.operation, answer) {
        (_, Err(error)) => Some(Err(error)),
        // The script also works on a full server, and it may know a record that is unknown here. A
        // call for many keys is repeated per key: one key without rights must not affect the
        // others.
        (_, Ok(Value::ServerError(error)))
            if matches!(error.code(), "OOM" | "ERR" | "NOPERM")
                || errors::is_several_slots(&error) =>
        {
            None
        }
        (_, Ok(Value::ServerError(error))) => {
            Some(Err(errors::store_error(&error, Some(&command.key))))
        }
        (Operation::Claim { .. }, Ok(Value::Nil)) => Some(Ok(Reply::Verdict {
            verdict: Verdict::Granted(granted),
            uncompared: false,
        })),
        (Operation::Claim { fingerprint, .. }, Ok(Value::BulkString(record))) if !durable => {
            verdict(layout::fingerprint_bytes(*fingerprint), record.into()).map(Ok)
        }
        (Operation::Complete { .. }, Ok(Value::Okay)) => {
            Some(Ok(Reply::Applied { recreated: false }))
        }
        _ => None,
    }
}

/// The reply of a settled record to a claim with this fingerprint; `None` for any other record.
fn verdict(ours: [u8; 7], record: Bytes) -> Option<Reply> {
    let (theirs, verdict) = layout::settled(record)?;
    let uncompared = ours != theirs;
    let is_same_specification = ours.first() != Some(&0) && ours.first() == theirs.first();
    if uncompared && is_same_specification {
        return Some(Reply::Verdict {
            verdict: Verdict::Mismatch,
            uncompared: false,
        });
    }
    Some(Reply::Verdict {
        verdict,
        uncompared,
    })
}
