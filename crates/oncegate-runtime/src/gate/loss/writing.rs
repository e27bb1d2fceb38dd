//! Looks again after a loss was found, and writes it into the scope's descriptor, so that every
//! process obeys it.

use std::sync::atomic::Ordering;
use std::time::Duration;

use oncegate_core::store::{Epoch, ScopeDescriptor, StoreError};

use super::LossWatch;
use super::finding::{Evidence, Loss, Noticed, time_of};
use crate::backoff::Backoff;
use crate::gate::scope_descriptor::{Comparison, MAX_WRITES, compare, halted};
use crate::gate::settings::OnStoreLoss;
use crate::gate::{shard_markers, witnesses};
use crate::observe::Event;

/// The delays between tries to write a loss before a stop ends.
const WRITE_BACKOFF: Backoff = Backoff::new(Duration::from_millis(100), Duration::from_secs(2));

/// The result of writing a loss.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Written {
    /// The descriptor holds it, or its acceptance.
    Settled,
    /// Another look does not show it.
    Withdrawn,
}

impl LossWatch {
    /// Records a loss: halts this process if so configured, and writes the loss to the store if
    /// another look shows it as well.
    pub(super) async fn lost(&self, loss: Loss) {
        {
            let mut state = self.lock();
            if state.known.epoch != loss.found_in {
                // Another check has adopted an accepted loss since the question: this one was about
                // the records before.
                return;
            }
            state.lost_at = Some(time_of(loss.at_ms));
            if !state.unwritten.iter().any(|noted| noted.is_same(&loss)) {
                state.unwritten.push(loss.clone());
            }
            if self.on_loss == OnStoreLoss::Halt {
                state.halt = Some(halted(&self.scope, &loss.reason));
                self.halted.store(true, Ordering::Release);
            }
        }
        let written = self.write(&loss).await;
        if matches!(written, Ok(Written::Withdrawn)) {
            return;
        }
        let scope = self.scope.as_str();
        tracing::error!(scope, reason = loss.reason, on_store_loss = ?self.on_loss, "the store has lost records");
        self.observer.observe(Event::StoreLost { scope });
        if let Err(error) = written {
            tracing::warn!(scope, %error, "the loss of records could not be written to the store; trying again");
        }
    }

    /// Waits until each loss that this process has noticed is in the store, or is withdrawn. A
    /// process that stops before would take it along: the next one may find no evidence of its own.
    pub(in crate::gate) async fn losses_written(&self) {
        let mut failures = 0_u32;
        loop {
            let Some(loss) = self.lock().unwritten.first().cloned() else {
                return;
            };
            let Err(error) = self.write(&loss).await else {
                continue;
            };
            failures = failures.saturating_add(1);
            tracing::warn!(
                scope = self.scope.as_str(),
                %error,
                "the loss of records could not be written to the store; the stop waits for it"
            );
            tokio::time::sleep(WRITE_BACKOFF.wait(failures, self.entropy.fraction())).await;
        }
    }

    /// Looks again, and writes the halt, or the epoch in which work continues, into the descriptor.
    pub(super) async fn write(&self, loss: &Loss) -> Result<Written, StoreError> {
        for _ in 0..MAX_WRITES {
            let known = self.lock().known.clone();
            let text = self.store.descriptor(&self.scope).await?;
            let held = text
                .as_deref()
                .map(|held| ScopeDescriptor::parse(&self.scope, held))
                .transpose()?;
            if let Some(held) = held.clone().filter(|held| loss.is_written_in(held)) {
                self.settle(loss, held);
                return Ok(Written::Settled);
            }
            if !self.is_still_shown(loss, &known, held.as_ref()).await? {
                self.withdraw(loss);
                return Ok(Written::Withdrawn);
            }
            let next_epoch = (self.on_loss == OnStoreLoss::Continue)
                .then(|| Epoch::from_bits(self.entropy.bits()));
            let next = loss.written_into(held.as_ref(), &known, next_epoch);
            if self.replace(held.as_ref(), &next).await? {
                self.settle(loss, next);
                return Ok(Written::Settled);
            }
        }
        Err(StoreError::unavailable(
            "other processes keep changing the scope's descriptor",
        ))
    }

    /// Takes over the descriptor that holds the loss which this process has noticed.
    fn settle(&self, loss: &Loss, held: ScopeDescriptor) {
        let mut state = self.lock();
        state.unwritten.retain(|noted| !noted.is_same(loss));
        self.adopt(state, held, Noticed::Here);
    }

    /// Returns whether the store still shows the loss, as far as it can be asked.
    async fn is_still_shown(
        &self,
        loss: &Loss,
        known: &ScopeDescriptor,
        held: Option<&ScopeDescriptor>,
    ) -> Result<bool, StoreError> {
        let confirmed_sequence = self.lock().confirmed_sequence;
        let Comparison::Same(held) = compare(known, confirmed_sequence, held.cloned()) else {
            return Ok(true);
        };
        match &loss.evidence {
            Evidence::Told => Ok(true),
            Evidence::Positions(kept) => Ok(kept.iter().any(|kept| kept.is_ahead_of(&held))),
            Evidence::Records(witnesses) => witnesses::are_missing(&*self.store, witnesses).await,
            // Other processes may have raised the number of a restored store meanwhile: its records
            // must be there, too.
            Evidence::Descriptor | Evidence::Marker => {
                if shard_markers::is_one_missing(&*self.store, &self.scope, known).await {
                    return Ok(true);
                }
                witnesses::are_missing(&*self.store, &self.witnesses.ask()).await
            }
        }
    }

    /// Takes back a loss that another look does not show. Another one that is not written yet still
    /// halts this process.
    fn withdraw(&self, loss: &Loss) {
        let mut state = self.lock();
        state.unwritten.retain(|noted| !noted.is_same(loss));
        if matches!(loss.evidence, Evidence::Positions(_)) {
            state.evidence = None;
        }
        let other = state.unwritten.first().cloned();
        let lost_at_ms = other
            .as_ref()
            .map_or(state.known.lost_at_ms, |other| Some(other.at_ms));
        state.lost_at = lost_at_ms.map(time_of);
        if state.known.halt.is_none() && self.on_loss == OnStoreLoss::Halt {
            state.halt = other.map(|other| halted(&self.scope, &other.reason));
            self.halted.store(state.halt.is_some(), Ordering::Release);
        }
        tracing::warn!(
            scope = self.scope.as_str(),
            reason = loss.reason,
            "the store seemed to have lost records, and another look shows them: a copy that lags has answered"
        );
    }
}
