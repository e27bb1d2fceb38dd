//! What the consumer runtime does with messages, one behaviour a test, on paused time and a store
//! in memory.

#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "a test that cannot go on has failed"
)]

mod batch_failures;
mod batches;
mod bench;
mod breaker;
mod dead_letters;
mod duplicates;
mod fail_open;
#[allow(dead_code, reason = "its other users need more of it")]
mod list;
mod lost_claims;
mod monitor;
mod moving_key;
mod neighbours;
mod outage;
mod pace;
mod results;
mod retries;
mod returned;
mod running;
mod schemas;
mod stop;
mod tenants;
mod unknown;
mod waits;

use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bench::{Bench, Gauge, LEASE, numbered};
use oncegate::core::key::Scope;
use oncegate::core::record::State;
use oncegate::core::store::Store as _;
use oncegate::core::testing::fault::{FaultStore, Faults};
use oncegate::{Attempt, BoxError, Failure, Gate, Handler, Key, Message, Ordering};
use tokio::sync::{Notify, oneshot};
use tokio::time::sleep;

// invariant: shared-record
#[tokio::test(start_paused = true)]
async fn the_same_id_by_another_route_is_another_message() {
    let bench = Bench::of([("", r#"{"id":1}"#.to_owned())]);
    bench.list.push("refunds", "", r#"{"id":1}"#.to_owned());
    let order = async |_: Message, _: Attempt| Ok("order".to_owned());
    let refund = async |_: Message, _: Attempt| Ok("refund".to_owned());
    let consumer = bench
        .consumer(order)
        .route("refunds", bench.gate("runtime"), refund);
    bench.run(consumer, 2).await.unwrap();
    assert_eq!(bench.counters.get("claims", "granted"), 2);
    assert_eq!(bench.counters.get("claims", "completed"), 0);
}

// invariant: claim-without-permit
#[tokio::test(start_paused = true)]
async fn a_claim_is_made_only_with_a_permit_in_hand() {
    let bench = Bench::of(numbered(50));
    let gauge = Arc::new(Gauge::default());
    let store = Arc::clone(&bench.store);
    let most_pending = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&gauge);
    let pending = Arc::clone(&most_pending);
    let handler = move |_: Message, _: Attempt| {
        let gauge = Arc::clone(&counted);
        let store = Arc::clone(&store);
        let pending = Arc::clone(&pending);
        async move {
            let is_pending = |state: &State| matches!(state, State::Pending { .. });
            let claimed = store
                .records()
                .iter()
                .filter(|(_, record)| is_pending(&record.state))
                .count();
            pending.fetch_max(claimed, SeqCst);
            gauge.through(sleep(Duration::from_millis(20))).await;
            Ok(())
        }
    };
    bench
        .run(bench.consumer(handler).concurrency(4), 50)
        .await
        .unwrap();
    assert_eq!(gauge.most.load(SeqCst), 4, "as many handlers as permits");
    assert!(
        most_pending.load(SeqCst) <= 4,
        "no claim waits for a permit"
    );
}

/// Records the order in which the handlers of these messages begin and end.
async fn order_of(ordering: Ordering, messages: &[(&'static str, u64, u64)]) -> Vec<String> {
    let payload = |id: u64, ms: u64| format!(r#"{{"id":{id},"ms":{ms}}}"#);
    let bench = Bench::of(
        messages
            .iter()
            .map(|(key, id, ms)| (*key, payload(*id, *ms))),
    );
    let log = Arc::new(Mutex::new(Vec::new()));
    let written = Arc::clone(&log);
    #[derive(serde::Deserialize)]
    struct Payload {
        id: u64,
        ms: u64,
    }
    let handler = move |message: Message, _: Attempt| {
        let log = Arc::clone(&written);
        async move {
            let Payload { id, ms } = message.json()?;
            log.lock().unwrap().push(format!("+{id}"));
            sleep(Duration::from_millis(ms)).await;
            log.lock().unwrap().push(format!("-{id}"));
            Ok(())
        }
    };
    bench
        .run(bench.consumer(handler).ordering(ordering), messages.len())
        .await
        .unwrap();
    Arc::into_inner(log).unwrap().into_inner().unwrap()
}

#[tokio::test(start_paused = true)]
async fn orders_are_kept_within_a_partition_a_key_or_not_at_all() {
    let messages = [("a", 1, 30), ("a", 2, 10), ("b", 3, 20)];
    assert_eq!(
        order_of(Ordering::Partition, &messages).await,
        ["+1", "-1", "+2", "-2", "+3", "-3"]
    );
    assert_eq!(
        order_of(Ordering::Key, &messages).await,
        ["+1", "+3", "-3", "-1", "+2", "-2"]
    );
    assert_eq!(
        order_of(Ordering::Unordered, &messages).await,
        ["+1", "+2", "+3", "-2", "-3", "-1"]
    );
}

#[tokio::test(start_paused = true)]
async fn two_deliveries_of_one_key_wait_for_each_other_locally() {
    let log = order_of(Ordering::Unordered, &[("a", 1, 30), ("b", 1, 10)]).await;
    assert_eq!(
        log,
        ["+1", "-1"],
        "the second is answered with the first one's result"
    );
}

#[tokio::test(start_paused = true)]
async fn a_result_that_is_too_large_is_not_kept_and_causes_no_rerun() {
    let bench = Bench::of([
        ("", r#"{"id":1}"#.to_owned()),
        ("", r#"{"id":1}"#.to_owned()),
    ]);
    let gate = bench.gate("runtime").max_result_bytes(100);
    bench
        .run(
            bench.consumer_behind(gate, async |_: Message, _: Attempt| Ok("x".repeat(200))),
            2,
        )
        .await
        .unwrap();
    assert_eq!(bench.counters.get("handler_runs", "succeeded"), 1);
    assert_eq!(bench.counters.total("results_not_kept"), 1);
}

/// A handler with its own `duplicate`.
struct Answering {
    asked: Arc<AtomicUsize>,
}

impl Handler for Answering {
    type Output = u64;

    async fn handle(&self, _: &Message, _: &Attempt) -> Result<u64, Failure> {
        Ok(42)
    }

    async fn duplicate(&self, _: &Message, result: u64) -> Result<(), Failure> {
        assert_eq!(result, 42);
        self.asked.fetch_add(1, SeqCst);
        Err("no listener".into())
    }
}

#[tokio::test(start_paused = true)]
async fn a_duplicate_that_cannot_be_answered_is_acked_all_the_same() {
    let bench = Bench::of([
        ("", r#"{"id":1}"#.to_owned()),
        ("", r#"{"id":1}"#.to_owned()),
    ]);
    let asked = Arc::new(AtomicUsize::new(0));
    bench
        .run(
            bench.consumer(Answering {
                asked: Arc::clone(&asked),
            }),
            2,
        )
        .await
        .unwrap();
    assert_eq!(asked.load(SeqCst), 3, "three tries");
    assert_eq!(bench.counters.total("duplicate_hooks_failed"), 1);
    assert_eq!(bench.letters.causes(), [""; 0]);
}

#[tokio::test(start_paused = true)]
async fn after_two_crashes_a_message_runs_alone_and_claims_only_then() {
    let bench = Bench::of(numbered(6));
    let store = Arc::clone(&bench.store);
    let most_pending = Arc::new(AtomicUsize::new(0));
    let gauge = Arc::new(Gauge::default());
    // Two owners claim message 3, one after the other, and crash.
    let gate = bench.gate("runtime");
    let origin = oncegate::Origin::Other("an earlier delivery".into());
    let suspect = Message::new("orders", origin, Some(r#"{"id":3}"#.into()));
    for _ in 0..2 {
        drop(gate.enter(&suspect).await.unwrap());
        sleep(LEASE * 2).await;
    }
    let alone = Arc::new(AtomicUsize::new(usize::MAX));
    let others = Arc::clone(&gauge);
    let seen = Arc::clone(&alone);
    let pending = Arc::clone(&most_pending);
    let handler = move |_: Message, attempt: Attempt| {
        let gauge = Arc::clone(&others);
        let seen = Arc::clone(&seen);
        let store = Arc::clone(&store);
        let pending = Arc::clone(&pending);
        async move {
            gauge
                .through(async {
                    sleep(Duration::from_millis(50)).await;
                    if attempt.recovered() {
                        seen.store(gauge.now.load(SeqCst), SeqCst);
                    }
                    let is_pending = |state: &State| matches!(state, State::Pending { .. });
                    let claimed = store
                        .records()
                        .iter()
                        .filter(|(_, record)| is_pending(&record.state))
                        .count();
                    pending.fetch_max(claimed, SeqCst);
                })
                .await;
            Ok(())
        }
    };
    bench
        .run(bench.consumer(handler).concurrency(6), 6)
        .await
        .unwrap();
    assert_eq!(
        alone.load(SeqCst),
        1,
        "no other handler ran at the same time"
    );
    assert_eq!(
        most_pending.load(SeqCst),
        5,
        "a death of the five others would cost it no attempt"
    );
    assert_eq!(bench.counters.total("quarantined"), 1);
    assert!(gauge.most.load(SeqCst) > 1, "the others ran side by side");
}

#[tokio::test(start_paused = true)]
async fn a_run_that_takes_too_long_is_cancelled_and_told_so() {
    let bench = Bench::of(numbered(1));
    let told = Arc::new(Notify::new());
    let teller = Arc::clone(&told);
    let handler = move |_: Message, attempt: Attempt| {
        let told = Arc::clone(&teller);
        async move {
            if attempt.number() == 1 {
                attempt.cancelled().await;
                told.notify_one();
                std::future::pending::<()>().await;
            }
            Ok(attempt.recovered())
        }
    };
    let gate = bench.gate("runtime").max_run(LEASE * 5);
    bench
        .run(bench.consumer_behind(gate, handler), 1)
        .await
        .unwrap();
    told.notified().await;
    assert_eq!(bench.counters.get("handler_runs", "cancelled"), 1);
    assert_eq!(bench.counters.get("extra_runs", "discarded"), 1);
    assert_eq!(
        bench.counters.get("extra_runs", "crash_takeover"),
        0,
        "no process has died"
    );
}

// invariant: stop-without-end
#[tokio::test(start_paused = true)]
async fn the_stop_deadline_holds_when_a_handler_does_not_return() {
    let bench = Bench::of(numbered(1));
    let (began, begun) = oneshot::channel();
    let began = Mutex::new(Some(began));
    let handler = move |_: Message, _: Attempt| {
        if let Some(began) = began.lock().unwrap().take() {
            began.send(()).unwrap();
        }
        std::future::pending::<Result<(), Failure>>()
    };
    let consumer = bench
        .consumer(handler)
        .stop_deadline(Duration::from_secs(10));
    let started = tokio::time::Instant::now();
    consumer
        .run_until(async { begun.await.unwrap() })
        .await
        .unwrap();
    assert!(
        started.elapsed() < Duration::from_secs(12),
        "{:?}",
        started.elapsed()
    );
    assert_eq!(bench.list.acked(), [0_i64; 0]);
}

// invariant: key-spec-changed
#[tokio::test(start_paused = true)]
async fn another_key_specification_is_refused_with_both_in_the_error() {
    let bench = Bench::of(numbered(1));
    bench
        .run(bench.consumer(async |_: Message, _: Attempt| Ok(())), 1)
        .await
        .unwrap();
    let gate = Gate::new("runtime", Key::json(["order_id"]), Arc::clone(&bench.store)).simulated(7);
    let error: BoxError = gate.open().await.unwrap_err().into();
    let text = error.to_string();
    assert!(
        text.contains("order_id") && text.contains("\"id\"") && text.contains("`runtime`"),
        "{text}"
    );
}

#[tokio::test(start_paused = true)]
async fn settings_that_make_no_sense_are_refused_by_name() {
    let bench = Bench::of([]);
    let refused = async |gate: Gate| gate.open().await.unwrap_err().to_string();
    assert!(
        refused(bench.gate("a").lease(Duration::ZERO))
            .await
            .contains("`lease`")
    );
    assert!(
        refused(bench.gate("a").retention(LEASE / 2))
            .await
            .contains("`retention`")
    );
    assert!(
        refused(bench.gate("a").max_run(LEASE / 2))
            .await
            .contains("`max_run`")
    );
    assert!(refused(bench.gate("a b")).await.contains("scope"));
    let consumer = bench
        .consumer(async |_: Message, _: Attempt| Ok(()))
        .concurrency(0);
    let error = consumer
        .run_until(std::future::pending())
        .await
        .unwrap_err();
    assert!(error.to_string().contains("`concurrency`"), "{error}");
}

#[tokio::test(start_paused = true)]
async fn a_steps_idempotency_key_survives_attempts_and_redeliveries() {
    let bench = Bench::of([
        ("", r#"{"id":1}"#.to_owned()),
        ("", r#"{"id":1.0}"#.to_owned()),
    ]);
    let keys: Arc<Mutex<Vec<String>>> = Arc::default();
    let seen = Arc::clone(&keys);
    let handler = move |_: Message, attempt: Attempt| {
        let mut seen = seen.lock().unwrap();
        seen.push(attempt.idempotency_key("charge"));
        assert_ne!(
            attempt.idempotency_key("refund"),
            seen[0],
            "another step has another key"
        );
        let runs = seen.len();
        async move {
            if runs < 3 {
                Err(Failure::retry("not yet"))
            } else {
                Ok(())
            }
        }
    };
    bench.run(bench.consumer(handler), 2).await.unwrap();
    let keys = keys.lock().unwrap();
    assert_eq!(keys.len(), 3, "the second delivery is a duplicate");
    assert!(keys.iter().all(|key| *key == keys[0]), "{keys:?}");
}

#[tokio::test(start_paused = true)]
async fn a_gate_that_was_opened_before_tells_the_consumers_observer() {
    let bench = Bench::of(numbered(3));
    let gate = bench.gate("runtime");
    gate.open().await.unwrap();
    bench
        .run(
            bench.consumer_behind(gate, async |_: Message, _: Attempt| Ok(())),
            3,
        )
        .await
        .unwrap();
    assert_eq!(bench.counters.get("claims", "granted"), 3);
}

#[tokio::test(start_paused = true)]
async fn no_handler_begins_on_a_lease_that_is_over() {
    let bench = Bench::of(numbered(60));
    let faults = Faults {
        slow_reply: 0.7,
        max_delay: LEASE * 3,
        ..Faults::default()
    };
    let store = FaultStore::new(Arc::clone(&bench.store) as _, faults, 3).sleep_with(sleep);
    let gate = Gate::new("runtime", Key::json(["id"]), store)
        .lease(LEASE)
        .simulated(7);
    let memory = Arc::clone(&bench.store);
    let key = Key::json(["id"])
        .compile(&Scope::new("runtime").unwrap())
        .unwrap();
    let handler = move |message: Message, _: Attempt| {
        let store_key = key.derive(message.route(), &message).unwrap();
        let memory = Arc::clone(&memory);
        async move {
            let snapshot = memory
                .read(vec![store_key])
                .await
                .remove(0)
                .unwrap()
                .expect("a record of its own");
            assert!(
                snapshot.record.protected_for(snapshot.now).is_some(),
                "the lease was over when the handler began"
            );
            Ok(())
        }
    };
    bench
        .run(bench.consumer_behind(gate, handler), 60)
        .await
        .unwrap();
    assert_eq!(bench.counters.get("handler_runs", "panicked"), 0);
}
