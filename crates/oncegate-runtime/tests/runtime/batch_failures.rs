//! What becomes of the messages of a batch that fails, is cancelled, or ends its process.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use oncegate::dead_letters::{DeadLetter, DeadLetters};
use oncegate::{BatchMessage, BoxError, Failure, Message, Origin};
use tokio::sync::{Notify, oneshot};
use tokio::time::sleep;

use super::batches::{Outcomes, Seen, id, ids, limits, succeed};
use super::{Bench, LEASE, numbered};

/// What makes a whole batch fail.
#[derive(Clone, Copy, Debug)]
enum Poison {
    Permanent,
    Retry,
    Panic,
}

async fn poisoned(batch: Vec<BatchMessage>, poison: Poison, poisonous: u64) -> Outcomes {
    if !ids(&batch).contains(&poisonous) {
        return succeed(&batch);
    }
    match poison {
        Poison::Permanent => Err(Failure::permanent(format!("{poisonous} is bad"))),
        Poison::Retry => Err(format!("{poisonous} fails").into()),
        Poison::Panic => panic!("simulated"),
    }
}

// invariant: batch-neighbours
#[tokio::test(start_paused = true)]
async fn a_message_that_fails_its_batch_is_found_at_no_cost_to_others() {
    const MESSAGES: usize = 100;
    for (poison, cause) in [
        (Poison::Permanent, "permanent"),
        (Poison::Retry, "attempts_used_up"),
        (Poison::Panic, "attempts_used_up"),
    ] {
        let bench = Bench::of(numbered(MESSAGES));
        let seen = Seen::default();
        let attempts: Arc<Mutex<BTreeMap<u64, u32>>> = Arc::default();
        let noted = Arc::clone(&attempts);
        let consumer = seen.consumer(&bench, limits(MESSAGES), move |batch| {
            let attempt_of = |one: &BatchMessage| (id(one.message()), one.attempt().number());
            noted.lock().unwrap().extend(batch.iter().map(attempt_of));
            poisoned(batch, poison, 37)
        });
        let consumer = consumer.max_attempts(4).without_breaker();
        bench.run(consumer, MESSAGES).await.unwrap();
        assert_eq!(bench.letters.causes(), [cause], "{poison:?}");
        assert_eq!(bench.counters.total("completions"), MESSAGES as u64 - 1);
        let attempts = attempts.lock().unwrap().clone();
        assert!(
            attempts
                .iter()
                .all(|(id, number)| *id == 37 || *number == 1),
            "{attempts:?}"
        );
        // 100, 50 and 50, then one more pair for each of six halvings.
        let failed_alone = seen.calls().iter().filter(|call| **call == [37]).count();
        let others = seen.calls().len() - failed_alone;
        assert!(others <= 14, "{poison:?}: {others} calls");
        let after = seen
            .calls()
            .into_iter()
            .skip_while(|call| *call != [37])
            .skip(1);
        assert!(
            after
                .filter(|call| call.contains(&37))
                .all(|call| call == [37]),
            "it runs alone from then on"
        );
    }
}

// invariant: batch-neighbours
#[tokio::test(start_paused = true)]
async fn the_reason_of_a_split_is_that_of_the_message_alone() {
    #[derive(Debug, Default)]
    struct Reasons(Mutex<Vec<(String, String)>>);
    #[async_trait::async_trait]
    impl DeadLetters for Reasons {
        async fn send(&self, letter: &DeadLetter) -> Result<(), BoxError> {
            let of = letter.message.origin().to_string();
            self.0.lock().unwrap().push((of, letter.reason.clone()));
            Ok(())
        }
    }
    let bench = Bench::of(numbered(20));
    let seen = Seen::default();
    let reasons = Arc::new(Reasons::default());
    let consumer = seen.consumer(&bench, limits(20), async |batch| {
        match ids(&batch).into_iter().find(|id| id % 10 == 3) {
            Some(id) => Err(Failure::permanent(format!(
                "{id} of {} is bad",
                batch.len()
            ))),
            None => succeed(&batch),
        }
    });
    bench
        .run(consumer.dead_letters(Arc::clone(&reasons)), 20)
        .await
        .unwrap();
    let expected = [3, 13].map(|id| (format!("orders/0@{id}"), format!("{id} of 1 is bad")));
    let mut reasons = reasons.0.lock().unwrap().clone();
    reasons.sort();
    let mut expected = expected.to_vec();
    expected.sort();
    assert_eq!(reasons, expected);
}

