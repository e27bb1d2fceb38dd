//! Detects that the store has lost records of a scope, and refuses claims until the loss is
//! accepted.
//!
//! There are four kinds of evidence, each for losses that the others cannot show. The scope's
//! descriptor: it is gone, or another one, when the store was emptied, and its sequence number is
//! lower when an earlier state was restored. Marker records, one in each shard of a store that has
//! several. Records that this process has completed, or has found completed. And the position that
//! a broker stores with its commits, where a loss of the store has no effect.
//!
//! A halt is stored in the descriptor, so that every process of the scope obeys it, whenever it
//! starts. Before it is stored, another look must show the same loss: the first answer may have
//! come from a copy of the store that lags.
//!
//! Checks overlap: an answer is judged only when it was asked for after what is known now.

mod finding;
mod records;
mod writing;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use oncegate_core::key::Scope;
use oncegate_core::record::whole_millis;
use oncegate_core::store::{DeadLetterStop, Epoch, Pause, ScopeDescriptor, Store, StoreError};
use parking_lot::{Mutex, MutexGuard};
use tokio::time::Instant;

use self::finding::{Evidence, Loss, Noticed, is_settled, millis_of, time_of};
use super::GateError;
use super::scope_descriptor::{Comparison, at_start, compare, halted};
use super::settings::OnStoreLoss;
use super::store_position::StorePosition;
use super::witnesses::Witnesses;
use crate::entropy::Entropy;
use crate::health::FailureLog;
use crate::observe::{Event, Observer};

/// The time between two checks of a gate for a loss, give or take half of it.
pub(super) const LOOK_INTERVAL: Duration = Duration::from_secs(2);
/// The number of times that one check asks again because another one has learned something
/// meanwhile.
const MAX_QUESTIONS: u32 = 8;

/// Watches one scope of a store for losses.
#[derive(Debug)]
pub(super) struct LossWatch {
    scope: Scope,
    store: Arc<dyn Store>,
    on_loss: OnStoreLoss,
    observer: Arc<dyn Observer>,
    entropy: Arc<Entropy>,
    /// The longest lease in the scope, in milliseconds, as the descriptor had it last.
    longest_lease_ms: AtomicU64,
    halted: AtomicBool,
    /// An operator has paused the scope, as the descriptor said last.
    paused: AtomicBool,
    /// A message was completed since the sequence number was last raised.
    completed: AtomicBool,
    pub(super) witnesses: Witnesses,
    /// The checks that the store has not answered.
    unanswered: FailureLog,
    state: Mutex<LossState>,
}

/// The state of knowledge when the store was asked.
#[derive(Clone, Copy, Debug)]
struct AskedAt {
    changes: u64,
    epoch: Epoch,
}

