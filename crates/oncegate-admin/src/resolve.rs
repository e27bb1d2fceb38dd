//! The end of a message by an operator who knows what has become of it.

use std::time::Duration;

use bytes::Bytes;
use oncegate_core::key::{Fingerprint, StoreKey};
use oncegate_core::record::{State, Token, TokenTag};
use oncegate_core::rules::{Operation, Reply, Resolution, Verdict};
use oncegate_core::store::{Command, RecordSnapshot, Store, StoreError};

use super::{REPEAT_AFTER, REPEATS, read};
use oncegate_runtime::GateSettings;

/// The most looks at a record that changes between two of them.
const LOOKS: u32 = 15;

/// The lease of the claim under which a message without a record is given up.
const LEASE: Duration = Duration::from_secs(10);

/// The knowledge of an operator about a message: its effect has happened, or it is not to run.
///
/// Each decision has a token of its own, so that one whose answer was lost can be repeated by the
/// same value: make a new one for each message.
#[derive(Clone, Debug)]
pub struct Decision {
    resolution: Resolution,
    retention: Duration,
    fingerprint: Option<Fingerprint>,
    token: Token,
}

/// Returns the rest of a failed record's retention: the message must not be forgotten earlier.
fn kept_for(RecordSnapshot { now, record }: &RecordSnapshot) -> Duration {
    match record.state {
        State::Failed { .. } => {
            let left = record.expires_at.millis().saturating_sub(now.millis());
            Duration::from_millis(left)
        }
        _ => Duration::ZERO,
    }
}

impl Decision {
    /// The effect has happened. The record becomes COMPLETED, and duplicates get an empty result.
    pub fn happened() -> Self {
        Self::with_result(Bytes::new())
    }

    /// The effect has happened with this result: the bytes that
    /// [`ToStored`](oncegate_runtime::codec::ToStored) makes of it.
    pub fn with_result(stored: Bytes) -> Self {
        Self::new(Resolution::Completed { result: stored })
    }

    /// The message is given up for this reason. Its record becomes FAILED, and its consumer writes
    /// the dead letter when it looks at the message again.
    pub fn give_up(reason: impl Into<String>) -> Self {
        Self::new(Resolution::Failed {
            reason: reason.into(),
        })
    }

    fn new(resolution: Resolution) -> Self {
        Self {
            resolution,
            retention: GateSettings::DEFAULT.retention,
            fingerprint: None,
            token: Token::from_bits(rand::random()),
        }
    }

    /// The time for which the record is kept, seven days by default. Take the gate's.
    #[must_use]
    pub fn retention(mut self, retention: Duration) -> Self {
        self.retention = retention;
        self
    }

    /// The fingerprint of the message's content, if the gate compares contents. It is for a message
    /// that has no record; others keep that of their record.
    #[must_use]
    pub fn fingerprint(mut self, fingerprint: Option<Fingerprint>) -> Self {
        self.fingerprint = fingerprint;
        self
    }

    fn completes(&self) -> bool {
        matches!(self.resolution, Resolution::Completed { .. })
    }

    /// Returns the command that records it where there is no record, for a completion.
    pub(crate) fn completion_of_absent(&self, key: &StoreKey) -> Option<Command> {
        let Resolution::Completed { result } = &self.resolution else {
            return None;
        };
        let operation = Operation::Complete {
            token: self.token,
            fingerprint: self.fingerprint,
            result: result.clone(),
            retention: self.retention,
        };
        Some(Command {
            key: key.clone(),
            operation,
        })
    }

    /// Records it, if the record is still the one that was read. Returns whether it was.
    async fn record(
        &self,
        store: &dyn Store,
        key: &StoreKey,
        read: Option<&RecordSnapshot>,
    ) -> Result<bool, StoreError> {
        let resolve = match (read, &self.resolution) {
            (Some(read), resolution) => Command {
                key: key.clone(),
                operation: Operation::Resolve {
                    expected: read.record.clone(),
                    token: self.token,
                    resolution: resolution.clone(),
                    retention: self.retention.max(kept_for(read)),
                },
            },
            // It writes only where there is no record.
            (None, Resolution::Completed { .. }) => match self.completion_of_absent(key) {
                Some(completion) => completion,
                None => return Ok(false),
            },
            (None, Resolution::Failed { reason }) => {
                return self.claim_and_fail(store, key, reason).await;
            }
        };
        let reply = execute(store, &resolve).await?;
        Ok(matches!(reply, Reply::Applied { .. }))
    }

    /// Gives up a message without a record. No attempt begins between the two steps, because the
    /// claim is this call's.
    async fn claim_and_fail(
        &self,
        store: &dyn Store,
        key: &StoreKey,
        reason: &str,
    ) -> Result<bool, StoreError> {
        let claim = Command {
            key: key.clone(),
            operation: Operation::Claim {
                token: self.token,
                lease: LEASE,
                fingerprint: self.fingerprint,
                fenced: false,
                longest_lease: Duration::MAX,
            },
        };
        let Reply::Verdict {
            verdict: Verdict::Granted(_),
            ..
        } = execute(store, &claim).await?
        else {
            return Ok(false);
        };
        let fail = Command {
            key: key.clone(),
            operation: Operation::Fail {
                token: self.token,
                reason: reason.to_owned(),
                retention: self.retention,
            },
        };
        let reply = execute(store, &fail).await?;
        Ok(matches!(reply, Reply::Applied { .. }))
    }
}

