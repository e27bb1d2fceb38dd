//! The store is away for longer than a lease while a handler runs.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};
use std::time::Duration;

use oncegate::consumer::DeadLetterLimit;
use oncegate::core::testing::fault::{FaultStore, Faults};
use oncegate::health::Phase;
use oncegate::{Attempt, ConsumerError, Gate, GateError, Key, Message};
use tokio::sync::{Barrier, Notify};
use tokio::time::{Instant, sleep, timeout};

use super::{Bench, LEASE, numbered};

/// Longer than a lease and the grace of a cancelled handler.
const LONG: Duration = Duration::from_secs(5);

/// The longest that a test may take, in the time of the test.
const LIMIT: Duration = Duration::from_secs(240);

struct Outage {
    bench: Bench,
    faulty: Arc<FaultStore>,
    runs: Arc<AtomicU32>,
    began: Arc<Notify>,
    ended: Arc<Notify>,
}

impl Outage {
    fn new() -> Self {
        let bench = Bench::of(numbered(1));
        let faulty = Arc::new(FaultStore::new(
            Arc::clone(&bench.store) as _,
            Faults::default(),
            1,
        ));
        Self {
            bench,
            faulty,
            runs: Arc::default(),
            began: Arc::default(),
            ended: Arc::default(),
        }
    }

    /// Runs a handler that goes on for a long time after its cancellation in the first run, until
    /// one message is acknowledged.
    async fn run(&self, meanwhile: impl Future<Output = ()> + Send) {
        let gate = Gate::new("runtime", Key::json(["id"]), Arc::clone(&self.faulty));
        let runs = Arc::clone(&self.runs);
        let began = Arc::clone(&self.began);
        let ended = Arc::clone(&self.ended);
        let handler = move |_: Message, attempt: Attempt| {
            let first = runs.fetch_add(1, SeqCst) == 0;
            let began = Arc::clone(&began);
            let ended = Arc::clone(&ended);
            async move {
                began.notify_one();
                if first {
                    attempt.cancelled().await;
                    sleep(LONG).await;
                    ended.notify_one();
                }
                Ok(())
            }
        };
        let consumer = self
            .bench
            .consumer_behind(gate.lease(LEASE).simulated(7), handler);
        let list = Arc::clone(&self.bench.list);
        let watched = async {
            meanwhile.await;
            list.until_acked(1).await;
        };
        let ended = timeout(LIMIT, consumer.run_until(watched)).await;
        ended
            .expect("the first run ends, and its message is acknowledged")
            .unwrap();
    }
}

// invariant: result-of-an-outage, store-starts-late
#[tokio::test(start_paused = true)]
async fn a_consumer_waits_for_a_store_that_is_away_at_the_start() {
    let outage = Outage::new();
    outage.faulty.begin_outage();
    let gate = || Gate::new("runtime", Key::json(["id"]), Arc::clone(&outage.faulty)).simulated(7);
    let handler = async |_: Message, _: Attempt| Ok(());

    let impatient = outage
        .bench
        .consumer_behind(gate(), handler)
        .start_patience(Duration::from_secs(10));
    let began = Instant::now();
    let error = impatient
        .run_until(std::future::pending())
        .await
        .unwrap_err();
    assert!(
        matches!(error, ConsumerError::Gate(GateError::Store(_))),
        "{error}"
    );
    assert!(
        began.elapsed() >= Duration::from_secs(10),
        "it ended after {:?}",
        began.elapsed()
    );

    let stopped = outage.bench.consumer_behind(gate(), handler);
    timeout(LIMIT, stopped.run_until(sleep(LEASE)))
        .await
        .expect("it stops while it waits")
        .unwrap();

    let patient = outage.bench.consumer_behind(gate(), handler);
    let monitor = patient.monitor();
    let meanwhile = async {
        sleep(Duration::from_secs(60)).await;
        let status = monitor.status();
        assert_eq!(status.phase, Phase::Starting);
        assert_eq!(
            status
                .source
                .failures
                .first()
                .map(|failure| failure.operation.as_str()),
            Some("open")
        );
        outage.faulty.end_outage();
    };
    tokio::join!(
        async { outage.bench.run(patient, 1).await.unwrap() },
        meanwhile
    );
}

#[tokio::test(start_paused = true)]
async fn what_a_handler_returns_during_an_outage_is_recorded_after_it() {
    let outage = Outage::new();
    let meanwhile = async {
        outage.began.notified().await;
        outage.faulty.begin_outage();
        outage.ended.notified().await;
        sleep(LONG).await;
        assert_eq!(
            outage.bench.list.acked(),
            [0_i64; 0],
            "nothing is acknowledged before"
        );
        outage.faulty.end_outage();
    };
    outage.run(meanwhile).await;
    assert_eq!(outage.runs.load(SeqCst), 1);
    assert_eq!(outage.bench.counters.get("extra_runs", "lease_lost"), 0);
    assert_eq!(
        outage.bench.counters.get("extra_runs", "complete_unknown"),
        0
    );
}

