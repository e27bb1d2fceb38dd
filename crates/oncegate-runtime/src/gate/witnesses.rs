//! Records that a store must still hold: the last one that this process has completed, a sample of
//! those that it has completed since the last check, and some that it has read before.
//!
//! The sample holds completions at intervals, and the last one before each call that the store has
//! not answered: a copy of the store that takes over then lacks this one first.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use oncegate_core::key::StoreKey;
use oncegate_core::record::{State, Token, TokenTag};
use oncegate_core::store::{RecordSnapshot, Store, StoreError};
use parking_lot::{Mutex, MutexGuard};
use tokio::time::Instant;

/// The number of records of earlier checks that are read again.
const MAX_EARLIER: usize = 8;
/// The least time between two completions in the sample.
const SAMPLE_SPACING: Duration = Duration::from_millis(100);
/// The most completions in the sample. When it is full, every other one is dropped, and the spacing
/// doubled.
const MAX_SAMPLE: usize = 32;

/// A completed record that must be in the store for a while.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Witness {
    pub(super) key: StoreKey,
    /// The token that completed it; `None` when another process may have done it.
    by: Option<TokenTag>,
    /// Until then it cannot have expired, whatever the clocks show; `None` while its expiry is
    /// unknown.
    until: Option<Instant>,
}

/// The witnesses of one gate.
#[derive(Debug, Default)]
pub(super) struct Witnesses {
    /// The next duplicate is taken as a witness.
    wants_duplicate: AtomicBool,
    kept: Mutex<Sightings>,
}

#[derive(Debug, Default)]
struct Sightings {
    /// The last completion: if the store has lost the end of its log, it has lost this one, unless
    /// it was completed after the loss.
    last: Option<Witness>,
    /// Completions since the last check that the store has answered.
    sample: Sample,
    /// A record that answered a duplicate since the last check.
    duplicate: Option<Witness>,
    /// The records found at earlier checks, the newest first: on a busy store the last completion
    /// is always younger than the loss.
    earlier: VecDeque<Witness>,
}

/// Completions since the last check. A copy of the store that takes over on a busy process lacks
/// some of them, although the process has completed others on it since.
#[derive(Debug)]
struct Sample {
    /// The oldest first.
    taken: VecDeque<Witness>,
    spacing: Duration,
    next_at: Option<Instant>,
}

impl Default for Sample {
    fn default() -> Self {
        Self {
            taken: VecDeque::new(),
            spacing: SAMPLE_SPACING,
            next_at: None,
        }
    }
}

impl Sample {
    /// Takes a completion, if one is due.
    fn note(&mut self, now: Instant, witness: &Witness) {
        if self.next_at.is_none_or(|at| at <= now) {
            self.take(now, witness);
        }
    }

    /// Takes a completion, unless it was the last one taken.
    fn take(&mut self, now: Instant, witness: &Witness) {
        if self.taken.back() == Some(witness) {
            return;
        }
        if self.taken.len() >= MAX_SAMPLE {
            let mut is_kept = false;
            self.taken.retain(|_| {
                is_kept = !is_kept;
                is_kept
            });
            self.spacing = self.spacing.saturating_mul(2);
        }
        self.taken.push_back(witness.clone());
        self.next_at = now.checked_add(self.spacing);
    }

    /// Drops a completion that the store has answered.
    fn drop_answered(&mut self, answered: &Witness) {
        self.taken.retain(|taken| taken != answered);
        if self.taken.is_empty() {
            self.spacing = SAMPLE_SPACING;
        }
    }
}

