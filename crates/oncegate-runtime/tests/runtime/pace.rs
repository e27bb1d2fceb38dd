//! What a handler that computes, blocks or waits for long costs other messages: claims are made for
//! what begins soon, each run has its own time, and nothing begins under a claim that is over or
//! after the stop.

use std::collections::BTreeMap;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::task::{Context, Waker};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use oncegate::core::rules::{Operation, Reply};
use oncegate::core::store::{Command, Store, StoreError, StoreWrapper};
use oncegate::{Attempt, Failure, Gate, Key, MemoryStore, Message};
use tokio::sync::watch;
use tokio::time::sleep;

use super::{Bench, Gauge, LEASE, numbered};

/// Uses this much time up within one poll, as a handler does that computes or blocks: paused time
/// goes on, and no other task runs.
fn compute(time: Duration) {
    let advance = pin!(tokio::time::advance(time));
    // It goes on at its first poll, and yields after that.
    let _yields = advance.poll(&mut Context::from_waker(Waker::noop()));
}

const COMPUTES: Duration = Duration::from_millis(100);

// invariant: run-not-its-own
#[test]
fn handlers_that_compute_run_once_whatever_their_units_take() {
    let bench = Bench::of(numbered(32));
    let runs: Arc<Mutex<BTreeMap<Bytes, u32>>> = Arc::default();
    let consume = |messages: &Bench| {
        let runs = Arc::clone(&runs);
        let handler = move |message: Message, _: Attempt| {
            *runs
                .lock()
                .unwrap()
                .entry(message.payload_bytes().unwrap())
                .or_default() += 1;
            // The fault itself: a thread of the runtime is busy.
            std::thread::sleep(COMPUTES);
            std::future::ready(Ok::<(), Failure>(()))
        };
        let gate = Gate::new("runtime", Key::json(["id"]), Arc::clone(&bench.store))
            .lease(COMPUTES * 5)
            .max_run(COMPUTES * 10);
        let consumer = messages.consumer_behind(gate, handler);
        let list = Arc::clone(&messages.list);
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_multi_thread()
                .worker_threads(2)
                .enable_all()
                .build()
                .unwrap();
            let stop = async move { list.until_acked(32).await };
            runtime.block_on(consumer.run_until(stop)).unwrap();
        })
    };
    // Two processes have the same messages, as after a rebalance or a second delivery.
    let other = Bench {
        store: Arc::clone(&bench.store),
        ..Bench::of(numbered(32))
    };
    for process in [consume(&bench), consume(&other)] {
        process.join().unwrap();
    }
    let runs = runs.lock().unwrap().clone();
    assert_eq!(runs.len(), 32);
    assert!(runs.values().all(|runs| *runs == 1), "{runs:?}");
    for one in [&bench, &other] {
        assert_eq!(one.counters.total("extra_runs"), 0, "nothing crashed");
    }
}

// invariant: starts-after-the-stop
#[tokio::test(start_paused = true)]
async fn nothing_begins_after_the_stop() {
    let bench = Bench::of(numbered(1_000));
    let begun = Arc::new(watch::channel(0_usize).0);
    let noted = Arc::clone(&begun);
    let handler = move |_: Message, _: Attempt| {
        noted.send_modify(|begun| *begun += 1);
        compute(COMPUTES / 2);
        std::future::ready(Ok::<(), Failure>(()))
    };
    let consumer = bench.consumer(handler).concurrency(1_024);
    let stopped_at = Arc::new(AtomicUsize::new(0));
    let noted = Arc::clone(&stopped_at);
    let counted = Arc::clone(&begun);
    let stop = async move {
        let mut begun = counted.subscribe();
        let now = *begun.wait_for(|begun| *begun >= 20).await.unwrap();
        noted.store(now, SeqCst);
    };
    consumer.run_until(stop).await.unwrap();
    let after = *begun.borrow() - stopped_at.load(SeqCst);
    // The stop is a task as others are: those that were ready before it had their turn.
    assert!(after <= 2, "{after} handlers begin after the stop");
    assert_eq!(bench.list.acked().len(), *begun.borrow());
}

