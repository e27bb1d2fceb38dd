//! Programs of `oncegate run` with workers on standard streams, under the faults that only they can
//! have. The order of the faults, and what the workers do, is decided by `ONCEGATE_SEED`.
//!
//! The harness is that of `tests/e2e/fire`, and so is the worker: build both, as `scripts/test
//! --test fire` does. `scripts/torture` runs them for as long as one likes, together with the other
//! faults.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::path::{Path, PathBuf};

use oncegate_testkit::fire::{Fault, Plan, Report, StoreKind, run, seed};

/// Runs the faults, one after the other, and returns the report when nothing was violated.
async fn under(faults: Vec<Fault>, store: StoreKind) -> Report {
    let seed = seed();
    let oncegate = PathBuf::from(env!("CARGO_BIN_EXE_oncegate"));
    let worker = oncegate.with_file_name("fire_worker");
    assert!(
        Path::exists(&worker),
        "{} is missing: use `scripts/test --test fire`",
        worker.display()
    );
    println!("{faults:?} on {store:?}: seed {seed}");
    let plan = Plan::each_once(seed, store, faults, worker).of_programs(oncegate);
    let report = run(&plan, None).await;
    println!("{report:#?}");
    assert!(
        report.violations.is_empty(),
        "seed {seed}: {:#?}",
        report.violations
    );
    for fault in plan.steps.iter().flatten() {
        assert!(
            report.has_reached(&format!("fault {fault}")),
            "seed {seed}: {fault} did not happen"
        );
    }
    report
}

// invariant: worker-hangs
#[tokio::test(flavor = "multi_thread")]
async fn hung_workers_are_replaced_and_unseen_messages_not_counted() {
    let report = under(vec![Fault::Hang], StoreKind::Redis).await;
    assert!(report.has_reached("handler hung"));
    assert!(report.has_reached("handler late"));
}

// invariant: worker-outlives
#[tokio::test(flavor = "multi_thread")]
async fn signals_to_the_process_group_end_no_worker_in_mid_message() {
    let report = under(
        vec![Fault::GroupSignal, Fault::GroupSignal],
        StoreKind::Sqlite,
    )
    .await;
    assert!(report.has_reached("run finished after a group signal"));
}

// invariant: worker-hangs
// invariant: worker-outlives
#[tokio::test(flavor = "multi_thread")]
async fn hung_workers_and_signals_to_the_group_with_kills_between() {
    under(
        vec![Fault::Hang, Fault::Kill, Fault::GroupSignal],
        StoreKind::Postgres,
    )
    .await;
}