/// The result of judging an answer of the store.
#[derive(Debug)]
enum Taken {
    /// Something was learned since the question: ask again.
    Overtaken,
    /// Nothing is lost; and whether the sequence number has risen.
    Same(Box<ScopeDescriptor>, bool),
    Halted,
    Accepted,
    /// Records are lost, with the reason.
    Lost(&'static str),
}

/// The name of a check that was not answered.
const CHECK: &str = "check";

#[derive(Debug)]
struct LossState {
    /// The descriptor that was last read from the store, or that this process wrote.
    known: ScopeDescriptor,
    /// The sequence number of the previous check: a store that shows a lower one was restored to an
    /// earlier state.
    confirmed_sequence: u64,
    /// The number of changes of `known`: an answer that was asked for before a change is not judged
    /// by it.
    changes: u64,
    /// The reason why no claim is granted.
    halt: Option<Arc<str>>,
    lost_at: Option<SystemTime>,
    /// The losses that are not written to the store yet. Each is written, or withdrawn, by itself.
    unwritten: Vec<Loss>,
    /// The last loss that the store itself has reported.
    reported: Option<SystemTime>,
    /// The broker's position when it contradicted the store: kept at the broker until the loss is
    /// accepted.
    evidence: Option<StorePosition>,
    /// The checks of records.
    looks: u32,
    /// The checks of the descriptor alone since the last check of records.
    skipped: u32,
}

impl LossWatch {
    /// Reads the scope's descriptor, or writes the first one. Afterwards its longest lease is at
    /// least `lease`.
    ///
    /// # Errors
    /// Returns an error when the store does not answer, or holds the records of another key
    /// specification.
    pub(super) async fn open(
        scope: Scope,
        store: Arc<dyn Store>,
        keys: &str,
        lease: Duration,
        on_loss: OnStoreLoss,
        observer: Arc<dyn Observer>,
        entropy: Arc<Entropy>,
    ) -> Result<Self, GateError> {
        let first = ScopeDescriptor {
            begun_at_ms: millis_of(SystemTime::now()),
            longest_lease_ms: whole_millis(lease),
            ..ScopeDescriptor::new(keys, Epoch::from_bits(entropy.bits()))
        };
        let noticed = store.loss();
        let known = at_start(&*store, &scope, &first).await?;
        let settled = noticed
            .filter(|loss| is_settled(loss.at, &known, &first))
            .map(|loss| loss.at);
        if settled.is_some() {
            // The gate that would have said so is gone. Every other gate of the store refuses
            // claims by itself.
            store.accept_loss();
        }
        let state = LossState {
            confirmed_sequence: known.sequence,
            changes: 0,
            lost_at: known.lost_at_ms.map(time_of),
            // The first look finds the halt, and reports it.
            known: ScopeDescriptor {
                halt: None,
                ..known
            },
            halt: None,
            unwritten: Vec::new(),
            reported: settled,
            evidence: None,
            looks: 0,
            skipped: 0,
        };
        let watch = Self {
            scope,
            store,
            on_loss,
            observer,
            entropy,
            longest_lease_ms: AtomicU64::new(state.known.longest_lease_ms),
            halted: AtomicBool::new(false),
            paused: AtomicBool::new(false),
            completed: AtomicBool::new(false),
            witnesses: Witnesses::default(),
            unanswered: FailureLog::default(),
            state: Mutex::new(state),
        };
        let found = watch.lock().known.clone();
        watch.note_pause(&found);
        watch.look().await;
        Ok(watch)
    }

    /// Locks the state. Every change leaves it consistent, so a panic elsewhere does no harm.
    fn lock(&self) -> MutexGuard<'_, LossState> {
        self.state.lock()
    }

    /// The longest lease of any gate in the scope.
    ///
    /// A gate with a longer one may have opened the scope since the last check. Until the next one,
    /// what is left of its leases may be cut, and its next heartbeat extends them again.
    pub(super) fn longest_lease(&self) -> Duration {
        Duration::from_millis(self.longest_lease_ms.load(Ordering::Relaxed))
    }

    /// Returns why no claim is granted; `None` if claims are granted.
    pub(super) fn refusal(&self) -> Option<StoreError> {
        if !self.halted.load(Ordering::Acquire) {
            return None;
        }
        self.lock().halt.clone().map(StoreError::refused)
    }

    /// The stop of a consumer at its dead-letter limit, as the descriptor held it last.
    pub(super) fn dead_letter_stop(&self) -> Option<DeadLetterStop> {
        self.lock().known.dead_letter_stop.clone()
    }

    /// Returns whether the circuit breaker of a process was open, as the descriptor said last.
    pub(super) fn is_breaker_marked_open(&self) -> bool {
        self.lock().known.breaker_open
    }

    /// Returns whether an operator has paused the scope, as the descriptor said last.
    pub(super) fn is_paused(&self) -> bool {
        self.paused.load(Ordering::Relaxed)
    }

    /// The operator's pause, as the descriptor said last.
    pub(super) fn pause(&self) -> Option<Pause> {
        self.lock().known.pause.clone()
    }

    /// Returns when records were last lost.
    pub(super) fn lost_at(&self) -> Option<SystemTime> {
        self.lock().lost_at
    }

    /// Notes that a message was completed: the next check raises the sequence number.
    pub(super) fn note_completed(&self) {
        if !self.completed.load(Ordering::Relaxed) {
            self.completed.store(true, Ordering::Relaxed);
        }
    }

    /// The position that a broker is to store with its commits.
    pub(super) fn position(&self) -> StorePosition {
        let state = self.lock();
        let confirmed = StorePosition {
            epoch: state.known.epoch,
            sequence: state.confirmed_sequence,
        };
        state.evidence.unwrap_or(confirmed)
    }

