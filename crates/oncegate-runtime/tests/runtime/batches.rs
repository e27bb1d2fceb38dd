//! A handler that takes many messages in one call: what is in a batch, and how each message ends.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use oncegate::consumer::DeadLetterLimit;
use oncegate::core::record::State;
use oncegate::{
    BatchHandler, BatchLimits, BatchMessage, Batched, Consumer, Entry, Failure, Gate, Message,
    Ordering, Origin,
};
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep};

use super::list::Listed;
use super::{Bench, LEASE, numbered};

const WAIT: Duration = Duration::from_millis(10);

pub(super) type Outcomes = Result<Vec<Result<String, Failure>>, Failure>;

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

pub(super) fn id(message: &Message) -> u64 {
    message.json::<Order>().unwrap().id
}

pub(super) fn ids(batch: &[BatchMessage]) -> Vec<u64> {
    batch.iter().map(|one| id(one.message())).collect()
}

pub(super) fn succeed(batch: &[BatchMessage]) -> Outcomes {
    Ok(ids(batch)
        .into_iter()
        .map(|id| Ok(format!("done {id}")))
        .collect())
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
pub(super) struct Seen {
    calls: Arc<Mutex<Vec<Vec<u64>>>>,
    duplicates: Arc<Mutex<Vec<(u64, String)>>>,
}

impl Seen {
    pub(super) fn consumer<F, Fut>(
        &self,
        bench: &Bench,
        limits: BatchLimits,
        outcomes: F,
    ) -> Consumer
    where
        F: Fn(Vec<BatchMessage>) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Outcomes> + Send + 'static,
    {
        self.consumer_behind(bench, bench.gate("runtime"), limits, outcomes)
    }

    pub(super) fn consumer_behind<F, Fut>(
        &self,
        bench: &Bench,
        gate: Gate,
        limits: BatchLimits,
        outcomes: F,
    ) -> Consumer
    where
        F: Fn(Vec<BatchMessage>) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Outcomes> + Send + 'static,
    {
        let calls = Arc::clone(&self.calls);
        let duplicates = Arc::clone(&self.duplicates);
        let handler = Calls {
            outcomes,
            calls,
            duplicates,
        };
        Consumer::new(
            Listed(Arc::clone(&bench.list)),
            gate,
            Batched::new(limits, handler),
        )
        .dead_letters(Arc::clone(&bench.letters))
        .observer(Arc::clone(&bench.counters) as _)
    }

    pub(super) fn calls(&self) -> Vec<Vec<u64>> {
        self.calls.lock().unwrap().clone()
    }

    pub(super) fn sizes(&self) -> Vec<usize> {
        self.calls().iter().map(Vec::len).collect()
    }

    /// How often the handler was called with each message.
    pub(super) fn runs(&self) -> BTreeMap<u64, usize> {
        let mut runs = BTreeMap::new();
        self.calls()
            .into_iter()
            .flatten()
            .for_each(|id| *runs.entry(id).or_default() += 1);
        runs
    }
}

pub(super) fn limits(messages: usize) -> BatchLimits {
    BatchLimits::new(messages).wait(WAIT)
}

#[tokio::test(start_paused = true)]
async fn a_batch_keeps_its_limit_and_order_and_completes_each_message() {
    let bench = Bench::of(numbered(250));
    let seen = Seen::default();
    let consumer = seen.consumer(&bench, limits(100), async |batch| succeed(&batch));
    bench.run(consumer, 250).await.unwrap();
    assert_eq!(
        seen.calls(),
        [
            (0..100).collect::<Vec<u64>>(),
            (100..200).collect(),
            (200..250).collect()
        ]
    );
    assert_eq!(bench.counters.total("completions"), 250);
    assert_eq!(bench.counters.get("batch_calls", "gathered"), 3);
    assert_eq!(bench.counters.get("handler_runs", "succeeded"), 250);
}

#[tokio::test(start_paused = true)]
async fn a_lone_message_waits_as_long_as_the_limits_say() {
    let bench = Bench::of(numbered(1));
    let seen = Seen::default();
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
    let bench = Bench::of(numbered(6));
    let seen = Seen::default();
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
    assert_eq!(
        (counters.total("completions"), counters.total("retries")),
        (5, 1)
    );
    assert_eq!(
        counters.get("batch_calls", "split"),
        0,
        "an outcome for each needs no split"
    );
}

// invariant: batch-order
#[tokio::test(start_paused = true)]
async fn a_key_is_in_a_batch_once_and_its_duplicates_get_the_result() {
    let twice = numbered(3).into_iter().chain(numbered(3));
    let bench = Bench::of(twice);
    let seen = Seen::default();
    let consumer = seen.consumer(&bench, limits(6), async |batch| succeed(&batch));
    bench.run(consumer, 6).await.unwrap();
    assert_eq!(seen.calls(), [vec![0, 1, 2]]);
    let mut duplicates = seen.duplicates.lock().unwrap().clone();
    duplicates.sort();
    assert_eq!(duplicates, [0, 1, 2].map(|id| (id, format!("done {id}"))));
}

#[tokio::test(start_paused = true)]
async fn a_key_that_is_held_elsewhere_is_left_out_and_runs_later() {
    let bench = Bench::of(numbered(4));
    let seen = Seen::default();
    let elsewhere = Message::new(
        "orders",
        Origin::Other("elsewhere".into()),
        Some(r#"{"id":2}"#.into()),
    );
    let Entry::Granted(lease) = bench.gate("runtime").enter(&elsewhere).await.unwrap() else {
        panic!()
    };
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
        let bench = Bench::of(messages());
        let seen = Seen::default();
        let consumer = seen.consumer(&bench, limits(7), async |batch| succeed(&batch));
        bench.run(consumer.ordering(ordering), 7).await.unwrap();
        assert_eq!(seen.calls(), expected, "{ordering:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn concurrency_counts_calls_and_what_is_claimed_runs() {
    let bench = Bench::of(numbered(40));
    let seen = Seen::default();
    let gauge = Arc::new(super::Gauge::default());
    let counted = Arc::clone(&gauge);
    let store = Arc::clone(&bench.store);
    let consumer = seen.consumer(&bench, limits(5), move |batch| {
        let gauge = Arc::clone(&counted);
        let store = Arc::clone(&store);
        async move {
            gauge.through(sleep(Duration::from_millis(20))).await;
            let is_pending = |state: &State| matches!(state, State::Pending { .. });
            let claimed = store
                .records()
                .iter()
                .filter(|(_, record)| is_pending(&record.state))
                .count();
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
    let bench = Bench::of(numbered(10));
    let seen = Seen::default();
    for id in 0..10 {
        bench.list.push("refunds", "", format!(r#"{{"id":{id}}}"#));
    }
    let one_by_one = async |_: Message, _: oncegate::Attempt| Ok(());
    let consumer = seen
        .consumer(&bench, limits(10), async |batch| succeed(&batch))
        .route("refunds", bench.gate("refunds"), one_by_one);
    bench.run(consumer, 20).await.unwrap();
    assert_eq!(seen.sizes(), [10]);
    assert_eq!(bench.counters.get("handler_runs", "succeeded"), 20);
}

#[tokio::test(start_paused = true)]
async fn a_stop_lets_a_running_batch_end() {
    let bench = Bench::of(numbered(20));
    let seen = Seen::default();
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
    consumer
        .concurrency(1)
        .run_until(async { begun.await.unwrap() })
        .await
        .unwrap();
    assert_eq!(bench.list.acked(), [0, 1, 2, 3, 4]);
    assert_eq!(
        bench.counters.get("claims", "granted"),
        5,
        "nothing else was claimed"
    );
}

#[tokio::test(start_paused = true)]
async fn limits_that_make_no_sense_are_refused_by_name() {
    let bench = Bench::of([]);
    let refused = async |limits: BatchLimits| {
        let consumer = Seen::default().consumer(&bench, limits, async |batch| succeed(&batch));
        let error = consumer
            .in_flight(50, 1 << 20)
            .run_until(std::future::pending())
            .await
            .unwrap_err();
        error.to_string()
    };
    assert!(
        refused(BatchLimits::new(0))
            .await
            .contains("`batch.messages`")
    );
    assert!(
        refused(BatchLimits::new(51))
            .await
            .contains("`in_flight_messages`")
    );
    assert!(
        refused(BatchLimits::new(5).bytes(0))
            .await
            .contains("`batch.bytes`")
    );
    assert!(
        refused(BatchLimits::new(5).wait(LEASE * 6))
            .await
            .contains("`batch.wait`")
    );
}

#[tokio::test(start_paused = true)]
async fn bad_keys_in_a_batch_are_dead_letters_of_their_own() {
    let bad = ("", "{not json".to_owned());
    let messages = numbered(3).into_iter().chain([bad.clone(), bad]);
    let bench = Bench::of(messages);
    let seen = Seen::default();
    let consumer = seen.consumer(&bench, limits(5), async |batch| succeed(&batch));
    let consumer = consumer.dead_letter_limit(DeadLetterLimit {
        in_a_row: 10,
        ..DeadLetterLimit::default()
    });
    bench.run(consumer, 5).await.unwrap();
    assert_eq!(seen.calls(), [vec![0, 1, 2]]);
    assert_eq!(bench.letters.causes(), ["bad_key"; 2]);
}

#[tokio::test(start_paused = true)]
async fn messages_that_wait_for_their_batch_are_no_stall() {
    let bench = Bench::of(numbered(0));
    let seen = Seen::default();
    let others = Seen::default();
    let limits = BatchLimits::new(10_000).wait(BatchLimits::LONGEST_WAIT);
    let consumer = seen.consumer(&bench, limits, async |batch| succeed(&batch));
    let calls = Arc::clone(&others.calls);
    let duplicates = Arc::clone(&others.duplicates);
    let refunds = Calls {
        outcomes: async |batch: Vec<BatchMessage>| succeed(&batch),
        calls,
        duplicates,
    };
    let consumer = consumer.route(
        "refunds",
        bench.gate("refunds"),
        Batched::new(limits, refunds),
    );
    let monitor = consumer.monitor();
    let list = Arc::clone(&bench.list);
    let trickle = async move {
        let mut pushed = 0;
        // The batches of one route start while those of the other have waited for half of their
        // time: at any moment some message waits, and permits are free, for much longer than a
        // stall may last.
        for tick in 0..600_u64 {
            list.push("orders", "", format!(r#"{{"id":{tick}}}"#));
            pushed += 1;
            if tick >= 12 {
                list.push("refunds", "", format!(r#"{{"id":{tick}}}"#));
                pushed += 1;
            }
            sleep(BatchLimits::LONGEST_WAIT / 25).await;
            assert!(
                tick < 25 || monitor.health().is_ready(),
                "{tick}: {:?}",
                monitor.health()
            );
        }
        list.until_acked(pushed).await;
    };
    consumer.run_until(trickle).await.unwrap();
    assert!(seen.calls().len() > 20 && others.calls().len() > 20);
}

/// The handler answers its first two messages and ends only when they are recorded; the outcome
/// that it returns for them is another one.
// invariant: batch-early-answer
#[tokio::test(start_paused = true)]
async fn an_answer_of_a_batch_is_recorded_before_the_others_come() {
    let bench = Bench::of(numbered(3));
    let seen = Seen::default();
    let counters = Arc::clone(&bench.counters);
    let consumer = seen.consumer(&bench, limits(3), move |batch| {
        let counters = Arc::clone(&counters);
        async move {
            batch[0].answer(Ok("first".to_owned()));
            batch[0].answer::<String>(Err(Failure::permanent("the first outcome counts")));
            batch[1].answer(Ok("second".to_owned()));
            while counters.total("completions") < 2 {
                sleep(WAIT).await;
            }
            let late = || Err(Failure::permanent("it is answered already"));
            Ok(vec![late(), late(), Ok("third".to_owned())])
        }
    });
    bench.run(consumer, 3).await.unwrap();
    assert_eq!(bench.counters.get("handler_runs", "succeeded"), 3);
    assert_eq!(bench.letters.causes(), [""; 0]);
    assert_eq!(seen.calls().len(), 1);
}

/// What was answered has its outcome, whatever the call says of its batch; the rest is tried alone.
#[tokio::test(start_paused = true)]
async fn an_error_of_a_batch_concerns_what_is_not_answered() {
    let bench = Bench::of(numbered(3));
    let seen = Seen::default();
    let consumer = seen.consumer(&bench, limits(3), async |batch: Vec<BatchMessage>| {
        if batch.len() == 1 {
            return succeed(&batch);
        }
        batch
            .iter()
            .take(2)
            .for_each(|one| one.answer(Ok("done".to_owned())));
        Err(Failure::retry("the rest is rolled back"))
    });
    bench.run(consumer, 3).await.unwrap();
    assert_eq!(seen.calls(), [vec![0, 1, 2], vec![2]]);
    assert_eq!(bench.counters.get("handler_runs", "succeeded"), 3);
}

/// The call hangs after two of its answers, and is cut off at `max_run`.
// invariant: batch-early-answer
#[tokio::test(start_paused = true)]
async fn a_batch_that_is_cut_off_repeats_only_what_is_not_answered() {
    let bench = Bench::of(numbered(3));
    let seen = Seen::default();
    let gate = bench.gate("runtime").max_run(LEASE * 2);
    let consumer =
        seen.consumer_behind(&bench, gate, limits(3), async |batch: Vec<BatchMessage>| {
            if batch.len() == 1 {
                return succeed(&batch);
            }
            batch
                .iter()
                .take(2)
                .for_each(|one| one.answer(Ok("done".to_owned())));
            std::future::pending().await
        });
    bench.run(consumer, 3).await.unwrap();
    assert_eq!(seen.runs(), BTreeMap::from([(0, 1), (1, 1), (2, 2)]));
}