/// A store that answers claims when it is told to.
#[derive(Debug)]
struct Stalled {
    inner: Arc<MemoryStore>,
    answers: watch::Sender<bool>,
    waiting: watch::Sender<usize>,
}

#[async_trait]
impl StoreWrapper for Stalled {
    fn inner(&self) -> &dyn Store {
        &*self.inner
    }

    async fn execute(&self, commands: Vec<Command>) -> Vec<Result<Reply, StoreError>> {
        let claims = commands
            .iter()
            .filter(|one| matches!(one.operation, Operation::Claim { .. }))
            .count();
        let replies = self.inner.execute(commands).await;
        if claims > 0 {
            self.waiting.send_modify(|waiting| *waiting += claims);
            let mut answers = self.answers.subscribe();
            answers.wait_for(|answers| *answers).await.unwrap();
        }
        replies
    }
}

// invariant: starts-after-the-stop
#[tokio::test(start_paused = true)]
async fn claims_that_are_answered_after_the_stop_are_given_back() {
    let bench = Bench::of(numbered(1));
    let store = Arc::new(Stalled {
        inner: Arc::clone(&bench.store),
        answers: watch::channel(false).0,
        waiting: watch::channel(0).0,
    });
    let gate = Gate::new("runtime", Key::json(["id"]), Arc::clone(&store))
        .lease(LEASE * 60)
        .simulated(7);
    let runs = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&runs);
    let handler = move |_: Message, _: Attempt| {
        counted.fetch_add(1, SeqCst);
        std::future::ready(Ok::<(), Failure>(()))
    };
    let consumer = bench.consumer_behind(gate, handler);
    let answering = Arc::clone(&store);
    let stop = async move {
        let mut waiting = answering.waiting.subscribe();
        waiting.wait_for(|waiting| *waiting == 1).await.unwrap();
        // Its answer comes in the middle of the stop.
        tokio::spawn(async move {
            sleep(Duration::from_secs(4)).await;
            answering.answers.send_replace(true);
        });
    };
    consumer.run_until(stop).await.unwrap();
    assert_eq!(runs.load(SeqCst), 0);
    let records = bench.store.records();
    let [(_, record)] = &records[..] else {
        panic!("one record")
    };
    assert!(
        matches!(
            record.state,
            oncegate::core::record::State::Released { attempt: 0, .. }
        ),
        "{:?}",
        record.state
    );
}

// invariant: loop-without-a-turn
#[tokio::test(start_paused = true)]
async fn the_loop_has_its_turns_beside_handlers_that_compute() {
    let bench = Bench::of(numbered(600));
    let longest: Arc<Mutex<Duration>> = Arc::default();
    let monitor = Arc::new(Mutex::new(None::<oncegate::consumer::Monitor>));
    let noted = Arc::clone(&longest);
    let seen = Arc::clone(&monitor);
    let handler = move |_: Message, _: Attempt| {
        if let Some(monitor) = &*seen.lock().unwrap() {
            let mut longest = noted.lock().unwrap();
            *longest = longest.max(monitor.status().looked_ago);
        }
        compute(COMPUTES);
        std::future::ready(Ok::<(), Failure>(()))
    };
    let consumer = bench.consumer(handler).concurrency(1_024);
    *monitor.lock().unwrap() = Some(consumer.monitor());
    bench.run(consumer, 600).await.unwrap();
    let longest = *longest.lock().unwrap();
    assert!(
        longest < Duration::from_secs(3),
        "no turn for {longest:?} of handlers"
    );
    assert_eq!(bench.counters.total("extra_runs"), 0);
}

