//! What becomes of messages while something is down that their handler needs.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use oncegate::consumer::Breaker;
use oncegate::core::key::Scope;
use oncegate::core::record::State;
use oncegate::core::store::{ScopeDescriptor, Store};
use oncegate::core::testing::fault::{FaultStore, Faults};
use oncegate::health::Phase;
use oncegate::{Attempt, Backoff, Failure, Gate, Key, MemoryStore, Message, Ordering};
use tokio::sync::Barrier;
use tokio::time::{Instant, sleep};

use super::list::{Letters, List};
use super::{Bench, Gauge, LEASE, numbered};

/// Something that a handler needs, and when it is there.
#[derive(Debug)]
struct Dependency {
    down_until: Instant,
    /// How often it was asked while it was down.
    asked_in_vain: AtomicUsize,
}

impl Dependency {
    fn down_for(time: Duration) -> Arc<Self> {
        Arc::new(Self {
            down_until: Instant::now() + time,
            asked_in_vain: AtomicUsize::new(0),
        })
    }

    async fn call(&self) -> Result<(), Failure> {
        sleep(Duration::from_millis(10)).await;
        if Instant::now() < self.down_until {
            self.asked_in_vain.fetch_add(1, SeqCst);
            return Err(Failure::retry("it is down"));
        }
        Ok(())
    }
}

const HOUR: Duration = Duration::from_secs(3_600);

async fn survives(messages: usize, ordering: Ordering, in_vain_at_most: usize) -> usize {
    let bench = Bench::of(numbered(messages));
    let dependency = Dependency::down_for(HOUR / 2);
    let down = Arc::clone(&dependency);
    let handler = move |_: Message, _: Attempt| {
        let dependency = Arc::clone(&down);
        async move { dependency.call().await }
    };
    let consumer = bench
        .consumer(handler)
        .concurrency(8)
        .ordering(ordering)
        .max_attempts(5);
    bench.run(consumer, messages).await.unwrap();
    let in_vain = dependency.asked_in_vain.load(SeqCst);
    assert!(in_vain <= in_vain_at_most, "asked {in_vain} times in vain");
    assert_eq!(bench.counters.get("breaker_changes", "closed"), 1);
    bench.letters.causes().len()
}

// invariant: dependency-down
#[tokio::test(start_paused = true)]
async fn a_dependency_down_for_half_an_hour_causes_no_dead_letter() {
    // A probe every 30 s at the most often, jitter included, and what ran before it opened.
    assert_eq!(survives(500, Ordering::Key, 200).await, 0);
}

/// Retries that are due again and again would use up the attempts of a few keys before others have
/// failed.
// invariant: dependency-down
#[tokio::test(start_paused = true)]
async fn quick_retries_of_a_dependency_that_is_down_bury_nothing() {
    const MESSAGES: usize = 200;
    let bench = Bench::of(numbered(MESSAGES));
    let dependency = Dependency::down_for(HOUR / 60);
    let down = Arc::clone(&dependency);
    let handler = move |_: Message, _: Attempt| {
        let dependency = Arc::clone(&down);
        async move { dependency.call().await }
    };
    let quick = Backoff::new(Duration::from_millis(1), Duration::from_millis(2));
    let consumer = bench
        .consumer(handler)
        .concurrency(4)
        .max_attempts(2)
        .backoff(quick);
    bench.run(consumer, MESSAGES).await.unwrap();
    assert_eq!(bench.letters.causes(), [""; 0]);
}

#[tokio::test(start_paused = true)]
async fn a_partition_in_order_gives_up_no_more_than_the_breaker_needs() {
    // Nineteen bad messages at its head cannot be distinguished from a dependency that is down.
    assert_eq!(survives(100, Ordering::Partition, 200).await, 19);
}

#[tokio::test(start_paused = true)]
async fn without_a_breaker_the_topic_ends_with_the_dead_letters() {
    let bench = Bench::of(numbered(90));
    let consumer =
        bench.consumer(async |_: Message, _: Attempt| Err::<(), _>(Failure::retry("it is down")));
    bench
        .run(consumer.max_attempts(3).without_breaker(), 90)
        .await
        .unwrap();
    assert_eq!(bench.letters.causes(), ["attempts_used_up"; 90]);
}

