//! A dependency of the worker is down for a while.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};

use oncegate_testkit::{unique, until};

use super::raw::{Answer, Asked, RawWorker};
use super::{LIMIT, Stage};

/// The header that a worker adds to a 503 of its own: it has done nothing.
const OWN: &str = "oncegate-outcome: retry\r\n";

/// Two attempts each would be used up in a moment, and the topic with them.
// invariant: dependency-down
#[tokio::test]
async fn while_the_worker_answers_503_nothing_is_dead_lettered() {
    nothing_is_dead_lettered_during_503(OWN).await;
}

/// The outcome of each call is unknown, so each message waits until its lease is over.
// invariant: dependency-down
#[tokio::test]
async fn while_a_gateway_answers_503_nothing_is_dead_lettered() {
    nothing_is_dead_lettered_during_503("").await;
}

async fn nothing_is_dead_lettered_during_503(header: &'static str) {
    /// More calls than there are messages, so that some messages have had both their attempts.
    const PROBED: usize = 140;
    let stage = Stage::with_orders(60).await;
    let down = Arc::new(AtomicBool::new(true));
    let is_down = Arc::clone(&down);
    let worker = RawWorker::start(move |_| {
        if is_down.load(SeqCst) {
            Answer::status(503, header, "the bank does not answer")
        } else {
            Answer::status(200, "", "")
        }
    })
    .await;
    // As many run at once as the breaker must see fail, however slow the machine is.
    let flags = ["--set", "max_attempts=2", "--concurrency", "4"];
    let quick = [
        "breaker.first=100ms",
        "breaker.most=400ms",
        "backoff.most=200ms",
        "lease=2s",
    ];
    let quick = quick.map(|setting| format!("--set=consumer.{}.{setting}", stage.scope));
    let quick = quick.each_ref().map(String::as_str);
    let running = stage.start(&[&["--handler", &worker.url()][..], &flags, &quick].concat());
    until("several probes", LIMIT, async || {
        let asked = worker.asked().len();
        if asked >= PROBED {
            Ok(())
        } else {
            Err(format!("asked {asked} times\n{}", stage.log()))
        }
    })
    .await;
    assert!(
        stage.log().contains("the handler is paused"),
        "{}",
        stage.log()
    );
    assert!(
        stage.letters().await.is_empty(),
        "the dead letters have some already"
    );
    down.store(false, SeqCst);
    stage.until_consumed(&running.group).await;
    running.stop().await;
    assert!(stage.letters().await.is_empty());
}

/// The breaker of the first process opens. Each process after it finds its mark in the store, and
/// only probes.
// invariant: restarts-in-an-outage
#[tokio::test]
async fn thirteen_restarts_while_the_worker_is_down_bury_no_message() {
    const MESSAGES: usize = 200;
    /// More calls than a breaker needs to open, and so many probes of each process after the first.
    const CALLS: [usize; 2] = [30, 5];
    let stage = Stage::with_orders(MESSAGES).await;
    let down = Arc::new(AtomicBool::new(true));
    let is_down = Arc::clone(&down);
    let worker = RawWorker::start(move |_| {
        if is_down.load(SeqCst) {
            Answer::status(503, OWN, "the bank does not answer")
        } else {
            Answer::status(200, "", "")
        }
    })
    .await;
    let group = unique("run");
    let url = worker.url();
    let quick = ["breaker.first=100ms", "breaker.most=200ms"];
    let quick = quick.map(|setting| format!("--set=consumer.{}.{setting}", stage.scope));
    let flags = [
        "--handler",
        &url,
        &quick[0],
        &quick[1],
        "--set",
        "max_attempts=3",
    ];
    for restart in 0..13 {
        let calls = CALLS[usize::from(restart > 0)];
        let before = worker.asked().len();
        let running = stage.start_in(&group, &flags);
        until(
            "the breaker to open, and some probes",
            LIMIT,
            async || match worker.asked().len() - before {
                asked if asked >= calls => Ok(()),
                asked => Err(format!("asked {asked} times\n{}", stage.log())),
            },
        )
        .await;
        running.stop().await;
    }
    down.store(false, SeqCst);
    let running = stage.start_in(&group, &flags);
    stage.until_consumed(&group).await;
    running.stop().await;
    assert!(stage.letters().await.is_empty(), "{}", stage.log());
    let attempts: Vec<u32> = worker.asked().iter().map(Asked::attempt).collect();
    assert!(attempts.iter().all(|attempt| *attempt <= 2), "{attempts:?}");
}

/// A worker that asks for a short wait is asked again after it. With doubled pauses, a dozen probes
/// would take minutes.
#[tokio::test]
async fn the_breaker_probes_when_a_worker_has_asked_for_it() {
    const PROBES: usize = 12;
    let stage = Stage::with_orders(60).await;
    let asked = Arc::new(AtomicUsize::new(0));
    let refused = Arc::new(AtomicUsize::new(usize::MAX));
    let count = Arc::clone(&asked);
    let limit = Arc::clone(&refused);
    let worker = RawWorker::start(move |_| {
        if count.fetch_add(1, SeqCst) < limit.load(SeqCst) {
            Answer::status(429, "retry-after: 0\r\n", "too many requests")
        } else {
            Answer::status(200, "", "")
        }
    })
    .await;
    let settings = ["breaker.first=100ms", "breaker.most=60s"];
    let settings = settings.map(|setting| format!("--set=consumer.{}.{setting}", stage.scope));
    let settings = settings.each_ref().map(String::as_str);
    let flags = ["--set", "max_attempts=200", "--concurrency", "24"];
    let running = stage.start(&[&["--handler", &worker.url()][..], &flags, &settings].concat());
    stage.until_logged("the circuit breaker is open").await;
    refused.store(asked.load(SeqCst) + PROBES, SeqCst);
    stage.until_consumed(&running.group).await;
    running.stop().await;
    assert!(stage.letters().await.is_empty(), "{}", stage.log());
}
