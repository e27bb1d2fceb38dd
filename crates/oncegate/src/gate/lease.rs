//! The right to run a handler, and how it ends.

use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use oncegate_core::key::StoreKey;
use oncegate_core::record::{Recovery, Token};
use oncegate_core::rules::{Grant, Operation, Reply};
use oncegate_core::store::StoreError;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::journal::FAIL_OPEN;
use super::lease_renewer::{LeaseGuard, REPEAT_BACKOFF};
use super::{Claimed, Gate, GateError, Identity, OpenGate, Unfetched};
use crate::attempt::Attempt;
use crate::codec::{FromStored, ToStored};
use crate::failure::BoxError;
use crate::message::Message;
use crate::observe::{Event, ExtraRunCause};
use crate::transaction::Unit;

/// What a message gets at the gate.
#[derive(Debug)]
#[non_exhaustive]
pub enum Entry {
    /// Do the work, then [`complete`](Lease::complete), and only then acknowledge.
    Granted(Lease),
    /// The work is done: acknowledge.
    Completed(Stored),
    /// Another worker does it, or its retry is not due: acknowledge nothing, ask again.
    Busy {
        /// When it is worth asking again.
        retry_in: Duration,
    },
    /// It was given up: put it with the dead letters unless it is there, then acknowledge.
    Failed {
        /// Why.
        reason: String,
        /// Whether it is durably in the dead letters.
        handed_over: bool,
    },
    /// The key is known with other content. Never answer it with the other message's result.
    Mismatch,
}

/// The result of a completed message, as it is stored.
#[derive(Clone, PartialEq, Eq)]
pub struct Stored {
    bytes: Bytes,
    /// Why a large result is not among them.
    lost: Option<Arc<str>>,
}

impl Stored {
    /// The result.
    ///
    /// # Errors
    /// When it is of another type, was not kept, or is missing or damaged in the gate's
    /// [`large_results`](Gate::large_results).
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

/// What became of a completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "only a held completion may be acknowledged"]
pub enum Completion {
    /// COMPLETED is in the store: acknowledge.
    Applied,
    /// The lease was lost and somebody else has taken over: acknowledge nothing, ask the gate again.
    NotOwner,
}

impl Gate {
    /// Asks for the right to do the work of `message`.
    ///
    /// While an answer of the store is unknown it is asked again with the same token, for up to a lease. A
    /// dropped future gives back what it may have been granted.
    ///
    /// # Errors
    /// When the gate does not open, no key can be made, or the store or the result store is unavailable:
    /// acknowledge nothing.
    pub async fn enter(&self, message: &Message) -> Result<Entry, GateError> {
        let gate = self.opened().await?;
        let identity = gate.identify(message)?;
        let claim = gate.new_claim();
        let mut failures = 0;
        let claimed = loop {
            match gate.claim(message, &identity, claim).await {
                Ok(claimed) => break claimed,
                Err(StoreError::Unknown { .. }) if claim.first_sent_at.elapsed() < gate.settings.lease => {
                    failures += 1;
                    tokio::time::sleep(REPEAT_BACKOFF.wait(failures, gate.fraction())).await;
                }
                Err(error) => {
                    gate.abandon(&identity, claim.token);
                    return Err(error.into());
                }
            }
        };
        Ok(match claimed {
            Claimed::Granted(lease) => Entry::Granted(lease),
            Claimed::Completed(stored) => match gate.fetch(&stored).await {
                Ok(bytes) => Entry::Completed(Stored { bytes, lost: None }),
                Err(Unfetched::Lost(why)) => {
                    Entry::Completed(Stored { bytes: stored, lost: Some(why.to_string().into()) })
                }
                Err(Unfetched::NoAnswer(error)) => return Err(error.into()),
            },
            Claimed::Busy(retry_in) => Entry::Busy { retry_in },
            Claimed::Failed { reason, handed_over } => Entry::Failed { reason, handed_over },
            Claimed::Mismatch => Entry::Mismatch,
        })
    }
}

/// The right to run the handler once. Heartbeats keep it alive while it is held.
///
/// A lease that is dropped is a run that ended without a word, like a crash: nothing is written, the lease
/// lapses, and the next attempt is told that this one may have had its effect.
#[derive(Debug)]
pub struct Lease {
    pub(super) gate: Arc<OpenGate>,
    pub(super) identity: Identity,
    pub(super) token: Token,
    grant: Grant,
    pub(super) message: Message,
    pub(super) attempt: Attempt,
    pub(super) kept: LeaseGuard,
    pub(super) granted_at: Instant,
}

impl Lease {
    pub(super) fn new(
        gate: &Arc<OpenGate>,
        message: &Message,
        identity: &Identity,
        token: Token,
        grant: Grant,
        sent_at: Instant,
    ) -> Self {
        let kept = gate.lease_renewer.keep(identity.key.clone(), token, sent_at);
        let unit = Unit {
            key: identity.key.clone(),
            token,
            fingerprint: identity.fingerprint,
            retention: gate.settings.retention,
            lease: gate.settings.lease,
            codec: gate.settings.codec,
            max_result_bytes: gate.settings.max_result_bytes,
            attempted: Mutex::default(),
        };
        let attempt = Attempt::new(grant, kept.cancelled().clone(), unit, gate.is_fail_open);
        Self {
            gate: Arc::clone(gate),
            identity: identity.clone(),
            token,
            grant,
            message: message.clone(),
            attempt,
            kept,
            granted_at: sent_at,
        }
    }

