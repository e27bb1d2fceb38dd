//! What an operator says of a message, while attempts come and go and answers are lost.

// invariant (all tests): operator-decides

#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "a test that cannot go on has failed"
)]

use std::sync::Arc;
use std::time::Duration;

use oncegate::admin::{self, Decided, Decision};
use oncegate::core::key::StoreKey;
use oncegate::core::record::State;
use oncegate::core::store::{RecordSnapshot, Store};
use oncegate::core::testing::fault::{FaultStore, Faults};
use oncegate::{Completion, Entry, Gate, Key, Lease, MemoryStore, Message};
use tokio::time::{advance, sleep};

/// Longer than a decision looks at a message that runs.
const LEASE: Duration = Duration::from_secs(60);

fn order() -> Message {
    Message::keyed("orders", "1")
}

/// A store with the gate of a consumer.
struct Shop {
    store: Arc<MemoryStore>,
    gate: Gate,
}

impl Shop {
    async fn new() -> Self {
        // The store's time begins with zero, and "due at once" is a millisecond before now.
        advance(Duration::from_millis(10)).await;
        let store = Arc::new(MemoryStore::new());
        let gate = Gate::new("billing", Key::message_key(), Arc::clone(&store)).lease(LEASE);
        Self { store, gate }
    }

    async fn claim(&self) -> Lease {
        // A retry without delay is due in the next millisecond.
        sleep(Duration::from_millis(2)).await;
        match self.gate.enter(&order()).await.unwrap() {
            Entry::Granted(lease) => lease,
            other => panic!("{other:?}"),
        }
    }

    /// An attempt that has failed; the next one is due after the delay.
    async fn failed(&self, delay: Duration) -> StoreKey {
        let lease = self.claim().await;
        let key = lease.store_key().clone();
        lease.release(delay, true, "ledger 7 is locked").await;
        key
    }

    async fn read(&self, key: &StoreKey) -> Option<RecordSnapshot> {
        admin::read(&*self.store, key).await.unwrap()
    }

    async fn decide(&self, key: &StoreKey, decision: &Decision) -> Decided {
        let seen = self.read(key).await;
        admin::decide(&*self.store, key, seen.as_ref(), decision)
            .await
            .unwrap()
    }

    async fn state(&self, key: &StoreKey) -> State {
        self.read(key).await.unwrap().record.state
    }
}

fn decisions() -> [Decision; 2] {
    [Decision::happened(), Decision::give_up("skipped by ada")]
}

