//! Each fault once, in a random order, on every store. `ONCEGATE_SEED` repeats one order.

use std::path::PathBuf;

use oncegate_testkit::KafkaBroker;
use oncegate_testkit::fire::{Fault, Plan, Report, StoreKind, run, seed};

/// What every run must reach, whatever its order, or it proves nothing. Whether a killed worker
/// holds a claim is left to chance: `zombies` and `consumers/kill.rs` test takeovers.
const REACHED: [&str; 11] = [
    "granted",
    "completed",
    "mismatch",
    "held",
    "duplicate",
    "handler succeeded",
    "handler failed",
    "handler gave_up",
    "dead letter bad_key",
    "dead letter mismatch",
    "dead letter permanent",
];

async fn each_fault_once(store: StoreKind, broker: Option<&mut KafkaBroker>) -> Report {
    let seed = seed();
    println!("{store:?}: seed {seed}");
    let worker = PathBuf::from(env!("CARGO_BIN_EXE_fire_worker"));
    let plan = Plan::each_once(seed, store, Fault::of(store, broker.is_some()), worker);
    let report = run(&plan, broker).await;
    println!("{report:#?}");
    assert!(
        report.violations.is_empty(),
        "seed {seed}: {:#?}",
        report.violations
    );
    let missing: Vec<&str> = REACHED
        .into_iter()
        .filter(|what| !report.has_reached(what))
        .collect();
    assert!(
        missing.is_empty(),
        "seed {seed}: the run proves nothing, it never reached {missing:?}"
    );
    for fault in &plan.steps {
        assert!(
            report.has_reached(&format!("fault {}", fault[0])),
            "seed {seed}: {fault:?} did not happen"
        );
    }
    report
}

// invariant: promises-under-faults
#[tokio::test(flavor = "multi_thread")]
async fn redis_under_each_fault_once() {
    let mut broker = KafkaBroker::start().await;
    let report = each_fault_once(StoreKind::Redis, Some(&mut broker)).await;
    assert!(report.has_reached("loss noticed"));
    assert!(report.has_reached("unknown outcome"));
    assert!(report.has_reached("store unavailable"));
}

// invariant: promises-under-faults
#[tokio::test(flavor = "multi_thread")]
async fn sqlite_under_each_fault_once() {
    each_fault_once(StoreKind::Sqlite, None).await;
}

// invariant: promises-under-faults
#[tokio::test(flavor = "multi_thread")]
async fn dynamodb_under_each_fault_once() {
    // Its calls are repeated for longer than the server is away, so no outage need reach a worker.
    each_fault_once(StoreKind::DynamoDb, None).await;
}

// invariant: promises-under-faults
#[tokio::test(flavor = "multi_thread")]
async fn postgres_under_each_fault_once() {
    let report = each_fault_once(StoreKind::Postgres, None).await;
    assert!(report.has_reached("store unavailable"));
}
