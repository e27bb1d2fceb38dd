//! Stops that do not go well.

use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use async_trait::async_trait;
use oncegate::core::key::{Scope, StoreKey};
use oncegate::core::record::{Recovery, State};
use oncegate::core::store::StoreWrapper;
use oncegate::core::store::{RecordSnapshot, Store, StoreError};
use oncegate::{Attempt, ConsumerError, Failure, Gate, Key, MemoryStore, Message};
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep};

use super::{Bench, LEASE, numbered};

/// Resolves when a handler has begun.
fn beginning() -> (impl Fn() + Send + Sync + 'static, oneshot::Receiver<()>) {
    let (began, begun) = oneshot::channel();
    let began = Mutex::new(Some(began));
    let tell = move || {
        if let Some(began) = began.lock().unwrap().take() {
            began.send(()).unwrap();
        }
    };
    (tell, begun)
}

// invariant: stop-without-end
#[tokio::test(start_paused = true)]
async fn a_second_signal_ends_the_stop_at_once() {
    let bench = Bench::of(numbered(1));
    let (tell, begun) = beginning();
    let handler = move |_: Message, _: Attempt| {
        tell();
        std::future::pending::<Result<(), Failure>>()
    };
    let hour = Duration::from_secs(3_600);
    let again = Duration::from_secs(10);
    let consumer = bench
        .consumer(handler)
        .stop_deadline(hour)
        .stop_at_once_on(sleep(again));
    let started = Instant::now();
    consumer
        .run_until(async { begun.await.unwrap() })
        .await
        .unwrap();
    let took = started.elapsed();
    assert!(took >= again && took < again * 2, "{took:?}");
    assert_eq!(bench.list.acked(), [0_i64; 0]);
}

/// What runs the message next counts no crash, and waits as long as the lease would have lasted:
/// what the dropped handler has begun elsewhere may go on.
#[tokio::test(start_paused = true)]
async fn a_handler_that_a_stop_drops_is_no_crash() {
    let day = Duration::from_secs(86_400);
    for (deadline, again) in [(LEASE * 3, day), (day, LEASE * 3)] {
        let bench = Bench::of(numbered(1));
        let (tell, begun) = beginning();
        let handler = move |_: Message, _: Attempt| {
            tell();
            std::future::pending::<Result<(), Failure>>()
        };
        let consumer = bench
            .consumer(handler)
            .stop_deadline(deadline)
            .stop_at_once_on(sleep(again));
        consumer
            .run_until(async { begun.await.unwrap() })
            .await
            .unwrap();
        assert_eq!(bench.counters.get("extra_runs", "discarded"), 1);
        let [(_, record)] = &bench.store.records()[..] else {
            panic!("one record")
        };
        let is_flagged = matches!(
            record.state,
            State::Released {
                attempt: 0,
                recovery: Recovery::Earlier,
                ..
            }
        );
        assert!(is_flagged, "{:?}", record.state);

        let next = Bench {
            store: Arc::clone(&bench.store),
            ..Bench::of(numbered(1))
        };
        let seen: Arc<Mutex<Vec<(u32, bool)>>> = Arc::default();
        let told = Arc::clone(&seen);
        let handler = move |_: Message, attempt: Attempt| {
            told.lock()
                .unwrap()
                .push((attempt.number(), attempt.recovered()));
            std::future::ready(Ok::<(), Failure>(()))
        };
        next.run(next.consumer(handler), 1).await.unwrap();
        assert_eq!(
            *seen.lock().unwrap(),
            [(1, true)],
            "a stop costs no attempt"
        );
        assert_eq!(next.counters.total("extra_runs"), 0, "no process has died");
    }
}

/// Supervisors send two signals for one stop: `timeout` does, and systemd with `SendSIGHUP`.
#[tokio::test(start_paused = true)]
async fn two_signals_at_once_are_one_stop() {
    let bench = Bench::of(numbered(1));
    let (tell, begun) = beginning();
    let handler = move |_: Message, _: Attempt| {
        tell();
        async {
            sleep(Duration::from_millis(900)).await;
            Ok(())
        }
    };
    let consumer = bench.consumer(handler).stop_at_once_on(async {});
    consumer
        .run_until(async { begun.await.unwrap() })
        .await
        .unwrap();
    assert_eq!(bench.list.acked(), [0_i64], "its handler may end");
}

#[tokio::test(start_paused = true)]
async fn a_second_signal_counts_only_after_the_first() {
    let bench = Bench::of(numbered(100));
    let asked = Arc::new(AtomicBool::new(false));
    let seen = Arc::clone(&asked);
    let consumer = bench
        .consumer(async |_: Message, _: Attempt| Ok(()))
        .stop_at_once_on(async move {
            seen.store(true, SeqCst);
        });
    let list = Arc::clone(&bench.list);
    let first = async move {
        list.until_acked(100).await;
        assert!(!asked.load(SeqCst), "stop was not requested yet");
    };
    consumer.run_until(first).await.unwrap();
}

