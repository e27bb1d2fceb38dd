//! The conformance suite that every store must pass.
//!
//! The suite uses only the [`Store`] trait and makes no assumption about the store's clock. In
//! addition, a store must offer a way to let time pass for a key; see [`Bench`]. All leases and
//! delays differ by half a step from the time that passes, so the real time of a slow server
//! decides nothing.

mod attempts;
mod batches;
mod claims;
mod endings;
mod fingerprints;
mod operators;

use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::Poll;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;

use crate::key::{Fingerprint, Scope, StoreKey};
use crate::record::{Record, Token};
use crate::rules::{Grant, Operation, ReleaseCause, Reply, Verdict};
use crate::store::{Command, Store, StoreError};

/// The store under test, with hooks that the suite needs besides the [`Store`] trait.
#[async_trait]
pub trait Bench: Send + Sync {
    /// The store. Called once for every case.
    fn store(&self) -> Arc<dyn Store>;

    /// Simulates that `time` passes for `key`, and possibly for other keys, without waiting: moves
    /// the record's expiry towards now, or advances the store's clock.
    async fn pass(&self, key: &StoreKey, time: Duration);

    /// Stores a value under `key` that is not a record of a known format. Returns `false` if the
    /// store cannot hold such a value; then the case about it proves nothing for this store.
    async fn spoil(&self, key: &StoreKey) -> bool;

    /// The key of this name. On a shared server, the bench makes its keys distinct from those of
    /// others.
    fn key(&self, name: &str) -> StoreKey {
        super::key(name)
    }

    /// The scope of this name, made distinct in the same way.
    fn scope(&self, name: &str) -> Scope {
        super::scope(name)
    }
}

/// A test case that every store must pass.
pub struct Case {
    /// The name of the case, as a failure reports it.
    pub name: &'static str,
    run: for<'a> fn(&'a StoreUnderTest<'a>) -> Running<'a>,
}

type Running<'a> = Pin<Box<dyn Future<Output = ()> + Send + 'a>>;

impl std::fmt::Debug for Case {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name)
    }
}

macro_rules! cases {
    ($($module:ident :: $case:ident,)*) => {
        &[$(Case { name: stringify!($case), run: |subject| Box::pin($module::$case(subject)) },)*]
    };
}

