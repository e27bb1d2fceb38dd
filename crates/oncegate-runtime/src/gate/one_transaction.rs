//! A run whose claim and completion are one transaction.

use std::sync::Arc;
use std::time::Duration;

use oncegate_core::key::{Scope, StoreKey};
use oncegate_core::record::{Recovery, State, Token, TokenTag};
use oncegate_core::rules::Grant;
use oncegate_core::store::{Epoch, ScopeDescriptor, StoreError};
use parking_lot::Mutex;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::warn;

use super::{GateError, Identity, OpenGate};
use crate::attempt::Attempt;
use crate::cancellation::Cancellation;
use crate::completing::RunCompletion;
use crate::journal::JournalEntry;
use crate::message::Message;
use crate::observe::Event;

/// The grant of a transaction whose key has no record: the first attempt.
const FIRST: Grant = Grant {
    attempt: 1,
    recovery: Recovery::None,
    fencing_token: None,
    reopened: false,
};

/// The right to run a handler in a transaction that holds its key. There is no lease: the
/// transaction protects the key.
#[derive(Debug)]
pub(crate) struct TransactionRun {
    gate: Arc<OpenGate>,
    identity: Identity,
    token: Token,
    message: Message,
    attempt: Attempt,
    on_grant: Option<OnGrant>,
    began: Instant,
}

/// A callback for the moment when a transaction holds its key: the store answers, however long the
/// handler takes.
pub(crate) struct OnGrant(Box<dyn Fn() + Send + Sync>);

impl OnGrant {
    pub(crate) fn new(tell: impl Fn() + Send + Sync + 'static) -> Self {
        Self(Box::new(tell))
    }
}

impl std::fmt::Debug for OnGrant {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("OnGrant")
    }
}

impl OpenGate {
    /// A run of the key's first attempt, in a transaction that lasts for up to `limit`.
    ///
    /// # Errors
    /// The store has lost records, and the loss is not accepted.
    pub(crate) fn transaction_run(
        self: &Arc<Self>,
        message: &Message,
        identity: &Identity,
        limit: Duration,
        on_grant: Option<OnGrant>,
    ) -> Result<TransactionRun, StoreError> {
        if let Some(refused) = self.refusal() {
            self.observe(Event::StoreError {
                scope: self.scope(),
                class: refused.class(),
            });
            return Err(refused);
        }
        let token = self.entropy.token();
        let completion = RunCompletion {
            key: identity.key.clone(),
            token,
            fingerprint: identity.fingerprint,
            retention: Mutex::new(self.settings.retention),
            lease: limit,
            codec: self.settings.codec,
            max_result_bytes: self.settings.max_result_bytes,
            attempted: Mutex::default(),
        };
        let attempt = Attempt::new(
            FIRST,
            Cancellation::under(&self.transactions),
            completion,
            false,
            Some(Arc::clone(&self.stops)),
        );
        Ok(TransactionRun {
            gate: Arc::clone(self),
            identity: identity.clone(),
            token,
            message: message.clone(),
            attempt,
            on_grant,
            began: Instant::now(),
        })
    }

    /// The namespace of its keys.
    pub(crate) fn scope_name(&self) -> &Scope {
        &self.scope
    }

    /// A random number for a session.
    pub(crate) fn random_number(&self) -> i64 {
        let [a, b, c, d, e, f, g, h, ..] = *self.entropy.token().as_bytes();
        i64::from_be_bytes([a, b, c, d, e, f, g, h])
    }

    /// Returns whether a descriptor that was read in another way is the scope's in the gate's
    /// store. Its epoch is random, so another database has another one.
    pub(crate) async fn is_described_by(
        &self,
        descriptor: Option<&str>,
    ) -> Result<bool, GateError> {
        let Some(ours) = self.store.descriptor(&self.scope).await? else {
            return Ok(false);
        };
        let ours = self.epoch_in(&ours)?;
        let theirs = descriptor.map(|text| self.epoch_in(text)).transpose()?;
        Ok(theirs == Some(ours))
    }

    fn epoch_in(&self, descriptor: &str) -> Result<Epoch, StoreError> {
        Ok(ScopeDescriptor::parse(&self.scope, descriptor)?.epoch)
    }