// invariant: dependency-down
#[tokio::test(start_paused = true)]
async fn failures_while_it_is_open_cost_no_attempt() {
    let bench = Bench::of(numbered(60));
    let up_at = Instant::now() + HOUR / 2;
    let attempts: Arc<Mutex<BTreeMap<u32, usize>>> = Arc::default();
    let seen = Arc::clone(&attempts);
    let handler = move |_: Message, attempt: Attempt| {
        let is_up = Instant::now() >= up_at;
        if is_up {
            *seen.lock().unwrap().entry(attempt.number()).or_default() += 1;
        }
        async move {
            if is_up {
                Ok(())
            } else {
                Err(Failure::retry("it is down"))
            }
        }
    };
    let consumer = bench.consumer(handler).concurrency(4);
    let consumer = consumer.backoff(Backoff::new(Duration::from_secs(1), Duration::from_secs(1)));
    bench.run(consumer, 60).await.unwrap();
    let attempts = attempts.lock().unwrap();
    assert!(attempts.keys().all(|attempt| *attempt <= 2), "{attempts:?}");
    assert!(
        attempts[&2] < 20,
        "only those before it opened were counted: {attempts:?}"
    );
}

/// Whether the scope's descriptor says that a breaker is open.
async fn is_marked(store: &MemoryStore) -> bool {
    let scope = Scope::new("runtime").unwrap();
    let text = store
        .descriptor(&scope)
        .await
        .unwrap()
        .expect("a consumer has opened the scope");
    ScopeDescriptor::parse(&scope, &text).unwrap().breaker_open
}

/// Each process is given the same first messages.
// invariant: restarts-in-an-outage
#[tokio::test(start_paused = true)]
async fn thirteen_restarts_in_an_outage_cause_no_dead_letter() {
    const RESTARTS: u64 = 13;
    let store = Arc::new(MemoryStore::new());
    let letters = Arc::new(Letters::default());
    let attempts: Arc<Mutex<BTreeMap<u32, usize>>> = Arc::default();
    for process in 0..=RESTARTS {
        let is_up = process == RESTARTS;
        let seen = Arc::clone(&attempts);
        let handler = move |_: Message, attempt: Attempt| {
            if is_up {
                *seen.lock().unwrap().entry(attempt.number()).or_default() += 1;
            }
            async move {
                if is_up {
                    Ok(())
                } else {
                    Err(Failure::retry("it is down"))
                }
            }
        };
        let list = List::of("orders", numbered(200));
        let store = Arc::clone(&store);
        let letters = Arc::clone(&letters);
        let bench = Bench {
            list,
            store,
            letters,
            counters: Arc::default(),
        };
        let gate = bench.gate("runtime").simulated(process);
        let consumer = bench.consumer_behind(gate, handler).max_attempts(3);
        if is_up {
            bench.run(consumer, 200).await.unwrap();
        } else {
            consumer
                .run_until(sleep(Duration::from_secs(6)))
                .await
                .unwrap();
        }
        assert_eq!(is_marked(&bench.store).await, !is_up, "process {process}");
    }
    assert_eq!(letters.causes(), [""; 0]);
    let attempts = attempts.lock().unwrap();
    assert!(attempts.keys().all(|attempt| *attempt <= 2), "{attempts:?}");
    assert!(
        attempts[&2] < 20,
        "only failures before the first opening count, once for each key: {attempts:?}"
    );
}