impl Witnesses {
    /// Locks the lists. Every change leaves them consistent, so a panic elsewhere does no harm.
    fn lock(&self) -> MutexGuard<'_, Sightings> {
        self.kept.lock()
    }

    /// Notes that the store has confirmed this completion of an attempt that began at `begun`. Only
    /// half of the retention is relied on, from then on: the completion may have been executed long
    /// before it was confirmed.
    pub(super) fn note_completed(
        &self,
        key: &StoreKey,
        token: &Token,
        begun: Instant,
        retention: Duration,
    ) {
        let now = Instant::now();
        let until = begun.checked_add(retention / 2);
        let witness = Witness {
            key: key.clone(),
            by: Some(token.tag()),
            until,
        };
        let mut kept = self.lock();
        kept.sample.note(now, &witness);
        kept.last = Some(witness);
    }

    /// Notes that the store has not answered a call: a copy of it may take over, and what it lacks
    /// is what was completed last, however briefly it has lagged.
    pub(super) fn note_unanswered(&self) {
        let mut kept = self.lock();
        if let Some(last) = kept.last.clone() {
            kept.sample.take(Instant::now(), &last);
        }
    }

    /// Notes that the record has answered a duplicate.
    pub(super) fn note_duplicate(&self, key: &StoreKey) {
        if self.wants_duplicate.load(Ordering::Relaxed)
            && self.wants_duplicate.swap(false, Ordering::Relaxed)
        {
            self.lock().duplicate = Some(Witness {
                key: key.clone(),
                by: None,
                until: None,
            });
        }
    }

    /// Forgets all witnesses: after an accepted loss, earlier records prove nothing.
    pub(super) fn clear(&self) {
        *self.lock() = Sightings::default();
        self.wants_duplicate.store(true, Ordering::Relaxed);
    }

    /// Returns the records to read.
    pub(super) fn ask(&self) -> Vec<Witness> {
        let now = Instant::now();
        let mut kept = self.lock();
        kept.earlier.retain(|earlier| earlier.holds_at(now));
        kept.sample.taken.retain(|taken| taken.holds_at(now));
        kept.last.take_if(|last| !last.holds_at(now));
        self.wants_duplicate.store(true, Ordering::Relaxed);
        let duplicate = kept.duplicate.take();
        let mut asked: Vec<Witness> = kept.last.iter().cloned().chain(duplicate).collect();
        for earlier in kept.sample.taken.iter().chain(&kept.earlier) {
            if asked.iter().all(|asked| asked.key != earlier.key) {
                asked.push(earlier.clone());
            }
        }
        asked
    }

    /// Returns the witnesses that what the store holds contradicts. Each contradiction is reported
    /// once.
    pub(super) fn check(
        &self,
        asked: Vec<Witness>,
        found: Vec<Result<Option<RecordSnapshot>, StoreError>>,
    ) -> Vec<Witness> {
        let mut contradicted = Vec::new();
        let mut kept = self.lock();
        // Of the sample, only the newest is read again at later checks.
        let newest = asked.first().cloned();
        for (witness, found) in asked.into_iter().zip(found) {
            let Ok(found) = found else { continue };
            let is_sampled =
                kept.sample.taken.contains(&witness) && newest.as_ref() != Some(&witness);
            kept.sample.drop_answered(&witness);
            if witness.is_contradicted_by(found.as_ref()) {
                kept.last
                    .take_if(|last| last.key == witness.key && last.by == witness.by);
                kept.earlier.retain(|earlier| earlier.key != witness.key);
                contradicted.push(witness);
            } else if let Some(found) = found.filter(|_| !is_sampled) {
                kept.confirm(witness, &found);
            }
        }
        contradicted
    }
}

/// Returns whether the store contradicts one of these completions now.
///
/// # Errors
/// When it does not answer. An error about a single record is no proof that the record is there.
pub(super) async fn are_missing(store: &dyn Store, asked: &[Witness]) -> Result<bool, StoreError> {
    if asked.is_empty() {
        return Ok(false);
    }
    let keys = asked.iter().map(|asked| asked.key.clone()).collect();
    for (witness, found) in asked.iter().zip(store.read(keys).await) {
        match found {
            Err(error) if error.is_away() => return Err(error),
            Err(_) => return Ok(true),
            Ok(found) if witness.is_contradicted_by(found.as_ref()) => return Ok(true),
            Ok(_) => {}
        }
    }
    Ok(false)
}

impl Sightings {
    /// Keeps the record as a witness for later checks, because it was found.
    fn confirm(&mut self, witness: Witness, found: &RecordSnapshot) {
        let is_completed = matches!(found.record.state, State::Completed { .. });
        if !is_completed
            || self
                .earlier
                .iter()
                .any(|earlier| earlier.key == witness.key)
        {
            return;
        }
        let until = witness.until.or_else(|| {
            let left = found
                .record
                .expires_at
                .micros()
                .saturating_sub(found.now.micros());
            Instant::now().checked_add(Duration::from_micros(left / 2))
        });
        self.earlier.push_front(Witness { until, ..witness });
        self.earlier.truncate(MAX_EARLIER);
    }
}

