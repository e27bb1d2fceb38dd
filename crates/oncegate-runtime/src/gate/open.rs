//! An open gate: its checked settings and store, and its operations for a message.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use bytes::Bytes;
use oncegate_core::key::{
    CompiledFingerprint, CompiledKey, ContentMark, Fingerprint, KeyError, PrepareError, Scope,
    StoreKey,
};
use oncegate_core::record::{State, Token, TokenTag};
use oncegate_core::rules::{Operation, Reply};
use oncegate_core::store::{
    Checkup, Command, Completed, Promise, Store, StoreError, Survives, Upkeep,
};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::GateSettings;
use super::journal::Notes;
use super::lease_renewer::LeaseRenewer;
use super::loss::LossWatch;
use super::store_position::StorePosition;
use crate::entropy::Entropy;
use crate::journal::JournalEntry;
use crate::message::Message;
use crate::observe::{Event, Observer};
use crate::results::{Reference, ResultStore};

/// A gate whose settings and store have been checked.
#[derive(Debug)]
pub(crate) struct OpenGate {
    pub(super) scope: Scope,
    pub(super) key: CompiledKey,
    pub(super) fingerprint: Option<CompiledFingerprint>,
    /// The marks of contents, where there is no fingerprint.
    pub(super) content_mark: ContentMark,
    /// The number of duplicates with another content.
    pub(super) other_contents: AtomicU64,
    pub(super) settings: GateSettings,
    /// `None`: messages always wait for the store.
    pub(super) fail_open_after: Option<Duration>,
    pub(super) store: Arc<dyn Store>,
    pub(super) results: Option<Arc<dyn ResultStore>>,
    pub(super) notes: Notes,
    pub(super) observer: Arc<dyn Observer>,
    pub(super) entropy: Arc<Entropy>,
    pub(super) lease_renewer: LeaseRenewer,
    /// `None` when the gate uses no store.
    pub(super) losses: Option<Arc<LossWatch>>,
    pub(super) checkup: Checkup,
    /// Cancels the runs without a claim.
    pub(super) transactions: CancellationToken,
    /// Set when no handler may begin any more.
    pub(super) stops: Arc<AtomicBool>,
    /// `true` if it uses no store: what it grants may run, or have run, elsewhere.
    pub(super) is_fail_open: bool,
}

/// The identity of a message: its key and fingerprint.
#[derive(Clone, Debug)]
pub(crate) struct Identity {
    pub(crate) key: StoreKey,
    pub(crate) fingerprint: Option<Fingerprint>,
}

impl Identity {
    /// Returns whether the content is marked only, so that another one is counted, not refused.
    pub(super) fn has_mark(&self) -> bool {
        self.fingerprint.as_ref().is_some_and(Fingerprint::is_mark)
    }
}

impl OpenGate {
    pub(crate) fn scope(&self) -> &str {
        self.scope.as_str()
    }

    pub(crate) fn settings(&self) -> &GateSettings {
        &self.settings
    }

    pub(crate) fn checkup(&self) -> &Checkup {
        &self.checkup
    }

    /// The row of `docs/STORES.md` that applies.
    pub(crate) fn promise(&self) -> Promise {
        if self.settings.transactional {
            Promise::SAME_TRANSACTION
        } else {
            self.checkup.survives.promise()
        }
    }

    pub(crate) fn observe(&self, event: Event<'_>) {
        self.observer.observe(event);
    }

    /// Returns whether keys may need something from elsewhere: see [`prepare`](Self::prepare).
    pub(crate) fn has_format(&self) -> bool {
        self.key.has_format()
    }

    /// Gets what the key of this message needs from elsewhere, such as its schema.
    ///
    /// # Errors
    /// When it does not come now. It says nothing about the message.
    pub(crate) async fn prepare(&self, message: &Message) -> Result<(), PrepareError> {
        self.key.prepare(message).await?;
        match &self.fingerprint {
            Some(fingerprint) => fingerprint.prepare(message).await,
            None => Ok(()),
        }
    }

    pub(crate) fn identify(&self, message: &Message) -> Result<Identity, KeyError> {
        Ok(self.identify_with_tenant(message)?.0)
    }

    /// Like `identify`, with a number for the message's tenant, if the tenant is part of the key.
    pub(crate) fn identify_with_tenant(
        &self,
        message: &Message,
    ) -> Result<(Identity, Option<u64>), KeyError> {
        if let Some(what) = message.defect() {
            return Err(KeyError::BadInput { what });
        }
        let (key, tenant) = self.key.derive_with_tenant(message.route(), message)?;
        let fingerprint = match &self.fingerprint {
            Some(fingerprint) => Some(fingerprint.derive(message)?),
            None => self.content_mark.of(&key, message),
        };
        Ok((Identity { key, fingerprint }, tenant))
    }

    /// Counts a duplicate with another content than the message that was handled.
    pub(super) fn note_other_content(&self) {
        self.other_contents.fetch_add(1, Relaxed);
        self.observe(Event::OtherContent {
            scope: self.scope(),
        });
    }