    /// Compares the store with the positions that a broker has stored.
    ///
    /// The store is read after them: since it was read last, other processes may have completed
    /// messages and committed.
    ///
    /// # Errors
    /// When the store does not answer. Nothing was compared then.
    pub(super) async fn compare_with(&self, kept: &[StorePosition]) -> Result<(), StoreError> {
        if kept.is_empty() {
            return Ok(());
        }
        self.try_look().await?;
        let known = self.lock().known.clone();
        let ahead: Vec<StorePosition> = kept
            .iter()
            .filter(|kept| kept.is_ahead_of(&known))
            .copied()
            .collect();
        let Some(first) = ahead.first() else {
            return Ok(());
        };
        self.lock().evidence = Some(*first);
        let mut epochs: Vec<Epoch> = Vec::new();
        for kept in ahead.iter().filter(|kept| kept.epoch != known.epoch) {
            if !epochs.contains(&kept.epoch) {
                epochs.push(kept.epoch);
            }
        }
        let reason = if epochs.is_empty() {
            "the store is older than the offsets that the consumer group has committed"
        } else {
            "the consumer group has committed offsets with another store, or before this one was emptied"
        };
        let evidence = Evidence::Positions(ahead);
        self.lost(Loss::new(known.epoch, reason, epochs, evidence))
            .await;
        Ok(())
    }

    /// Checks for a loss once. If the store does not answer, this is noted, and the next check asks
    /// again.
    pub(super) async fn look(&self) {
        match self.try_look().await {
            Ok(()) => self.unanswered.succeeded(CHECK),
            Err(error) => self
                .unanswered
                .failed(Instant::now().into_std(), CHECK, &error),
        }
    }

    /// Since when the store has answered no check, with its last error; `None` while it answers.
    pub(super) fn unanswered(&self, now: Instant) -> Option<(Duration, String)> {
        let failing = self.unanswered.at(now.into_std()).into_iter().next()?;
        Some((failing.lasts, failing.error))
    }

    async fn try_look(&self) -> Result<(), StoreError> {
        // A known loss is written first: until then, other processes grant claims.
        let unwritten = self.lock().unwritten.first().cloned();
        if let Some(loss) = unwritten {
            return self.write(&loss).await.map(drop);
        }
        if let Some(told) = self.store.loss().filter(|loss| self.is_news(loss.at)) {
            let epoch = self.lock().known.epoch;
            self.lost(Loss::new(epoch, &told.reason, Vec::new(), Evidence::Told))
                .await;
            return Ok(());
        }
        for _ in 0..MAX_QUESTIONS {
            let AskedAt { changes, epoch } = self.asked_at();
            let held = self.store.descriptor(&self.scope).await?;
            let held = held
                .as_deref()
                .map(|held| ScopeDescriptor::parse(&self.scope, held))
                .transpose();
            let lost = match held {
                Ok(held) => match self.take(changes, held) {
                    Taken::Overtaken => continue,
                    Taken::Halted => None,
                    Taken::Lost(why) => {
                        Some(Loss::new(epoch, why, Vec::new(), Evidence::Descriptor))
                    }
                    Taken::Same(held, is_raised) => {
                        self.advance(*held, is_raised).await;
                        self.missing_record().await
                    }
                    Taken::Accepted => self.missing_record().await,
                },
                Err(unreadable) => Some(Loss::new(
                    epoch,
                    &unreadable.to_string(),
                    Vec::new(),
                    Evidence::Descriptor,
                )),
            };
            if let Some(loss) = lost {
                self.lost(loss).await;
            }
            return Ok(());
        }
        Err(StoreError::unavailable(
            "the checks of this process keep overtaking each other",
        ))
    }

    fn asked_at(&self) -> AskedAt {
        let state = self.lock();
        AskedAt {
            changes: state.changes,
            epoch: state.known.epoch,
        }
    }

    /// Judges an answer that was asked for at `changes`, and takes over what it shows.
    fn take(&self, changes: u64, held: Option<ScopeDescriptor>) -> Taken {
        let mut state = self.lock();
        if state.changes != changes {
            return Taken::Overtaken;
        }
        match compare(&state.known, state.confirmed_sequence, held) {
            Comparison::Lost(why) => Taken::Lost(why),
            Comparison::Adopt(held) => {
                let is_halted = held.halt.is_some();
                self.adopt(state, held, Noticed::Elsewhere);
                if is_halted {
                    Taken::Halted
                } else {
                    Taken::Accepted
                }
            }
            Comparison::Same(held) => {
                let is_raised = held.sequence > state.known.sequence;
                self.note_longest_lease(&held);
                self.note_pause(&held);
                state.confirmed_sequence = held.sequence;
                state.learn(held.clone());
                Taken::Same(Box::new(held), is_raised)
            }
        }
    }