    /// The message.
    pub fn message(&self) -> &Message {
        &self.message
    }

    /// The attempt: its number, its fencing token, its idempotency keys for downstream systems.
    pub fn attempt(&self) -> &Attempt {
        &self.attempt
    }

    /// The record's key in the store: scope and digest. It tells nothing of the message, so it may be logged.
    pub fn store_key(&self) -> &StoreKey {
        &self.identity.key
    }

    pub(super) fn token(&self) -> &Token {
        &self.token
    }

    /// Whether earlier attempts have ended without a word more than once, as far as the record tells.
    pub(crate) fn is_suspect(&self) -> bool {
        const FIRST_SUSPECT_ATTEMPT: u8 = 3;
        self.grant.recovery != Recovery::None && self.grant.attempt >= FIRST_SUSPECT_ATTEMPT
    }

    /// Tells the handler that an earlier attempt of this process may have had its effect, although the record, which was
    /// lost meanwhile, does not know of it.
    pub(crate) fn mark_recovered(&mut self) {
        self.attempt.mark_recovered();
    }

    /// How long the lease lasts from now on without a heartbeat, by this process's clock.
    pub(crate) fn remaining(&self) -> Duration {
        self.kept.remaining()
    }

    /// Whether so much of the lease is gone without a heartbeat that a handler must not begin any more.
    pub(crate) fn is_over(&self) -> bool {
        self.kept.is_over()
    }

    /// Whether the run was told to stop for a reason that is not its own: an outage of the store, or a stop.
    pub(crate) fn was_cut_short(&self) -> bool {
        self.kept.cancelled().is_cancelled() && self.granted_at.elapsed() < self.gate.settings.max_run
    }

    /// Fires when the run should stop.
    pub fn cancelled(&self) -> &CancellationToken {
        self.kept.cancelled()
    }

    /// Stores the result. Repeats until the store has answered; if this future is dropped before, the gate
    /// goes on in the background, and the caller must acknowledge nothing.
    ///
    /// # Errors
    /// When the result is larger than the gate keeps, cannot be encoded, or the gate's
    /// [`large_results`](Gate::large_results) did not take it. The work is recorded as done by then, without its
    /// result: acknowledge all the same.
    pub fn complete<T: ToStored + ?Sized>(
        self,
        result: &T,
    ) -> impl Future<Output = Result<Completion, ResultNotKept>> + Send + use<T> {
        let encoded = result.to_stored(self.gate.settings.codec);
        async move {
            let storable = self.storable(encoded).await;
            match (self.record_result(storable.stored).await, storable.trouble) {
                (Completion::Applied, Some(reason)) => Err(ResultNotKept { reason }),
                (completion, _) => Ok(completion),
            }
        }
    }

    /// Stores what [`storable`](Self::storable) has made of the result. It is the last that is asked of a lease: drop it then.
    pub(crate) async fn record_result(&self, result: Bytes) -> Completion {
        let result_bytes = result.len() as u64;
        let finished = self.finish(self.completion(result)).await;
        let scope = self.gate.scope();
        match finished {
            Some(Reply::Applied { recreated }) => {
                if recreated {
                    self.gate.observe(Event::ExtraRun { scope, cause: ExtraRunCause::StoreLoss });
                }
                self.gate.observe(Event::Completed { scope, result_bytes });
                self.gate.note_completed(&self.identity.key, &self.token);
                self.note_ended("completed", "");
                Completion::Applied
            }
            Some(Reply::NotOwner | Reply::Verdict { .. }) => {
                self.gate.observe(Event::CompleteLost { scope });
                self.note_ended("lost", "");
                Completion::NotOwner
            }
            // The work is done, and the consumer has chosen not to wait for its record.
            None => {
                self.gate.observe(Event::ExtraRun { scope, cause: ExtraRunCause::FailOpen });
                self.note_ended("completed", FAIL_OPEN);
                Completion::Applied
            }
        }
    }

    pub(super) fn completion(&self, result: Bytes) -> Operation {
        Operation::Complete {
            token: self.token,
            fingerprint: self.identity.fingerprint,
            result,
            retention: self.gate.settings.retention,
        }
    }