    /// Returns what the marks of contents have found, in words, if it is anything.
    pub(crate) fn other_contents(&self) -> Option<String> {
        let count = self.other_contents.load(Relaxed);
        (count > 0).then(|| {
            format!("{count} duplicates had another content than the message that was handled (one key in 16 is looked at): if their id is used again for something else, they were lost; put what tells them apart into the key, or set `fingerprint`")
        })
    }

    /// The source of its random numbers.
    pub(crate) fn entropy(&self) -> Arc<Entropy> {
        Arc::clone(&self.entropy)
    }

    /// A random number from 0 up to 1, for jitter.
    pub(crate) fn fraction(&self) -> f64 {
        self.entropy.fraction()
    }

    /// The stored results of the keys that are completed with the same fingerprint. It claims
    /// nothing.
    ///
    /// An error counts as "not completed", and so does a result that must be fetched first: such a
    /// key is claimed afterwards.
    pub(crate) async fn completed(&self, identities: &[Identity]) -> Vec<Option<Bytes>> {
        let keys = identities
            .iter()
            .map(|identity| identity.key.clone())
            .collect();
        let found = self.store.prefetch(keys).await;
        let completed = identities.iter().zip(found).map(|(identity, found)| {
            let Completed {
                result,
                fingerprint,
            } = found.ok()??;
            if fingerprint != identity.fingerprint {
                let record = fingerprint?;
                if !(record.is_mark() && identity.has_mark()) {
                    return None;
                }
                self.note_other_content();
            }
            // In a replay, nearly all duplicates are answered here, and no claim finds them.
            if let Some(losses) = &self.losses {
                losses.witnesses.note_duplicate(&identity.key);
            }
            (!Reference::is(&result)).then_some(result)
        });
        completed.collect()
    }

    /// Marks a record that the owner with this tag has failed as handed over to the dead letters.
    pub(crate) async fn hand_over(&self, key: &StoreKey, by: TokenTag) -> Result<(), StoreError> {
        // `NotOwner` means that the record is gone or was reopened in the meantime: nothing is left
        // to mark.
        if let Reply::Applied { .. } = self.execute(key, Operation::HandOver { by }).await? {
            self.notes
                .note(|| JournalEntry::now("handed_over").key(key));
        }
        Ok(())
    }

    /// Reopens the record of a failed key, so that its message runs again. A record that has
    /// changed meanwhile stays: the next claim finds out what it is.
    pub(crate) async fn reopen_failed(&self, key: &StoreKey) -> Result<(), StoreError> {
        let found = self.store.read(vec![key.clone()]).await.into_iter().next();
        let found =
            found.unwrap_or_else(|| Err(StoreError::unknown("the store gave no answer")))?;
        let Some(expected) = found.map(|found| found.record) else {
            return Ok(());
        };
        if !matches!(expected.state, State::Failed { .. }) {
            return Ok(());
        }
        if let Reply::Applied { .. } = self.execute(key, Operation::Reopen { expected }).await? {
            self.notes.note(|| {
                JournalEntry::now("reopened")
                    .key(key)
                    .why("its dead letter has come back")
            });
        }
        Ok(())
    }

    /// The position that a broker stores with its commits, where a loss of the store has no effect.
    /// `None`: the store does not outlive this process, so a stored position could only raise false
    /// alarms.
    pub(crate) fn store_position(&self) -> Option<StorePosition> {
        let losses = self
            .losses
            .as_ref()
            .filter(|_| self.checkup.survives != Survives::Process)?;
        Some(losses.position())
    }

    /// Compares the store with what a broker has stored: a store that is older, or another one, has
    /// lost records.
    ///
    /// # Errors
    /// When the store does not answer. Nothing was compared then.
    pub(crate) async fn compare_with(&self, kept: &[StorePosition]) -> Result<(), StoreError> {
        match &self.losses {
            Some(losses) => losses.compare_with(kept).await,
            None => Ok(()),
        }
    }

    /// Notes that this process has completed the key's record, in an attempt that began at `begun`,
    /// and that it is kept for `retention`.
    pub(super) fn note_completed(
        &self,
        key: &StoreKey,
        token: &Token,
        (begun, retention): (Instant, Duration),
    ) {
        if let Some(losses) = &self.losses {
            losses.note_completed();
            losses
                .witnesses
                .note_completed(key, token, begun, retention);
        }
    }

    /// Notes whether the store has answered.
    fn note_reply(&self, reply: &Result<Reply, StoreError>) {
        if let (Err(error), Some(losses)) = (reply, &self.losses)
            && error.is_away()
        {
            losses.witnesses.note_unanswered();
        }
    }

    /// Returns why no claim is granted; `None` if claims are granted.
    pub(crate) fn refusal(&self) -> Option<StoreError> {
        self.losses.as_ref().and_then(|losses| losses.refusal())
    }

    /// Returns whether a grant came from a store that has noticed a loss in the meantime.
    pub(super) fn is_grant_in_doubt(&self) -> bool {
        self.losses
            .as_ref()
            .is_some_and(|losses| losses.refusal().is_some() || losses.is_behind())
    }

    /// Returns the shard of the store that holds `key`.
    pub(crate) fn shard(&self, key: &StoreKey) -> u64 {
        self.store.shard(key)
    }

