//! Claims a key, and turns the store's answer into the claim outcome.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use oncegate_core::record::{Recovery, Token, TokenTag};
use oncegate_core::rules::{Grant, Operation, Reply, Verdict};
use oncegate_core::store::{Command, StoreError};
use tokio::time::Instant;

use super::{AfterUnknown, Identity, Lease, OpenGate};
use crate::message::Message;
use crate::observe::{Event, ExtraRunCause};

/// A claim, however often it is sent. After an error it is sent again with the same token: it may
/// have been granted.
///
/// When it is dropped without an answer, the gate releases in the background whatever its token was
/// or will be granted. So a future that is dropped, or a message that is given back, leaves no
/// unknown lease behind.
#[derive(Debug)]
pub(crate) struct OpenClaim {
    gate: Arc<OpenGate>,
    identity: Identity,
    token: Token,
    /// The lease to ask for: that of the gate, or a shorter one.
    lease: Duration,
    /// The caller repeats it with the same token by itself, so nothing may release that token.
    is_repeated_by_caller: bool,
    /// A repeat does not renew the lease: it may have begun when the first one arrived.
    first_sent_at: Instant,
    /// The store may have granted it, and its answer is not known.
    is_in_doubt: bool,
    /// The same before it was last sent.
    was_in_doubt: bool,
}

/// The answer to one claim.
#[derive(Debug)]
pub(crate) enum Claimed {
    Granted(Lease),
    Completed(Bytes),
    Busy(Duration),
    Failed {
        reason: String,
        handed_over: bool,
        by: TokenTag,
    },
    Mismatch,
}

impl OpenClaim {
    /// The same claim for another lease, which is no longer than the gate's.
    pub(crate) fn lasting(mut self, lease: Duration) -> Self {
        self.lease = lease;
        self
    }

    /// The same claim by a token of the caller, who sends it again if it has no answer.
    pub(crate) fn repeated_by_caller(mut self, token: Token) -> Self {
        self.token = token;
        self.is_repeated_by_caller = true;
        self
    }

    /// Returns how long ago the first request was sent that may have been executed.
    pub(crate) fn age(&self) -> Duration {
        self.first_sent_at.elapsed()
    }

    /// Sends the claim once.
    pub(crate) async fn send(&mut self, message: &Message) -> Result<Claimed, StoreError> {
        let operation = self.begin()?;
        let reply = self.gate.execute(&self.identity.key, operation).await;
        self.end(message, reply)
    }

    /// Sends the claims of these messages in one call of the store, and returns the answers in
    /// their order.
    pub(crate) async fn send_all(
        claims: &mut [(&mut Self, &Message)],
    ) -> Vec<Result<Claimed, StoreError>> {
        let Some(gate) = claims.first().map(|(claim, _)| Arc::clone(&claim.gate)) else {
            return Vec::new();
        };
        let begun: Result<Vec<Command>, StoreError> = claims
            .iter_mut()
            .map(|(claim, _)| {
                Ok(Command {
                    operation: claim.begin()?,
                    key: claim.identity.key.clone(),
                })
            })
            .collect();
        let replies = match begun {
            Ok(commands) => gate.execute_all(commands).await,
            // The gate grants nothing at all.
            Err(refused) => return claims.iter().map(|_| Err(refused.clone())).collect(),
        };
        let answered = claims.iter_mut().zip(replies);
        answered
            .map(|((claim, message), reply)| claim.end(message, reply))
            .collect()
    }

    /// The operation to send. From here on the store may grant the claim.
    fn begin(&mut self) -> Result<Operation, StoreError> {
        let gate = &self.gate;
        if let Some(refused) = gate.refusal() {
            gate.observe(Event::StoreError {
                scope: gate.scope(),
                class: refused.class(),
            });
            return Err(refused);
        }
        self.was_in_doubt = std::mem::replace(&mut self.is_in_doubt, true);
        // While no request may have been executed, no lease can have begun.
        if !self.was_in_doubt {
            self.first_sent_at = Instant::now();
        }
        Ok(Operation::Claim {
            token: self.token,
            lease: self.lease,
            fingerprint: self.identity.fingerprint,
            fenced: gate.settings.fenced,
            longest_lease: gate.longest_lease(),
        })
    }

    /// Turns the store's reply into the answer to the claim.
    fn end(
        &mut self,
        message: &Message,
        reply: Result<Reply, StoreError>,
    ) -> Result<Claimed, StoreError> {
        let gate = Arc::clone(&self.gate);
        let scope = gate.scope();
        let verdict = match reply {
            Ok(Reply::Verdict {
                verdict,
                uncompared,
            }) => {
                if uncompared && !self.identity.has_mark() {
                    gate.observe(Event::FingerprintUncompared { scope });
                } else if uncompared && matches!(verdict, Verdict::Completed { .. }) {
                    gate.note_other_content();
                }
                Ok(verdict)
            }
            Ok(Reply::Applied { .. } | Reply::NotOwner) => Err(StoreError::unknown(
                "the store answered a claim with something else",
            )),
            Err(error) => {
                gate.observe(Event::StoreError {
                    scope,
                    class: error.class(),
                });
                Err(error)
            }
        };
        if matches!(verdict, Ok(Verdict::Granted(_))) && gate.is_grant_in_doubt() {
            // The grant is released, and the next one has a token of its own.
            *self = gate.new_claim(&self.identity);
            let refused = gate
                .refusal()
                .unwrap_or_else(|| StoreError::refused("the store has lost records"));
            gate.observe(Event::StoreError {
                scope,
                class: refused.class(),
            });
            return Err(refused);
        }
        self.is_in_doubt = match &verdict {
            Ok(_) => false,
            Err(StoreError::Unknown { .. }) => true,
            Err(_) => self.was_in_doubt,
        };
        Ok(gate.note_verdict(message, self, verdict?))
    }
}

