//! Claims whose answers are lost, and consumers that stop meanwhile.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use oncegate::core::record::State;
use oncegate::core::testing::fault::{FaultStore, Faults};
use oncegate::{Attempt, Consumer, Entry, Gate, Key, MemoryStore, Message, Origin};
use tokio::time::{Instant, sleep};

use super::{Bench, LEASE, numbered};

/// A gate on a store with faults, with a lease that outlasts the test.
pub(super) fn behind(store: &Arc<FaultStore>) -> Gate {
    Gate::new("runtime", Key::json(["id"]), Arc::clone(store))
        .lease(LEASE * 600)
        .simulated(7)
}

fn pending(store: &MemoryStore) -> usize {
    let is_pending = |state: &State| matches!(state, State::Pending { .. });
    store
        .records()
        .iter()
        .filter(|(_, record)| is_pending(&record.state))
        .count()
}

/// Stops a consumer while its claim's answer is lost; the store is away for `outage` after that.
async fn stop_while_the_answer_of_a_claim_is_lost(bench: &Bench, outage: Duration) {
    let faults = Faults {
        reply_lost: 1.0,
        ..Faults::default()
    };
    let store = Arc::new(FaultStore::new(Arc::clone(&bench.store) as _, faults, 1));
    let consumer = bench.consumer_behind(behind(&store), async |_: Message, _: Attempt| Ok(()));
    let stop = async {
        while store.injected().reply_lost == 0 {
            sleep(Duration::from_millis(1)).await;
        }
        store.stop_faults();
        store.begin_outage();
        let ends = Arc::clone(&store);
        tokio::spawn(async move {
            sleep(outage).await;
            ends.end_outage();
        });
    };
    consumer.run_until(stop).await.unwrap();
}

// invariant: claim-left-behind
#[tokio::test(start_paused = true)]
async fn a_claim_whose_answer_was_lost_is_released_when_the_consumer_stops() {
    for outage in [Duration::ZERO, Duration::from_secs(5)] {
        let bench = Bench::of(numbered(1));
        stop_while_the_answer_of_a_claim_is_lost(&bench, outage).await;
        assert_eq!(
            pending(&bench.store),
            0,
            "the next process would wait for the lease, and count an attempt"
        );
        // The store counts whole milliseconds.
        sleep(Duration::from_millis(2)).await;
        let message = Message::new(
            "orders",
            Origin::Other("again".into()),
            Some(r#"{"id":0}"#.into()),
        );
        let store = Arc::new(FaultStore::new(
            Arc::clone(&bench.store) as _,
            Faults::default(),
            1,
        ));
        let Entry::Granted(lease) = behind(&store).enter(&message).await.unwrap() else {
            panic!("released")
        };
        assert_eq!(
            (lease.attempt().number(), lease.attempt().recovered()),
            (1, false)
        );
    }
}

// invariant: extra-run-uncounted
#[tokio::test(start_paused = true)]
async fn a_takeover_whose_answer_was_lost_is_counted_when_the_next_attempt_takes_over() {
    let bench = Bench::of(numbered(1));
    let message = Message::new(
        "orders",
        Origin::Other("before".into()),
        Some(r#"{"id":0}"#.into()),
    );
    drop(
        bench
            .gate("runtime")
            .simulated(99)
            .enter(&message)
            .await
            .unwrap(),
    );
    sleep(LEASE * 2).await;
    stop_while_the_answer_of_a_claim_is_lost(&bench, Duration::ZERO).await;
    assert_eq!(bench.counters.total("extra_runs"), 0, "nothing has run");

    let store = Arc::new(FaultStore::new(
        Arc::clone(&bench.store) as _,
        Faults::default(),
        1,
    ));
    let seen: Arc<Mutex<Vec<(u32, bool)>>> = Arc::default();
    let noted = Arc::clone(&seen);
    let handler = move |_: Message, attempt: Attempt| {
        noted
            .lock()
            .unwrap()
            .push((attempt.number(), attempt.recovered()));
        async { Ok(()) }
    };
    bench.list.push("orders", "", r#"{"id":0}"#.to_owned());
    let list = Arc::clone(&bench.list);
    let consumer = bench.consumer_behind(behind(&store), handler);
    consumer
        .run_until(async move { list.until_acked(1).await })
        .await
        .unwrap();
    assert_eq!(*seen.lock().unwrap(), [(2, true)]);
    assert_eq!(bench.counters.get("extra_runs", "crash_takeover"), 1);
}

// invariant: claim-left-behind
#[tokio::test(start_paused = true)]
async fn a_stop_does_not_wait_beyond_its_deadline_for_a_store_that_stays_away() {
    let bench = Bench::of(numbered(1));
    let began = Instant::now();
    let hour = Duration::from_secs(3_600);
    stop_while_the_answer_of_a_claim_is_lost(&bench, hour).await;
    assert!(
        began.elapsed() < Consumer::DEFAULT_STOP_DEADLINE * 2,
        "{:?}",
        began.elapsed()
    );
}
