//! What an operator may do to records, with answers that are lost.

// invariant (all tests): redrive

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::sync::Arc;
use std::time::Duration;

use oncegate::admin::{self, Reopened, is_reopened};
use oncegate::core::record::State;
use oncegate::core::testing::fault::{FaultStore, Faults};
use oncegate::{Completion, Counters, Entry, Gate, Key, MemoryStore, Message, Origin};

fn order() -> Message {
    Message::new(
        "orders",
        Origin::Other("a test".into()),
        Some(r#"{"order_id":1}"#.into()),
    )
}

async fn completed(gate: &Gate) -> oncegate::core::key::StoreKey {
    // The store's time begins with zero, and "due at once" is a millisecond before now.
    tokio::time::advance(Duration::from_millis(10)).await;
    let Entry::Granted(lease) = gate.enter(&order()).await.unwrap() else {
        panic!("not granted")
    };
    let key = lease.store_key().clone();
    assert_eq!(lease.complete(&()).await.unwrap(), Completion::Applied);
    key
}

#[tokio::test(start_paused = true)]
async fn a_reopen_needs_the_record_that_was_seen_and_counts_once() {
    let store = Arc::new(MemoryStore::new());
    let counters = Arc::new(Counters::default());
    let gate = Gate::new("billing", Key::json(["order_id"]), Arc::clone(&store))
        .observer(counters.clone());
    let key = completed(&gate).await;
    let seen = admin::read(&*store, &key).await.unwrap().unwrap().record;
    assert_eq!(
        admin::reopen(&*store, &key, &seen).await.unwrap(),
        Reopened::Opened
    );

    // An operator that has read the old record changes nothing any more.
    let Reopened::Changed(Some(now)) = admin::reopen(&*store, &key, &seen).await.unwrap() else {
        panic!("opened twice")
    };
    assert!(is_reopened(&now.record));
    assert_eq!(
        counters.get("extra_runs", "reset"),
        0,
        "nothing has run yet"
    );
    completed(&gate).await;
    assert_eq!(counters.get("extra_runs", "reset"), 1);
    assert!(matches!(
        gate.enter(&order()).await,
        Ok(Entry::Completed(_))
    ));
    let record = admin::read(&*store, &key).await.unwrap().unwrap().record;
    assert!(matches!(record.state, State::Completed { .. }) && !is_reopened(&record));
}

#[tokio::test(start_paused = true)]
async fn a_reopen_whose_answer_is_lost_is_found_in_the_record() {
    let store = Arc::new(MemoryStore::new());
    let gate = Gate::new("billing", Key::json(["order_id"]), Arc::clone(&store));
    let key = completed(&gate).await;
    let seen = admin::read(&*store, &key).await.unwrap().unwrap().record;
    let faults = |reply_lost, request_lost| Faults {
        reply_lost,
        request_lost,
        ..Faults::default()
    };

    // Never sent: the outcome stays unknown, and after the last retry that is the error.
    let deaf = FaultStore::new(Arc::clone(&store) as _, faults(0.0, 1.0), 1);
    let unknown = admin::reopen(&deaf, &key, &seen).await.unwrap_err();
    assert_eq!(unknown.class(), "unknown");
    // Done, and never answered: some repeat gets an answer, and finds its own change.
    let mut opened = 0;
    for seed in 0..20 {
        let seen = admin::read(&*store, &key).await.unwrap().unwrap().record;
        let mute = FaultStore::new(Arc::clone(&store) as _, faults(0.5, 0.0), seed);
        match admin::reopen(&mute, &key, &seen).await {
            Ok(reopened) => {
                assert_eq!(reopened, Reopened::Opened, "seed {seed}");
                opened += u32::from(mute.injected().reply_lost > 0);
            }
            // A read whose answer is lost changes nothing.
            Err(error) => {
                assert!(
                    ["unknown", "unavailable"].contains(&error.class()),
                    "seed {seed}: {error}"
                );
            }
        }
        completed(&gate).await;
    }
    assert!(opened > 0, "no answer was lost");
}