    /// Returns whether this loss is new: not reported before, and not the one that the descriptor
    /// holds.
    fn is_news(&self, at: SystemTime) -> bool {
        let mut state = self.lock();
        let is_reported = state.reported.replace(at) == Some(at);
        !is_reported
            && state
                .known
                .lost_at_ms
                .is_none_or(|known| known < millis_of(at))
    }

    /// Returns whether the store itself has noticed a loss that this gate has not checked yet.
    pub(super) fn is_behind(&self) -> bool {
        self.store
            .loss()
            .is_some_and(|loss| self.lock().reported != Some(loss.at))
    }

    /// Takes over the descriptor from the store: halts with it, or continues with it.
    fn adopt(&self, mut state: MutexGuard<'_, LossState>, held: ScopeDescriptor, noticed: Noticed) {
        state.confirmed_sequence = held.sequence;
        state.lost_at = held.lost_at_ms.map(time_of).or(state.lost_at);
        state.looks = 0;
        let was_halted = state.known.halt.is_some();
        // Another process has noticed it first.
        let is_news = noticed == Noticed::Elsewhere
            && !was_halted
            && (held.halt.is_some() || held.epoch != state.known.epoch);
        if let Some(halt) = &held.halt {
            state.lost_at = Some(time_of(halt.at_ms));
            state.halt = Some(halted(&self.scope, &halt.reason));
            self.halted.store(true, Ordering::Release);
            if !was_halted {
                tracing::error!(
                    scope = self.scope.as_str(),
                    reason = halt.reason,
                    "the scope is halted because the store has lost records; no message runs until `oncegate accept loss`"
                );
            }
        } else {
            tracing::warn!(
                scope = self.scope.as_str(),
                "a loss of records was accepted; messages whose records are lost run again"
            );
            state.halt = None;
            state.evidence = None;
            self.witnesses.clear();
            self.store.accept_loss();
            self.halted.store(false, Ordering::Release);
        }
        self.note_longest_lease(&held);
        self.note_pause(&held);
        state.learn(held);
        drop(state);
        if is_news {
            self.observer.observe(Event::StoreLost {
                scope: self.scope.as_str(),
            });
        }
    }

    fn note_longest_lease(&self, held: &ScopeDescriptor) {
        self.longest_lease_ms
            .fetch_max(held.longest_lease_ms, Ordering::Relaxed);
    }

    /// Follows an operator who has paused or resumed the scope.
    fn note_pause(&self, held: &ScopeDescriptor) {
        let is_paused = held.pause.is_some();
        if self.paused.swap(is_paused, Ordering::Relaxed) == is_paused {
            return;
        }
        let scope = self.scope.as_str();
        match &held.pause {
            Some(Pause { reason, by, .. }) => tracing::warn!(
                scope,
                by,
                reason,
                "an operator has paused the scope: no attempt begins until `oncegate resume`"
            ),
            None => tracing::info!(scope, "an operator has resumed the scope"),
        }
    }

    /// Replaces `expected` by `next`, and returns whether the store holds `next` now.
    async fn replace(
        &self,
        expected: Option<&ScopeDescriptor>,
        next: &ScopeDescriptor,
    ) -> Result<bool, StoreError> {
        let expected = expected.map(ScopeDescriptor::to_text).transpose()?;
        let next = next.to_text()?;
        Ok(self
            .store
            .describe(&self.scope, expected.as_deref(), &next)
            .await?
            == next)
    }
}

impl LossState {
    /// Takes over a descriptor that the store holds.
    fn learn(&mut self, held: ScopeDescriptor) {
        if self.known != held {
            self.known = held;
            self.changes = self.changes.wrapping_add(1);
        }
    }

    /// Notes that the store holds `next` in place of `before`, unless another check has learned of
    /// a later one.
    fn follow(&mut self, before: &ScopeDescriptor, next: ScopeDescriptor) {
        if self.known == *before {
            self.learn(next);
        }
    }
}

#[cfg(test)]
mod tests;