/// The process that opened it was killed, and what its handler needs works again.
#[tokio::test(start_paused = true)]
async fn an_outdated_mark_costs_one_probe_and_pauses_no_idle_consumer() {
    let bench = Bench::of([]);
    let gate = bench.gate("runtime");
    gate.open().await.unwrap();
    let scope = Scope::new("runtime").unwrap();
    let text = bench.store.descriptor(&scope).await.unwrap().unwrap();
    let held = ScopeDescriptor::parse(&scope, &text).unwrap();
    let marked = ScopeDescriptor {
        breaker_open: true,
        ..held
    }
    .to_text()
    .unwrap();
    bench
        .store
        .describe(&scope, Some(&text), &marked)
        .await
        .unwrap();

    let gauge = Arc::new(Gauge::default());
    let most = Arc::new(Mutex::new(Vec::new()));
    let counted = Arc::clone(&gauge);
    let seen = Arc::clone(&most);
    let handler = move |_: Message, _: Attempt| {
        let gauge = Arc::clone(&counted);
        let seen = Arc::clone(&seen);
        async move {
            gauge.through(sleep(Duration::from_millis(20))).await;
            seen.lock().unwrap().push(gauge.most.load(SeqCst));
            Ok(())
        }
    };
    let consumer = bench.consumer_behind(gate, handler).concurrency(8);
    let list = Arc::clone(&bench.list);
    let monitor = consumer.monitor();
    let counters = Arc::clone(&bench.counters);
    let messages = async move {
        while counters.get("breaker_changes", "open") == 0
            || monitor.status().phase != Phase::Running
        {
            sleep(Duration::from_millis(10)).await;
        }
        assert_eq!(
            (monitor.status().paused, monitor.health().is_ready()),
            (Vec::new(), true)
        );
        (0..50).for_each(|id| list.push("orders", "", format!(r#"{{"id":{id}}}"#)));
        list.until_acked(50).await;
    };
    consumer.run_until(messages).await.unwrap();
    assert_eq!(most.lock().unwrap()[0], 1, "the first message probes alone");
    assert_eq!(gauge.most.load(SeqCst), 8, "the others run side by side");
    assert_eq!(bench.counters.get("breaker_changes", "open"), 1);
    assert_eq!(bench.counters.get("breaker_changes", "closed"), 1);
    assert!(!is_marked(&bench.store).await);
}

#[tokio::test(start_paused = true)]
async fn a_breakers_mark_is_written_as_soon_as_the_store_answers() {
    let bench = Bench::of(numbered(20));
    let store = Arc::new(FaultStore::new(
        Arc::clone(&bench.store) as _,
        Faults::default(),
        1,
    ));
    let gate = Gate::new("runtime", Key::json(["id"]), Arc::clone(&store))
        .lease(LEASE)
        .simulated(7);
    let together = Arc::new(Barrier::new(20));
    let down = Arc::clone(&store);
    let handler = move |_: Message, _: Attempt| {
        let together = Arc::clone(&together);
        let down = Arc::clone(&down);
        async move {
            if together.wait().await.is_leader() {
                down.begin_outage();
            }
            Err::<(), _>(Failure::retry("it is down"))
        }
    };
    let consumer = bench.consumer_behind(gate, handler).concurrency(20);
    // No probe is due in this test: what is written is the opening.
    let patient = Breaker {
        first: HOUR,
        most: HOUR,
        ..Breaker::default()
    };
    let counters = Arc::clone(&bench.counters);
    let memory = Arc::clone(&bench.store);
    let outage = async move {
        while counters.get("breaker_changes", "open") == 0 {
            sleep(Duration::from_millis(10)).await;
        }
        assert!(!is_marked(&memory).await, "the store is away");
        store.end_outage();
        while !is_marked(&memory).await {
            sleep(Duration::from_millis(10)).await;
        }
    };
    let consuming = consumer.breaker(patient).run_until(outage);
    tokio::time::timeout(HOUR / 6, consuming)
        .await
        .expect("the mark is written before a probe is due")
        .unwrap();
}

/// With doubled pauses, a limit that is lifted right after a probe would be noticed up to half a
/// minute later.
#[tokio::test(start_paused = true)]
async fn work_resumes_when_the_handler_has_asked_for_it() {
    const AGAIN_IN: Duration = Duration::from_secs(2);
    for limited_s in [20, 25, 30, 35, 40, 45, 50] {
        let bench = Bench::of(numbered(60));
        let lifted = Instant::now() + Duration::from_secs(limited_s);
        let handler = move |_: Message, _: Attempt| async move {
            if Instant::now() < lifted {
                return Err(Failure::retry_after(AGAIN_IN, "too many requests"));
            }
            Ok(())
        };
        bench
            .run(bench.consumer(handler).concurrency(4), 60)
            .await
            .unwrap();
        let late = lifted.elapsed();
        assert!(
            late <= AGAIN_IN * 2,
            "limited for {limited_s} s: it resumed {late:?} late"
        );
        assert_eq!(bench.counters.get("breaker_changes", "closed"), 1);
    }
}

#[tokio::test(start_paused = true)]
async fn one_message_at_a_time_probes_and_a_duplicate_is_no_probe() {
    let bench = Bench::of(numbered(40).into_iter().chain(numbered(40)));
    let dependency = Dependency::down_for(Duration::from_secs(60));
    let running = Arc::new(AtomicUsize::new(0));
    let opened_at: Arc<Mutex<Option<Instant>>> = Arc::default();
    let down = Arc::clone(&dependency);
    let count = Arc::clone(&running);
    let opened = Arc::clone(&opened_at);
    let handler = move |_: Message, _: Attempt| {
        let dependency = Arc::clone(&down);
        let count = Arc::clone(&count);
        let opened = Arc::clone(&opened);
        async move {
            let beside = count.fetch_add(1, SeqCst);
            let answer = dependency.call().await;
            count.fetch_sub(1, SeqCst);
            // What began before it opened has ended by then.
            let first = *opened.lock().unwrap().get_or_insert_with(Instant::now);
            if answer.is_err() && first.elapsed() > Duration::from_secs(2) {
                assert_eq!(beside, 0, "a probe runs alone");
            }
            answer
        }
    };
    bench
        .run(bench.consumer(handler).concurrency(40), 80)
        .await
        .unwrap();
    assert_eq!(
        bench.counters.get("handler_runs", "panicked"),
        0,
        "a probe ran beside others"
    );
    assert_eq!(bench.counters.get("claims", "completed"), 40);
    assert_eq!(bench.letters.causes(), [""; 0]);
}

#[tokio::test(start_paused = true)]
async fn giving_up_is_an_answer_and_opens_nothing() {
    let bench = Bench::of(numbered(60));
    let consumer = bench
        .consumer(async |_: Message, _: Attempt| Err::<(), _>(Failure::permanent("bad order")));
    bench.run(consumer, 60).await.unwrap();
    assert_eq!(bench.counters.total("breaker_changes"), 0);
    assert_eq!(bench.letters.causes(), ["permanent"; 60]);
}

#[tokio::test(start_paused = true)]
async fn each_route_has_a_breaker_of_its_own() {
    let bench = Bench::of(numbered(30));
    (0..30).for_each(|id| bench.list.push("refunds", "", format!(r#"{{"id":{id}}}"#)));
    let consumer =
        bench.consumer(async |_: Message, _: Attempt| Err::<(), _>(Failure::retry("it is down")));
    let refund = async |_: Message, _: Attempt| Ok(());
    let consumer = consumer.route("refunds", bench.gate("refunds"), refund);
    bench.run(consumer, 30).await.unwrap();
    assert_eq!(
        bench.counters.get("handler_runs", "succeeded"),
        30,
        "refunds go on while orders wait"
    );
    assert_eq!(bench.letters.causes(), [""; 0]);
}

#[tokio::test(start_paused = true)]
async fn limits_that_make_no_sense_are_refused() {
    let bench = Bench::of([]);
    let consumer = bench.consumer(async |_: Message, _: Attempt| Ok(()));
    let consumer = consumer.breaker(Breaker {
        keys: 0,
        ..Breaker::default()
    });
    let error = consumer
        .run_until(std::future::pending())
        .await
        .unwrap_err();
    assert!(error.to_string().contains("`breaker.keys`"), "{error}");
}

#[tokio::test(start_paused = true)]
async fn an_unknown_outcome_waits_for_its_lease() {
    let bench = Bench::of(numbered(1));
    let store = Arc::clone(&bench.store);
    let failed_at = Arc::new(Mutex::new(None));
    let at = Arc::clone(&failed_at);
    let handler = move |_: Message, attempt: Attempt| {
        let at = Arc::clone(&at);
        let store = Arc::clone(&store);
        async move {
            if attempt.number() == 1 {
                *at.lock().unwrap() = Some(Instant::now());
                return Err(Failure::unknown("no answer in time"));
            }
            let waited = at.lock().unwrap().map(|at| at.elapsed());
            let pending = store
                .records()
                .iter()
                .any(|(_, r)| matches!(r.state, State::Pending { .. }));
            Ok((attempt.recovered(), pending, waited >= Some(LEASE / 2)))
        }
    };
    bench.run(bench.consumer(handler), 1).await.unwrap();
    let stored = bench
        .store
        .records()
        .into_iter()
        .find_map(|(_, record)| match record.state {
            State::Completed { result, .. } => Some(result),
            _ => None,
        });
    assert_eq!(&stored.unwrap()[1..], b"[true,true,true]");
    assert_eq!(bench.counters.get("extra_runs", "crash_takeover"), 1);
}
