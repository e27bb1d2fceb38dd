//! A handler that takes many messages in one call: what is in a batch, and what becomes of each message.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use oncegate::consumer::DeadLetterLimit;
use oncegate::core::record::State;
use oncegate::dead_letters::{DeadLetter, DeadLetters};
use oncegate::{
    BatchHandler, BatchLimits, BatchMessage, Batched, BoxError, Consumer, Entry, Failure, Gate, Message,
    Ordering, Origin,
};
use tokio::sync::{Notify, oneshot};
use tokio::time::{Instant, sleep};

use super::list::Listed;
use super::{Bench, LEASE, numbered};

const WAIT: Duration = Duration::from_millis(10);

type Outcomes = Result<Vec<Result<String, Failure>>, Failure>;

/// A batch handler that is a closure over the ids and attempts of a batch, and records each call.
struct Calls<F> {
    outcomes: F,
    calls: Arc<Mutex<Vec<Vec<u64>>>>,
    duplicates: Arc<Mutex<Vec<(u64, String)>>>,
}

#[derive(serde::Deserialize)]
struct Order {
    id: u64,
}

fn id(message: &Message) -> u64 {
    message.json::<Order>().unwrap().id
}

fn ids(batch: &[BatchMessage]) -> Vec<u64> {
    batch.iter().map(|one| id(one.message())).collect()
}

fn succeed(batch: &[BatchMessage]) -> Outcomes {
    Ok(ids(batch).into_iter().map(|id| Ok(format!("done {id}"))).collect())
}

impl<F: Fn(Vec<BatchMessage>) -> Fut + Send + Sync + 'static, Fut: Future<Output = Outcomes> + Send>
    BatchHandler for Calls<F>
{
    type Output = String;

    async fn handle(&self, batch: &[BatchMessage]) -> Outcomes {
        self.calls.lock().unwrap().push(ids(batch));
        (self.outcomes)(batch.to_vec()).await
    }

    async fn duplicate(&self, message: &Message, result: String) -> Result<(), Failure> {
        self.duplicates.lock().unwrap().push((id(message), result));
        Ok(())
    }
}

/// What a test sees of its batches.
#[derive(Clone, Default)]
struct Seen {
    calls: Arc<Mutex<Vec<Vec<u64>>>>,
    duplicates: Arc<Mutex<Vec<(u64, String)>>>,
}

impl Seen {
    fn consumer<F, Fut>(&self, bench: &Bench, limits: BatchLimits, outcomes: F) -> Consumer
    where
        F: Fn(Vec<BatchMessage>) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Outcomes> + Send + 'static,
    {
        self.consumer_behind(bench, bench.gate("runtime"), limits, outcomes)
    }

    fn consumer_behind<F, Fut>(&self, bench: &Bench, gate: Gate, limits: BatchLimits, outcomes: F) -> Consumer
    where
        F: Fn(Vec<BatchMessage>) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Outcomes> + Send + 'static,
    {
        let (calls, duplicates) = (Arc::clone(&self.calls), Arc::clone(&self.duplicates));
        let handler = Calls { outcomes, calls, duplicates };
        Consumer::new(Listed(Arc::clone(&bench.list)), gate, Batched::new(limits, handler))
            .dead_letters(Arc::clone(&bench.letters))
            .observer(Arc::clone(&bench.counters) as _)
    }

    fn calls(&self) -> Vec<Vec<u64>> {
        self.calls.lock().unwrap().clone()
    }

    fn sizes(&self) -> Vec<usize> {
        self.calls().iter().map(Vec::len).collect()
    }

    /// How often the handler was called with each message.
    fn runs(&self) -> BTreeMap<u64, usize> {
        let mut runs = BTreeMap::new();
        self.calls().into_iter().flatten().for_each(|id| *runs.entry(id).or_default() += 1);
        runs
    }
}

fn limits(messages: usize) -> BatchLimits {
    BatchLimits::new(messages).wait(WAIT)
}

