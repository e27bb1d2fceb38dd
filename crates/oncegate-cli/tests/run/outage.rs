//! A dependency of the worker is down for a while.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

use oncegate_tests::until;

use super::raw::{Answer, RawWorker};
use super::{LIMIT, Stage};

/// Two attempts each would be used up in a moment, and the topic with them.
#[tokio::test]
async fn no_message_goes_to_the_dead_letters_while_the_worker_answers_nothing_but_503() {
    let stage = Stage::with_orders(120).await;
    let down = Arc::new(AtomicBool::new(true));
    let is_down = Arc::clone(&down);
    let worker = RawWorker::start(move |_| match is_down.load(SeqCst) {
        true => Answer::status(503, "", "the bank does not answer"),
        false => Answer::status(200, "", ""),
    })
    .await;
    let flags = ["--max-attempts", "2", "--concurrency", "4"];
    let quick = [
        "--set",
        &format!("consumer.{}.breaker.most=2s", stage.scope),
        "--set",
        &format!("consumer.{}.backoff.most=1s", stage.scope),
    ];
    let running = stage.start(&[&["--handler", &worker.url()][..], &flags, &quick].concat());
    until("several probes", LIMIT, async || {
        let asked = worker.asked().len();
        if asked >= 25 { Ok(()) } else { Err(format!("asked {asked} times\n{}", stage.log())) }
    })
    .await;
    assert!(stage.log().contains("the handler is paused"), "{}", stage.log());
    assert!(stage.letters().await.is_empty(), "the dead letters have some already");
    down.store(false, SeqCst);
    stage.until_consumed(&running.group).await;
    running.stop().await;
    assert!(stage.letters().await.is_empty());
}