// invariant: run-not-its-own
#[tokio::test(start_paused = true)]
async fn a_handler_s_time_is_its_own() {
    let bench = Bench::of(numbered(300));
    let handler = |_: Message, _: Attempt| {
        compute(COMPUTES);
        std::future::ready(Ok::<(), Failure>(()))
    };
    let consumer = bench.consumer(handler).concurrency(1_024);
    let monitor = consumer.monitor();
    let list = Arc::clone(&bench.list);
    let stop = async move {
        list.until_acked(300).await;
        let p99 = monitor.status().handler_p99.unwrap();
        assert!(p99 < COMPUTES * 2, "{p99:?}");
    };
    consumer.run_until(stop).await.unwrap();
}

// invariant: claimed-without-a-turn
#[tokio::test(start_paused = true)]
async fn what_gets_no_permit_in_time_is_released_uncounted() {
    let bench = Bench::of(numbered(200));
    let is_slow = Arc::new(AtomicBool::new(false));
    let slow = Arc::clone(&is_slow);
    let attempts: Arc<Mutex<Vec<(u32, bool)>>> = Arc::default();
    let noted = Arc::clone(&attempts);
    let handler = move |_: Message, attempt: Attempt| {
        noted
            .lock()
            .unwrap()
            .push((attempt.number(), attempt.recovered()));
        let is_slow = slow.load(SeqCst);
        async move {
            if is_slow {
                sleep(Duration::from_secs(30)).await;
            }
            Ok(())
        }
    };
    let consumer = bench.consumer(handler).concurrency(2);
    let list = Arc::clone(&bench.list);
    let store = Arc::clone(&bench.store);
    let stop = async move {
        list.until_acked(200).await;
        is_slow.store(true, SeqCst);
        for id in 200..260 {
            list.push("orders", "", format!(r#"{{"id":{id}}}"#));
        }
        sleep(Duration::from_secs(10)).await;
        let pending = |state: &oncegate::core::record::State| {
            matches!(state, oncegate::core::record::State::Pending { .. })
        };
        let claimed = store
            .records()
            .iter()
            .filter(|(_, record)| pending(&record.state))
            .count();
        assert_eq!(claimed, 2, "what runs is claimed");
        list.until_acked(260).await;
    };
    consumer.run_until(stop).await.unwrap();
    let attempts = attempts.lock().unwrap().clone();
    assert_eq!(attempts, [(1, false)].repeat(260));
}

// invariant: suspect-never-runs
#[tokio::test(start_paused = true)]
async fn a_message_runs_alone_beside_handlers_that_take_long() {
    let suspect = 0;
    let bench = Bench::of(numbered(4_000));
    // Two processes have died with the first message.
    for _ in 0..2 {
        let gate = bench.gate("runtime");
        let message = Message::new(
            "orders",
            oncegate::Origin::Other("before".into()),
            Some(format!(r#"{{"id":{suspect}}}"#).into()),
        );
        let entered = gate.enter(&message).await.unwrap();
        assert!(
            matches!(entered, oncegate::Entry::Granted(_)),
            "{entered:?}"
        );
        drop(entered);
        sleep(LEASE * 2).await;
    }
    let running = Arc::new(AtomicUsize::new(0));
    let has_run = Arc::new(watch::channel(false).0);
    let now = Arc::clone(&running);
    let told = Arc::clone(&has_run);
    let rng = Arc::new(Mutex::new(fastrand::Rng::with_seed(7)));
    let handler = move |message: Message, _: Attempt| {
        let is_suspect = message.payload() == br#"{"id":0}"#;
        let now = Arc::clone(&now);
        let told = Arc::clone(&told);
        let seconds = rng.lock().unwrap().u64(20..60);
        async move {
            let beside = now.fetch_add(1, SeqCst);
            if is_suspect {
                assert_eq!(beside, 0, "it runs alone");
                told.send_replace(true);
            } else {
                sleep(Duration::from_secs(seconds)).await;
            }
            now.fetch_sub(1, SeqCst);
            Ok(())
        }
    };
    let consumer = bench.consumer(handler).concurrency(16);
    let stop = async move {
        let mut has_run = has_run.subscribe();
        let hour = Duration::from_secs(3_600);
        let ran = tokio::time::timeout(hour, has_run.wait_for(|has_run| *has_run)).await;
        ran.expect("it has run within the hour").unwrap();
    };
    consumer.run_until(stop).await.unwrap();
}

/// Runs handlers that end at once, and then these payloads, which come together: one unit.
async fn in_one_unit(bench: &Bench, consumer: oncegate::Consumer, payloads: &[String]) {
    let list = Arc::clone(&bench.list);
    let stop = async move {
        list.until_acked(100).await;
        for payload in payloads {
            list.push("orders", "", payload.clone());
        }
        list.until_acked(100 + payloads.len()).await;
    };
    consumer.run_until(stop).await.unwrap();
}

// invariant: run-not-its-own
#[tokio::test(start_paused = true)]
async fn the_time_of_a_run_begins_with_its_handler() {
    let bench = Bench::of(numbered(100));
    let gate = bench.gate("runtime").lease(LEASE).max_run(LEASE);
    let handler = |message: Message, _: Attempt| {
        if message.payload() == br#"{"id":100}"# {
            compute(LEASE * 6 / 10);
        }
        let waits = message.payload() == br#"{"id":101}"#;
        async move {
            if waits {
                sleep(LEASE * 6 / 10).await;
            }
            Ok::<(), Failure>(())
        }
    };
    let consumer = bench.consumer_behind(gate, handler);
    let payloads = [100, 101].map(|id| format!(r#"{{"id":{id}}}"#));
    in_one_unit(&bench, consumer, &payloads).await;
    assert_eq!(bench.counters.total("extra_runs"), 0);
    assert_eq!(bench.counters.get("handler_runs", "succeeded"), 102);
}

// invariant: neighbour-held-up
#[tokio::test(start_paused = true)]
async fn what_has_ended_is_recorded_while_its_unit_goes_on() {
    let bench = Bench::of(numbered(100));
    let acked_before: Arc<Mutex<Vec<usize>>> = Arc::default();
    let noted = Arc::clone(&acked_before);
    let list = Arc::clone(&bench.list);
    let handler = move |message: Message, _: Attempt| {
        if message.payload().starts_with(br#"{"id":1"#) && message.payload().len() == 10 {
            noted.lock().unwrap().push(list.acked().len() - 100);
            compute(LEASE / 4);
        }
        std::future::ready(Ok::<(), Failure>(()))
    };
    let consumer = bench.consumer(handler);
    let payloads: Vec<String> = (100..110).map(|id| format!(r#"{{"id":{id}}}"#)).collect();
    in_one_unit(&bench, consumer, &payloads).await;
    let acked = acked_before.lock().unwrap().clone();
    assert_eq!(acked.len(), 10);
    assert!(
        acked
            .iter()
            .enumerate()
            .all(|(place, acked)| acked + 1 >= place),
        "{acked:?}"
    );
    assert_eq!(bench.counters.total("extra_runs"), 0);
}

/// The most handlers that run at a time, of those that take so long.
async fn most_at_a_time(takes: Duration) -> usize {
    const MESSAGES: usize = 200;
    let bench = Bench::of(numbered(MESSAGES));
    let gauge = Arc::new(Gauge::default());
    let counted = Arc::clone(&gauge);
    let handler = move |_: Message, _: Attempt| {
        let gauge = Arc::clone(&counted);
        async move {
            gauge.through(sleep(takes)).await;
            Ok::<(), Failure>(())
        }
    };
    let consumer = bench.consumer(handler).concurrency(2).ahead(3);
    bench.run(consumer, MESSAGES).await.unwrap();
    gauge.most.load(SeqCst)
}

// invariant: neighbour-held-up
#[tokio::test(start_paused = true)]
async fn only_what_ends_within_milliseconds_is_given_ahead() {
    assert_eq!(most_at_a_time(Duration::from_millis(1)).await, 5);
    assert_eq!(most_at_a_time(Duration::from_millis(100)).await, 2);
}