// invariant: stop-without-end
#[tokio::test(flavor = "multi_thread", worker_threads = 3)]
async fn a_handler_that_blocks_its_thread_is_named_and_not_waited_for() {
    let bench = Bench::of(numbered(2));
    let (tell, begun) = beginning();
    let (release, released) = mpsc::channel::<()>();
    let released = Arc::new(Mutex::new(released));
    let handler = move |message: Message, _: Attempt| {
        let released = Arc::clone(&released);
        let blocks = message.payload() == br#"{"id":0}"#;
        if blocks {
            tell();
        }
        async move {
            if blocks {
                // The fault itself: a thread of the runtime that never comes back, as far as the
                // consumer can see.
                released.lock().unwrap().recv().unwrap_err();
            }
            Ok(())
        }
    };
    let gate = oncegate::Gate::new(
        "runtime",
        oncegate::Key::json(["id"]),
        Arc::clone(&bench.store),
    );
    let consumer = bench
        .consumer_behind(gate, handler)
        .stop_deadline(Duration::from_millis(100));
    let list = Arc::clone(&bench.list);
    let stop = async move {
        begun.await.unwrap();
        list.until_acked(1).await;
    };
    let limit = Duration::from_secs(60);
    let ended = tokio::time::timeout(limit, consumer.run_until(stop))
        .await
        .expect("it returns");
    let error = ended.unwrap_err();
    assert!(
        matches!(error, ConsumerError::StillRunning { .. }),
        "{error}"
    );
    assert!(
        error.to_string().contains("orders/0@0 in `runtime`"),
        "{error}"
    );
    assert_eq!(bench.list.acked(), [1], "the other one has ended");
    let pending = |state: &State| matches!(state, State::Pending { .. });
    let held = bench
        .store
        .records()
        .iter()
        .filter(|(_, record)| pending(&record.state))
        .count();
    assert_eq!(held, 1, "the running attempt keeps its claim");
    drop(release);
}

/// A store that loses its records. It shows that once, and then does not answer what is asked about
/// the scope.
#[derive(Debug)]
struct Losing {
    inner: Arc<MemoryStore>,
    has_lost: AtomicBool,
    is_away: AtomicBool,
}

#[async_trait]
impl StoreWrapper for Losing {
    fn inner(&self) -> &dyn Store {
        &*self.inner
    }

    async fn read(&self, keys: Vec<StoreKey>) -> Vec<Result<Option<RecordSnapshot>, StoreError>> {
        if self.has_lost.swap(false, SeqCst) {
            self.is_away.store(true, SeqCst);
        }
        self.inner.read(keys).await
    }

    async fn descriptor(&self, scope: &Scope) -> Result<Option<String>, StoreError> {
        if self.is_away.load(SeqCst) {
            return Err(StoreError::unavailable("simulated"));
        }
        self.inner.descriptor(scope).await
    }
}

/// The process that starts next may find no evidence of its own.
// invariant: run-after-loss
#[tokio::test(start_paused = true)]
async fn a_loss_that_was_noticed_is_in_the_store_before_a_stop_ends() {
    let bench = Bench::of(numbered(1));
    let inner = Arc::clone(&bench.store);
    let no = || AtomicBool::new(false);
    let store = Arc::new(Losing {
        inner,
        has_lost: no(),
        is_away: no(),
    });
    let gate = Gate::new("runtime", Key::json(["id"]), Arc::clone(&store))
        .lease(LEASE)
        .simulated(7);
    let consumer = bench.consumer_behind(gate, async |_: Message, _: Attempt| Ok(()));
    let list = Arc::clone(&bench.list);
    let counters = Arc::clone(&bench.counters);
    let losing = Arc::clone(&store);
    let noticed = async move {
        list.until_acked(1).await;
        losing.inner.lose_everything();
        losing.has_lost.store(true, SeqCst);
        while counters.total("store_losses") == 0 {
            sleep(Duration::from_millis(100)).await;
        }
        tokio::spawn(async move {
            sleep(Duration::from_secs(5)).await;
            losing.is_away.store(false, SeqCst);
        });
    };
    consumer.run_until(noticed).await.unwrap();
    let held = bench
        .store
        .descriptor(&Scope::new("runtime").unwrap())
        .await
        .unwrap();
    assert!(
        held.as_ref().is_some_and(|held| held.contains("halt")),
        "{held:?}"
    );
}

#[tokio::test(start_paused = true)]
async fn a_stop_lets_running_handlers_end_and_starts_no_other() {
    let bench = Bench::of(numbered(10));
    let (began, begun) = oneshot::channel();
    let began = Mutex::new(Some(began));
    let handler = move |_: Message, _: Attempt| {
        if let Some(began) = began.lock().unwrap().take() {
            began.send(()).unwrap();
        }
        async {
            sleep(Duration::from_secs(5)).await;
            Ok(())
        }
    };
    let consumer = bench.consumer(handler).concurrency(2);
    consumer
        .run_until(async { begun.await.unwrap() })
        .await
        .unwrap();
    assert_eq!(bench.list.acked(), [0, 1], "what had started has ended");
    assert_eq!(
        bench.counters.get("claims", "granted"),
        2,
        "nothing else was claimed"
    );
}
