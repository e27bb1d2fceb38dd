//! Claims a key, and turns the store's answer into the claim outcome.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use oncegate_core::record::{Recovery, Token};
use oncegate_core::rules::{Grant, Operation, Reply, Verdict};
use oncegate_core::store::StoreError;
use tokio::time::Instant;

use super::{Identity, Lease, OpenGate};
use crate::message::Message;
use crate::observe::{Event, ExtraRunCause};

/// One claim, however often it is sent.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Claim {
    pub(crate) token: Token,
    /// A repeat does not renew the lease: it may have begun when the first one arrived.
    pub(crate) first_sent_at: Instant,
}

/// The answer to one claim.
#[derive(Debug)]
pub(crate) enum Claimed {
    Granted(Lease),
    Completed(Bytes),
    Busy(Duration),
    Failed { reason: String, handed_over: bool },
    Mismatch,
}

impl OpenGate {
    /// Sends the claim once. After an error, send the same claim again: it may have been granted.
    ///
    /// A future that is dropped before the answer leaves no unknown lease behind: the lease renewer releases whatever
    /// this token was or will be granted.
    pub(crate) async fn claim(
        self: &Arc<Self>,
        message: &Message,
        identity: &Identity,
        claim: Claim,
    ) -> Result<Claimed, StoreError> {
        let Claim { token, first_sent_at } = claim;
        if let Some(refused) = self.refusal() {
            self.observe(Event::StoreError { scope: self.scope(), class: refused.class() });
            return Err(refused);
        }
        let operation = Operation::Claim {
            token,
            lease: self.settings.lease,
            fingerprint: identity.fingerprint,
            fenced: self.settings.fenced,
        };
        let abandoned = Abandoned { gate: self, identity, token, armed: true };
        let reply = self.execute(&identity.key, operation).await;
        let scope = self.scope();
        let is_granted = matches!(&reply, Ok(Reply::Verdict { verdict: Verdict::Granted(_), .. }));
        if is_granted && self.is_grant_in_doubt() {
            // The grant is released, as after a dropped future.
            let refused = self.refusal().unwrap_or_else(|| StoreError::refused("the store has lost records"));
            self.observe(Event::StoreError { scope, class: refused.class() });
            return Err(refused);
        }
        abandoned.disarm();
        let verdict = match reply {
            Ok(Reply::Verdict { verdict, uncompared }) => {
                if uncompared {
                    self.observe(Event::FingerprintUncompared { scope });
                }
                verdict
            }
            Ok(Reply::Applied { .. } | Reply::NotOwner) => {
                return Err(StoreError::unknown("the store answered a claim with something else"));
            }
            Err(error) => {
                self.observe(Event::StoreError { scope, class: error.class() });
                return Err(error);
            }
        };
        let (word, claimed) = match verdict {
            Verdict::Granted(grant) => {
                if let Some(cause) = self.cause_of_extra_run(message, &grant) {
                    self.observe(Event::ExtraRun { scope, cause });
                }
                let lease = Lease::new(self, message, identity, token, grant, first_sent_at);
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
            Verdict::Failed { reason, handed_over } => ("failed", Claimed::Failed { reason, handed_over }),
            Verdict::Mismatch => ("mismatch", Claimed::Mismatch),
        };
        if !self.is_fail_open {
            self.observe(Event::Claimed { scope, verdict: word });
        }
        Ok(claimed)
    }

    /// Why the message may have run before; `None` if it cannot have.
    fn cause_of_extra_run(&self, message: &Message, grant: &Grant) -> Option<ExtraRunCause> {
        let is_lost = || self.lost_at().is_some_and(|lost_at| is_produced_before(message, lost_at));
        if self.is_fail_open {
            Some(ExtraRunCause::FailOpen)
        } else if grant.reopened {
            Some(ExtraRunCause::Reset)
        } else if grant.recovery == Recovery::Takeover {
            Some(ExtraRunCause::CrashTakeover)
        } else if grant.attempt == 1 && is_older_than(message, self.settings.retention) {
            Some(ExtraRunCause::Retention)
        } else {
            (grant.attempt == 1 && is_lost()).then_some(ExtraRunCause::StoreLoss)
        }
    }

    /// When the store last lost records, as far as this process knows.
    fn lost_at(&self) -> Option<SystemTime> {
        self.losses.as_ref().and_then(|losses| losses.lost_at())
    }

    /// Releases, in the background, what a claim with this token may have been granted.
    pub(crate) fn abandon(&self, identity: &Identity, token: Token) {
        self.lease_renewer.release_later(identity.key.clone(), token);
    }
}

/// Whether the message was produced so long ago that its record may have been completed and expired since.
///
/// The wall clock decides only a count here.
fn is_older_than(message: &Message, retention: Duration) -> bool {
    let forgotten = || SystemTime::now().checked_sub(retention);
    message.timestamp_ms().is_some()
        && forgotten().is_some_and(|forgotten| is_produced_before(message, forgotten))
}

/// Whether the message was produced before `time`; `false` for a message without a timestamp.
fn is_produced_before(message: &Message, time: SystemTime) -> bool {
    let produced = message.timestamp_ms().and_then(|millis| u64::try_from(millis).ok());
    produced.is_some_and(|millis| SystemTime::UNIX_EPOCH + Duration::from_millis(millis) < time)
}

/// Releases the claim in the background unless it is disarmed.
struct Abandoned<'a> {
    gate: &'a OpenGate,
    identity: &'a Identity,
    token: Token,
    armed: bool,
}

impl Abandoned<'_> {
    fn disarm(mut self) {
        self.armed = false;
    }
}

impl Drop for Abandoned<'_> {
    fn drop(&mut self) {
        if self.armed {
            self.gate.abandon(self.identity, self.token);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::Origin;

    #[test]
    fn only_messages_older_than_the_retention_may_have_been_forgotten() {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap();
        let hour = Duration::from_secs(3_600);
        let message = |age: Duration| {
            let millis = i64::try_from((now - age).as_millis()).unwrap();
            Message::new("orders", Origin::Other("test".into()), None).with_timestamp_ms(millis)
        };
        assert!(is_older_than(&message(hour * 2), hour));
        assert!(!is_older_than(&message(hour / 2), hour));
        assert!(!is_older_than(&Message::new("orders", Origin::Other("test".into()), None), hour));
    }
}