impl Witness {
    /// Returns whether it cannot have expired by now, as far as is known.
    fn holds_at(&self, now: Instant) -> bool {
        self.until.is_none_or(|until| until > now)
    }
    /// Returns whether what the store holds now cannot have followed the completion.
    fn is_contradicted_by(&self, found: Option<&RecordSnapshot>) -> bool {
        let Some(found) = found else {
            // If its expiry is unknown, it may have expired.
            return self.until.is_some();
        };
        // It is this process's own claim: what came after it is lost.
        match (&found.record.state, self.by) {
            (State::Pending { token, .. }, Some(by)) => token.tag() == by,
            (
                State::Released {
                    by: released_by, ..
                },
                Some(by),
            ) => *released_by == by,
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use oncegate_core::key::{Digest, Scope};
    use oncegate_core::record::{Record, StoreTime};

    use super::*;

    const RETENTION: Duration = Duration::from_secs(3_600);

    fn key(number: u128) -> StoreKey {
        StoreKey::new(
            &Scope::new("billing").unwrap(),
            Digest::from_bytes(number.to_be_bytes()),
        )
    }

    fn token(number: u128) -> Token {
        Token::from_bits(number + 1)
    }

    /// What a store has completed.
    #[derive(Default)]
    struct Held(HashMap<StoreKey, RecordSnapshot>);

    impl Held {
        fn complete(&mut self, number: u128) {
            let state = State::Completed {
                by: token(number).tag(),
                result: bytes::Bytes::new(),
            };
            let record = Record {
                expires_at: StoreTime::from_millis(3_600_000),
                fingerprint: None,
                state,
            };
            self.0.insert(
                key(number),
                RecordSnapshot {
                    now: StoreTime::default(),
                    record,
                },
            );
        }

        fn check(&self, witnesses: &Witnesses) -> bool {
            let asked = witnesses.ask();
            let found = asked
                .iter()
                .map(|asked| Ok(self.0.get(&asked.key).cloned()))
                .collect();
            !witnesses.check(asked, found).is_empty()
        }
    }

    /// Completes a record every 10 ms for this long, and returns the number of the next one.
    async fn complete_for(
        witnesses: &Witnesses,
        held: &mut Held,
        first: u128,
        time: Duration,
    ) -> u128 {
        let until = Instant::now() + time;
        let mut number = first;
        while Instant::now() < until {
            held.complete(number);
            witnesses.note_completed(&key(number), &token(number), Instant::now(), RETENTION);
            number += 1;
            tokio::time::advance(Duration::from_millis(10)).await;
        }
        number
    }

    // invariant: loss-undetected
    #[tokio::test(start_paused = true)]
    async fn a_copy_that_lags_briefly_is_noticed_under_constant_work() {
        // The looks are up to 3 s apart, or far more with many processes.
        for until_look in [Duration::from_secs(2), Duration::from_secs(60)] {
            for lag_ms in [300, 1_000] {
                let lag = Duration::from_millis(lag_ms).max(until_look / 20);
                let witnesses = Witnesses::default();
                let mut held = Held::default();
                let first = complete_for(&witnesses, &mut held, 0, Duration::from_secs(2)).await;
                assert!(!held.check(&witnesses));
                let lost_from = complete_for(&witnesses, &mut held, first, until_look / 3).await;
                let mut copy = Held(held.0.clone());
                let next = complete_for(&witnesses, &mut held, lost_from, lag).await;
                complete_for(&witnesses, &mut copy, next, until_look / 2).await;
                assert!(copy.check(&witnesses), "{until_look:?} {lag:?}");
                assert!(!copy.check(&witnesses), "each is reported once");
            }
        }
    }

    // invariant: loss-undetected
    #[tokio::test(start_paused = true)]
    async fn a_lag_of_a_single_record_is_noticed_where_a_call_has_failed() {
        for unanswered in [false, true] {
            let witnesses = Witnesses::default();
            let mut held = Held::default();
            let work = Duration::from_millis(450);
            let last = complete_for(&witnesses, &mut held, 0, work).await - 1;
            // Several calls fail, some of them after others have succeeded on the copy.
            let mut copy = Held(held.0.clone());
            copy.0.remove(&key(last));
            let mut next = last + 1;
            for _ in 0..3 {
                if unanswered {
                    witnesses.note_unanswered();
                }
                next = complete_for(&witnesses, &mut copy, next, Duration::from_millis(20)).await;
            }
            complete_for(&witnesses, &mut copy, next, Duration::from_secs(1)).await;
            assert_eq!(copy.check(&witnesses), unanswered);
        }
    }

    /// A store that answers some calls and not others costs no check more.
    #[tokio::test(start_paused = true)]
    async fn the_sample_stays_small_while_calls_fail() {
        let witnesses = Witnesses::default();
        let mut held = Held::default();
        let mut next = 0;
        for _ in 0..1_000 {
            next = complete_for(&witnesses, &mut held, next, Duration::from_millis(10)).await;
            witnesses.note_unanswered();
        }
        assert!(witnesses.ask().len() <= MAX_SAMPLE + 1);
        assert!(!held.check(&witnesses));
    }

    #[tokio::test(start_paused = true)]
    async fn a_check_reads_a_limited_sample_and_an_intact_store_is_fine() {
        let witnesses = Witnesses::default();
        let mut held = Held::default();
        let mut next = 0;
        for seconds in [1, 3, 30, 600, 1] {
            next = complete_for(&witnesses, &mut held, next, Duration::from_secs(seconds)).await;
            let asked = witnesses.ask().len();
            assert!(
                (2..=MAX_SAMPLE + MAX_EARLIER + 2).contains(&asked),
                "{asked} after {seconds} s"
            );
            assert!(!held.check(&witnesses));
        }
        // Without new completions, only those of earlier checks are read again, and the last one.
        assert!(witnesses.ask().len() <= MAX_EARLIER + 1);
    }

    #[tokio::test(start_paused = true)]
    async fn a_check_without_an_answer_is_made_up_for_by_the_next() {
        let witnesses = Witnesses::default();
        let mut held = Held::default();
        let next = complete_for(&witnesses, &mut held, 0, Duration::from_secs(1)).await;
        let asked = witnesses.ask();
        let away = asked
            .iter()
            .map(|_| Err(StoreError::unavailable("away")))
            .collect();
        assert!(witnesses.check(asked, away).is_empty());
        let mut copy = Held::default();
        complete_for(&witnesses, &mut copy, next, Duration::from_millis(10)).await;
        assert!(copy.check(&witnesses));
    }
}
