//! The conformance suite that every store must pass.
//!
//! The suite uses only the [`Store`](crate::store::Store) trait and makes no assumption about the
//! store's clock. In addition, a store must offer a way to let time pass for a key; see [`Bench`].
//! All leases and delays differ by half a step from the time that passes, so the real time of a
//! slow server decides nothing.

mod attempts;
mod batches;
mod bench;
mod claims;
mod endings;
mod fingerprints;
mod operators;

use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::AtomicU64;

pub use self::bench::Bench;
use self::bench::StoreUnderTest;

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

/// The cases, in the order in which they run.
pub const CASES: &[Case] = cases![
    claims::an_absent_key_is_granted,
    claims::a_live_claim_is_busy,
    claims::a_claim_whose_lease_is_over_is_taken_over,
    claims::the_same_token_gets_the_same_grant_again,
    claims::a_lease_beyond_the_longest_of_the_scope_is_cut,
    claims::an_extend_keeps_a_claim_alive,
    claims::an_extend_never_moves_a_lease_back,
    claims::an_extend_revives_a_lease_that_was_not_taken_over,
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
    attempts::an_abandoned_attempt_is_flagged_and_does_not_count,
    attempts::attempts_stay_at_the_limit,
    attempts::a_crash_is_remembered_for_days,
    attempts::a_release_is_remembered_for_days,
    endings::a_completed_key_answers_with_its_result,
    endings::a_late_complete_counts_before_a_takeover,
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
    operators::a_resolve_ends_every_record_that_is_open,
    operators::a_resolve_compares_the_record,
    operators::a_resolve_spares_an_attempt_that_runs,
    operators::a_repeated_resolve_changes_nothing,
    operators::a_resolve_wins_or_loses_against_claims_as_a_whole,
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

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::Ordering;
    use std::time::Duration;

    use async_trait::async_trait;

    use super::*;
    use crate::key::StoreKey;
    use crate::record::StoreTime;
    use crate::store::{MemoryStore, Store};

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
