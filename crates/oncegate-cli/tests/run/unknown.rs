//! Attempts with an unknown outcome: the log has the reason of each, and the dead letter that of
//! the last.

use super::Stage;
use super::raw::{Answer, RawWorker};
use oncegate_testkit::{LoopbackPort, until};

use super::LIMIT;

#[tokio::test]
async fn unknown_outcomes_are_logged_and_a_dead_letter_has_the_last() {
    let ways = ["half", "silence", "nothing"];
    let stage = Stage::with(ways.map(|how| format!(r#"{{"how":"{how}"}}"#))).await;
    let worker = RawWorker::start(|asked| match &asked.body {
        body if body.contains("half") => {
            Answer::Bytes("HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\nhalf".to_owned())
        }
        body if body.contains("silence") => Answer::Silence,
        _ => Answer::Bytes(String::new()),
    })
    .await;
    let flags = [
        "--key",
        "how",
        "--lease",
        "1s",
        "--timeout",
        "3s",
        "--set",
        "max_attempts=2",
        "--set",
        "ordering=unordered",
    ];
    stage
        .consume(&[&["--handler", &worker.url()][..], &flags].concat())
        .await;
    assert_eq!(worker.asked().len(), 6, "two attempts each");
    let letters = stage.letters().await;
    let attempts = stage.letters_with("oncegate-attempts").await;
    assert_eq!(letters.len(), 3, "{letters:?}");
    assert!(
        attempts.iter().all(|(_, attempts)| attempts == "2"),
        "{attempts:?}"
    );
    for (how, words) in [
        ("half", "was cut short"),
        ("silence", "no answer within 3s"),
        ("nothing", "the worker did not answer"),
    ] {
        let (_, reason) = letters
            .iter()
            .find(|(payload, _)| payload.contains(how))
            .unwrap();
        assert!(
            reason.contains("2 attempts have failed") && reason.contains(words),
            "{how}: {reason}"
        );
        let log = stage.log();
        let warned = log.lines().filter(|line| {
            line.contains("the outcome of an attempt is unknown") && line.contains(words)
        });
        assert_eq!(warned.count(), 2, "{how}: {log}");
    }
}

/// What cannot be sent has not run: it is tried again for as long as it takes, and never given up.
// invariant: worker-hangs
#[tokio::test]
async fn a_worker_that_cannot_be_reached_costs_no_attempt() {
    let stage = Stage::with_orders(2).await;
    let port = LoopbackPort::reserve();
    let ready = RawWorker::start(|_| Answer::status(200, "", "")).await;
    let url = format!("http://127.0.0.1:{}/", port.number());
    let backoff = format!("consumer.{}.backoff.most=200ms", stage.scope);
    let flags = [
        "--handler",
        &url,
        "--set",
        &format!("handler.ready_url={}", ready.url()),
        "--set",
        "max_attempts=1",
        "--set",
        &backoff,
    ];
    let running = stage.start(&flags);
    until("it to have tried six times", LIMIT, async || {
        let log = stage.log();
        if log.matches("the worker cannot be reached").count() >= 6 {
            Ok(())
        } else {
            Err(log)
        }
    })
    .await;
    let worker = RawWorker::start_at(&format!("127.0.0.1:{}", port.number()), |_| {
        Answer::status(200, "", "")
    })
    .await;
    stage.until_consumed(&running.group).await;
    running.stop().await;
    assert!(stage.letters().await.is_empty(), "{}", stage.log());
    let told: Vec<(u32, bool)> = worker
        .asked()
        .iter()
        .map(|asked| (asked.attempt(), asked.recovered()))
        .collect();
    assert_eq!(told, [(1, false), (1, false)]);
}
