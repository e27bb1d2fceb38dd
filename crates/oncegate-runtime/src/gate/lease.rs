//! The lease: the right to run a handler once, and how it ends.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use bytes::Bytes;
use oncegate_core::key::StoreKey;
use oncegate_core::record::{Recovery, Token, TokenTag};
use oncegate_core::rules::{Grant, Operation, ReleaseCause, Reply};
use oncegate_core::store::StoreError;
use parking_lot::Mutex;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::journal::FAIL_OPEN;
use super::leases::LeaseGuard;
use super::open::OperationGuard;
use super::pending::{REPEAT_BACKOFF, is_unknown};
use super::{Identity, OpenGate};
use crate::attempt::Attempt;
use crate::cancellation::Cancellation;
use crate::codec::ToStored;
use crate::completing::RunCompletion;
use crate::failure::BoxError;
use crate::message::Message;
use crate::observe::{Event, ExtraRunCause};
use crate::running::policy::{AttemptLimit, GiveUp, before_run};

/// The outcome of a completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "only an applied completion may be acknowledged"]
pub enum Completion {
    /// COMPLETED is in the store: acknowledge.
    Applied,
    /// The lease was lost and another owner has taken over: do not acknowledge, ask the gate again.
    NotOwner,
}

/// The right to run the handler once. Heartbeats renew it while it is held.
///
/// Dropping a lease counts as a run that ended without an outcome, like a crash: nothing is
/// written, the lease lapses, and the next attempt is flagged as recovered, because this one may
/// have had its effect. After [`discarded`](Self::discarded) it is [`discard`](Self::discard), in
/// the background.
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
    /// The time for which the record is kept once it is completed or failed.
    pub(super) retention: Duration,
    /// An operation has ended the run, or is about to.
    is_ended: AtomicBool,
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
        let completion = RunCompletion {
            key: identity.key.clone(),
            token,
            fingerprint: identity.fingerprint,
            retention: Mutex::new(gate.settings.retention),
            lease: gate.settings.lease,
            codec: gate.settings.codec,
            max_result_bytes: gate.settings.max_result_bytes,
            attempted: Mutex::default(),
        };
        let attempt = Attempt::new(
            grant,
            Cancellation::default(),
            completion,
            gate.is_fail_open,
            gate.settings.transactional.then(|| Arc::clone(&gate.stops)),
        );
        let kept = gate.lease_renewer.keep(&attempt, sent_at);
        Self {
            gate: Arc::clone(gate),
            identity: identity.clone(),
            token,
            grant,
            message: message.clone(),
            attempt,
            kept,
            granted_at: sent_at,
            retention: gate.settings.retention,
            is_ended: AtomicBool::new(false),
        }
    }

    /// The message.
    pub fn message(&self) -> &Message {
        &self.message
    }

    /// Keeps the record for this long once it is completed or failed, instead of the gate's
    /// retention. It must not be longer than that, or shorter than the lease: what is out of these
    /// bounds counts as the nearer one.
    pub fn keep_for(&mut self, retention: Duration) {
        let settings = &self.gate.settings;
        self.retention =
            retention.clamp(settings.lease.min(settings.retention), settings.retention);
        self.attempt.completion().keep_for(self.retention);
    }

    /// The attempt: its number, its fencing token, its idempotency keys for downstream systems.
    pub fn attempt(&self) -> &Attempt {
        &self.attempt
    }

    /// The record's key in the store: scope and digest. It contains nothing of the message, so it
    /// may be logged.
    pub fn store_key(&self) -> &StoreKey {
        &self.identity.key
    }

    /// Ends the heartbeats and leaves the claim to the caller with its token. Nothing is written.
    pub(super) fn detach(self) -> (Identity, Token, Grant) {
        self.is_ended.store(true, Relaxed);
        (self.identity.clone(), self.token, self.grant)
    }

    /// The tag that the record has when this lease ends it.
    pub(crate) fn tag(&self) -> TokenTag {
        self.token.tag()
    }

    pub(super) fn token(&self) -> &Token {
        &self.token
    }

    /// Returns whether earlier attempts have ended without an outcome more than once, as far as the
    /// record shows.
    pub(crate) fn is_suspect(&self) -> bool {
        const FIRST_SUSPECT_ATTEMPT: u8 = 3;
        self.grant.recovery != Recovery::None && self.grant.attempt >= FIRST_SUSPECT_ATTEMPT
    }

    /// Returns why its run must not begin; `None` if it may. `limit` is `None` where it is not
    /// looked at.
    pub(crate) fn not_to_run(&self, limit: Option<AttemptLimit>) -> Option<GiveUp> {
        // Without its store, nothing is known of earlier attempts.
        let is_unknown = self.attempt.recovered() && !self.attempt.is_fail_open();
        let after_unknown = self.gate.settings.after_unknown();
        before_run(self.attempt.number(), is_unknown, after_unknown, limit)
    }

    /// Flags the attempt as recovered: an earlier attempt of this process may have had its effect,
    /// although the record, which was lost since, does not hold this.
    pub(crate) fn mark_recovered(&self) {
        self.attempt.mark_recovered();
    }

    /// Returns how long the lease lasts from now on without a heartbeat, by this process's clock.
    pub(crate) fn remaining(&self) -> Duration {
        self.kept.remaining()
    }

    /// Returns whether so much of the lease has passed without a heartbeat that a handler must no
    /// longer begin.
    pub(crate) fn is_over(&self, now: Instant) -> bool {
        self.kept.is_over(now)
    }

    /// Notes that the handler begins: from now on its run lasts for at most `max_run`. What came
    /// before, such as the handlers of other messages that were claimed together with this one, is
    /// no part of it. A handler that is called again begins again.
    pub(crate) fn begin_run(&self, now: Instant) {
        self.attempt.begin(now);
    }

    /// Returns whether the run was cancelled for an external reason: an outage of the store, or a
    /// stop.
    pub fn was_cut_short(&self) -> bool {
        self.attempt.cancellation().is_cancelled() && !self.has_run_too_long()
    }

    fn has_run_too_long(&self) -> bool {
        let began = self.attempt.began();
        began.is_some_and(|began| began.elapsed() >= self.gate.settings.max_run)
    }

    /// Fires when the run should stop.
    pub fn cancelled(&self) -> &CancellationToken {
        self.attempt.cancellation().cancelled()
    }

    /// Fires when the run should stop and its result would not be used: another process owns the
    /// record, the run has taken too long, or its consumer stops. Then
    /// [`cancelled`](Self::cancelled) has fired, too. While the store gives no answer, that fires
    /// alone: the result is recorded later, unless another process has taken over.
    pub fn discarded(&self) -> &CancellationToken {
        self.attempt.cancellation().discarded()
    }

    /// Stores the result and completes the record. Repeats until the store has answered. If this
    /// future is dropped before, the gate continues in the background, and the caller must not
    /// acknowledge.
    ///
    /// # Errors
    /// Returns an error when the result is larger than the gate keeps, cannot be encoded, or the
    /// gate's [`large_results`](super::Gate::large_results) did not take it. The work is then
    /// recorded as done without its result: acknowledge all the same.
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

    /// Completes the record with what [`storable`](Self::storable) returned. It is the last
    /// operation of a lease: drop it then.
    pub(crate) async fn record_result(&self, result: Bytes) -> Completion {
        let result_bytes = result.len() as u64;
        let finished = self.finish(self.completion(result)).await;
        self.note_recorded(finished, result_bytes)
    }

    /// Completes the records of these leases of one gate in one call of the store. A lease whose
    /// completion has no answer comes back with the error: [`record_again`](Self::record_again)
    /// must follow.
    pub(crate) async fn record_results(
        leases: &[(&Self, &Bytes)],
    ) -> Vec<Result<Completion, StoreError>> {
        let guards: Vec<OperationGuard<'_>> = leases
            .iter()
            .map(|(lease, result)| lease.ending(lease.completion(Bytes::clone(result))))
            .collect();
        let Some(gate) = leases.first().map(|(lease, _)| &lease.gate) else {
            return Vec::new();
        };
        let replies = gate
            .execute_all(guards.iter().map(OperationGuard::command).collect())
            .await;
        guards
            .into_iter()
            .zip(leases.iter().zip(replies))
            .map(|(guard, ((lease, result), reply))| {
                guard.finished();
                reply.map(|reply| lease.note_recorded(Some(reply), result.len() as u64))
            })
            .collect()
    }

    /// Completes the record after a completion, sent at `began`, that had no answer but this error.
    pub(crate) async fn record_again(
        &self,
        result: Bytes,
        began: Instant,
        error: StoreError,
    ) -> Completion {
        let result_bytes = result.len() as u64;
        let unfinished = self.ending(self.completion(result));
        let finished = self.repeat(&unfinished, began, error).await;
        if finished.is_some() {
            unfinished.finished();
        }
        self.note_recorded(finished, result_bytes)
    }

    fn note_recorded(&self, finished: Option<Reply>, result_bytes: u64) -> Completion {
        let scope = self.gate.scope();
        match finished {
            Some(Reply::Applied { recreated }) => {
                if recreated {
                    self.gate.observe(Event::ExtraRun {
                        scope,
                        cause: ExtraRunCause::StoreLoss,
                    });
                }
                self.gate.observe(Event::Completed {
                    scope,
                    result_bytes,
                });
                self.gate.note_completed(
                    &self.identity.key,
                    &self.token,
                    (self.granted_at, self.retention),
                );
                self.note_ended("completed", "");
                Completion::Applied
            }
            Some(Reply::NotOwner | Reply::Verdict { .. }) => {
                self.gate.observe(Event::CompleteLost { scope });
                if let Some(cause) = self.kept.refused() {
                    self.gate.observe(Event::ExtraRun { scope, cause });
                }
                self.note_ended("lost", "");
                Completion::NotOwner
            }
            // The work is done, and the consumer has chosen not to wait for its record.
            None => {
                self.gate.observe(Event::ExtraRun {
                    scope,
                    cause: ExtraRunCause::FailOpen,
                });
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
            retention: self.retention,
        }
    }

    /// Releases the claim: no other owner can claim the key before `delay` has passed. `counted`
    /// tells whether the attempt counts: a failure does, a stop or an outage does not.
    ///
    /// It is tried once; if the store does not answer, the gate continues in the background.
    pub async fn release(self, delay: Duration, counted: bool, reason: &str) {
        let end = if counted {
            ReleaseCause::Failed
        } else {
            ReleaseCause::Interrupted
        };
        let operation = Operation::Release {
            token: self.token,
            delay,
            end,
            reason: reason.to_owned(),
        };
        let unfinished = self.ending(operation);
        if let Ok(reply) = unfinished.ask().await {
            unfinished.finished();
            self.note_ended(
                if matches!(reply, Reply::Applied { .. }) {
                    "released"
                } else {
                    "lost"
                },
                reason,
            );
        }
    }

    /// Ends the lease of a run that this process has thrown away, because it took too long or a
    /// stop did not wait for it, or whose outcome is unknown while its handler is paused. Its
    /// effect may have happened, so the next attempt is flagged as recovered, and what it has begun
    /// may go on, so no other owner can claim the key before the lease would have been over. The
    /// attempt counts if it took too long.
    ///
    /// It is tried once; if the store does not answer, the gate continues in the background. If
    /// this process ends before, the lease lapses, and the next attempt is counted as one after a
    /// crash.
    pub async fn discard(self, reason: &str) {
        let mut unfinished = self.ending(self.discarding(reason));
        // Until it has an answer, which this future may not live to see.
        unfinished.note_sent(true);
        match unfinished.ask().await {
            Ok(reply) => {
                unfinished.finished();
                let is_applied = matches!(reply, Reply::Applied { .. });
                if is_applied {
                    self.gate.observe(Event::ExtraRun {
                        scope: self.gate.scope(),
                        cause: ExtraRunCause::Discarded,
                    });
                }
                self.note_ended(if is_applied { "released" } else { "lost" }, reason);
            }
            Err(error) => unfinished.note_sent(is_unknown(&error)),
        }
    }

    /// Returns the operation that ends the run. From here on, the run is not ended by its drop.
    pub(super) fn ending(&self, operation: Operation) -> OperationGuard<'_> {
        self.is_ended.store(true, Relaxed);
        self.gate.guard(&self.identity.key, operation)
    }

    fn discarding(&self, reason: &str) -> Operation {
        Operation::Release {
            token: self.token,
            delay: self.remaining(),
            // Only a run that has used its own time up counts. Stops and lost deliveries are not
            // the message's doing: counted, two deployments would make a suspect of it.
            end: if self.has_run_too_long() {
                ReleaseCause::Discarded
            } else {
                ReleaseCause::Abandoned
            },
            reason: reason.to_owned(),
        }
    }

    /// Fails the record for good. Write the dead letter afterwards, then acknowledge.
    /// Repeats until the store has answered.
    pub async fn fail(self, reason: &str) -> Completion {
        let operation = Operation::Fail {
            token: self.token,
            reason: reason.to_owned(),
            retention: self.retention,
        };
        let (event, completion) = match self.finish(operation).await {
            Some(Reply::Applied { .. }) | None => ("failed", Completion::Applied),
            Some(Reply::NotOwner | Reply::Verdict { .. }) => ("lost", Completion::NotOwner),
        };
        self.note_ended(event, reason);
        completion
    }

    /// Repeats with the same token until the outcome is known. Heartbeats continue in the meantime.
    ///
    /// `None`: the gate fails open, and the lease renewer continues in the background.
    fn finish(&self, operation: Operation) -> impl Future<Output = Option<Reply>> + Send {
        let began = Instant::now();
        let unfinished = self.ending(operation);
        async move {
            let reply = match unfinished.ask().await {
                Ok(reply) => Some(reply),
                // Boxed: few calls fail, and otherwise every message's task would be larger.
                Err(error) => Box::pin(self.repeat(&unfinished, began, error)).await,
            };
            if reply.is_some() {
                unfinished.finished();
            }
            reply
        }
    }

    /// Repeats the operation after an error.
    async fn repeat(
        &self,
        unfinished: &OperationGuard<'_>,
        began: Instant,
        mut error: StoreError,
    ) -> Option<Reply> {
        let mut failures = 0;
        loop {
            if let Operation::Complete { .. } = unfinished.operation() {
                self.kept.completing();
            }
            self.gate.observe(Event::StoreError {
                scope: self.gate.scope(),
                class: error.class(),
            });
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

impl Drop for Lease {
    /// A run that is dropped with its task is none that has crashed.
    fn drop(&mut self) {
        if self.is_ended.load(Relaxed) || self.gate.is_fail_open {
            return;
        }
        let operation = if self.attempt.began().is_none() {
            // No handler had it, so there is nothing to recover.
            Operation::Release {
                token: self.token,
                delay: Duration::ZERO,
                end: ReleaseCause::Interrupted,
                reason: NOT_BEGUN.to_owned(),
            }
        } else if self.attempt.cancellation().is_discarded() {
            self.discarding(DROPPED)
        } else {
            return;
        };
        self.gate
            .lease_renewer
            .finish_later(self.identity.key.clone(), operation);
    }
}

/// The reason of a claim that was dropped before its handler began.
const NOT_BEGUN: &str = "the claim was dropped before its handler began";

/// The reason of a run that was dropped after it was discarded.
const DROPPED: &str = "the handler was dropped";

/// The work is recorded as done, but duplicates will not get its result.
#[derive(Debug, thiserror::Error)]
#[error("completed without its result: {reason}")]
pub struct ResultNotKept {
    reason: BoxError,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::MemoryStore;
    use crate::gate::{Entry, Gate};
    use crate::message::Origin;
    use oncegate_core::key::Key;

    /// Every message's task contains these futures, and a thousand of them have to fit in a core's
    /// cache: rare code belongs in a box.
    #[tokio::test]
    async fn what_every_message_s_task_carries_is_small() {
        const MOST_BYTES: usize = 768;
        let gate = Gate::new("billing", Key::message_key(), MemoryStore::new());
        let message = Message::new("orders", Origin::Other("one".into()), None).with_key("4711");
        let entering = gate.enter(&message);
        assert!(
            size_of_val(&entering) <= MOST_BYTES,
            "`enter` has {} bytes",
            size_of_val(&entering)
        );
        let Entry::Granted(lease) = entering.await.unwrap() else {
            panic!("the key is new")
        };
        let completing = lease.complete(&());
        assert!(
            size_of_val(&completing) <= MOST_BYTES,
            "`complete` has {} bytes",
            size_of_val(&completing)
        );
        assert_eq!(completing.await.unwrap(), Completion::Applied);
    }
}