impl Drop for OpenClaim {
    fn drop(&mut self) {
        if self.is_in_doubt && !self.is_repeated_by_caller {
            self.gate
                .lease_renewer
                .release_later(self.identity.key.clone(), self.token);
        }
    }
}

impl OpenGate {
    /// A new claim, which has not been sent.
    pub(crate) fn new_claim(self: &Arc<Self>, identity: &Identity) -> OpenClaim {
        OpenClaim {
            gate: Arc::clone(self),
            identity: identity.clone(),
            token: self.entropy.token(),
            lease: self.settings.lease,
            is_repeated_by_caller: false,
            first_sent_at: Instant::now(),
            is_in_doubt: false,
            was_in_doubt: false,
        }
    }

    /// Turns the verdict into the answer to the claim, and tells the observer.
    fn note_verdict(
        self: &Arc<Self>,
        message: &Message,
        claim: &OpenClaim,
        verdict: Verdict,
    ) -> Claimed {
        let OpenClaim {
            identity,
            token,
            first_sent_at,
            ..
        } = claim;
        let scope = self.scope();
        let (word, claimed) = match verdict {
            Verdict::Granted(grant) => {
                if let Some(cause) = self.cause_of_extra_run(message, &grant) {
                    self.observe(Event::ExtraRun { scope, cause });
                }
                let lease = Lease::new(self, message, identity, *token, grant, *first_sent_at);
                lease.note_claimed(grant);
                ("granted", Claimed::Granted(lease))
            }
            Verdict::Completed { result } => {
                if let Some(losses) = &self.losses {
                    losses.witnesses.note_duplicate(&identity.key);
                }
                ("completed", Claimed::Completed(result))
            }
            Verdict::Busy { retry_in } => ("busy", Claimed::Busy(retry_in)),
            Verdict::Failed {
                reason,
                handed_over,
                by,
            } => (
                "failed",
                Claimed::Failed {
                    reason,
                    handed_over,
                    by,
                },
            ),
            Verdict::Mismatch => ("mismatch", Claimed::Mismatch),
        };
        if !self.is_fail_open {
            self.observe(Event::Claimed {
                scope,
                verdict: word,
            });
        }
        claimed
    }

    /// Returns why the message may have run before; `None` if it cannot have.
    pub(super) fn cause_of_extra_run(
        &self,
        message: &Message,
        grant: &Grant,
    ) -> Option<ExtraRunCause> {
        // One run has one cause: the surest comes first.
        if self.is_fail_open {
            Some(ExtraRunCause::FailOpen)
        } else if grant.reopened {
            Some(ExtraRunCause::Reset)
        } else if grant.recovery == Recovery::Takeover {
            // What is given up instead does not run.
            let runs = self.settings.after_unknown() == AfterUnknown::Retry;
            runs.then_some(ExtraRunCause::CrashTakeover)
        } else if grant.attempt == 1 && is_older_than(message, self.settings.retention) {
            Some(ExtraRunCause::Retention)
        } else if grant.attempt == 1 && self.is_older_than_a_loss(message) {
            Some(ExtraRunCause::StoreLoss)
        } else {
            None
        }
    }

    /// The longest lease of any gate in the scope, as far as this process knows.
    fn longest_lease(&self) -> Duration {
        let known = self.losses.as_ref().map(|losses| losses.longest_lease());
        known.unwrap_or_default().max(self.settings.lease)
    }

    /// Returns whether the message was produced before the store last lost records, as far as this
    /// process knows.
    fn is_older_than_a_loss(&self, message: &Message) -> bool {
        self.losses
            .as_ref()
            .and_then(|losses| losses.lost_at())
            .is_some_and(|lost_at| is_produced_before(message, lost_at))
    }
}

/// Returns whether the message was produced so long ago that its record may have been completed and
/// expired since.
///
/// The wall clock decides only a count here.
fn is_older_than(message: &Message, retention: Duration) -> bool {
    message.produced_at().is_some()
        && SystemTime::now()
            .checked_sub(retention)
            .is_some_and(|forgotten| is_produced_before(message, forgotten))
}

/// Returns whether the message was produced before `time`; `false` for a message without a
/// timestamp.
fn is_produced_before(message: &Message, time: SystemTime) -> bool {
    message
        .produced_at()
        .is_some_and(|produced_at| produced_at < time)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::Origin;

    /// A message that was produced at this time since the Unix epoch.
    fn produced_at(time: Duration) -> Message {
        let millis = i64::try_from(time.as_millis()).unwrap();
        Message::new("orders", Origin::Other("test".into()), None).with_timestamp_ms(millis)
    }

    #[test]
    fn only_messages_older_than_the_retention_may_be_forgotten() {
        let now = SystemTime::now()
            .duration_since(SystemTime::UNIX_EPOCH)
            .unwrap();
        let hour = Duration::from_secs(3_600);
        assert!(is_older_than(&produced_at(now - hour * 2), hour));
        assert!(!is_older_than(&produced_at(now - hour / 2), hour));
        assert!(!is_older_than(
            &Message::new("orders", Origin::Other("test".into()), None),
            hour
        ));
        assert!(
            !is_older_than(&produced_at(Duration::ZERO), hour),
            "a timestamp of 0 is none"
        );
    }
}