#[tokio::test(start_paused = true)]
async fn a_failure_that_no_message_can_have_caused_is_not_split() {
    let failures: [fn() -> Failure; 3] = [
        || Failure::not_run("no connection"),
        || Failure::retry_after(LEASE, "the bank is overloaded"),
        || Failure::unknown("no answer"),
    ];
    for failure in failures {
        let bench = Bench::of(numbered(10));
        let seen = Seen::default();
        let failed = Arc::new(AtomicBool::new(false));
        let consumer = seen.consumer(&bench, limits(10), move |batch| {
            let is_first = !failed.swap(true, SeqCst);
            async move {
                if is_first {
                    Err(failure())
                } else {
                    succeed(&batch)
                }
            }
        });
        bench.run(consumer, 10).await.unwrap();
        assert_eq!(
            bench.counters.get("batch_calls", "split"),
            0,
            "{:?}",
            failure()
        );
        assert!(
            seen.runs().values().all(|runs| *runs == 2),
            "{:?}",
            seen.calls()
        );
    }
}

// invariant: batch-neighbours
#[tokio::test(start_paused = true)]
async fn an_outage_of_what_all_need_is_not_sought_in_the_messages() {
    const MESSAGES: usize = 64;
    let bench = Bench::of(numbered(MESSAGES));
    let seen = Seen::default();
    let is_down = Arc::new(AtomicBool::new(true));
    let asked = Arc::clone(&is_down);
    let first_batch = Arc::new(Notify::new());
    let tell = Arc::clone(&first_batch);
    let highest = Arc::new(Mutex::new(BTreeMap::<u64, u32>::new()));
    let noted = Arc::clone(&highest);
    let consumer = seen.consumer(&bench, limits(MESSAGES), move |batch| {
        let is_down = asked.load(SeqCst);
        if !is_down {
            let attempt_of = |one: &BatchMessage| (id(one.message()), one.attempt().number());
            noted.lock().unwrap().extend(batch.iter().map(attempt_of));
        }
        tell.notify_one();
        async move {
            if is_down {
                Err("the database is down".into())
            } else {
                succeed(&batch)
            }
        }
    });
    let list = Arc::clone(&bench.list);
    let counters = Arc::clone(&bench.counters);
    let calls = seen.clone();
    let until = async move {
        while counters.total("retries") < MESSAGES as u64 {
            first_batch.notified().await;
            tokio::task::yield_now().await;
            sleep(Duration::from_millis(1)).await;
        }
        // 64, 32, 16, 8, 4, 2, and three messages alone; their halves are not tried.
        assert_eq!(calls.sizes()[..9], [64, 32, 16, 8, 4, 2, 1, 1, 2]);
        is_down.store(false, SeqCst);
        list.until_acked(MESSAGES).await;
    };
    consumer.run_until(until).await.unwrap();
    let highest = highest.lock().unwrap().clone();
    let burnt: Vec<u64> = highest
        .iter()
        .filter(|(_, number)| **number > 1)
        .map(|(id, _)| *id)
        .collect();
    assert!(
        burnt.len() <= 8,
        "the outage cost these an attempt: {burnt:?}"
    );
    assert_eq!(bench.letters.causes(), [""; 0]);
}

// invariant: batch-crash
#[tokio::test(start_paused = true)]
async fn a_batch_with_mismatched_outcomes_has_an_unknown_outcome() {
    let bench = Bench::of(numbered(3));
    let seen = Seen::default();
    let recovered = Arc::new(Mutex::new(Vec::new()));
    let noted = Arc::clone(&recovered);
    let consumer = seen.consumer(&bench, limits(3), move |batch| {
        noted
            .lock()
            .unwrap()
            .extend(batch.iter().map(|one| one.attempt().recovered()));
        let is_first = batch.iter().all(|one| one.attempt().number() == 1);
        async move {
            if is_first {
                Ok(vec![Ok("one".to_owned())])
            } else {
                succeed(&batch)
            }
        }
    });
    bench.run(consumer, 3).await.unwrap();
    assert_eq!(
        *recovered.lock().unwrap(),
        [false, false, false, true, true, true]
    );
    assert_eq!(bench.counters.get("extra_runs", "crash_takeover"), 3);
}

