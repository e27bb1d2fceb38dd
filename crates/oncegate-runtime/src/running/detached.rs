//! Claims for work in other processes, in any language: the caller that has the token of a claim
//! extends and ends it, through any process with a gate of the same scope and store.
//!
//! Nothing about a claim is kept here, so a restart loses none. There is no heartbeat either: the
//! owner [extends](Gate::extend_claims) in time, or its lease lapses and the next claim takes over,
//! marked as recovered. An operation without an answer is repeated by its caller with the same
//! claim, and is applied again. What follows an attempt is the table of [`policy`](super::policy).

use std::time::Duration;

use bytes::Bytes;
use oncegate_core::key::{Fingerprint, StoreKey};
use oncegate_core::record::{FencingToken, Record, State, Token};
use oncegate_core::rules::{Operation, ReleaseCause, Reply};
use oncegate_core::store::StoreError;

use super::policy::{
    AttemptLimit, Consequence, GiveUp, after_failure, before_run, outcome_unknown,
};
use crate::backoff::Backoff;
use crate::codec::{Codec, ToStored, not_kept};
use crate::failure::Failure;
use crate::gate::{Claimed, Gate, GateError, Stored};
use crate::message::Message;
use crate::observe::Event;

/// The terms of a claim.
#[derive(Clone, Copy, Debug)]
pub struct ClaimTerms {
    /// The time for which the claim lasts without an extend; no longer than the gate's lease, which
    /// is the longest one of its scope.
    pub lease: Duration,
    /// The time for which the record is kept once the claim has ended for good.
    pub retention: Duration,
    /// Digest of what the work is given, if equal keys with other arguments are to be refused.
    pub fingerprint: Option<Fingerprint>,
    /// A token of the caller, random and new for each claim, who repeats a claim that has had no
    /// answer with the same one; `None`: the gate makes one, and releases what it granted without
    /// an answer.
    pub token: Option<Token>,
    /// The number of attempts after which the work is given up.
    pub limit: AttemptLimit,
}

/// A claim that another process holds: what it needs to extend and end it.
///
/// The token in it is the proof of ownership: it is enough to end the work of the key, so it
/// belongs into no log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DetachedClaim {
    /// The key of the record.
    pub key: StoreKey,
    /// The owner token.
    pub token: Token,
    /// The fingerprint of the claim.
    pub fingerprint: Option<Fingerprint>,
    /// The number of the attempt, from 1.
    pub attempt: u32,
    /// The lease that an extend renews.
    pub lease: Duration,
    /// The time for which the record is kept once the claim has ended for good.
    pub retention: Duration,
}

/// The outcome of a claim.
#[derive(Debug)]
pub enum ClaimOutcome {
    /// The caller does the work.
    Granted {
        /// The claim, to extend and to end it.
        claim: DetachedClaim,
        /// `true` if an earlier attempt ended without an outcome, so that its effect may have
        /// happened.
        recovered: bool,
        /// The fencing token, if the gate is fenced.
        fencing_token: Option<u64>,
    },
    /// The work is done.
    Completed(Stored),
    /// Another owner has it, or its next attempt is not due.
    Busy {
        /// The time after which it is worth asking again.
        retry_in: Duration,
    },
    /// No attempt follows.
    GivenUp {
        /// The reason.
        reason: String,
    },
    /// The key is known with other arguments.
    Mismatch,
}

/// The outcome of the end of a claim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ClaimEnd {
    /// The work is recorded as done.
    Completed {
        /// `true` if its result is in the record; otherwise it was too large, or could not be
        /// encoded.
        is_kept: bool,
    },
    /// Another attempt may follow.
    Released {
        /// The time after which it is due.
        retry_in: Duration,
    },
    /// No attempt follows.
    GivenUp {
        /// The reason.
        reason: String,
    },
    /// Another owner has taken over, or the claim has ended in another way before: nothing was
    /// changed.
    NotOwner,
}

/// The state of a key.
#[derive(Debug)]
pub enum KeyState {
    /// No record: the work has never been claimed, or its record has expired.
    Absent,
    /// An owner has it.
    Claimed {
        /// The number of the attempt.
        attempt: u32,
        /// The rest of the lease; `None` when it is over, so that the next claim takes over.
        lease_left: Option<Duration>,
    },
    /// An attempt has ended, and another one may follow.
    Released {
        /// The number of attempts that have counted.
        attempt: u32,
        /// The time after which the next one is due; `None` when it is due now.
        retry_in: Option<Duration>,
        /// The reason, if there is one.
        reason: String,
    },
    /// The work is done.
    Completed(Stored),
    /// No attempt follows.
    GivenUp {
        /// The number of attempts that were made.
        attempt: u32,
        /// The reason.
        reason: String,
    },
}

