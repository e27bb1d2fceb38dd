//! `Gate::run`: closures that run once for a key.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::join_all;
use oncegate::core::testing::fault::{FaultStore, Faults};
use oncegate::running::policy::OUTCOME_UNKNOWN;
use oncegate::running::{Done, RunError};
use oncegate::{
    AfterUnknown, Attempt, Counters, Failure, FingerprintSpec, Gate, Key, MemoryStore, Message,
};
use tokio::time::{sleep, timeout};

const LEASE: Duration = Duration::from_secs(1);

/// A process: its gate shares the store and the counters with those of others.
struct Processes {
    store: Arc<MemoryStore>,
    counters: Arc<Counters>,
}

impl Processes {
    fn new() -> Self {
        Self {
            store: Arc::new(MemoryStore::new()),
            counters: Arc::default(),
        }
    }

    fn gate(&self, seed: u64) -> Gate {
        Gate::new("jobs", Key::message_key(), Arc::clone(&self.store))
            .lease(LEASE)
            .observer(Arc::clone(&self.counters) as _)
            .simulated(seed)
    }
}

fn tick() -> Message {
    Message::keyed("report", "02:00")
}

/// Fails with this, and counts.
async fn fails(gate: &Gate, runs: &AtomicU32, failure: Failure) -> RunError {
    let work = async |_: Attempt| {
        runs.fetch_add(1, SeqCst);
        Err::<String, _>(failure)
    };
    gate.runner()
        .max_attempts(3)
        .run(&tick(), work)
        .await
        .unwrap_err()
}

// invariant: run-door
#[tokio::test(start_paused = true)]
async fn of_three_replicas_one_works_and_all_get_its_result() {
    let processes = Processes::new();
    let runs = Arc::new(AtomicU32::new(0));
    let replicas = (1..=3).map(|seed| {
        let (gate, runs) = (processes.gate(seed), Arc::clone(&runs));
        async move {
            let work = async |attempt: Attempt| {
                runs.fetch_add(1, SeqCst);
                // Several leases.
                sleep(LEASE * 5).await;
                assert_eq!((attempt.number(), attempt.recovered()), (1, false));
                Ok(seed)
            };
            let runner = gate.runner().wait(Duration::from_secs(60));
            runner.run(&tick(), work).await.unwrap()
        }
    });
    let results = join_all(replicas).await;
    assert_eq!(runs.load(SeqCst), 1);
    let now = results
        .iter()
        .filter(|done| matches!(done, Done::Now(_)))
        .count();
    assert_eq!(now, 1, "{results:?}");
    let first = results[0].into_result();
    assert!(results.iter().all(|done| done.into_result() == first));
    assert_eq!(processes.counters.get("handler_runs", "succeeded"), 1);
}

// invariant: run-door
#[tokio::test(start_paused = true)]
async fn without_a_wait_the_others_are_told_that_it_runs() {
    let processes = Processes::new();
    let (one, other) = (processes.gate(1), processes.gate(2));
    let job = tick();
    let working = one.run(&job, async |_: Attempt| {
        sleep(LEASE * 3).await;
        Ok(7)
    });
    let asking = async {
        sleep(LEASE * 2).await;
        let late = other
            .run(&tick(), async |_: Attempt| Ok::<u32, Failure>(8))
            .await;
        assert!(matches!(late, Err(RunError::Busy { .. })), "{late:?}");
    };
    let (worked, ()) = tokio::join!(working, asking);
    assert_eq!(worked.unwrap(), Done::Now(7));
}

// invariant: run-door
#[tokio::test(start_paused = true)]
async fn what_fails_is_due_again_until_its_attempts_are_used_up() {
    let processes = Processes::new();
    let gate = processes.gate(1);
    let runs = AtomicU32::new(0);
    for attempt in 1..=2 {
        let failed = fails(&gate, &runs, Failure::retry_after(LEASE, "closed")).await;
        let RunError::Failed {
            attempt: number,
            reason,
            retry_in,
        } = failed
        else {
            panic!("{failed}")
        };
        assert_eq!((number, reason.as_str()), (attempt, "closed"));
        let early = fails(&gate, &runs, Failure::retry("too early")).await;
        assert!(matches!(early, RunError::Busy { .. }), "{early}");
        sleep(retry_in + Duration::from_millis(1)).await;
    }
    for _ in 0..2 {
        let failed = fails(&gate, &runs, Failure::retry("closed")).await;
        assert!(
            matches!(&failed, RunError::GivenUp { reason } if reason == "closed"),
            "{failed}"
        );
    }
    assert_eq!(runs.load(SeqCst), 3, "given up for good");
}

// invariant: run-door
#[tokio::test(start_paused = true)]
async fn a_permanent_failure_and_a_later_one_are_what_they_say() {
    let processes = Processes::new();
    let gate = processes.gate(1);
    let runs = AtomicU32::new(0);
    for _ in 0..5 {
        let failed = fails(&gate, &runs, Failure::later(LEASE, "not ready")).await;
        assert!(
            matches!(failed, RunError::Failed { attempt: 1, .. }),
            "it costs no attempt: {failed}"
        );
        sleep(LEASE * 2).await;
    }
    let failed = fails(&gate, &runs, Failure::permanent("no such customer")).await;
    assert!(matches!(failed, RunError::GivenUp { .. }), "{failed}");
    assert_eq!(runs.load(SeqCst), 6);
}

