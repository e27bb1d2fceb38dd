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

use oncegate_core::store::StoreError;
use redis::{Cmd, Value};

use super::first_attempt::{FirstAttempt, Step};
use super::info::Info;
use super::layout;
use super::replies::RawReply;
use super::scripts::Scripts;
use super::sources::Verb;

/// The first versions that support `SET … IFEQ`.
const IFEQ_IN_REDIS: (u32, u32) = (8, 4);
const IFEQ_IN_VALKEY: (u32, u32) = (8, 1);

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

/// The requests that can share one script call: the same operation with the same expiry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Kind {
    verb: Verb,
    millis: u64,
}

impl FirstAttempt {
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
}

impl Kind {
    /// Returns one call for all of these requests, which are of this kind.
    pub(super) fn together(self, scripts: &Scripts, firsts: &[(usize, FirstAttempt)]) -> Cmd {
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
