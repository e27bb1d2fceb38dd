//! Claims and releases whose answers are lost, and consumers that stop meanwhile.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use oncegate::core::record::State;
use oncegate::core::rules::{Operation, Reply};
use oncegate::core::store::StoreWrapper;
use oncegate::core::store::{Command, Store, StoreError};
use oncegate::core::testing::fault::{FaultStore, Faults};
use oncegate::{Attempt, ConsumerSettings, Entry, Gate, Key, MemoryStore, Message, Origin};
use tokio::sync::Semaphore;
use tokio::time::{Instant, sleep, timeout};

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
async fn a_claim_whose_answer_was_lost_is_released_at_the_stop() {
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
async fn a_takeover_whose_answer_was_lost_is_counted_at_the_next_one() {
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
async fn a_stop_waits_for_an_absent_store_only_until_its_deadline() {
    let bench = Bench::of(numbered(1));
    let began = Instant::now();
    let hour = Duration::from_secs(3_600);
    stop_while_the_answer_of_a_claim_is_lost(&bench, hour).await;
    assert!(
        began.elapsed() < ConsumerSettings::DEFAULT.stop_deadline * 2,
        "{:?}",
        began.elapsed()
    );
}

/// Executes the first discard of a run without an answer, and the next when a permit is there.
#[derive(Debug)]
struct UnansweredDiscard {
    inner: Arc<MemoryStore>,
    /// The first discard's caller waits, in place of getting an error.
    is_silent: bool,
    is_executed: Semaphore,
    repeats: Semaphore,
}

#[async_trait]
impl StoreWrapper for UnansweredDiscard {
    fn inner(&self) -> &dyn Store {
        &*self.inner
    }

    async fn execute(&self, commands: Vec<Command>) -> Vec<Result<Reply, StoreError>> {
        let is_discard = |operation: &Operation| matches!(operation, Operation::Release { end, .. } if end.is_without_outcome());
        if !commands.iter().any(|one| is_discard(&one.operation)) {
            return self.inner.execute(commands).await;
        }
        if self.is_executed.available_permits() > 0 {
            _ = self.repeats.acquire().await.unwrap();
            return self.inner.execute(commands).await;
        }
        let replies = self.inner.execute(commands).await;
        self.is_executed.add_permits(1);
        if self.is_silent {
            std::future::pending::<()>().await;
        }
        let lost = |_| Err(StoreError::unknown("the reply was lost"));
        replies.into_iter().map(lost).collect()
    }
}

// invariant: extra-run-uncounted
#[tokio::test(start_paused = true)]
async fn a_discard_is_counted_when_only_a_claim_after_it_was_answered() {
    for is_silent in [false, true] {
        let bench = Bench::of(numbered(1));
        let store = Arc::new(UnansweredDiscard {
            inner: Arc::clone(&bench.store),
            is_silent,
            is_executed: Semaphore::new(0),
            repeats: Semaphore::new(0),
        });
        let gate = Gate::new("runtime", Key::json(["id"]), Arc::clone(&store))
            .lease(LEASE)
            .simulated(7)
            .observer(Arc::clone(&bench.counters) as _);
        let message = Message::new(
            "orders",
            Origin::Other("first".into()),
            Some(r#"{"id":0}"#.into()),
        );
        let Entry::Granted(lease) = gate.enter(&message).await.unwrap() else {
            panic!("the key is new")
        };
        let answered = timeout(LEASE / 10, lease.discard("too long")).await;
        assert_eq!(answered.is_err(), is_silent);
        // The store counts whole milliseconds.
        sleep(Duration::from_millis(2)).await;
        bench.complete_elsewhere().await;
        store.repeats.add_permits(1);
        // The repeat needs one round of the lease renewer.
        sleep(LEASE * 10).await;
        assert_eq!(bench.counters.get("extra_runs", "discarded"), 1);
        assert_eq!(bench.counters.total("extra_runs"), 1);
    }
}
