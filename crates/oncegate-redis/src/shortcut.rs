//! Shortcuts for first attempts, which are nearly all attempts. They use the same bytes as the
//! rules' scripts.
//!
//! A claim without a fencing token is `SET … NX GET`: the key was absent, or the old value is a
//! settled record. The completion of a first attempt is `SET … IFEQ`, where the server supports it:
//! the owner knows every byte of its record. Several of these in one pipeline share one call of a
//! script for many keys. A command that the shortcut does not settle is executed by the rules'
//! script, so the rules are in those scripts alone.
//!
//! They stay because `scripts/bench server_cpu` shows what they save. In its last published run
//! (`BENCHMARKS.md`) a message costs the server 7.83 µs by the rules' scripts, 5.76 µs with a plain
//! claim (0.74 of that), and 4.77 µs where 64 operations share calls (0.83 of the plain claim); on
//! Valkey, plain commands take 0.45 of the scripts' time.

use bytes::Bytes;
use oncegate_core::key::StoreKey;
use oncegate_core::record::{Recovery, TAIL, Token};
use oncegate_core::rules::{Grant, Operation, Reply, Verdict};
use oncegate_core::store::{Command, StoreError};
use redis::{Cmd, Value};

use super::info::Info;
use super::replies::RawReply;
use super::scripts::Scripts;
use super::sources::Verb;
use super::witnesses::Completed;
use super::{errors, layout};

/// The first versions that support `SET … IFEQ`.
const IFEQ_IN_REDIS: (u32, u32) = (8, 4);
const IFEQ_IN_VALKEY: (u32, u32) = (8, 1);

/// Protocol overhead, in bytes, of the arguments of a plain command.
const OVERHEAD_BYTES: usize = 96;

/// The shortcuts that a server supports, as found when the connection was opened.
#[derive(Clone, Copy, Debug)]
pub(super) struct Abilities {
    /// The server supports `SET … IFEQ`. If it then refuses the command, the script runs instead.
    has_ifeq: bool,
    /// `true` if one script call may use many keys, as it may not in a cluster.
    has_one_slot: bool,
}

impl Abilities {
    pub(super) fn of(info: &Info<'_>) -> Self {
        let has_ifeq = match info.version("valkey_version") {
            Some(version) => version >= IFEQ_IN_VALKEY,
            None => info
                .version("redis_version")
                .is_some_and(|version| version >= IFEQ_IN_REDIS),
        };
        Self {
            has_ifeq,
            has_one_slot: info.get("cluster_enabled") == Some("0"),
        }
    }

    /// The same for a server that may have refused a call with keys of several slots.
    pub(super) fn unless_sharded(self, is_sharded: bool) -> Self {
        Self {
            has_one_slot: self.has_one_slot && !is_sharded,
            ..self
        }
    }
}

/// A claim without a fencing token, or a completion, that may be of a first attempt.
#[derive(Debug)]
pub(super) struct First {
    key: StoreKey,
    token: Token,
    fingerprint: [u8; 7],
    /// The time until the record expires.
    millis: u64,
    step: Step,
}

#[derive(Debug)]
enum Step {
    Claim,
    Completion { result: Bytes },
}

/// The requests that can share one script call: the same operation with the same expiry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Kind {
    verb: Verb,
    millis: u64,
}

impl First {
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

    /// The kind of call that this request can share; `None` when it is sent alone.
    pub(super) fn kind(&self, abilities: Abilities) -> Option<Kind> {
        let verb = match self.step {
            Step::Claim => Verb::FirstClaims,
            // A plain command is cheaper for the server than a script.
            Step::Completion { .. } if abilities.has_ifeq => return None,
            Step::Completion { .. } => Verb::FirstCompletions,
        };
        abilities.has_one_slot.then_some(Kind {
            verb,
            millis: self.millis,
        })
    }

    /// The command for this request alone.
    pub(super) fn alone(&self, scripts: &Scripts, abilities: Abilities) -> Cmd {
        let key = self.key.as_str();
        let record = self.record();
        match &self.step {
            Step::Claim => {
                let mut cmd = Cmd::with_capacity(7, self.bytes());
                cmd.arg("SET")
                    .arg(key)
                    .arg(&record)
                    .arg("PX")
                    .arg(self.millis)
                    .arg("NX")
                    .arg("GET");
                cmd
            }
            Step::Completion { result } if abilities.has_ifeq => {
                let mut cmd = Cmd::with_capacity(7, self.bytes());
                cmd.arg("SET").arg(key);
                layout::add_completed(&mut cmd, self.token.tag(), self.fingerprint, result);
                cmd.arg("PX").arg(self.millis).arg("IFEQ").arg(&record);
                cmd
            }
            Step::Completion { result } => scripts.complete(
                &self.key,
                &self.token,
                self.fingerprint,
                result,
                self.millis,
            ),
        }
    }

    /// The record of a first attempt.
    fn record(&self) -> [u8; 25] {
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

impl Kind {
    /// Returns one call for all of these requests, which are of this kind.
    pub(super) fn together(self, scripts: &Scripts, firsts: &[(usize, First)]) -> Cmd {
        let bytes = firsts.iter().map(|(_, first)| first.bytes()).sum();
        let mut cmd = scripts.evalsha(self.verb, 3 * firsts.len() + 4, bytes);
        cmd.arg(firsts.len());
        for (_, first) in firsts {
            cmd.arg(first.key.as_str());
        }
        cmd.arg(self.millis);
        for (_, first) in firsts {
            cmd.arg(&first.record());
            if let Step::Completion { result } = &first.step {
                layout::add_completed(&mut cmd, first.token.tag(), first.fingerprint, result);
            }
        }
        cmd
    }

    /// Splits the answer of a shared call into one answer per request, as if each had been sent
    /// alone.
    ///
    /// `Nil` settles a claim, and `Okay` a completion.
    pub(super) fn answers(self, said: Value, count: usize) -> Vec<RawReply> {
        let settled = if self.verb == Verb::FirstClaims {
            Value::Nil
        } else {
            Value::Okay
        };
        match said {
            Value::Nil => vec![Ok(settled); count],
            Value::ServerError(error) => vec![Ok(Value::ServerError(error)); count],
            Value::Array(found) if self.verb == Verb::FirstClaims && found.len() == count => {
                found.into_iter().map(Ok).collect()
            }
            Value::Array(others) if self.verb == Verb::FirstCompletions => {
                let mut answers = vec![Ok(settled); count];
                for other in others {
                    if let Value::Int(number) = other
                        && let Some(place) =
                            usize::try_from(number).ok().and_then(|n| n.checked_sub(1))
                        && let Some(answer) = answers.get_mut(place)
                    {
                        *answer = Ok(Value::Nil);
                    } else {
                        return unheard_of(count);
                    }
                }
                answers
            }
            _ => unheard_of(count),
        }
    }
}

fn unheard_of(count: usize) -> Vec<RawReply> {
    vec![
        Err(StoreError::unknown(
            "the server returned an unexpected answer"
        ));
        count
    ]
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