    /// Returns whether the record of the key was completed by the owner with this tag.
    pub(crate) async fn is_completed_by(
        &self,
        identity: &Identity,
        tag: TokenTag,
    ) -> Result<bool, StoreError> {
        let found = self
            .store
            .read(vec![identity.key.clone()])
            .await
            .into_iter()
            .next();
        let found =
            found.unwrap_or_else(|| Err(StoreError::unknown("the store gave no answer")))?;
        let state = found.map(|found| found.record.state);
        Ok(matches!(state, Some(State::Completed { by, .. }) if by == tag))
    }

    /// Counts the committed run of a message as an extra one, if there may have been one before.
    ///
    /// It is counted with the commit: a transaction that is rolled back, and repeated, leaves
    /// nothing, and a claim that follows it counts its own grant.
    fn note_extra_run(&self, message: &Message) {
        if let Some(cause) = self.cause_of_extra_run(message, &FIRST) {
            self.observe(Event::ExtraRun {
                scope: self.scope(),
                cause,
            });
        }
    }

    /// Notes that the transaction of this message, which was not answered, turned out to be
    /// committed.
    pub(crate) fn note_transaction_completed(
        &self,
        message: &Message,
        identity: &Identity,
        tag: TokenTag,
    ) {
        self.note_extra_run(message);
        self.observe(Event::Completed {
            scope: self.scope(),
            result_bytes: 0,
        });
        self.notes
            .note(|| JournalEntry::now("completed").key(&identity.key).run(tag));
    }
}

impl TransactionRun {
    pub(crate) fn gate(&self) -> &OpenGate {
        &self.gate
    }

    pub(crate) fn message(&self) -> &Message {
        &self.message
    }

    pub(crate) fn attempt(&self) -> &Attempt {
        &self.attempt
    }

    pub(crate) fn store_key(&self) -> &StoreKey {
        &self.identity.key
    }

    /// Fires when the run must end, and is rolled back.
    pub(crate) fn discarded(&self) -> &CancellationToken {
        self.attempt.cancellation().discarded()
    }

    /// The tag of the record that its transaction writes.
    pub(crate) fn tag(&self) -> TokenTag {
        self.token.tag()
    }

    /// Notes that the transaction holds the key.
    ///
    /// # Errors
    /// The store has noticed a loss of records meanwhile: roll back.
    pub(crate) fn granted(&self) -> Result<(), StoreError> {
        let gate = &self.gate;
        let scope = self.gate.scope();
        self.on_grant.iter().for_each(|OnGrant(tell)| tell());
        if gate.is_grant_in_doubt() {
            let refused = gate
                .refusal()
                .unwrap_or_else(|| StoreError::refused("the store has lost records"));
            gate.observe(Event::StoreError {
                scope,
                class: refused.class(),
            });
            return Err(refused);
        }
        gate.observe(Event::StoreCalled {
            scope,
            operation: "claim",
            took: self.began.elapsed(),
        });
        gate.observe(Event::Claimed {
            scope,
            verdict: "granted",
        });
        gate.notes.note(|| self.entry("claimed", ""));
        Ok(())
    }

    /// Notes that the transaction is committed. `took` is the time of the commit.
    pub(crate) fn committed(&self, took: Duration) {
        let gate = &self.gate;
        let scope = self.gate.scope();
        let attempted = self.attempt.completion().lock().take().unwrap_or_default();
        if let Some(error) = attempted.not_kept {
            gate.observe(Event::ResultNotKept { scope });
            warn!(scope, origin = %self.message.origin(), %error, "the work is recorded without its result");
        }
        gate.note_extra_run(&self.message);
        gate.observe(Event::StoreCalled {
            scope,
            operation: "complete",
            took,
        });
        gate.observe(Event::Completed {
            scope,
            result_bytes: attempted.result_bytes,
        });
        let kept = (self.began, gate.settings.retention);
        gate.note_completed(&self.identity.key, &self.token, kept);
        gate.notes.note(|| self.entry("completed", ""));
    }

    /// Notes that the transaction was rolled back, and why.
    pub(crate) fn rolled_back(&self, reason: &str) {
        self.gate.notes.note(|| self.entry("lost", reason));
    }

    fn entry(&self, event: &str, reason: &str) -> JournalEntry {
        let took_ms = u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX);
        let entry = JournalEntry::now(event)
            .key(&self.identity.key)
            .attempt(self.attempt.number())
            .origin(self.message.origin())
            .run(self.token.tag())
            .why(reason);
        JournalEntry {
            took_ms: (event != "claimed").then_some(took_ms),
            ..entry
        }
    }
}
