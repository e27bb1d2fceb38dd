//! Records that a store must still hold: the last one that this process has completed, and some that it has read
//! before.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use oncegate_core::key::StoreKey;
use oncegate_core::record::{State, Token, TokenTag};
use oncegate_core::store::{RecordSnapshot, StoreError};
use tokio::time::Instant;

/// How many records of earlier checks are read again.
const MAX_EARLIER: usize = 8;

/// A completed record that must be in the store for a while.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Witness {
    pub(super) key: StoreKey,
    /// The token that completed it; `None` when another process may have done it.
    by: Option<TokenTag>,
    /// Until then it cannot have expired, whatever the clocks show; `None` while its expiry is unknown.
    until: Option<Instant>,
}

/// The witnesses of one gate.
#[derive(Debug, Default)]
pub(super) struct Witnesses {
    /// The next duplicate is taken as a witness.
    wants_duplicate: AtomicBool,
    kept: Mutex<Kept>,
}

#[derive(Debug, Default)]
struct Kept {
    /// The last completion: if the store has lost the end of its log, it has lost this one.
    last: Option<Witness>,
    /// A record that answered a duplicate since the last check.
    duplicate: Option<Witness>,
    /// Those found at earlier checks, the newest first: on a busy store the last completion is always younger than
    /// the loss.
    earlier: VecDeque<Witness>,
}

impl Witnesses {
    /// Every change leaves the lists consistent, so a panic elsewhere does no harm.
    fn lock(&self) -> MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes that the store has confirmed this completion. Only half of the retention is relied on.
    pub(super) fn note_completed(&self, key: &StoreKey, token: &Token, retention: Duration) {
        let until = Instant::now().checked_add(retention / 2);
        self.lock().last = Some(Witness { key: key.clone(), by: Some(token.tag()), until });
    }

    /// Notes that the record has answered a duplicate.
    pub(super) fn note_duplicate(&self, key: &StoreKey) {
        if self.wants_duplicate.load(Ordering::Relaxed) && self.wants_duplicate.swap(false, Ordering::Relaxed)
        {
            self.lock().duplicate = Some(Witness { key: key.clone(), by: None, until: None });
        }
    }

    /// Forgets all witnesses: after an accepted loss, earlier records prove nothing.
    pub(super) fn clear(&self) {
        *self.lock() = Kept::default();
        self.wants_duplicate.store(true, Ordering::Relaxed);
    }

    /// Returns the records to read.
    pub(super) fn ask(&self) -> Vec<Witness> {
        let now = Instant::now();
        let mut kept = self.lock();
        let is_due = |witness: &Witness| witness.until.is_none_or(|until| until > now);
        kept.earlier.retain(is_due);
        kept.last.take_if(|last| !is_due(last));
        self.wants_duplicate.store(true, Ordering::Relaxed);
        let duplicate = kept.duplicate.take();
        let mut asked: Vec<Witness> = kept.last.iter().cloned().chain(duplicate).collect();
        for earlier in &kept.earlier {
            if asked.iter().all(|asked| asked.key != earlier.key) {
                asked.push(earlier.clone());
            }
        }
        asked
    }

    /// Whether what the store holds contradicts one of the witnesses. Each contradiction is reported once.
    pub(super) fn check(
        &self,
        asked: Vec<Witness>,
        found: Vec<Result<Option<RecordSnapshot>, StoreError>>,
    ) -> bool {
        let mut is_contradicted = false;
        let mut kept = self.lock();
        for (witness, found) in asked.into_iter().zip(found) {
            let Ok(found) = found else { continue };
            if witness.is_contradicted_by(found.as_ref()) {
                is_contradicted = true;
                kept.last.take_if(|last| last.key == witness.key && last.by == witness.by);
                kept.earlier.retain(|earlier| earlier.key != witness.key);
            } else if let Some(found) = found {
                kept.confirm(witness, &found);
            }
        }
        is_contradicted
    }
}

impl Kept {
    /// Keeps the record as a witness for later checks, because it was found.
    fn confirm(&mut self, witness: Witness, found: &RecordSnapshot) {
        let is_completed = matches!(found.record.state, State::Completed { .. });
        if !is_completed || self.earlier.iter().any(|earlier| earlier.key == witness.key) {
            return;
        }
        let until = witness.until.or_else(|| {
            let left = found.record.expires_at.micros().saturating_sub(found.now.micros());
            Instant::now().checked_add(Duration::from_micros(left / 2))
        });
        self.earlier.push_front(Witness { until, ..witness });
        self.earlier.truncate(MAX_EARLIER);
    }
}

impl Witness {
    /// Whether what the store holds now cannot have followed the completion.
    fn is_contradicted_by(&self, found: Option<&RecordSnapshot>) -> bool {
        let Some(found) = found else {
            // If its expiry is unknown, it may have expired.
            return self.until.is_some();
        };
        // It is this process's own claim: what came after it is lost.
        match (&found.record.state, self.by) {
            (State::Pending { token, .. }, Some(by)) => token.tag() == by,
            (State::Released { by: released_by, .. }, Some(by)) => *released_by == by,
            _ => false,
        }
    }
}