/// The outcome of [`decide`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use = "only a decision that is done has changed the record"]
pub enum Decided {
    /// The record says so now.
    Done,
    /// An attempt runs, or its process has died and its lease goes on. Nothing was changed.
    Runs(RecordSnapshot),
    /// The record is final already: completed, or failed when it was to be given up. Nothing was
    /// changed.
    Final(RecordSnapshot),
    /// The record is no longer of the kind that was seen. Nothing was changed. The value is the
    /// current record; `None` when there is none.
    Changed(Option<RecordSnapshot>),
}

/// Records what an operator has decided who has `seen` this record of the message; `None` when
/// there was none.
///
/// It reads the record again, and changes it by one atomic step of the store, which compares it
/// with the one that was read and refuses one under which an attempt runs: a message either runs or
/// is decided. A failed record may be completed if it still is the failure that was seen; a
/// completed one is never changed. Attempts that ended since are no reason to refuse: while the
/// message goes on waiting, this is repeated for a few seconds, and so it is if an attempt runs
/// that did not when it was seen.
///
/// # Errors
/// When the store does not answer, or the record cannot be read. Call again with the same decision:
/// one that was recorded is then found [`Done`](Decided::Done).
pub async fn decide(
    store: &dyn Store,
    key: &StoreKey,
    seen: Option<&RecordSnapshot>,
    decision: &Decision,
) -> Result<Decided, StoreError> {
    let before = SeenState::of(seen, decision);
    let mut now = None;
    for look in 1..=LOOKS {
        now = read(store, key).await?;
        if now.as_ref().is_some_and(|now| decision.is_end_of(now)) {
            // The answer of an earlier call was lost.
            return Ok(Decided::Done);
        }
        match (before, SeenState::of(now.as_ref(), decision)) {
            (_, SeenState::Final) => return Ok(now.map_or(Decided::Changed(None), Decided::Final)),
            (SeenState::Runs, SeenState::Runs) => break,
            (SeenState::Waits, SeenState::Runs) if look < LOOKS => {
                tokio::time::sleep(REPEAT_AFTER).await;
            }
            (SeenState::Waits, SeenState::Runs) => break,
            // It may have run in between: it waits, and that is what the decision is about.
            (SeenState::Waits | SeenState::Runs, SeenState::Waits) => {
                if decision.record(store, key, now.as_ref()).await? {
                    return Ok(Decided::Done);
                }
                // An attempt came in between, or the store is not sure yet that the lease is over.
                tokio::time::sleep(REPEAT_AFTER).await;
            }
            (SeenState::Failed(seen), SeenState::Failed(found)) if seen == found => {
                if decision.record(store, key, now.as_ref()).await? {
                    return Ok(Decided::Done);
                }
            }
            _ => return Ok(Decided::Changed(now)),
        }
    }
    Ok(match (SeenState::of(now.as_ref(), decision), now) {
        (SeenState::Runs, Some(record)) => Decided::Runs(record),
        (_, now) => Decided::Changed(now),
    })
}

impl Decision {
    /// Returns whether this decision has ended the record.
    fn is_end_of(&self, found: &RecordSnapshot) -> bool {
        match found.record.state {
            State::Completed { by, .. } => self.completes() && by == self.token.tag(),
            State::Failed { by, .. } => !self.completes() && by == self.token.tag(),
            State::Pending { .. } | State::Released { .. } => false,
        }
    }
}

/// A record as far as a decision depends on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SeenState {
    /// There is no record, or the message waits for its next attempt.
    Waits,
    Runs,
    /// The message has failed, by this owner, and may be completed.
    Failed(TokenTag),
    /// The decision would change nothing, or something final.
    Final,
}

impl SeenState {
    fn of(found: Option<&RecordSnapshot>, decision: &Decision) -> Self {
        let Some(RecordSnapshot { now, record }) = found else {
            return Self::Waits;
        };
        match record.state {
            State::Pending { .. } if record.protected_for(*now).is_some() => Self::Runs,
            State::Pending { .. } | State::Released { .. } => Self::Waits,
            State::Failed { by, .. } if decision.completes() => Self::Failed(by),
            State::Failed { .. } | State::Completed { .. } => Self::Final,
        }
    }
}

/// Executes a command; repeats it while its outcome is unknown, which changes nothing when it was
/// executed.
async fn execute(store: &dyn Store, command: &Command) -> Result<Reply, StoreError> {
    let mut repeats = 0;
    loop {
        match store.execute_one(command.clone()).await {
            Err(StoreError::Unknown { .. }) if repeats < REPEATS => {
                repeats += 1;
                tokio::time::sleep(REPEAT_AFTER * repeats).await;
            }
            answer => return answer,
        }
    }
}