/// All cases, in the order in which they run.
pub const CASES: &[Case] = cases![
    claims::an_absent_key_is_granted,
    claims::a_live_claim_is_busy,
    claims::a_claim_whose_lease_is_over_is_taken_over,
    claims::the_same_token_gets_the_same_grant_again,
    claims::a_lease_beyond_the_longest_of_the_scope_is_cut,
    claims::an_extend_keeps_a_claim_alive,
    claims::an_extend_never_moves_a_lease_back,
    claims::an_extend_revives_a_lease_that_nobody_took,
    claims::an_extend_by_a_stranger_is_lost,
    claims::an_extend_recreates_nothing,
    claims::an_extend_after_the_own_end_is_held,
    claims::a_fencing_token_only_grows,
    claims::a_fencing_token_grows_over_a_lost_record,
    claims::a_claim_without_a_fencing_token_gets_none,
    attempts::recovery_is_flagged_and_stays,
    attempts::a_takeover_that_was_not_started_is_left_to_the_next_attempt,
    attempts::attempts_count_failures_and_crashes,
    attempts::an_uncounted_release_counts_nothing,
    attempts::a_discarded_attempt_is_flagged_and_counts,
    attempts::attempts_stay_at_the_limit,
    attempts::a_crash_is_remembered_for_days,
    attempts::a_release_is_remembered_for_days,
    endings::a_completed_key_answers_with_its_result,
    endings::a_late_complete_is_held_while_nobody_took_over,
    endings::a_complete_after_a_takeover_is_lost,
    endings::a_repeated_complete_keeps_the_first_result,
    endings::a_complete_by_a_stranger_is_lost,
    endings::a_complete_after_another_end_is_lost,
    endings::a_complete_of_a_lost_claim_recreates_the_record,
    endings::a_completed_record_lasts_for_its_retention,
    endings::a_very_long_retention_is_kept,
    endings::the_shortest_retention_ends,
    endings::a_released_key_waits_for_its_delay,
    endings::a_repeated_release_changes_nothing,
    endings::a_release_by_a_stranger_is_lost,
    endings::a_failed_key_says_why,
    endings::a_failed_record_lasts_for_its_retention,
    endings::a_repeated_fail_changes_nothing,
    endings::a_fail_by_a_stranger_is_lost,
    endings::reasons_are_cut_at_whole_characters,
    endings::results_of_every_size_come_back,
    fingerprints::another_fingerprint_is_a_mismatch_in_every_state,
    fingerprints::the_same_fingerprint_is_no_mismatch,
    fingerprints::another_specification_is_not_compared,
    fingerprints::the_record_keeps_the_fingerprint_of_the_claim,
    operators::a_hand_over_marks_a_failed_record,
    operators::a_hand_over_of_anything_else_is_lost,
    operators::a_late_hand_over_does_not_mark_a_newer_failure,
    operators::a_reopened_key_starts_again_from_every_state,
    operators::a_reopen_compares_the_record,
    operators::a_reopen_ignores_the_time_that_is_left,
    operators::a_reopen_takes_the_claim_away,
    operators::a_fencing_token_grows_over_a_reopen,
    operators::a_read_shows_the_record_and_changes_nothing,
    operators::descriptors_are_compared_and_set,
    operators::asking_for_a_descriptor_changes_nothing,
    operators::a_descriptor_with_every_mark_is_read_as_it_was_written,
    operators::a_spoilt_record_is_never_an_answer,
    operators::the_check_names_the_store,
    batches::answers_stand_in_the_order_of_the_commands,
    batches::empty_batches_are_answered,
    batches::many_keys_are_read_at_once,
    batches::one_of_many_claimants_is_granted,
    batches::one_of_many_takes_over,
    batches::concurrent_repeats_of_a_complete_are_held,
    batches::batches_that_cross_each_other_all_end,
];

/// Runs all cases on `bench`.
///
/// # Panics
/// When the store breaks a rule. The name of the case is printed on standard error.
pub async fn conformance(bench: &dyn Bench) {
    for case in CASES {
        check_case(bench, case).await;
    }
}

/// Runs one case on `bench`.
///
/// # Panics
/// When the store breaks the rule. The name of the case is printed on standard error.
async fn check_case(bench: &dyn Bench, case: &Case) {
    let _named = Named(case.name);
    let subject = StoreUnderTest {
        bench,
        store: bench.store(),
        case: case.name,
        tokens: AtomicU64::new(1),
    };
    (case.run)(&subject).await;
}

/// Prints the name of the case when it panics.
struct Named(&'static str);

impl Drop for Named {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("the store does not conform: {}", self.0);
        }
    }
}

/// The unit of time in the cases.
const STEP: Duration = Duration::from_secs(10);

/// A lease of one and a half steps: it is live after one step and has expired after two.
const LEASE: Duration = Duration::from_secs(15);

/// A retention longer than any case takes.
const RETENTION: Duration = Duration::from_secs(86_400);

/// The real time that may pass without an influence on a case: half a step.
const SLACK: Duration = Duration::from_secs(5);

const APPLIED: Reply = Reply::Applied { recreated: false };

/// The store under test, with short methods for the operations of the cases.
struct StoreUnderTest<'a> {
    bench: &'a dyn Bench,
    store: Arc<dyn Store>,
    case: &'static str,
    tokens: AtomicU64,
}