#[tokio::test(start_paused = true)]
async fn a_batch_has_up_to_its_limit_of_messages_in_their_order_and_each_is_completed() {
    let (bench, seen) = (Bench::of(numbered(250)), Seen::default());
    let consumer = seen.consumer(&bench, limits(100), async |batch| succeed(&batch));
    bench.run(consumer, 250).await.unwrap();
    assert_eq!(seen.calls(), [(0..100).collect::<Vec<u64>>(), (100..200).collect(), (200..250).collect()]);
    assert_eq!(bench.counters.total("completions"), 250);
    assert_eq!(bench.counters.get("batch_calls", "gathered"), 3);
    assert_eq!(bench.counters.get("handler_runs", "succeeded"), 250);
}

#[tokio::test(start_paused = true)]
async fn a_lone_message_waits_as_long_as_the_limits_say() {
    let (bench, seen) = (Bench::of(numbered(1)), Seen::default());
    let wait = Duration::from_secs(3);
    let began = Instant::now();
    let called = Arc::new(Mutex::new(None));
    let noted = Arc::clone(&called);
    let consumer = seen.consumer(&bench, BatchLimits::new(100).wait(wait), move |batch| {
        noted.lock().unwrap().get_or_insert_with(|| began.elapsed());
        async move { succeed(&batch) }
    });
    bench.run(consumer, 1).await.unwrap();
    let waited = called.lock().unwrap().expect("it ran");
    assert!(waited >= wait && waited < wait * 2, "{waited:?}");
}

#[tokio::test(start_paused = true)]
async fn each_message_of_a_batch_has_its_own_outcome() {
    let (bench, seen) = (Bench::of(numbered(6)), Seen::default());
    let consumer = seen.consumer(&bench, limits(6), async |batch| {
        let outcome = |one: &BatchMessage| match (id(one.message()), one.attempt().number()) {
            (2, 1) => Err(Failure::retry("not yet")),
            (4, _) => Err(Failure::permanent("no such account")),
            (id, number) => Ok(format!("{id} at attempt {number}")),
        };
        Ok(batch.iter().map(outcome).collect())
    });
    bench.run(consumer, 6).await.unwrap();
    assert_eq!(seen.calls(), [vec![0, 1, 2, 3, 4, 5], vec![2]]);
    assert_eq!(bench.letters.causes(), ["permanent"]);
    let counters = &bench.counters;
    assert_eq!((counters.total("completions"), counters.total("retries")), (5, 1));
    assert_eq!(counters.get("batch_calls", "split"), 0, "an outcome for each needs no split");
}

// invariant: batch-order
#[tokio::test(start_paused = true)]
async fn a_key_is_in_a_batch_once_and_its_other_messages_get_the_result() {
    let twice = numbered(3).into_iter().chain(numbered(3));
    let (bench, seen) = (Bench::of(twice), Seen::default());
    let consumer = seen.consumer(&bench, limits(6), async |batch| succeed(&batch));
    bench.run(consumer, 6).await.unwrap();
    assert_eq!(seen.calls(), [vec![0, 1, 2]]);
    let mut duplicates = seen.duplicates.lock().unwrap().clone();
    duplicates.sort();
    assert_eq!(duplicates, [0, 1, 2].map(|id| (id, format!("done {id}"))));
}

