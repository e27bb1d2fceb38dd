//! A consumer that fails open: what runs without its store, and what still holds then.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use oncegate::core::record::State;
use oncegate::core::rules::Reply;
use oncegate::core::store::StoreWrapper;
use oncegate::core::store::{Command, Store, StoreError};
use oncegate::core::testing::fault::{FaultStore, Faults};
use oncegate::{Attempt, Consumer, Failure, Gate, Handler, Key, MemoryStore, Message, Monitor};
use tokio::time::{Instant, sleep, timeout};

use super::{Bench, LEASE, numbered};

const PATIENCE: Duration = Duration::from_secs(5);
/// Longer than any outage here, so that no handler is cut short by one.
const LONG_LEASE: Duration = Duration::from_secs(3_600);

/// A bench whose store can go away.
struct Away {
    bench: Bench,
    store: Arc<FaultStore>,
}

impl Away {
    fn of(messages: usize) -> Self {
        let bench = Bench::of(numbered(messages));
        let store = FaultStore::new(Arc::clone(&bench.store) as _, Faults::default(), 1);
        Self {
            bench,
            store: Arc::new(store),
        }
    }

    fn gate(&self) -> Gate {
        let lease = LONG_LEASE;
        Gate::new("runtime", Key::json(["id"]), Arc::clone(&self.store))
            .max_run(lease)
            .lease(lease)
            .simulated(7)
    }

    fn consumer(&self, handler: impl Handler) -> Consumer {
        self.bench
            .consumer_behind(self.gate(), handler)
            .fail_open_after(PATIENCE)
    }

    fn push(&self, id: u64) {
        self.bench
            .list
            .push("orders", "", format!(r#"{{"id":{id}}}"#));
    }

    fn fail_open(&self) -> u64 {
        self.bench.counters.get("extra_runs", "fail_open")
    }

    fn is_completed(&self) -> bool {
        self.bench
            .store
            .records()
            .iter()
            .any(|(_, record)| matches!(record.state, State::Completed { .. }))
    }
}

/// Waits for this, in steps of paused time.
async fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let so = async {
        while !is_so() {
            sleep(Duration::from_millis(100)).await;
        }
    };
    timeout(Duration::from_secs(3_600), so)
        .await
        .unwrap_or_else(|_| panic!("never {what}"));
}

/// Asserts that the outage is reported, and that the consumer is ready all the same.
async fn reports_that_it_fails_open(monitor: &Monitor) {
    until("the report", || {
        let scopes = monitor.status().scopes;
        scopes[0]
            .outages
            .first()
            .is_some_and(|outage| outage.open && outage.waiting <= 1)
    })
    .await;
    assert!(
        monitor.health().is_ready(),
        "it handles messages: {}",
        monitor.health()
    );
    assert!(
        monitor.status().scopes[0]
            .warnings
            .iter()
            .any(|warning| warning.contains("fails open"))
    );
}

// invariant: fail-open
#[tokio::test(start_paused = true)]
async fn messages_bypass_a_store_that_stays_away_until_it_is_back() {
    let away = Away::of(1);
    let told = Arc::new(Mutex::new(Vec::new()));
    let seen = Arc::clone(&told);
    let handler = move |_: Message, attempt: Attempt| {
        let told = (
            attempt.is_fail_open(),
            attempt.recovered(),
            attempt.number(),
        );
        seen.lock().unwrap().push(told);
        std::future::ready(Ok(()))
    };
    let consumer = away.consumer(handler);
    let monitor = consumer.monitor();
    let list = Arc::clone(&away.bench.list);
    let watched = async {
        list.until_acked(1).await;
        away.store.begin_outage();
        let began = Instant::now();
        (10..40).for_each(|id| away.push(id));
        list.until_acked(31).await;
        assert!(
            began.elapsed() >= PATIENCE,
            "they waited for {:?} only",
            began.elapsed()
        );
        assert_eq!(away.fail_open(), 30);
        reports_that_it_fails_open(&monitor).await;
        // What comes later need not wait any more.
        let began = Instant::now();
        away.push(50);
        list.until_acked(32).await;
        assert!(
            began.elapsed() < PATIENCE,
            "it waited for {:?}",
            began.elapsed()
        );
        away.store.end_outage();
        until("the store is back", || {
            monitor.status().scopes[0].is_store_up() || {
                away.push(60);
                false
            }
        })
        .await;
        until("all is done", || monitor.status().messages.in_flight == 0).await;
        let before = away.fail_open();
        let acked = list.acked().len();
        away.push(70);
        list.until_acked(acked + 1).await;
        assert_eq!(away.fail_open(), before, "the store is asked again");
    };
    consumer.run_until(watched).await.unwrap();
    let told = told.lock().unwrap();
    assert_eq!(
        (told[0], *told.last().unwrap()),
        ((false, false, 1), (false, false, 1))
    );
    assert!(
        told[1..31].iter().all(|told| *told == (true, true, 1)),
        "{told:?}"
    );
}

// invariant: fail-open
#[tokio::test(start_paused = true)]
async fn an_outage_that_ends_in_time_runs_nothing_without_the_store() {
    let away = Away::of(1);
    let consumer = away.consumer(async |_: Message, _: Attempt| Ok(()));
    let list = Arc::clone(&away.bench.list);
    let watched = async {
        list.until_acked(1).await;
        away.store.begin_outage();
        (10..20).for_each(|id| away.push(id));
        sleep(PATIENCE - Duration::from_secs(1)).await;
        away.store.end_outage();
        list.until_acked(11).await;
    };
    consumer.run_until(watched).await.unwrap();
    assert_eq!(
        (
            away.fail_open(),
            away.bench.counters.get("claims", "granted")
        ),
        (0, 11)
    );
}

#[tokio::test(start_paused = true)]
async fn failures_without_the_store_are_retried_or_buried() {
    let away = Away::of(1);
    let runs = Arc::new(AtomicU32::new(0));
    let counted = Arc::clone(&runs);
    let acked = Arc::clone(&away.bench.list);
    let handler = move |message: Message, attempt: Attempt| {
        #[derive(serde::Deserialize)]
        struct Payload {
            id: u64,
        }
        let id = message.json::<Payload>().map(|payload| payload.id);
        let run = counted.fetch_add(u32::from(attempt.is_fail_open()), SeqCst);
        let before = acked.acked().len();
        async move {
            match id? {
                10 if run < 2 => {
                    assert_eq!(before, 1, "it was acknowledged before it succeeded");
                    Err(Failure::retry("not yet"))
                }
                11 => Err(Failure::permanent("rejected")),
                _ => Ok(()),
            }
        }
    };
    let consumer = away.consumer(handler);
    let list = Arc::clone(&away.bench.list);
    let watched = async {
        list.until_acked(1).await;
        away.store.begin_outage();
        away.push(10);
        list.until_acked(2).await;
        assert_eq!((runs.load(SeqCst), away.fail_open()), (3, 3));
        away.push(11);
        list.until_acked(3).await;
    };
    consumer.run_until(watched).await.unwrap();
    assert_eq!(away.bench.letters.causes(), ["permanent"]);
}

/// Every permit could be held by work that is done.
#[tokio::test(start_paused = true)]
async fn a_pending_completion_is_not_waited_for_and_is_written_later() {
    let away = Away::of(1);
    let store = Arc::clone(&away.store);
    let handler = move |_: Message, _: Attempt| {
        store.begin_outage();
        std::future::ready(Ok(()))
    };
    let consumer = away.consumer(handler).concurrency(1);
    let list = Arc::clone(&away.bench.list);
    let watched = async {
        let began = Instant::now();
        list.until_acked(1).await;
        assert!(began.elapsed() >= PATIENCE, "it was not even tried");
        assert_eq!((away.fail_open(), away.is_completed()), (1, false));
        away.store.end_outage();
        until("it is written", || away.is_completed()).await;
    };
    consumer.run_until(watched).await.unwrap();
}

/// A store that answers, by refusing.
#[derive(Debug)]
struct Refusing {
    inner: MemoryStore,
    refuses: AtomicBool,
}

#[async_trait]
impl StoreWrapper for Refusing {
    fn inner(&self) -> &dyn Store {
        &self.inner
    }