impl StoreUnderTest<'_> {
    /// A key of this case.
    fn key(&self, name: &str) -> StoreKey {
        self.bench.key(&format!("{}-{name}", self.case))
    }

    /// A token that no other call in this case returns. Its tag is unique too.
    fn token(&self) -> Token {
        let count = u128::from(self.tokens.fetch_add(1, Ordering::Relaxed));
        Token::from_bits((count << 96) | count)
    }

    /// Simulates that time passes for a key.
    async fn pass(&self, key: &StoreKey, time: Duration) {
        self.bench.pass(key, time).await;
    }

    async fn try_apply(&self, key: &StoreKey, operation: Operation) -> Result<Reply, StoreError> {
        self.store
            .execute_one(Command {
                key: key.clone(),
                operation,
            })
            .await
    }

    async fn apply(&self, key: &StoreKey, operation: Operation) -> Reply {
        self.try_apply(key, operation)
            .await
            .expect("the store answers")
    }

    async fn claim_as(
        &self,
        key: &StoreKey,
        token: Token,
        fingerprint: Option<Fingerprint>,
    ) -> Reply {
        self.apply(
            key,
            Operation::Claim {
                token,
                lease: LEASE,
                fingerprint,
                fenced: false,
                longest_lease: Duration::MAX,
            },
        )
        .await
    }

    async fn claim(&self, key: &StoreKey, token: Token) -> Verdict {
        match self.claim_as(key, token, None).await {
            Reply::Verdict {
                verdict,
                uncompared: false,
            } => verdict,
            other => panic!("unexpected reply to a claim: {other:?}"),
        }
    }

    /// A claim by another owner, for a scope in which no lease is longer. It must be busy.
    async fn busy_within(&self, key: &StoreKey, longest_lease: Duration) -> Duration {
        let token = self.token();
        let claim = Operation::Claim {
            token,
            lease: LEASE,
            fingerprint: None,
            fenced: false,
            longest_lease,
        };
        match self.apply(key, claim).await {
            Reply::Verdict {
                verdict: Verdict::Busy { retry_in },
                ..
            } => retry_in,
            other => panic!("expected busy, got {other:?}"),
        }
    }

    /// A claim that must be granted.
    async fn granted(&self, key: &StoreKey, token: Token) -> Grant {
        match self.claim(key, token).await {
            Verdict::Granted(grant) => grant,
            other => panic!("expected a grant, got {other:?}"),
        }
    }

    /// A fenced claim that must be granted.
    async fn granted_fenced(&self, key: &StoreKey, token: Token) -> Grant {
        let claim = Operation::Claim {
            token,
            lease: LEASE,
            fingerprint: None,
            fenced: true,
            longest_lease: Duration::MAX,
        };
        match self.apply(key, claim).await {
            Reply::Verdict {
                verdict: Verdict::Granted(grant),
                ..
            } => grant,
            other => panic!("expected a grant, got {other:?}"),
        }
    }

    /// A claim that must be busy. Returns how long to wait.
    async fn busy(&self, key: &StoreKey) -> Duration {
        match self.claim(key, self.token()).await {
            Verdict::Busy { retry_in } => retry_in,
            other => panic!("expected busy, got {other:?}"),
        }
    }

    async fn extend(&self, key: &StoreKey, token: Token, lease: Duration) -> Reply {
        self.apply(key, Operation::Extend { token, lease }).await
    }

    async fn complete(&self, key: &StoreKey, token: Token, result: &'static str) -> Reply {
        self.apply(key, completion(token, result)).await
    }

    async fn release(
        &self,
        key: &StoreKey,
        token: Token,
        delay: Duration,
        end: ReleaseCause,
    ) -> Reply {
        self.apply(
            key,
            Operation::Release {
                token,
                delay,
                end,
                reason: "later".to_owned(),
            },
        )
        .await
    }

    async fn fail(&self, key: &StoreKey, token: Token, reason: &str) -> Reply {
        self.apply(
            key,
            Operation::Fail {
                token,
                reason: reason.to_owned(),
                retention: RETENTION,
            },
        )
        .await
    }

    async fn read(&self, key: &StoreKey) -> Option<Record> {
        let mut answers = self.store.read(vec![key.clone()]).await;
        assert_eq!(answers.len(), 1, "one key, one answer");
        answers
            .pop()
            .expect("one answer")
            .expect("the store answers")
            .map(|snapshot| snapshot.record)
    }

    /// The record's fingerprint and state, without its expiry, which depends on the store's clock.
    async fn content(&self, key: &StoreKey) -> Option<(Option<Fingerprint>, crate::record::State)> {
        self.read(key)
            .await
            .map(|record| (record.fingerprint, record.state))
    }

    /// Brings a new key into each state, for rules that hold in all states.
    ///
    /// States that need time to pass come first, because on some benches time passes for all keys.
    async fn in_every_state(
        &self,
        fingerprint: Option<Fingerprint>,
    ) -> Vec<(StoreKey, &'static str)> {
        let names = ["over", "due", "pending", "released", "completed", "failed"];
        let mut keys = Vec::new();
        for name in names {
            let token = self.token();
            let key = self.key(&format!("{name}-{}", self.tokens.load(Ordering::Relaxed)));
            self.claim_as(&key, token, fingerprint).await;
            match name {
                "over" => self.pass(&key, 2 * STEP).await,
                "released" => {
                    assert_eq!(
                        self.release(&key, token, LEASE, ReleaseCause::Failed).await,
                        APPLIED
                    );
                }
                "due" => {
                    assert_eq!(
                        self.release(&key, token, LEASE, ReleaseCause::Failed).await,
                        APPLIED
                    );
                    self.pass(&key, 2 * STEP).await;
                }
                "completed" => assert_eq!(self.complete(&key, token, "done").await, APPLIED),
                "failed" => assert_eq!(self.fail(&key, token, "broken").await, APPLIED),
                _ => {}
            }
            keys.push((key, name));
        }
        keys
    }
}

