//! The dead-letter limit, under a supervisor that starts the process again.

use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

use oncegate_testkit::unique;

use super::raw::{Answer, RawWorker};
use super::{LIMIT, Stage};

const IN_A_ROW: usize = 5;

// invariant: restart-after-dead-letter-limit
#[tokio::test]
async fn a_restart_after_the_dead_letter_limit_buries_nothing() {
    let stage = Stage::with_orders(60).await;
    let bad = Arc::new(AtomicBool::new(true));
    let is_bad = Arc::clone(&bad);
    let worker = RawWorker::start(move |_| {
        if is_bad.load(SeqCst) {
            Answer::status(422, "", "no such account")
        } else {
            Answer::status(200, "", "")
        }
    })
    .await;
    let limit = format!(
        "--set=consumer.{}.dead_letter_limit.in_a_row={IN_A_ROW}",
        stage.scope
    );
    let group = unique("run");
    let url = worker.url();
    let flags = ["--handler", &url, "--concurrency", "1", &limit];
    let stops = async || {
        let mut running = stage.start_in(&group, &flags);
        assert_eq!(
            running.process.end_within(LIMIT).await.code(),
            Some(65),
            "{}",
            stage.log()
        );
        stage.letters().await.len()
    };
    assert_eq!(stops().await, IN_A_ROW, "{}", stage.log());
    assert!(
        stage.log().contains("oncegate accept dead-letters"),
        "{}",
        stage.log()
    );
    for _ in 0..3 {
        assert_eq!(stops().await, IN_A_ROW, "a restart gives up nothing");
    }

    let mut accept = Command::new(env!("CARGO_BIN_EXE_oncegate"));
    accept.args([
        "accept",
        "dead-letters",
        "--store",
        stage.redis.url(),
        "--scope",
        &stage.scope,
    ]);
    accept
        .args(["--yes", "--why", "these orders are bad"])
        .env("ONCEGATE_JOURNAL", stage.path("journal"));
    let accepted = accept.output().unwrap();
    assert!(accepted.status.success(), "{accepted:?}");
    assert_eq!(stops().await, 2 * IN_A_ROW, "as many may be given up again");

    bad.store(false, SeqCst);
    let running = stage.start_in(&group, &flags);
    stage.until_consumed(&group).await;
    running.stop().await;
    assert_eq!(
        stage.letters().await.len(),
        2 * IN_A_ROW,
        "what succeeds ends the stop, without an operator"
    );
    assert!(
        stage
            .log()
            .contains("the stop at the dead-letter limit is over"),
        "{}",
        stage.log()
    );
}