impl Gate {
    /// Claims the key of `message` for another process. `terms.fingerprint` takes the place of the
    /// gate's own.
    ///
    /// A grant over the limit of attempts is no grant: the work is given up under that very claim.
    /// So is one after an attempt without an outcome, with
    /// [`AfterUnknown::GiveUp`](crate::AfterUnknown::GiveUp).
    ///
    /// # Errors
    /// As of [`enter`](Gate::enter). A claim with a token of the caller may have been granted: send
    /// it again.
    pub async fn claim(
        &self,
        message: &Message,
        terms: &ClaimTerms,
    ) -> Result<ClaimOutcome, GateError> {
        let gate = self.opened().await?;
        if gate.has_format() {
            gate.prepare(message).await?;
        }
        let identity = gate.identify_with(message, terms.fingerprint)?;
        let lease = terms.lease.min(self.settings.lease);
        let claimed = gate
            .claim_away(message, &identity, lease, terms.token)
            .await?;
        let granted = match claimed {
            Ok(granted) => granted,
            Err(Claimed::Completed(stored)) => {
                return Ok(ClaimOutcome::Completed(gate.fetch_stored(stored).await?));
            }
            Err(Claimed::Busy(retry_in)) => return Ok(ClaimOutcome::Busy { retry_in }),
            Err(Claimed::Failed { reason, .. }) => return Ok(ClaimOutcome::GivenUp { reason }),
            Err(Claimed::Mismatch) => return Ok(ClaimOutcome::Mismatch),
            Err(Claimed::Granted(_)) => {
                return Err(StoreError::unknown("a grant was not taken").into());
            }
        };
        let claim = DetachedClaim {
            key: granted.identity.key,
            token: granted.token,
            fingerprint: granted.identity.fingerprint,
            attempt: u32::from(granted.grant.attempt),
            lease,
            retention: terms.retention,
        };
        let recovered = granted.grant.recovery.recovered();
        let after_unknown = self.settings.after_unknown();
        if let Some(why) = before_run(claim.attempt, recovered, after_unknown, Some(terms.limit)) {
            let reason = match why {
                GiveUp::OutcomeUnknown => outcome_unknown(claim.attempt, None),
                GiveUp::Permanent | GiveUp::AttemptsUsedUp => AttemptLimit::used_up(claim.attempt),
            };
            return Ok(match self.give_up_claim(&claim, reason).await? {
                ClaimEnd::GivenUp { reason } => ClaimOutcome::GivenUp { reason },
                // Another owner has taken over in the meantime.
                _ => ClaimOutcome::Busy {
                    retry_in: Duration::from_millis(1),
                },
            });
        }
        Ok(ClaimOutcome::Granted {
            claim,
            recovered,
            fencing_token: granted
                .grant
                .fencing_token
                .map(|FencingToken(number)| number),
        })
    }

    /// Extends claims of this scope by one call of the store. Returns for each, in their order,
    /// whether its owner still has it.
    ///
    /// # Errors
    /// The gate cannot be opened. For one claim: the store did not answer; repeat it.
    pub async fn extend_claims(
        &self,
        claims: &[DetachedClaim],
    ) -> Result<Vec<Result<bool, StoreError>>, GateError> {
        let gate = self.opened().await?;
        let extends = claims
            .iter()
            .map(|claim| (claim.key.clone(), claim.token, claim.lease));
        let replies = gate.extend_away(extends).await;
        Ok(replies
            .into_iter()
            .map(|reply| reply.map(|reply| matches!(reply, Reply::Applied { .. })))
            .collect())
    }

    /// Completes the work of a claim. A result that is larger than a
    /// [record keeps](Gate::max_result_bytes) is left out: the effect has happened.
    ///
    /// # Errors
    /// The store did not answer: repeat it with the same claim.
    pub async fn complete_claim<T: ToStored + Sync + ?Sized>(
        &self,
        claim: &DetachedClaim,
        result: &T,
    ) -> Result<ClaimEnd, GateError> {
        let stored = result
            .to_stored(Codec::Json)
            .ok()
            .filter(|stored| stored.len() <= self.settings.max_result_bytes);
        self.record_claim(claim, stored).await
    }

    /// Completes the work of a claim whose result its owner cannot send.
    ///
    /// # Errors
    /// The store did not answer: repeat it with the same claim.
    pub async fn complete_claim_without_result(
        &self,
        claim: &DetachedClaim,
    ) -> Result<ClaimEnd, GateError> {
        self.record_claim(claim, None).await
    }