    async fn execute(&self, commands: Vec<Command>) -> Vec<Result<Reply, StoreError>> {
        if self.refuses.load(SeqCst) {
            return commands
                .iter()
                .map(|_| Err(StoreError::refused("a setting must change")))
                .collect();
        }
        self.inner.execute(commands).await
    }
}

// invariant: fail-open
#[tokio::test(start_paused = true)]
async fn a_store_that_refuses_is_not_away() {
    let bench = Bench::of(numbered(2));
    let store = Arc::new(Refusing {
        inner: MemoryStore::new(),
        refuses: AtomicBool::new(true),
    });
    let gate = Gate::new("runtime", Key::json(["id"]), Arc::clone(&store))
        .lease(LEASE)
        .simulated(7);
    let consumer = bench
        .consumer_behind(gate, async |_: Message, _: Attempt| Ok(()))
        .fail_open_after(PATIENCE);
    let list = Arc::clone(&bench.list);
    let watched = async {
        sleep(PATIENCE * 20).await;
        assert_eq!(list.acked().len(), 0);
        store.refuses.store(false, SeqCst);
        list.until_acked(2).await;
    };
    consumer.run_until(watched).await.unwrap();
    assert_eq!(bench.counters.total("extra_runs"), 0);
}

#[tokio::test]
async fn what_needs_its_store_refuses_to_fail_open() {
    let bench = Bench::of([]);
    for gate in [bench.gate("a").transactional(), bench.gate("a").fenced()] {
        let consumer = bench
            .consumer_behind(gate, async |_: Message, _: Attempt| Ok(()))
            .fail_open_after(PATIENCE);
        let refused = consumer.check().unwrap_err().to_string();
        assert!(refused.contains("`fail_open_after`"), "{refused}");
    }
}