/// A completion with the usual retention.
fn completion(token: Token, result: &'static str) -> Operation {
    let result = Bytes::from_static(result.as_bytes());
    Operation::Complete {
        token,
        fingerprint: None,
        result,
        retention: RETENTION,
    }
}

/// The reply to a claim of a completed key.
fn done(result: &'static str) -> Verdict {
    Verdict::Completed {
        result: Bytes::from_static(result.as_bytes()),
    }
}

/// Runs all futures concurrently. Returns their outputs in order.
///
/// The suite must run on every async runtime, so it spawns no tasks.
async fn join_all<T>(futures: impl IntoIterator<Item = impl Future<Output = T> + Send>) -> Vec<T> {
    let mut running: Vec<_> = futures
        .into_iter()
        .map(|future| (Box::pin(future), None))
        .collect();
    poll_fn(|context| {
        let mut pending = false;
        for (future, output) in &mut running {
            if output.is_none() {
                match future.as_mut().poll(context) {
                    Poll::Ready(ready) => *output = Some(ready),
                    Poll::Pending => pending = true,
                }
            }
        }
        if pending {
            Poll::Pending
        } else {
            Poll::Ready(())
        }
    })
    .await;
    running
        .into_iter()
        .filter_map(|(_, output)| output)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::StoreTime;
    use crate::store::MemoryStore;

    /// A memory store whose clock is advanced by the suite.
    struct MemoryBench {
        store: Arc<MemoryStore>,
        now_ms: Arc<AtomicU64>,
    }

    impl MemoryBench {
        fn new() -> Self {
            let now_ms = Arc::new(AtomicU64::new(1_000));
            let clock = Arc::clone(&now_ms);
            let store = MemoryStore::with_clock(move || {
                StoreTime::from_millis(clock.load(Ordering::SeqCst))
            });
            Self {
                store: Arc::new(store),
                now_ms,
            }
        }
    }

    #[async_trait]
    impl Bench for MemoryBench {
        fn store(&self) -> Arc<dyn Store> {
            Arc::clone(&self.store) as Arc<dyn Store>
        }

        async fn pass(&self, _: &StoreKey, time: Duration) {
            self.now_ms
                .fetch_add(crate::record::whole_millis(time), Ordering::SeqCst);
        }

        async fn spoil(&self, _: &StoreKey) -> bool {
            false
        }
    }

    // invariant: store-equals-rules
    #[tokio::test]
    async fn the_memory_store_conforms() {
        conformance(&MemoryBench::new()).await;
    }

    #[test]
    fn every_case_has_a_name_of_its_own() {
        let names: std::collections::HashSet<_> = CASES.iter().map(|case| case.name).collect();
        assert_eq!(names.len(), CASES.len());
    }
}