#[tokio::test(start_paused = true)]
async fn a_key_that_is_held_elsewhere_is_left_out_and_runs_later() {
    let (bench, seen) = (Bench::of(numbered(4)), Seen::default());
    let elsewhere = Message::new("orders", Origin::Other("elsewhere".into()), Some(r#"{"id":2}"#.into()));
    let Entry::Granted(lease) = bench.gate("runtime").enter(&elsewhere).await.unwrap() else { panic!() };
    let list = Arc::clone(&bench.list);
    let consumer = seen.consumer(&bench, limits(4), async |batch| succeed(&batch));
    let until = async move {
        list.until_acked(3).await;
        lease.release(Duration::ZERO, false, "test").await;
        list.until_acked(4).await;
    };
    consumer.run_until(until).await.unwrap();
    assert_eq!(seen.calls(), [vec![0, 1, 3], vec![2]]);
    assert!(bench.counters.get("claims", "busy") > 0);
}

// invariant: batch-order
#[tokio::test(start_paused = true)]
async fn no_two_messages_of_one_order_are_in_a_batch() {
    let payload = |id: u64| format!(r#"{{"id":{id}}}"#);
    let keys = ["a", "a", "b", "", "", "b", "a"];
    let messages = || keys.iter().zip(0..).map(|(key, id)| (*key, payload(id)));
    for (ordering, expected) in [
        (Ordering::Key, vec![vec![0, 2, 3, 4], vec![1, 5], vec![6]]),
        (Ordering::Partition, (0..7).map(|id| vec![id]).collect()),
        (Ordering::Unordered, vec![(0..7).collect()]),
    ] {
        let (bench, seen) = (Bench::of(messages()), Seen::default());
        let consumer = seen.consumer(&bench, limits(7), async |batch| succeed(&batch));
        bench.run(consumer.ordering(ordering), 7).await.unwrap();
        assert_eq!(seen.calls(), expected, "{ordering:?}");
    }
}

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
async fn a_message_that_fails_its_batch_is_found_and_costs_the_others_nothing() {
    const MESSAGES: usize = 100;
    for (poison, cause) in [
        (Poison::Permanent, "permanent"),
        (Poison::Retry, "attempts_used_up"),
        (Poison::Panic, "attempts_used_up"),
    ] {
        let (bench, seen) = (Bench::of(numbered(MESSAGES)), Seen::default());
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
        assert!(attempts.iter().all(|(id, number)| *id == 37 || *number == 1), "{attempts:?}");
        // 100, 50 and 50, then one more pair for each of six halvings.
        let failed_alone = seen.calls().iter().filter(|call| **call == [37]).count();
        let others = seen.calls().len() - failed_alone;
        assert!(others <= 14, "{poison:?}: {others} calls");
        let after = seen.calls().into_iter().skip_while(|call| *call != [37]).skip(1);
        assert!(
            after.filter(|call| call.contains(&37)).all(|call| call == [37]),
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
    let (bench, seen, reasons) = (Bench::of(numbered(20)), Seen::default(), Arc::new(Reasons::default()));
    let consumer = seen.consumer(&bench, limits(20), async |batch| {
        match ids(&batch).into_iter().find(|id| id % 10 == 3) {
            Some(id) => Err(Failure::permanent(format!("{id} of {} is bad", batch.len()))),
            None => succeed(&batch),
        }
    });
    bench.run(consumer.dead_letters(Arc::clone(&reasons)), 20).await.unwrap();
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
        let (bench, seen) = (Bench::of(numbered(10)), Seen::default());
        let failed = Arc::new(AtomicBool::new(false));
        let consumer = seen.consumer(&bench, limits(10), move |batch| {
            let is_first = !failed.swap(true, SeqCst);
            async move { if is_first { Err(failure()) } else { succeed(&batch) } }
        });
        bench.run(consumer, 10).await.unwrap();
        assert_eq!(bench.counters.get("batch_calls", "split"), 0, "{:?}", failure());
        assert!(seen.runs().values().all(|runs| *runs == 2), "{:?}", seen.calls());
    }
}

// invariant: batch-neighbours
#[tokio::test(start_paused = true)]
async fn an_outage_of_what_all_need_is_not_searched_for_in_the_messages() {
    const MESSAGES: usize = 64;
    let (bench, seen) = (Bench::of(numbered(MESSAGES)), Seen::default());
    let is_down = Arc::new(AtomicBool::new(true));
    let (asked, first_batch) = (Arc::clone(&is_down), Arc::new(Notify::new()));
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
        async move { if is_down { Err("the database is down".into()) } else { succeed(&batch) } }
    });
    let (list, counters, calls) = (Arc::clone(&bench.list), Arc::clone(&bench.counters), seen.clone());
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
    let burnt: Vec<u64> = highest.iter().filter(|(_, number)| **number > 1).map(|(id, _)| *id).collect();
    assert!(burnt.len() <= 8, "the outage cost these an attempt: {burnt:?}");
    assert_eq!(bench.letters.causes(), [""; 0]);
}

// invariant: batch-crash
#[tokio::test(start_paused = true)]
async fn a_batch_whose_outcomes_do_not_match_its_messages_has_an_unknown_outcome() {
    let (bench, seen) = (Bench::of(numbered(3)), Seen::default());
    let recovered = Arc::new(Mutex::new(Vec::new()));
    let noted = Arc::clone(&recovered);
    let consumer = seen.consumer(&bench, limits(3), move |batch| {
        noted.lock().unwrap().extend(batch.iter().map(|one| one.attempt().recovered()));
        let is_first = batch.iter().all(|one| one.attempt().number() == 1);
        async move { if is_first { Ok(vec![Ok("one".to_owned())]) } else { succeed(&batch) } }
    });
    bench.run(consumer, 3).await.unwrap();
    assert_eq!(*recovered.lock().unwrap(), [false, false, false, true, true, true]);
    assert_eq!(bench.counters.get("extra_runs", "crash_takeover"), 3);
}

// invariant: batch-crash
#[tokio::test(start_paused = true)]
async fn after_a_crash_in_a_batch_each_of_its_messages_is_told() {
    let (bench, seen) = (Bench::of(numbered(5)), Seen::default());
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
    let (bench, seen) = (Bench::of(numbered(6)), Seen::default());
    let gate = bench.gate("runtime");
    let suspect = Message::new("orders", Origin::Other("earlier".into()), Some(r#"{"id":3}"#.into()));
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
async fn a_dead_letter_that_cannot_be_written_holds_up_only_its_own_message() {
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
    assert_eq!(seen.calls(), [vec![0, 1], vec![3]], "2 waits behind 0, and 3 does not");
    assert_eq!(bench.list.acked(), [1, 3]);
}

#[tokio::test(start_paused = true)]
async fn a_cancelled_batch_is_dropped_and_its_messages_are_told_in_the_next_attempt() {
    let (bench, seen) = (Bench::of(numbered(3)), Seen::default());
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
    assert!(dropped.load(SeqCst), "the call that takes too long does not go on for ever");
    assert_eq!(bench.counters.get("handler_runs", "cancelled"), 3);
}

#[tokio::test(start_paused = true)]
async fn concurrency_counts_calls_and_what_is_claimed_runs() {
    let (bench, seen) = (Bench::of(numbered(40)), Seen::default());
    let gauge = Arc::new(super::Gauge::default());
    let (counted, store) = (Arc::clone(&gauge), Arc::clone(&bench.store));
    let consumer = seen.consumer(&bench, limits(5), move |batch| {
        let (gauge, store) = (Arc::clone(&counted), Arc::clone(&store));
        async move {
            gauge.through(sleep(Duration::from_millis(20))).await;
            let is_pending = |state: &State| matches!(state, State::Pending { .. });
            let claimed = store.records().iter().filter(|(_, record)| is_pending(&record.state)).count();
            assert!(claimed <= 10, "{claimed} are claimed, and two calls run");
            succeed(&batch)
        }
    });
    bench.run(consumer.concurrency(2), 40).await.unwrap();
    assert_eq!(gauge.most.load(SeqCst), 2);
    assert_eq!(seen.sizes(), [5; 8]);
}

#[tokio::test(start_paused = true)]
async fn routes_with_and_without_batches_run_beside_each_other() {
    let (bench, seen) = (Bench::of(numbered(10)), Seen::default());
    for id in 0..10 {
        bench.list.push("refunds", "", format!(r#"{{"id":{id}}}"#));
    }
    let one_by_one = async |_: Message, _: oncegate::Attempt| Ok(());
    let consumer = seen.consumer(&bench, limits(10), async |batch| succeed(&batch)).route(
        "refunds",
        bench.gate("refunds"),
        one_by_one,
    );
    bench.run(consumer, 20).await.unwrap();
    assert_eq!(seen.sizes(), [10]);
    assert_eq!(bench.counters.get("handler_runs", "succeeded"), 20);
}

#[tokio::test(start_paused = true)]
async fn a_stop_lets_a_running_batch_end() {
    let (bench, seen) = (Bench::of(numbered(20)), Seen::default());
    let (began, begun) = oneshot::channel();
    let began = Mutex::new(Some(began));
    let consumer = seen.consumer(&bench, limits(5), move |batch| {
        if let Some(began) = began.lock().unwrap().take() {
            began.send(()).unwrap();
        }
        async move {
            sleep(Duration::from_secs(5)).await;
            succeed(&batch)
        }
    });
    consumer.concurrency(1).run_until(async { begun.await.unwrap() }).await.unwrap();
    assert_eq!(bench.list.acked(), [0, 1, 2, 3, 4]);
    assert_eq!(bench.counters.get("claims", "granted"), 5, "nothing else was claimed");
}

#[tokio::test(start_paused = true)]
async fn limits_that_make_no_sense_are_refused_by_name() {
    let bench = Bench::of([]);
    let refused = async |limits: BatchLimits| {
        let consumer = Seen::default().consumer(&bench, limits, async |batch| succeed(&batch));
        let error = consumer.in_flight(50, 1 << 20).run_until(std::future::pending()).await.unwrap_err();
        error.to_string()
    };
    assert!(refused(BatchLimits::new(0)).await.contains("`batch.messages`"));
    assert!(refused(BatchLimits::new(51)).await.contains("`in_flight`"));
    assert!(refused(BatchLimits::new(5).bytes(0)).await.contains("`batch.bytes`"));
    assert!(refused(BatchLimits::new(5).wait(LEASE * 6)).await.contains("`batch.wait`"));
}

#[tokio::test(start_paused = true)]
async fn bad_keys_in_a_batch_are_dead_letters_of_their_own() {
    let bad = ("", "{not json".to_owned());
    let messages = numbered(3).into_iter().chain([bad.clone(), bad]);
    let (bench, seen) = (Bench::of(messages), Seen::default());
    let consumer = seen.consumer(&bench, limits(5), async |batch| succeed(&batch));
    let consumer = consumer.dead_letter_limit(DeadLetterLimit { in_a_row: 10, ..DeadLetterLimit::default() });
    bench.run(consumer, 5).await.unwrap();
    assert_eq!(seen.calls(), [vec![0, 1, 2]]);
    assert_eq!(bench.letters.causes(), ["bad_key"; 2]);
}

#[tokio::test(start_paused = true)]
async fn messages_that_wait_for_their_batch_are_no_stall() {
    let (bench, seen, others) = (Bench::of(numbered(0)), Seen::default(), Seen::default());
    let limits = BatchLimits::new(10_000).wait(BatchLimits::LONGEST_WAIT);
    let consumer = seen.consumer(&bench, limits, async |batch| succeed(&batch));
    let (calls, duplicates) = (Arc::clone(&others.calls), Arc::clone(&others.duplicates));
    let refunds = Calls { outcomes: async |batch: Vec<BatchMessage>| succeed(&batch), calls, duplicates };
    let consumer = consumer.route("refunds", bench.gate("refunds"), Batched::new(limits, refunds));
    let (monitor, list) = (consumer.monitor(), Arc::clone(&bench.list));
    let trickle = async move {
        let mut pushed = 0;
        // The batches of one route start while those of the other have waited for half of their time: at any moment some
        // message waits, and permits are free, for much longer than a stall may last.
        for tick in 0..600_u64 {
            list.push("orders", "", format!(r#"{{"id":{tick}}}"#));
            pushed += 1;
            if tick >= 12 {
                list.push("refunds", "", format!(r#"{{"id":{tick}}}"#));
                pushed += 1;
            }
            sleep(BatchLimits::LONGEST_WAIT / 25).await;
            assert!(tick < 25 || monitor.health().is_ready(), "{tick}: {:?}", monitor.health());
        }
        list.until_acked(pushed).await;
    };
    consumer.run_until(trickle).await.unwrap();
    assert!(seen.calls().len() > 20 && others.calls().len() > 20);
}