// invariant: batch-crash
#[tokio::test(start_paused = true)]
async fn after_a_crash_in_a_batch_each_of_its_messages_is_told() {
    let bench = Bench::of(numbered(5));
    let seen = Seen::default();
    let (began, begun) = oneshot::channel();
    let began = Mutex::new(Some(began));
    let hanging = seen.consumer(&bench, limits(5), move |_| {
        began.lock().unwrap().take().unwrap().send(()).unwrap();
        std::future::pending()
    });
    let running = tokio::spawn(hanging.run_until(std::future::pending()));
    begun.await.unwrap();
    running.abort();
    assert!(running.await.unwrap_err().is_cancelled());
    for (_, payload) in numbered(5) {
        bench.list.push("orders", "", payload);
    }
    let told = Arc::new(Mutex::new(Vec::new()));
    let noted = Arc::clone(&told);
    // Another process has other owner tokens.
    let gate = bench.gate("runtime").simulated(8);
    let consumer = seen.consumer_behind(&bench, gate, limits(5), move |batch| {
        let of = |one: &BatchMessage| (one.attempt().number(), one.attempt().recovered());
        noted.lock().unwrap().extend(batch.iter().map(of));
        async move { succeed(&batch) }
    });
    bench.run(consumer, 5).await.unwrap();
    assert_eq!(*told.lock().unwrap(), [(2, true); 5]);
}

#[tokio::test(start_paused = true)]
async fn a_message_that_ended_its_process_twice_is_a_batch_of_its_own() {
    let bench = Bench::of(numbered(6));
    let seen = Seen::default();
    let gate = bench.gate("runtime");
    let suspect = Message::new(
        "orders",
        Origin::Other("earlier".into()),
        Some(r#"{"id":3}"#.into()),
    );
    for _ in 0..2 {
        drop(gate.enter(&suspect).await.unwrap());
        sleep(LEASE * 2).await;
    }
    let consumer = seen.consumer(&bench, limits(6), async |batch| succeed(&batch));
    bench.run(consumer.concurrency(2), 6).await.unwrap();
    assert_eq!(seen.calls(), [vec![0, 1, 2, 4, 5], vec![3]]);
    assert_eq!(bench.counters.total("quarantined"), 1);
}

// invariant: batch-neighbours
#[tokio::test(start_paused = true)]
async fn an_unwritable_dead_letter_holds_up_only_its_own_message() {
    #[derive(Debug)]
    struct Unwritable;
    #[async_trait::async_trait]
    impl DeadLetters for Unwritable {
        async fn send(&self, _: &DeadLetter) -> Result<(), BoxError> {
            Err("the topic is away".into())
        }
    }
    let messages = [("a", 0), ("b", 1), ("a", 2), ("b", 3)];
    let bench = Bench::of(messages.map(|(key, id)| (key, format!(r#"{{"id":{id}}}"#))));
    let seen = Seen::default();
    let consumer = seen.consumer(&bench, limits(4), async |batch| {
        let outcome = |id: u64| match id {
            0 => Err(Failure::permanent("bad")),
            id => Ok(format!("done {id}")),
        };
        Ok(ids(&batch).into_iter().map(outcome).collect())
    });
    let consumer = consumer.dead_letters(Unwritable).stop_deadline(LEASE);
    bench.run(consumer, 2).await.unwrap();
    assert_eq!(
        seen.calls(),
        [vec![0, 1], vec![3]],
        "2 waits behind 0, and 3 does not"
    );
    assert_eq!(bench.list.acked(), [1, 3]);
}

#[tokio::test(start_paused = true)]
async fn a_cancelled_batch_is_dropped_and_its_messages_are_recovered() {
    let bench = Bench::of(numbered(3));
    let seen = Seen::default();
    let dropped = Arc::new(AtomicBool::new(false));
    struct OnDrop(Arc<AtomicBool>);
    impl Drop for OnDrop {
        fn drop(&mut self) {
            self.0.store(true, SeqCst);
        }
    }
    let note = Arc::clone(&dropped);
    let gate = bench.gate("runtime").max_run(LEASE * 3);
    let consumer = seen.consumer_behind(&bench, gate, limits(3), move |batch| {
        let guard = OnDrop(Arc::clone(&note));
        async move {
            if batch.iter().all(|one| one.attempt().number() == 1) {
                let _guard = guard;
                std::future::pending::<()>().await;
            }
            assert!(batch.iter().all(|one| one.attempt().recovered()));
            succeed(&batch)
        }
    });
    bench.run(consumer, 3).await.unwrap();
    assert!(
        dropped.load(SeqCst),
        "the call that takes too long does not go on for ever"
    );
    assert_eq!(bench.counters.get("handler_runs", "cancelled"), 3);
}