#[tokio::test(start_paused = true)]
async fn a_message_that_waits_is_completed_or_given_up_at_once() {
    for delay in [Duration::ZERO, Duration::from_secs(3_600)] {
        let shop = Shop::new().await;
        let key = shop.failed(delay).await;
        assert_eq!(
            shop.decide(&key, &Decision::happened()).await,
            Decided::Done
        );
        assert!(matches!(
            shop.gate.enter(&order()).await,
            Ok(Entry::Completed(_))
        ));

        let shop = Shop::new().await;
        let key = shop.failed(delay).await;
        let give_up = Decision::give_up("skipped by ada");
        assert_eq!(shop.decide(&key, &give_up).await, Decided::Done);
        let Ok(Entry::Failed {
            reason,
            handed_over: false,
        }) = shop.gate.enter(&order()).await
        else {
            panic!("it is given up, and no dead letter is written")
        };
        assert_eq!(reason, "skipped by ada");
        let again = shop.decide(&key, &Decision::give_up("again")).await;
        assert!(matches!(again, Decided::Final(_)), "{again:?}");
        // It turns out to have happened.
        assert_eq!(
            shop.decide(&key, &Decision::happened()).await,
            Decided::Done
        );
        for decision in decisions() {
            let late = shop.decide(&key, &decision).await;
            assert!(matches!(late, Decided::Final(_)), "{late:?}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_message_without_a_record_can_be_decided_too() {
    for decision in decisions() {
        let shop = Shop::new().await;
        let key = shop.claim().await.store_key().clone();
        let empty = Arc::new(MemoryStore::new());
        let decided = admin::decide(&*empty, &key, None, &decision).await.unwrap();
        assert_eq!(decided, Decided::Done);
        let again = admin::decide(&*empty, &key, None, &decision).await.unwrap();
        assert_eq!(again, Decided::Done, "a repeat of the same decision");
        let [other, ..] = decisions();
        let found = admin::read(&*empty, &key).await.unwrap();
        let is_completed = matches!(
            found.as_ref().unwrap().record.state,
            State::Completed { .. }
        );
        let late = admin::decide(&*empty, &key, found.as_ref(), &other).await;
        assert_eq!(
            matches!(late.unwrap(), Decided::Final(_)),
            is_completed,
            "a failure may be completed"
        );
    }
}

#[tokio::test(start_paused = true)]
async fn what_runs_is_left_alone_until_its_lease_is_over() {
    for decision in decisions() {
        let shop = Shop::new().await;
        let lease = shop.claim().await;
        let key = lease.store_key().clone();
        let runs = shop.decide(&key, &decision).await;
        assert!(matches!(runs, Decided::Runs(_)), "{runs:?}");
        drop(lease);
        sleep(LEASE * 2).await;
        assert_eq!(shop.decide(&key, &decision).await, Decided::Done);
    }
}

// The record changes under the command: the attempt that was seen to wait has run and failed again.
#[tokio::test(start_paused = true)]
async fn a_message_that_fails_all_the_time_can_be_given_up() {
    for decision in decisions() {
        let shop = Shop::new().await;
        let key = shop.failed(Duration::ZERO).await;
        let seen = shop.read(&key).await;
        shop.failed(Duration::ZERO).await;
        let lease = shop.claim().await;
        let running = tokio::spawn(async move {
            sleep(Duration::from_secs(1)).await;
            lease.release(Duration::ZERO, true, "still locked").await;
        });
        let decided = admin::decide(&*shop.store, &key, seen.as_ref(), &decision).await;
        assert_eq!(decided.unwrap(), Decided::Done);
        running.await.unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn an_attempt_that_goes_on_and_another_state_are_told() {
    for decision in decisions() {
        let shop = Shop::new().await;
        let key = shop.failed(Duration::ZERO).await;
        let seen = shop.read(&key).await;
        let lease = shop.claim().await;
        let runs = admin::decide(&*shop.store, &key, seen.as_ref(), &decision).await;
        assert!(matches!(runs.unwrap(), Decided::Runs(_)));
        assert_eq!(lease.complete(&()).await.unwrap(), Completion::Applied);
        let completed = admin::decide(&*shop.store, &key, seen.as_ref(), &decision).await;
        assert!(matches!(completed.unwrap(), Decided::Final(_)));
    }
    // A failure that was redriven since is no failure any more.
    let shop = Shop::new().await;
    let lease = shop.claim().await;
    let key = lease.store_key().clone();
    assert_eq!(lease.fail("no account").await, Completion::Applied);
    let seen = shop.read(&key).await.unwrap();
    let reopened = admin::reopen(&*shop.store, &key, &seen.record).await;
    assert_eq!(reopened.unwrap(), admin::Reopened::Opened);
    let changed = admin::decide(&*shop.store, &key, Some(&seen), &Decision::happened()).await;
    assert!(matches!(changed.unwrap(), Decided::Changed(Some(_))));
}

// Between the look and the change, no attempt begins: the store decides which of them is first.
#[tokio::test(start_paused = true)]
async fn of_a_decision_and_attempts_at_once_one_wins() {
    let mut decided_first = 0;
    for round in 0..40 {
        let shop = Arc::new(Shop::new().await);
        let lease = shop.claim().await;
        let key = lease.store_key().clone();
        let failed = lease.fail("outcome unknown: attempt 1 ended").await;
        assert_eq!(failed, Completion::Applied);
        let seen = shop.read(&key).await;
        let racing = Arc::clone(&shop);
        let runner = tokio::spawn(async move {
            let mut granted = 0;
            for _ in 0..20 {
                if let Ok(Entry::Granted(_)) = racing.gate.enter(&order()).await {
                    granted += 1;
                }
                tokio::task::yield_now().await;
            }
            granted
        });
        for _ in 0..round % 7 {
            tokio::task::yield_now().await;
        }
        let decision = Decision::happened();
        let decided = admin::decide(&*shop.store, &key, seen.as_ref(), &decision).await;
        assert_eq!(decided.unwrap(), Decided::Done);
        assert_eq!(runner.await.unwrap(), 0, "round {round}: it has begun");
        assert!(matches!(shop.state(&key).await, State::Completed { .. }));
        decided_first += 1;
    }
    assert_eq!(decided_first, 40);
}

#[tokio::test(start_paused = true)]
async fn a_decision_whose_answer_is_lost_is_made_once_and_found() {
    let mut lost = 0;
    for seed in 0..60 {
        for decision in decisions() {
            let shop = Shop::new().await;
            let key = shop.failed(Duration::from_secs(60)).await;
            let seen = shop.read(&key).await;
            let faults = Faults {
                reply_lost: 0.5,
                request_lost: 0.2,
                ..Faults::default()
            };
            let mute = FaultStore::new(Arc::clone(&shop.store) as Arc<dyn Store>, faults, seed);
            // The caller repeats it, as the errors say.
            let decided = loop {
                match admin::decide(&mute, &key, seen.as_ref(), &decision).await {
                    Ok(decided) => break decided,
                    Err(error) => assert!(error.is_away(), "seed {seed}: {error}"),
                }
            };
            assert_eq!(decided, Decided::Done, "seed {seed}");
            lost += mute.injected().reply_lost;
        }
    }
    assert!(lost > 0, "no answer was lost");
}