    async fn record_claim(
        &self,
        claim: &DetachedClaim,
        stored: Option<Bytes>,
    ) -> Result<ClaimEnd, GateError> {
        let is_kept = stored.is_some();
        let operation = Operation::Complete {
            token: claim.token,
            fingerprint: claim.fingerprint,
            result: stored.unwrap_or_else(not_kept),
            retention: claim.retention,
        };
        if !self.end_claim(claim, operation).await? {
            return Ok(ClaimEnd::NotOwner);
        }
        if !is_kept {
            let scope = self.scope();
            self.observe(Event::ResultNotKept { scope });
        }
        Ok(ClaimEnd::Completed { is_kept })
    }

    /// Ends an attempt that has failed: the next one follows after the delay that the failure asks
    /// for, or after the back-off; after a permanent failure, and after the last attempt, none.
    ///
    /// A failure that is [unknown](Failure::unknown) writes nothing: the lease lapses, and the next
    /// attempt is marked as recovered.
    ///
    /// # Errors
    /// The store did not answer: repeat it with the same claim.
    pub async fn fail_claim(
        &self,
        claim: &DetachedClaim,
        failure: &Failure,
        limit: AttemptLimit,
        backoff: Backoff,
    ) -> Result<ClaimEnd, GateError> {
        let reason = failure.reason();
        let consequence = after_failure(failure.advice(), claim.attempt, true, limit);
        let (delay, end) = match consequence {
            Consequence::GiveUp(_) => return self.give_up_claim(claim, reason).await,
            Consequence::Unknown => {
                return Ok(ClaimEnd::Released {
                    retry_in: claim.lease,
                });
            }
            Consequence::Later { after } => (after, ReleaseCause::Interrupted),
            Consequence::Retry { after, counted } => {
                let delay = after.unwrap_or_else(|| backoff.wait(claim.attempt, self.fraction()));
                let end = if counted {
                    ReleaseCause::Failed
                } else {
                    ReleaseCause::Interrupted
                };
                (delay, end)
            }
        };
        let operation = Operation::Release {
            token: claim.token,
            delay,
            end,
            reason,
        };
        Ok(if self.end_claim(claim, operation).await? {
            ClaimEnd::Released { retry_in: delay }
        } else {
            ClaimEnd::NotOwner
        })
    }

    /// Returns a grant that its caller was never told of: it counts as no attempt.
    ///
    /// # Errors
    /// The store did not answer: the lease lapses.
    pub async fn return_claim(&self, claim: &DetachedClaim) -> Result<(), GateError> {
        let operation = Operation::Release {
            token: claim.token,
            delay: Duration::ZERO,
            end: ReleaseCause::NotStarted,
            reason: "the caller was gone before it had the answer".to_owned(),
        };
        self.end_claim(claim, operation).await?;
        Ok(())
    }

    /// Reads the state of the key of `message`, and changes nothing.
    ///
    /// # Errors
    /// As of [`enter`](Gate::enter).
    pub async fn look(&self, message: &Message) -> Result<KeyState, GateError> {
        let gate = self.opened().await?;
        if gate.has_format() {
            gate.prepare(message).await?;
        }
        let identity = gate.identify_with(message, None)?;
        let Some(found) = gate.read_record(&identity.key).await? else {
            return Ok(KeyState::Absent);
        };
        let left = found.record.protected_for(found.now);
        let Record { state, .. } = found.record;
        Ok(match state {
            State::Pending { attempt, .. } => KeyState::Claimed {
                attempt: u32::from(attempt),
                lease_left: left,
            },
            State::Released {
                attempt, reason, ..
            } => KeyState::Released {
                attempt: u32::from(attempt),
                retry_in: left,
                reason,
            },
            State::Completed { result, .. } => {
                KeyState::Completed(gate.fetch_stored(result).await?)
            }
            State::Failed {
                attempt, reason, ..
            } => KeyState::GivenUp {
                attempt: u32::from(attempt),
                reason,
            },
        })
    }

    async fn give_up_claim(
        &self,
        claim: &DetachedClaim,
        reason: String,
    ) -> Result<ClaimEnd, GateError> {
        let operation = Operation::Fail {
            token: claim.token,
            reason: reason.clone(),
            retention: claim.retention,
        };
        Ok(if self.end_claim(claim, operation).await? {
            ClaimEnd::GivenUp { reason }
        } else {
            ClaimEnd::NotOwner
        })
    }

    /// Returns whether the operation was applied.
    async fn end_claim(
        &self,
        claim: &DetachedClaim,
        operation: Operation,
    ) -> Result<bool, GateError> {
        let gate = self.opened().await?;
        let reply = gate.end_away(&claim.key, operation).await?;
        Ok(matches!(reply, Reply::Applied { .. }))
    }
}
