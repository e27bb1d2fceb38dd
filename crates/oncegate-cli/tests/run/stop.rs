//! Stopping, the status page, and configurations that are wrong.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

use oncegate_testkit::{HttpClient, LoopbackPort, Sent, until};
use tokio::process::Command;

use super::raw::{Answer, RawWorker};
use super::{LIMIT, Stage};

/// A worker that keeps a message until the test releases it.
async fn slow() -> (RawWorker, Arc<AtomicBool>) {
    let keep = Arc::new(AtomicBool::new(true));
    let kept = Arc::clone(&keep);
    let worker = RawWorker::start(move |_| {
        if kept.load(SeqCst) {
            Answer::Silence
        } else {
            Answer::status(200, "", "")
        }
    })
    .await;
    (worker, keep)
}

async fn until_asked(worker: &RawWorker, stage: &Stage) {
    until("the worker to be asked", LIMIT, async || {
        if worker.asked().is_empty() {
            Err(stage.log())
        } else {
            Ok(())
        }
    })
    .await;
}

#[tokio::test]
async fn a_signal_lets_work_end_and_a_second_one_does_not_wait() {
    let stage = Stage::with_orders(1).await;
    let (worker, _keep) = slow().await;
    let mut running = stage.start(&["--handler", &worker.url()]);
    until_asked(&worker, &stage).await;
    running.process.signal("TERM");
    until("the log to report the stop", LIMIT, async || {
        if stage.log().contains("stopping") {
            Ok(())
        } else {
            Err(stage.log())
        }
    })
    .await;
    assert!(
        running.process.try_wait().is_none(),
        "it waits for what runs"
    );
    // One that comes within a second of the first is a part of it.
    until("the end", LIMIT, async || {
        match running.process.try_wait() {
            Some(ended) => {
                assert_eq!(ended.code(), Some(130), "{}", stage.log());
                Ok(())
            }
            None => {
                running.process.signal("INT");
                Err(stage.log())
            }
        }
    })
    .await;
}

#[tokio::test]
async fn work_past_the_stop_deadline_runs_again_as_recovered() {
    let stage = Stage::with_orders(1).await;
    let (worker, keep) = slow().await;
    let deadline = format!("consumer.{}.stop_deadline=1s", stage.scope);
    let flags = [
        "--handler",
        &worker.url(),
        "--lease",
        "2s",
        "--set",
        &deadline,
    ];
    let running = stage.start(&flags);
    until_asked(&worker, &stage).await;
    running.stop().await;
    keep.store(false, SeqCst);
    stage.consume(&flags).await;
    let told: Vec<(u32, bool)> = worker
        .asked()
        .iter()
        .map(|asked| (asked.attempt(), asked.recovered()))
        .collect();
    assert_eq!(told, [(1, false), (1, true)], "a stop costs no attempt");
}

#[tokio::test]
async fn the_status_page_tells_when_messages_are_consumed() {
    let stage = Stage::with_orders(1).await;
    let page = LoopbackPort::reserve();
    let port = LoopbackPort::reserve();
    let listen = format!("127.0.0.1:{}", page.number());
    let running = stage.start(&[
        "--handler",
        &format!("http://127.0.0.1:{}/", port.number()),
        "--listen",
        &listen,
    ]);
    let client = HttpClient::http1(listen.parse().unwrap());
    let status = async |path: &str| {
        let sent = Sent::post(path, "", "")
            .method("GET")
            .unkeyed()
            .headers(&[]);
        client
            .try_send(sent)
            .await
            .map(|answer| answer.status.as_u16())
    };
    let is = async |path: &str, wanted: u16| {
        let what = format!("{path} to answer {wanted}");
        until(&what, LIMIT, async || match status(path).await {
            Ok(found) if found == wanted => Ok(()),
            other => Err(format!("{other:?}\n{}", stage.log())),
        })
        .await;
    };
    is("/healthz", 200).await;
    is("/readyz", 503).await;
    let _worker = RawWorker::start_at(&format!("127.0.0.1:{}", port.number()), |_| {
        Answer::status(200, "", "")
    })
    .await;
    is("/readyz", 200).await;
    let mut status = Command::new(env!("CARGO_BIN_EXE_oncegate"));
    status.args(["status", "--url", &format!("http://{listen}")]);
    let shown = status.output().await.unwrap();
    let text = String::from_utf8_lossy(&shown.stdout);
    assert!(shown.status.success(), "{shown:?}");
    assert!(
        text.contains("healthy") || text.contains("degraded"),
        "{text}"
    );
    stage.until_consumed(&running.group).await;
    running.stop().await;
}

#[tokio::test]
async fn what_is_wrong_is_said_before_anything_is_connected() {
    let stage = Stage::with_orders(1).await;
    let mut running = stage.start(&["--handler", "http://worker:8080/", "--lease", "7"]);
    assert_eq!(running.process.end_within(LIMIT).await.code(), Some(78));
    let log = stage.log();
    assert!(
        log.contains("--lease: error: ") && log.contains("30s"),
        "{log}"
    );
    assert!(
        log.contains("--handler: error: ") && log.contains("allow_remote"),
        "{log}"
    );
}