// invariant: result-of-an-outage
#[tokio::test(start_paused = true)]
async fn a_handlers_result_after_a_takeover_is_discarded() {
    let outage = Outage::new();
    let meanwhile = async {
        outage.began.notified().await;
        outage.faulty.begin_outage();
        // Another process reaches the store, and claims the message when its lease is over.
        sleep(2 * LEASE).await;
        outage.bench.complete_elsewhere().await;
        outage.ended.notified().await;
        outage.faulty.end_outage();
    };
    outage.run(meanwhile).await;
    assert_eq!(
        outage.runs.load(SeqCst),
        1,
        "the other process's result counts"
    );
    assert_eq!(outage.bench.counters.get("complete_lost", ""), 1);
    assert_eq!(outage.bench.counters.get("extra_runs", "lease_lost"), 1);
    assert_eq!(outage.bench.counters.get("acks", ""), 1);
}

/// Runs `count` messages that come in an outage and whose handlers wait for each other.
async fn run_all_after_an_outage(count: usize) {
    let bench = Bench::of(numbered(1));
    let faulty = Arc::new(FaultStore::new(
        Arc::clone(&bench.store) as _,
        Faults::default(),
        1,
    ));
    let met = Arc::new(Barrier::new(count));
    let handler = move |message: Message, _: Attempt| {
        let met = Arc::clone(&met);
        async move {
            if message.payload() != br#"{"id":0}"# {
                met.wait().await;
            }
            Ok(())
        }
    };
    let gate = Gate::new("runtime", Key::json(["id"]), Arc::clone(&faulty))
        .lease(LEASE)
        .simulated(7);
    let consumer = bench.consumer_behind(gate, handler);
    let list = Arc::clone(&bench.list);
    let watched = async {
        list.until_acked(1).await;
        faulty.begin_outage();
        numbered(count + 1)
            .drain(1..)
            .for_each(|(key, payload)| list.push("orders", key, payload));
        sleep(LEASE).await;
        faulty.end_outage();
        list.until_acked(count + 1).await;
    };
    let ended = timeout(LIMIT, consumer.run_until(watched)).await;
    ended
        .expect("all handlers run at once when the store answers")
        .unwrap();
    assert_eq!(
        bench.counters.get("handler_runs", "succeeded"),
        count as u64 + 1,
        "one run each"
    );
}

// invariant: outage-ends-with-a-handler
#[tokio::test(start_paused = true)]
async fn an_outage_ends_with_a_claim_and_not_with_its_handler() {
    run_all_after_an_outage(8).await;
}

// invariant: topic-drained
#[tokio::test(start_paused = true)]
async fn bad_keys_between_messages_that_wait_are_no_row() {
    let bench = Bench::of(numbered(1));
    let faulty = Arc::new(FaultStore::new(
        Arc::clone(&bench.store) as _,
        Faults::default(),
        1,
    ));
    let gate = Gate::new("runtime", Key::json(["id"]), Arc::clone(&faulty))
        .lease(LEASE)
        .simulated(7);
    let limit = DeadLetterLimit {
        in_a_row: 10,
        share: 1.0,
    };
    let handler = async |_: Message, _: Attempt| Ok(());
    let consumer = bench
        .consumer_behind(gate, handler)
        .dead_letter_limit(limit)
        .concurrency(4);
    let list = Arc::clone(&bench.list);
    let watched = async {
        list.until_acked(1).await;
        faulty.begin_outage();
        for id in 1..=300 {
            let field = if id % 10 == 0 { "no" } else { "id" };
            list.push("orders", "", format!(r#"{{"{field}":{id}}}"#));
        }
        sleep(Duration::from_secs(8)).await;
        assert!(
            bench.letters.causes().len() < 10,
            "they wait with the messages before them"
        );
        faulty.end_outage();
        list.until_acked(301).await;
    };
    let ended = timeout(LIMIT, consumer.run_until(watched)).await;
    ended
        .expect("everything ends")
        .expect("the limit is not reached");
    assert_eq!(bench.letters.causes(), ["bad_key"; 30]);
}

#[tokio::test(start_paused = true)]
async fn an_outage_is_not_over_because_a_bad_key_was_buried() {
    const CONCURRENCY: u32 = 32;
    const GOOD: usize = 9;
    let bad = (0..20).map(|_| ("", "{not json".to_owned()));
    let bench = Bench::of(numbered(GOOD).into_iter().chain(bad));
    let store = Arc::new(FaultStore::new(
        Arc::clone(&bench.store) as _,
        Faults::default(),
        1,
    ));
    let gate = Gate::new("runtime", Key::json(["id"]), Arc::clone(&store))
        .lease(LEASE * 60)
        .simulated(7);
    let down = Arc::clone(&store);
    // The first handler sees the store go, while all the others have started.
    let handler = move |message: Message, _: Attempt| {
        if message.payload() == br#"{"id":0}"# {
            down.begin_outage();
        }
        std::future::ready(Ok(()))
    };
    let consumer = bench
        .consumer_behind(gate, handler)
        .concurrency(CONCURRENCY);
    let list = Arc::clone(&bench.list);
    let counters = Arc::clone(&bench.counters);
    let outage = async move {
        while counters.get("store_paused", "paused") == 0 {
            sleep(Duration::from_millis(10)).await;
        }
        sleep(Duration::from_secs(10)).await;
        assert_eq!(
            counters.get("store_paused", "resumed"),
            0,
            "the store has not answered once"
        );
        store.end_outage();
        list.until_acked(20 + GOOD).await;
    };
    consumer.run_until(outage).await.unwrap();
    let paused = (
        bench.counters.get("store_paused", "paused"),
        bench.counters.get("store_paused", "resumed"),
    );
    assert_eq!(paused, (1, 1), "one outage");
}
