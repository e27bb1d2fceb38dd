//! Asking for the right to run, and what the store answers.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use oncegate_core::record::{Recovery, Token};
use oncegate_core::rules::{Operation, Reply, Verdict};
use oncegate_core::store::StoreError;
use tokio::time::Instant;

use super::{Identity, Lease, OpenGate};
use crate::message::Message;
use crate::observe::{Event, ExtraRunCause};

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
    /// Asks once. After an error, ask again with the same `token`: the claim may have been granted.
    ///
    /// A future that is dropped before its answer came leaves no lease behind that nobody knows of: the
    /// keeper releases whatever this token was or will be granted.
    pub(crate) async fn claim(
        self: &Arc<Self>,
        message: &Message,
        identity: &Identity,
        token: Token,
    ) -> Result<Claimed, StoreError> {
        let sent_at = Instant::now();
        let operation = Operation::Claim {
            token,
            lease: self.settings.lease,
            fingerprint: identity.fingerprint,
            fenced: self.settings.fenced,
        };
        let abandoned = Abandoned { gate: self, identity, token, armed: true };
        let reply = self.execute(&identity.key, operation).await;
        abandoned.disarm();
        let scope = self.scope();
        let verdict = match reply {
            Ok(Reply::Verdict { verdict, uncompared }) => {
                if uncompared {
                    self.observe(Event::FingerprintUncompared { scope });
                }
                verdict
            }
            Ok(Reply::Held { .. } | Reply::Lost) => {
                return Err(StoreError::unknown("the store answered a claim with something else"));
            }
            Err(error) => {
                self.observe(Event::StoreError { scope, class: error.class() });
                return Err(error);
            }
        };
        let (word, claimed) = match verdict {
            Verdict::Granted(grant) => {
                if grant.recovery == Recovery::Takeover {
                    self.observe(Event::ExtraRun { scope, cause: ExtraRunCause::CrashTakeover });
                }
                ("granted", Claimed::Granted(Lease::new(self, message, identity, token, grant, sent_at)))
            }
            Verdict::Completed { result } => ("completed", Claimed::Completed(result)),
            Verdict::Busy { retry_in } => ("busy", Claimed::Busy(retry_in)),
            Verdict::Failed { reason, handed_over } => ("failed", Claimed::Failed { reason, handed_over }),
            Verdict::Mismatch => ("mismatch", Claimed::Mismatch),
        };
        self.observe(Event::Claimed { scope, verdict: word });
        Ok(claimed)
    }

    /// Gives back, in the background, what a claim with this token may have been granted.
    pub(crate) fn abandon(&self, identity: &Identity, token: Token) {
        self.keeper.release_later(identity.key.clone(), token);
    }
}

/// Releases in the background unless it is disarmed.
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