    /// Returns whether the store has not answered since `began` for so long that the gate fails
    /// open.
    pub(super) fn fails_open(&self, began: Instant, error: &StoreError) -> bool {
        // A record that cannot be read still exists, and a refusal requires a change by an
        // operator.
        error.is_away()
            && self
                .fail_open_after
                .is_some_and(|patience| began.elapsed() >= patience)
    }

    /// Since when the store has answered none of the gate's own checks, with its last error; `None`
    /// while it answers.
    pub(crate) fn unanswered_checks(&self, now: Instant) -> Option<(Duration, String)> {
        self.losses.as_ref()?.unanswered(now)
    }

    /// The store's report of its own upkeep.
    pub(crate) fn upkeep(&self) -> Upkeep {
        self.store.upkeep()
    }

    /// The least time that is left of a running lease; the whole lease when none runs.
    pub(crate) fn least_lease_remaining(&self) -> Duration {
        self.lease_renewer.least_remaining()
    }

    /// The least time that a running handler has left until `max_run`; the whole of it when none
    /// runs.
    pub(crate) fn least_run_remaining(&self) -> Duration {
        self.lease_renewer.least_run_remaining()
    }

    /// Waits until no operation is left whose caller is gone, such as the release of an abandoned
    /// claim, and no loss of records that only this process knows.
    pub(crate) async fn operations_finished(&self) {
        self.lease_renewer.operations_finished().await;
        if let Some(losses) = &self.losses {
            losses.losses_written().await;
        }
    }

    /// Lets no handler begin any more: the consumer stops.
    pub(crate) fn stop(&self) {
        self.stops.store(true, Relaxed);
    }

    /// Returns whether no handler may begin any more.
    pub(crate) fn is_stopped(&self) -> bool {
        self.stops.load(Relaxed)
    }

    /// Cancels every running handler.
    pub(crate) fn cancel_all(&self) {
        self.lease_renewer.cancel_all();
        self.transactions.cancel();
    }

    /// Sends operations of one kind to the store in one call. Returns the replies in their order.
    pub(super) async fn execute_all(
        &self,
        commands: Vec<Command>,
    ) -> Vec<Result<Reply, StoreError>> {
        let count = commands.len();
        let Some(called) = commands.first().map(|command| command.operation.as_str()) else {
            return Vec::new();
        };
        let sent_at = Instant::now();
        let mut replies = self.store.execute(commands).await;
        // A store answers every command; one that does not has not answered this one.
        replies.resize_with(count, || {
            Err(StoreError::unknown("the store gave no answer"))
        });
        replies.iter().for_each(|reply| self.note_reply(reply));
        if !self.is_fail_open {
            let took = sent_at.elapsed();
            self.observe(Event::StoreCalled {
                scope: self.scope(),
                operation: called,
                took,
            });
        }
        replies
    }

    /// Sends one operation to the store.
    pub(super) fn execute(
        &self,
        key: &StoreKey,
        operation: Operation,
    ) -> impl Future<Output = Result<Reply, StoreError>> + Send {
        let called = operation.as_str();
        let sent_at = Instant::now();
        // Not through the pointer's own `Store`, which would wrap the store's future in another
        // one.
        let asked = self.store.as_ref().execute_one(Command {
            key: key.clone(),
            operation,
        });
        async move {
            let reply = asked.await;
            self.note_reply(&reply);
            if !self.is_fail_open {
                let took = sent_at.elapsed();
                self.observe(Event::StoreCalled {
                    scope: self.scope(),
                    operation: called,
                    took,
                });
            }
            reply
        }
    }

    /// Returns the operation as one whose outcome must become known.
    pub(super) fn guard<'a>(
        &'a self,
        key: &'a StoreKey,
        operation: Operation,
    ) -> OperationGuard<'a> {
        OperationGuard {
            gate: self,
            key,
            operation,
            may_be_executed: false,
            finished: false,
        }
    }
}

/// Passes the operation to the lease renewer if the caller is dropped before the outcome is known.
pub(super) struct OperationGuard<'a> {
    gate: &'a OpenGate,
    key: &'a StoreKey,
    operation: Operation,
    may_be_executed: bool,
    finished: bool,
}

impl OperationGuard<'_> {
    pub(super) fn operation(&self) -> &Operation {
        &self.operation
    }

    /// Sends the operation to the store, once.
    pub(super) fn ask(&self) -> impl Future<Output = Result<Reply, StoreError>> + Send {
        self.gate.execute(self.key, self.operation.clone())
    }

    pub(super) fn command(&self) -> Command {
        Command {
            key: self.key.clone(),
            operation: self.operation.clone(),
        }
    }

    /// Notes whether a request for it that had no answer may have been executed.
    pub(super) fn note_sent(&mut self, may_be_executed: bool) {
        self.may_be_executed = may_be_executed;
    }

    pub(super) fn finished(mut self) {
        self.finished = true;
    }
}

impl Drop for OperationGuard<'_> {
    fn drop(&mut self) {
        if !self.finished {
            self.gate
                .lease_renewer
                .repeat_later(self.command(), self.may_be_executed);
        }
    }
}
