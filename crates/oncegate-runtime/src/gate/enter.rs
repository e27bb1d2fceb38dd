//! The claim of a key, for loops of the user's own.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use oncegate_core::store::StoreError;
use tokio::time::Instant;

use super::pending::REPEAT_BACKOFF;
use super::{Claimed, Completion, Gate, GateError, Lease, OpenClaim, OpenGate, Unfetched};
use crate::codec::FromStored;
use crate::failure::BoxError;
use crate::message::Message;
use crate::results::Reference;
use crate::running::policy::outcome_unknown;

/// The outcome of a claim.
#[derive(Debug)]
pub enum Entry {
    /// Do the work, then [`complete`](Lease::complete), and only then acknowledge.
    Granted(Lease),
    /// The work is done: acknowledge.
    Completed(Stored),
    /// Another worker runs it, or its retry is not due: do not acknowledge, ask again.
    Busy {
        /// The time after which it is worth asking again.
        retry_in: Duration,
    },
    /// The message was given up: write a dead letter unless there is one, then acknowledge.
    Failed {
        /// The reason.
        reason: String,
        /// `true` if the dead letter is durably written.
        handed_over: bool,
    },
    /// The key is known with other content. Never answer it with the other message's result.
    Mismatch,
}

/// The stored result of a completed message.
#[derive(Clone, PartialEq, Eq)]
pub struct Stored {
    bytes: Bytes,
    /// The reason why a large result is not available.
    lost: Option<Arc<str>>,
}

impl Stored {
    /// Decodes the result.
    ///
    /// # Errors
    /// Returns an error when the result is of another type, was not kept, or is missing or damaged
    /// in the gate's [`large_results`](Gate::large_results).
    pub fn decode<T: FromStored>(&self) -> Result<T, BoxError> {
        match &self.lost {
            Some(why) => Err(why.to_string().into()),
            None => T::from_stored(&self.bytes),
        }
    }
}

impl fmt::Debug for Stored {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&crate::codec::describe_stored(&self.bytes))
    }
}

/// Gives up a message whose earlier attempt ended without an outcome.
async fn give_up(lease: Lease) -> Entry {
    let reason = outcome_unknown(lease.attempt().number(), None);
    tracing::warn!(key = %lease.store_key(), reason, "the message is not run again");
    match lease.fail(&reason).await {
        Completion::Applied => Entry::Failed {
            reason,
            handed_over: false,
        },
        // Another owner has taken over, and its outcome counts.
        Completion::NotOwner => Entry::Busy {
            retry_in: Duration::from_millis(1),
        },
    }
}

impl Gate {
    /// Claims the key of `message`.
    ///
    /// While an answer of the store is unknown, the claim is sent again with the same token, for up
    /// to a lease. A dropped future releases what it may have been granted.
    ///
    /// With [`AfterUnknown::GiveUp`](super::AfterUnknown::GiveUp), a message whose earlier attempt
    /// ended without an outcome is [`Failed`](Entry::Failed).
    ///
    /// # Errors
    /// Returns an error when the gate cannot be opened, no key can be made, or the store, the
    /// result store or the schema registry is unavailable: do not acknowledge.
    pub async fn enter(&self, message: &Message) -> Result<Entry, GateError> {
        let gate = self.opened().await?;
        if gate.has_format() {
            // Boxed: few gates have one, and otherwise every message's future would be larger.
            Box::pin(gate.prepare(message)).await?;
        }
        // What has been used takes no room in what follows.
        let claimed = {
            let mut claim = {
                let identity = gate.identify(message)?;
                gate.new_claim(&identity)
            };
            gate.send_until_known(&mut claim, message).await?
        };
        Ok(match claimed {
            // The caller runs under it at once.
            // Boxed: few messages come here, and every message's future would be larger.
            Claimed::Granted(lease) if lease.not_to_run(None).is_some() => {
                Box::pin(give_up(lease)).await
            }
            // Its answer came so late that another owner may take over at any moment: nothing
            // begins under it, and its drop releases it.
            Claimed::Granted(lease)
                if !lease.attempt().is_fail_open() && lease.is_over(Instant::now()) =>
            {
                Entry::Busy {
                    retry_in: Duration::from_millis(1),
                }
            }
            Claimed::Granted(lease) => {
                lease.begin_run(Instant::now());
                Entry::Granted(lease)
            }
            // Boxed for the same reason: few results are in a result store.
            Claimed::Completed(stored) if Reference::is(&stored) => {
                Entry::Completed(Box::pin(gate.fetch_stored(stored)).await?)
            }
            Claimed::Completed(bytes) => Entry::Completed(Stored { bytes, lost: None }),
            Claimed::Busy(retry_in) => Entry::Busy { retry_in },
            Claimed::Failed {
                reason,
                handed_over,
                ..
            } => Entry::Failed {
                reason,
                handed_over,
            },
            Claimed::Mismatch => Entry::Mismatch,
        })
    }
}

impl OpenGate {
    /// Sends the claim until the store's answer is known, for up to a lease.
    ///
    /// # Errors
    /// The last error of the store.
    pub(crate) async fn send_until_known(
        &self,
        claim: &mut OpenClaim,
        message: &Message,
    ) -> Result<Claimed, StoreError> {
        let mut failures = 0;
        loop {
            match claim.send(message).await {
                Err(StoreError::Unknown { .. }) if claim.age() < self.settings.lease => {
                    failures += 1;
                    let pause = REPEAT_BACKOFF.wait(failures, self.fraction());
                    Box::pin(tokio::time::sleep(pause)).await;
                }
                answered => return answered,
            }
        }
    }

    /// Returns the result that a record holds, or refers to.
    ///
    /// # Errors
    /// When the result store does not answer now.
    pub(crate) async fn fetch_stored(&self, stored: Bytes) -> Result<Stored, GateError> {
        match self.fetch(&stored).await {
            Ok(bytes) => Ok(Stored { bytes, lost: None }),
            Err(Unfetched::Lost(why)) => Ok(Stored {
                bytes: stored,
                lost: Some(why.to_string().into()),
            }),
            Err(Unfetched::NoAnswer(error)) => Err(error.into()),
        }
    }
}
