//! Messages that wait for something, and what they must not hold up.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use oncegate::consumer::Breaker;
use oncegate::core::testing::fault::{FaultStore, Faults};
use oncegate::dead_letters::{DeadLetter, DeadLetters};
use oncegate::health::{Health, Stage, WaitCause};
use oncegate::{
    Attempt, Backoff, BoxError, Consumer, Entry, Failure, Field, Gate, Key, MemoryStore, Message,
    Ordering, Origin, TenantSource,
};
use tokio::sync::Notify;
use tokio::time::{Instant, sleep};

use super::list::{Letters, Listed};
use super::lost_claims::behind;
use super::{Bench, LEASE, numbered};

fn id_of(message: &Message) -> u64 {
    #[derive(serde::Deserialize)]
    struct Payload {
        id: u64,
    }
    message.json::<Payload>().unwrap().id
}

/// Two owners claim this message, one after the other, and crash. From then on it runs alone.
async fn end_two_processes(bench: &Bench, id: u64) {
    let gate = bench.gate("runtime").simulated(99);
    let origin = Origin::Other("an earlier delivery".into());
    let suspect = Message::new("orders", origin, Some(format!(r#"{{"id":{id}}}"#).into()));
    for _ in 0..2 {
        drop(gate.enter(&suspect).await.unwrap());
        sleep(LEASE * 2).await;
    }
}

// invariant: retry-starved
#[tokio::test(start_paused = true)]
async fn a_retry_that_is_due_starts_before_messages_that_came_later() {
    let bench = Bench::of(numbered(100));
    let runs: Arc<Mutex<Vec<u64>>> = Arc::default();
    let noted = Arc::clone(&runs);
    let handler = move |message: Message, attempt: Attempt| {
        noted.lock().unwrap().push(id_of(&message));
        async move {
            sleep(Duration::from_millis(100)).await;
            if id_of(&message) == 0 && attempt.number() == 1 {
                return Err(Failure::retry_after(Duration::from_millis(50), "not yet"));
            }
            Ok(())
        }
    };
    bench
        .run(
            bench
                .consumer(handler)
                .ordering(Ordering::Unordered)
                .concurrency(1),
            100,
        )
        .await
        .unwrap();
    assert_eq!(runs.lock().unwrap()[..4], [0, 1, 0, 2]);
}

// invariant: retry-takes-permits
#[tokio::test(start_paused = true)]
async fn a_retry_without_a_delay_leaves_its_permits_to_others() {
    const LAST: u64 = 49;
    let bench = Bench::of(numbered(LAST as usize + 1));
    let attempts: Arc<Mutex<Option<u32>>> = Arc::default();
    let most = Arc::new(AtomicU32::new(0));
    let noted = Arc::clone(&attempts);
    let seen = Arc::clone(&most);
    let handler = move |message: Message, attempt: Attempt| {
        seen.fetch_max(attempt.number(), SeqCst);
        if id_of(&message) == LAST {
            noted.lock().unwrap().get_or_insert(seen.load(SeqCst));
        }
        async move {
            sleep(Duration::from_millis(1)).await;
            if attempt.number() < 60 {
                Err(Failure::retry_after(Duration::ZERO, "again, at once"))
            } else {
                Ok(())
            }
        }
    };
    let consumer = bench
        .consumer(handler)
        .ordering(Ordering::Unordered)
        .concurrency(4)
        .max_attempts(100);
    bench
        .run(consumer.without_breaker(), LAST as usize + 1)
        .await
        .unwrap();
    let most = attempts.lock().unwrap().expect("the last message ran");
    assert!(
        most < 10,
        "another message had {most} attempts before the last one had its first"
    );
}

/// Each is wanted later more often than it may fail, by twice as many keys as the breaker counts.
// invariant: later-counted
#[tokio::test(start_paused = true)]
async fn what_a_handler_wants_later_has_not_failed_however_often() {
    const POLLS: u32 = 12;
    const DELAY: Duration = Duration::from_secs(5);
    let bench = Bench::of(numbered(40));
    let polls: Arc<Mutex<BTreeMap<u64, u32>>> = Arc::default();
    let seen = Arc::clone(&polls);
    let attempts = Arc::new(AtomicU32::new(0));
    let most = Arc::clone(&attempts);
    let handler = move |message: Message, attempt: Attempt| {
        most.fetch_max(attempt.number(), SeqCst);
        let mut polls = seen.lock().unwrap();
        let polled = polls.entry(id_of(&message)).or_default();
        *polled += 1;
        let is_done = *polled > POLLS;
        async move {
            if is_done {
                Ok(())
            } else {
                Err(Failure::later(DELAY, "the job is not done"))
            }
        }
    };
    let consumer = bench
        .consumer(handler)
        .ordering(Ordering::Unordered)
        .max_attempts(2);
    let monitor = consumer.monitor();
    let began = Instant::now();
    let waiting = async {
        sleep(DELAY * 2).await;
        monitor.status()
    };
    let (ran, status) = tokio::join!(bench.run(consumer, 40), waiting);
    ran.unwrap();
    assert_eq!(status.messages.parked, 40);
    let health = Health::of(&status);
    assert_eq!(health, Health::Healthy);
    assert!(
        began.elapsed() >= DELAY * POLLS,
        "each waited for its delay"
    );
    assert_eq!(
        attempts.load(SeqCst),
        1,
        "the attempt is the first one each time"
    );
    assert_eq!(
        bench.counters.get("handler_runs", "later"),
        u64::from(POLLS) * 40
    );
    assert_eq!(bench.counters.total("retries"), 0);
    assert_eq!(bench.counters.total("breaker_changes"), 0);
    assert_eq!(bench.letters.causes(), [""; 0]);
}

#[tokio::test(start_paused = true)]
async fn the_status_lists_what_a_handler_wants_later() {
    const DELAY: Duration = Duration::from_secs(5);
    let bench = Bench::of(numbered(1));
    let consumer = bench
        .consumer(async |_: Message, _: Attempt| Err::<(), _>(Failure::later(DELAY, "not ready")));
    let monitor = consumer.monitor();
    let stop = async {
        sleep(DELAY / 2).await;
        let status = monitor.status();
        let [message] = &status.waiting[..] else {
            panic!("{status:?}")
        };
        assert_eq!(message.stage, Stage::Parked(WaitCause::Later));
    };
    consumer.run_until(stop).await.unwrap();
    assert_eq!(bench.list.acked(), [0_i64; 0]);
}

// invariant: tenant-waits-for-store
#[tokio::test(start_paused = true)]
async fn a_message_held_back_for_its_store_delays_none_of_its_tenant() {
    let payload = |id: u64, tenant: &str| format!(r#"{{"id":{id},"tenant":"{tenant}"}}"#);
    let bench = Bench::of([("", payload(0, "other"))]);
    let store = Arc::new(FaultStore::new(
        Arc::new(MemoryStore::new()),
        Faults::default(),
        1,
    ));
    let key = || Key::json([Field::from("id")]).tenant(TenantSource::json("tenant"));
    let orders = Gate::new("orders", key(), Arc::clone(&bench.store))
        .lease(LEASE)
        .simulated(7);
    let refunds = Gate::new("refunds", key(), Arc::clone(&store))
        .lease(LEASE)
        .simulated(8);
    let handler = async |_: Message, _: Attempt| {
        sleep(Duration::from_secs(1)).await;
        Ok(())
    };
    let consumer = bench
        .consumer_behind(orders, handler)
        .route("refunds", refunds, handler)
        .tenant_limit(1);
    let list = Arc::clone(&bench.list);
    let outage = async move {
        list.until_acked(1).await;
        store.begin_outage();
        // The first refund, of another tenant, asks the store again and again.
        list.push("refunds", "", payload(1, "other"));
        list.push("orders", "", payload(2, "big"));
        list.push("refunds", "", payload(3, "big"));
        list.push("orders", "", payload(4, "big"));
        list.until_acked(3).await;
        store.end_outage();
        list.until_acked(5).await;
    };
    consumer.run_until(outage).await.unwrap();
    assert_eq!(
        bench.list.acked()[..3],
        [0, 2, 4],
        "the orders do not wait for the store of the refunds"
    );
}

// invariant: busy-for-whole-lease
#[tokio::test(start_paused = true)]
async fn a_duplicate_of_a_short_run_elsewhere_awaits_no_whole_lease() {
    let bench = Bench::of(numbered(1));
    let lease = Duration::from_secs(60);
    let gate = |seed| {
        Gate::new("runtime", Key::json(["id"]), Arc::clone(&bench.store))
            .lease(lease)
            .simulated(seed)
    };
    let elsewhere = gate(99);
    let message = Message::new(
        "orders",
        Origin::Other("elsewhere".into()),
        Some(r#"{"id":0}"#.into()),
    );
    let Entry::Granted(run) = elsewhere.enter(&message).await.unwrap() else {
        panic!("the key is new")
    };
    let ends = tokio::spawn(async move {
        sleep(Duration::from_millis(50)).await;
        run.complete(&()).await.unwrap()
    });
    let began = Instant::now();
    bench
        .run(
            bench.consumer_behind(gate(7), async |_: Message, _: Attempt| Ok(())),
            1,
        )
        .await
        .unwrap();
    assert!(
        began.elapsed() < lease / 10,
        "it waited for {:?}",
        began.elapsed()
    );
    _ = ends.await.unwrap();
    assert_eq!(bench.counters.get("claims", "completed"), 1);
}

// invariant: busy-for-whole-lease
#[tokio::test(start_paused = true)]
async fn asking_for_a_busy_key_backs_off() {
    let bench = Bench::of(numbered(1));
    let lease = Duration::from_secs(60);
    let gate = |seed| {
        Gate::new("runtime", Key::json(["id"]), Arc::clone(&bench.store))
            .lease(lease)
            .simulated(seed)
    };
    let elsewhere = gate(99);
    let message = Message::new(
        "orders",
        Origin::Other("elsewhere".into()),
        Some(r#"{"id":0}"#.into()),
    );
    let Entry::Granted(run) = elsewhere.enter(&message).await.unwrap() else {
        panic!("the key is new")
    };
    let ends = tokio::spawn(async move {
        sleep(Duration::from_secs(600)).await;
        run.complete(&()).await.unwrap()
    });
    bench
        .run(
            bench.consumer_behind(gate(7), async |_: Message, _: Attempt| Ok(())),
            1,
        )
        .await
        .unwrap();
    _ = ends.await.unwrap();
    let asked = bench.counters.get("claims", "busy");
    assert!(
        (10..100).contains(&asked),
        "asked {asked} times in ten minutes"
    );
}

// invariant: run-alone
#[tokio::test(start_paused = true)]
async fn a_message_waiting_to_run_alone_does_not_start_after_a_stop() {
    let bench = Bench::of(numbered(2));
    end_two_processes(&bench, 1).await;
    let suspect_ran = Arc::new(AtomicBool::new(false));
    let ran = Arc::clone(&suspect_ran);
    let began = Arc::new(Notify::new());
    let teller = Arc::clone(&began);
    let handler = move |message: Message, _: Attempt| {
        let ran = Arc::clone(&ran);
        let teller = Arc::clone(&teller);
        async move {
            if id_of(&message) == 1 {
                ran.store(true, SeqCst);
            } else {
                teller.notify_one();
                sleep(Duration::from_secs(5)).await;
            }
            Ok(())
        }
    };
    let counters = Arc::clone(&bench.counters);
    let stop = async move {
        began.notified().await;
        while counters.total("quarantined") == 0 {
            sleep(Duration::from_millis(1)).await;
        }
    };
    bench
        .consumer(handler)
        .concurrency(2)
        .run_until(stop)
        .await
        .unwrap();
    assert_eq!(bench.list.acked(), [0]);
    assert!(
        !suspect_ran.load(SeqCst),
        "a handler began after the stop signal"
    );
}

// invariant: run-alone
#[tokio::test(start_paused = true)]
async fn a_wait_to_run_alone_behind_a_long_run_holds_up_no_others() {
    let bench = Bench::of(numbered(30));
    end_two_processes(&bench, 1).await;
    let released = Arc::new(Notify::new());
    let others = Arc::new(AtomicUsize::new(0));
    let long = Arc::clone(&released);
    let beside = Arc::clone(&others);
    let handler = move |message: Message, _: Attempt| {
        let long = Arc::clone(&long);
        let beside = Arc::clone(&beside);
        async move {
            let now = beside.fetch_add(1, SeqCst);
            match id_of(&message) {
                0 => long.notified().await,
                1 => assert_eq!(now, 0, "it runs alone"),
                _ => sleep(Duration::from_millis(100)).await,
            }
            beside.fetch_sub(1, SeqCst);
            Ok(())
        }
    };
    let consumer = bench.consumer(handler).concurrency(4);
    let list = Arc::clone(&bench.list);
    let stop = async move {
        list.until_acked(28).await;
        released.notify_one();
        list.until_acked(30).await;
    };
    consumer.run_until(stop).await.unwrap();
    assert_eq!(bench.counters.get("handler_runs", "panicked"), 0);
}

/// Dead letters whose first write takes the store away for five seconds.
#[derive(Debug)]
struct CuttingLetters {
    letters: Arc<Letters>,
    store: Arc<FaultStore>,
}

#[async_trait]
impl DeadLetters for CuttingLetters {
    async fn send(&self, letter: &DeadLetter) -> Result<(), BoxError> {
        self.letters.send(letter).await?;
        self.store.begin_outage();
        let store = Arc::clone(&self.store);
        tokio::spawn(async move {
            sleep(Duration::from_secs(5)).await;
            store.end_outage();
        });
        Ok(())
    }
}

// invariant: second-dead-letter
#[tokio::test(start_paused = true)]
async fn an_outage_between_dead_letter_and_mark_causes_no_second_one() {
    let bench = Bench::of(numbered(1));
    let store = Arc::new(FaultStore::new(
        Arc::clone(&bench.store) as _,
        Faults::default(),
        1,
    ));
    let letters = CuttingLetters {
        letters: Arc::clone(&bench.letters),
        store: Arc::clone(&store),
    };
    let handler = async |_: Message, _: Attempt| Err::<(), _>(Failure::permanent("hopeless"));
    let consumer = Consumer::new(Listed(Arc::clone(&bench.list)), behind(&store), handler)
        .dead_letters(letters)
        .observer(Arc::clone(&bench.counters) as _);
    let list = Arc::clone(&bench.list);
    let stop = async move {
        list.until_acked(1).await;
        list.push("orders", "", r#"{"id":0}"#.to_owned());
        list.until_acked(2).await;
    };
    consumer.run_until(stop).await.unwrap();
    assert_eq!(bench.letters.causes(), ["permanent"]);
}

// invariant: consumption-without-commits
#[tokio::test(start_paused = true)]
async fn a_retry_after_the_longest_time_there_is_ends_no_consumer() {
    let bench = Bench::of(numbered(2));
    let handler = async |message: Message, _: Attempt| match id_of(&message) {
        0 => Err(Failure::retry_after(Duration::MAX, "never")),
        _ => Ok(()),
    };
    bench
        .run(bench.consumer(handler).concurrency(1), 1)
        .await
        .unwrap();
    assert_eq!(bench.list.acked(), [1]);
}

// invariant: consumption-without-commits
#[tokio::test(start_paused = true)]
async fn times_that_no_clock_can_reach_are_refused_by_name() {
    let never = Duration::MAX;
    let bench = Bench::of([]);
    let consumer = || bench.consumer(async |_: Message, _: Attempt| Ok(()));
    let backoff = Backoff::new(Duration::from_secs(1), never);
    let breaker = Breaker {
        most: never,
        ..Breaker::default()
    };
    for (name, consumer) in [
        ("stop_deadline", consumer().stop_deadline(never)),
        ("start_patience", consumer().start_patience(never)),
        ("fail_open_after", consumer().fail_open_after(never)),
        ("backoff", consumer().backoff(backoff)),
        ("breaker.most", consumer().breaker(breaker)),
    ] {
        let error = consumer.run_until(async {}).await.unwrap_err();
        assert!(error.to_string().contains(&format!("`{name}`")), "{error}");
    }
}
