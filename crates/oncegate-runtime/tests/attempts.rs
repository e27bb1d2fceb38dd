//! What uses up an attempt, and what does not.

#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "a test that cannot go on has failed"
)]

#[path = "runtime/list.rs"]
#[allow(dead_code, reason = "shared with the tests of the runtime")]
mod list;

use std::sync::{Arc, Mutex};
use std::time::Duration;

use list::{Letters, List, Listed};
use oncegate::core::testing::fault::{FaultStore, Faults};
use oncegate::{Attempt, Consumer, Failure, Gate, Key, MemoryStore, Message};

const LEASE: Duration = Duration::from_secs(1);
/// How many runs an outage cuts short: more than the message has attempts.
const OUTAGES: usize = 5;
const MAX_ATTEMPTS: u32 = 2;

// invariant: attempt-lost-to-outage
#[tokio::test(start_paused = true)]
async fn an_outage_uses_up_no_attempt() {
    let store = Arc::new(FaultStore::new(
        Arc::new(MemoryStore::new()),
        Faults::default(),
        1,
    ));
    let list = List::of("orders", [("", r#"{"id":1}"#.to_owned())]);
    let letters = Arc::new(Letters::default());
    let attempts = Arc::new(Mutex::new(Vec::new()));
    let handler = {
        let store = Arc::clone(&store);
        let attempts = Arc::clone(&attempts);
        move |_: Message, attempt: Attempt| {
            let store = Arc::clone(&store);
            let attempts = Arc::clone(&attempts);
            async move {
                let outages = {
                    let mut attempts = attempts.lock().unwrap();
                    attempts.push(attempt.number());
                    attempts.len()
                };
                if outages > OUTAGES {
                    return Ok(());
                }
                // No heartbeat succeeds, so the run is cancelled; the handler returns in time.
                store.begin_outage();
                attempt.cancelled().await;
                store.end_outage();
                Err(Failure::retry("cut short"))
            }
        }
    };
    let gate = Gate::new("attempts", Key::json(["id"]), Arc::clone(&store))
        .lease(LEASE)
        .simulated(7);
    let consumer = Consumer::new(Listed(Arc::clone(&list)), gate, handler)
        .max_attempts(MAX_ATTEMPTS)
        .dead_letters(Arc::clone(&letters));
    consumer
        .run_until(async { list.until_acked(1).await })
        .await
        .unwrap();
    assert_eq!(letters.causes(), [""; 0], "nothing was given up");
    assert_eq!(*attempts.lock().unwrap(), [1; OUTAGES + 1]);
}

/// Attempt and whether it is recovered, of every run.
type Told = Arc<Mutex<Vec<(u32, bool)>>>;

/// A worker that is overloaded or unreachable is no failure of the message.
#[tokio::test(start_paused = true)]
async fn what_did_not_run_uses_up_no_attempt() {
    const TIMES: usize = 5;
    let list = List::of("orders", [("", r#"{"id":1}"#.to_owned())]);
    let letters = Arc::new(Letters::default());
    let told = Told::default();
    let noted = Arc::clone(&told);
    let handler = move |_: Message, attempt: Attempt| {
        let mut told = noted.lock().unwrap();
        told.push((attempt.number(), attempt.recovered()));
        let result = if told.len() > TIMES {
            Ok(())
        } else {
            Err(Failure::not_run("no connection"))
        };
        std::future::ready(result)
    };
    let gate = Gate::new("attempts", Key::json(["id"]), MemoryStore::new())
        .lease(LEASE)
        .simulated(7);
    let consumer = Consumer::new(Listed(Arc::clone(&list)), gate, handler)
        .max_attempts(1)
        .dead_letters(Arc::clone(&letters));
    consumer
        .run_until(async { list.until_acked(1).await })
        .await
        .unwrap();
    assert_eq!(letters.causes(), [""; 0], "nothing was given up");
    assert_eq!(*told.lock().unwrap(), [(1, false); TIMES + 1]);
}

/// The record that protected the first run is gone, so the claim would be granted at once, and as
/// that of a new key.
#[tokio::test(start_paused = true)]
async fn a_lost_records_rerun_is_recovered_and_awaits_the_lease() {
    let store = Arc::new(MemoryStore::new());
    let list = List::of("orders", [("", r#"{"id":1}"#.to_owned())]);
    let letters = Arc::new(Letters::default());
    let told = Told::default();
    let handler = {
        let store = Arc::clone(&store);
        let told = Arc::clone(&told);
        let lost_at = Arc::new(Mutex::new(None));
        move |_: Message, attempt: Attempt| {
            let store = Arc::clone(&store);
            let told = Arc::clone(&told);
            let lost_at = Arc::clone(&lost_at);
            async move {
                told.lock()
                    .unwrap()
                    .push((attempt.number(), attempt.recovered()));
                let lost_at: &Mutex<Option<tokio::time::Instant>> = &lost_at;
                let before = lost_at.lock().unwrap().take();
                if let Some(lost_at) = before {
                    assert!(
                        lost_at.elapsed() > LEASE / 2,
                        "it was called {:?} after the loss",
                        lost_at.elapsed()
                    );
                    return Ok(());
                }
                *lost_at.lock().unwrap() = Some(tokio::time::Instant::now());
                store.lose_everything();
                attempt.cancelled().await;
                Err(Failure::unknown(
                    "the worker was asked to stop, and may still be running",
                ))
            }
        }
    };
    let gate = Gate::new("attempts", Key::json(["id"]), Arc::clone(&store))
        .lease(LEASE)
        .simulated(7);
    let consumer =
        Consumer::new(Listed(Arc::clone(&list)), gate, handler).dead_letters(Arc::clone(&letters));
    consumer
        .run_until(async { list.until_acked(1).await })
        .await
        .unwrap();
    assert_eq!(*told.lock().unwrap(), [(1, false), (1, true)]);
}