    /// Gives the work back: nobody may claim it before `delay` has passed. `counted` says whether the
    /// attempt counts: a failure does, a stop or an outage does not.
    ///
    /// It is tried once; if the store does not answer, the gate goes on in the background.
    pub async fn release(self, delay: Duration, counted: bool, reason: &str) {
        let operation = Operation::Release { token: self.token, delay, counted, reason: reason.to_owned() };
        let unfinished = Unfinished::new(&self, operation);
        if let Ok(reply) = unfinished.ask().await {
            unfinished.finished();
            self.note_ended(if matches!(reply, Reply::Applied { .. }) { "released" } else { "lost" }, reason);
        }
    }

    /// Gives the work up for good. Put the message with the dead letters afterwards, then acknowledge.
    /// Repeats until the store has answered.
    pub async fn fail(self, reason: &str) -> Completion {
        let retention = self.gate.settings.retention;
        let operation = Operation::Fail { token: self.token, reason: reason.to_owned(), retention };
        let (event, completion) = match self.finish(operation).await {
            Some(Reply::Applied { .. }) | None => ("failed", Completion::Applied),
            Some(Reply::NotOwner | Reply::Verdict { .. }) => ("lost", Completion::NotOwner),
        };
        self.note_ended(event, reason);
        completion
    }

    /// Repeats with the same token until the outcome is known. Heartbeats go on meanwhile.
    ///
    /// `None`: the gate fails open, and the lease_renewer goes on in the background.
    fn finish(&self, operation: Operation) -> impl Future<Output = Option<Reply>> + Send {
        let (unfinished, began) = (Unfinished::new(self, operation), Instant::now());
        async move {
            let reply = match unfinished.ask().await {
                Ok(reply) => Some(reply),
                // On the heap: few calls fail, and every message's task would carry the room for it.
                Err(error) => Box::pin(self.repeat(&unfinished, began, error)).await,
            };
            if reply.is_some() {
                unfinished.finished();
            }
            reply
        }
    }

    /// Goes on asking after an error.
    async fn repeat(
        &self,
        unfinished: &Unfinished<'_>,
        began: Instant,
        mut error: StoreError,
    ) -> Option<Reply> {
        let mut failures = 0;
        loop {
            if let Operation::Complete { .. } = unfinished.operation {
                self.kept.completing();
            }
            self.gate.observe(Event::StoreError { scope: self.gate.scope(), class: error.class() });
            if self.gate.fails_open(began, &error) {
                return None;
            }
            failures += 1;
            tokio::time::sleep(REPEAT_BACKOFF.wait(failures, self.gate.fraction())).await;
            match unfinished.ask().await {
                Ok(reply) => return Some(reply),
                Err(again) => error = again,
            }
        }
    }
}

/// Leaves the operation to the lease_renewer when the one who waits for it goes away.
pub(super) struct Unfinished<'a> {
    lease: &'a Lease,
    operation: Operation,
    finished: bool,
}

impl<'a> Unfinished<'a> {
    pub(super) fn new(lease: &'a Lease, operation: Operation) -> Self {
        Self { lease, operation, finished: false }
    }

    /// Asks the store for it, once.
    fn ask(&self) -> impl Future<Output = Result<Reply, StoreError>> + Send {
        self.lease.gate.execute(&self.lease.identity.key, self.operation.clone())
    }

    pub(super) fn finished(mut self) {
        self.finished = true;
    }
}

impl Drop for Unfinished<'_> {
    fn drop(&mut self) {
        if !self.finished {
            let Lease { gate, identity, .. } = self.lease;
            gate.lease_renewer.finish_later(identity.key.clone(), self.operation.clone());
        }
    }
}

/// The work is recorded as done, but duplicates will not get its result.
#[derive(Debug, thiserror::Error)]
#[error("completed without its result: {reason}")]
pub struct ResultNotKept {
    reason: BoxError,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::Origin;
    use crate::{Key, MemoryStore};

    /// Every message's task carries these futures, and a thousand of them have to stay in a core's cache: what happens
    /// seldom belongs on the heap.
    #[tokio::test]
    async fn what_every_message_s_task_carries_is_small() {
        const MOST_BYTES: usize = 768;
        let gate = Gate::new("billing", Key::message_key(), MemoryStore::new());
        let message = Message::new("orders", Origin::Other("one".into()), None).with_key("4711");
        let entering = gate.enter(&message);
        assert!(size_of_val(&entering) <= MOST_BYTES, "`enter` has {} bytes", size_of_val(&entering));
        let Entry::Granted(lease) = entering.await.unwrap() else { panic!("the key is new") };
        let completing = lease.complete(&());
        assert!(size_of_val(&completing) <= MOST_BYTES, "`complete` has {} bytes", size_of_val(&completing));
        assert_eq!(completing.await.unwrap(), Completion::Applied);
    }
}