// invariant: run-door
#[tokio::test(start_paused = true)]
async fn a_panic_counts_and_goes_on() {
    let processes = Processes::new();
    let gate = processes.gate(1);
    for _ in 0..3 {
        let runner = gate.runner().max_attempts(3);
        let job = tick();
        let running = runner.run(&job, async |_: Attempt| -> Result<u32, Failure> {
            panic!("planned")
        });
        let panicked = AssertUnwindSafe(running).catch_unwind().await;
        assert!(panicked.is_err(), "{panicked:?}");
        sleep(Duration::from_secs(60)).await;
    }
    let given_up = gate
        .runner()
        .max_attempts(3)
        .run(&tick(), async |_: Attempt| Ok::<u32, Failure>(1))
        .await;
    assert!(
        matches!(given_up, Err(RunError::GivenUp { .. })),
        "{given_up:?}"
    );
    assert_eq!(processes.counters.get("handler_runs", "panicked"), 3);
}

// invariant: run-door
#[tokio::test(start_paused = true)]
async fn a_future_that_is_dropped_ends_like_a_crash() {
    let processes = Processes::new();
    let gate = processes.gate(1);
    let job = tick();
    let running = gate.run(&job, async |_: Attempt| {
        sleep(LEASE * 100).await;
        Ok(1)
    });
    timeout(LEASE * 2, running).await.unwrap_err();
    let other = processes.gate(2);
    let work = async |attempt: Attempt| Ok((attempt.number(), attempt.recovered()));
    let early = other.run(&tick(), work).await;
    assert!(matches!(early, Err(RunError::Busy { .. })), "{early:?}");
    let waits = other.runner().wait(LEASE * 4);
    assert_eq!(
        waits.run(&tick(), work).await.unwrap(),
        Done::Now((2, true))
    );
}

// invariant: outcome-unknown
#[tokio::test(start_paused = true)]
async fn work_without_an_outcome_is_given_up_if_the_gate_says_so() {
    let processes = Processes::new();
    let gate = processes.gate(1).after_unknown(AfterUnknown::GiveUp);
    let job = tick();
    let running = gate.run(&job, async |_: Attempt| {
        sleep(LEASE * 100).await;
        Ok(1)
    });
    timeout(LEASE * 2, running).await.unwrap_err();
    let other = processes.gate(2).after_unknown(AfterUnknown::GiveUp);
    let work = async |_: Attempt| -> Result<u32, Failure> { panic!("it must not run") };
    for waits in [other.runner().wait(LEASE * 4), other.runner()] {
        let given_up = waits.run(&tick(), work).await;
        assert!(
            matches!(&given_up, Err(RunError::GivenUp { reason }) if reason.starts_with(OUTCOME_UNKNOWN)),
            "{given_up:?}"
        );
    }
    assert_eq!(processes.counters.total("extra_runs"), 0);
}

// invariant: run-door
#[tokio::test(start_paused = true)]
async fn work_that_takes_too_long_is_cancelled() {
    let processes = Processes::new();
    let gate = processes.gate(1).max_run(LEASE * 3);
    let work = async |attempt: Attempt| {
        attempt.cancelled().await;
        std::future::pending::<Result<u32, Failure>>().await
    };
    let cancelled = gate.run(&tick(), work).await;
    assert!(
        matches!(&cancelled, Err(RunError::Failed { attempt: 1, .. })),
        "{cancelled:?}"
    );
    let recovered = async |attempt: Attempt| Ok(attempt.recovered());
    let next = gate.runner().wait(LEASE * 4);
    assert_eq!(next.run(&tick(), recovered).await.unwrap(), Done::Now(true));
}

// invariant: run-door
#[tokio::test(start_paused = true)]
async fn another_content_under_the_same_key_is_refused() {
    let processes = Processes::new();
    let gate = processes.gate(1).fingerprint(FingerprintSpec::payload());
    let with = |text: &'static str| tick().with_payload(text);
    let (one, two) = (with(r#"{"amount":1}"#), with(r#"{"amount":2}"#));
    let first = gate.run(&one, async |_: Attempt| Ok(1)).await;
    assert_eq!(first.unwrap(), Done::Now(1));
    let refused = gate.run(&two, async |_: Attempt| Ok(2)).await;
    assert!(matches!(refused, Err(RunError::Mismatch)), "{refused:?}");
}

/// Calls that are lost before or after the store has them, for two processes and 60 keys.
// invariant: run-door
#[tokio::test(start_paused = true)]
async fn whatever_the_store_answers_work_runs_once() {
    for seed in 0..40 {
        let store = Arc::new(MemoryStore::new());
        let faults = Faults {
            unavailable: 0.1,
            reply_lost: 0.1,
            request_lost: 0.1,
            stray: 0.3,
            outage: 0.01,
            outage_max_calls: 10,
            ..Faults::default()
        };
        let faulty = Arc::new(FaultStore::new(Arc::clone(&store) as _, faults, seed));
        let runs: Vec<AtomicU32> = (0..60).map(|_| AtomicU32::new(0)).collect();
        let process = async |number: u64| {
            let gate = Gate::new("jobs", Key::message_key(), Arc::clone(&faulty))
                .lease(LEASE)
                .simulated(seed * 2 + number);
            for (n, runs) in runs.iter().enumerate() {
                let job = Message::keyed("report", n.to_string());
                loop {
                    let work = async |_: Attempt| {
                        runs.fetch_add(1, SeqCst);
                        Ok(n)
                    };
                    let runner = gate.runner().max_attempts(200).wait(LEASE * 3);
                    match runner.run(&job, work).await {
                        Ok(done) => break assert_eq!(done.into_result(), n, "seed {seed}"),
                        Err(RunError::GivenUp { reason }) => panic!("seed {seed}: {reason}"),
                        Err(_not_yet) => sleep(Duration::from_millis(50)).await,
                    }
                }
            }
        };
        tokio::join!(process(0), process(1));
        for (n, runs) in runs.iter().enumerate() {
            assert_eq!(runs.load(SeqCst), 1, "seed {seed}, job {n}");
        }
    }
}
