//! The probes while no worker is ready.

use oncegate_testkit::{HttpClient, LoopbackPort, Sent, until};

use super::super::LIMIT;
use super::super::raw::{Answer, RawWorker};
use super::super::stdin::{Feed, order};
use super::three_orders;

async fn answer_of(port: &LoopbackPort, path: &str) -> (u16, String) {
    let client = HttpClient::http1(format!("127.0.0.1:{}", port.number()).parse().unwrap());
    match client
        .try_send(
            Sent::post(path, "", "")
                .method("GET")
                .unkeyed()
                .headers(&[]),
        )
        .await
    {
        Ok(answer) => (
            answer.status.as_u16(),
            String::from_utf8_lossy(&answer.body).into_owned(),
        ),
        Err(error) => (0, error.to_string()),
    }
}

/// A worker that dies on every message handles nothing, and that is no health.
#[tokio::test]
async fn the_probe_names_a_worker_that_dies_on_every_message() {
    let orders: Vec<String> = (0..10).map(|n| order(&format!("A-{n}"))).collect();
    let orders: Vec<&str> = orders.iter().map(String::as_str).collect();
    let feed = Feed::of(&orders);
    let worker = r#"
import json, sys
print(json.dumps({"type": "ready", "v": 1}), flush=True)
sys.stdin.readline()
sys.exit("the licence has expired")
"#;
    std::fs::write(feed.path("worker.py"), worker).unwrap();
    let port = LoopbackPort::reserve();
    let listen = format!("127.0.0.1:{}", port.number());
    let flags = ["--handler-exec", "python3 worker.py", "--listen", &listen];
    let mut process = feed.start_on_input(&flags);
    until(
        "the probe to name the end",
        LIMIT,
        async || match answer_of(&port, "/readyz").await {
            (503, body)
                if body.contains("\"worker_ends\"") && body.contains("the licence has expired") =>
            {
                Ok(())
            }
            other => Err(format!("{other:?}\n{}", feed.read("err"))),
        },
    )
    .await;
    let (_, metrics) = answer_of(&port, "/metrics").await;
    assert!(
        metrics.contains("oncegate_unwell{consumer=\"billing\",reason=\"worker_ends\"} 1"),
        "{metrics}"
    );
    assert!(
        metrics.contains("oncegate_worker_restarts{consumer=\"billing\"}"),
        "{metrics}"
    );
    process.kill();
}

#[tokio::test]
async fn a_probe_at_the_start_says_why_the_worker_is_not_ready() {
    let feed = three_orders();
    std::fs::write(feed.path("worker.py"), "import no_such_module\n").unwrap();
    let port = LoopbackPort::reserve();
    let listen = format!("127.0.0.1:{}", port.number());
    let mut process =
        feed.start_on_input(&["--handler-exec", "python3 worker.py", "--listen", &listen]);
    until("the probe to say why", LIMIT, async || {
        match answer_of(&port, "/readyz").await {
            (503, body) if body.contains("No module named 'no_such_module'") => Ok(()),
            other => Err(format!("{other:?}\n{}", feed.read("err"))),
        }
    })
    .await;
    process.kill();
}

/// The worker was ready at the start, and is gone: a few orders are too few for the circuit
/// breaker.
#[tokio::test]
async fn the_probe_names_a_worker_behind_http_that_is_gone() {
    let feed = three_orders();
    let [worker_port, port] = [LoopbackPort::reserve(), LoopbackPort::reserve()];
    let ready = RawWorker::start(|_| Answer::status(200, "", "")).await;
    let ready_url = format!("handler.ready_url={}", ready.url());
    let address = format!("127.0.0.1:{}", worker_port.number());
    let url = format!("http://{address}/charge?token=s3cret");
    let listen = format!("127.0.0.1:{}", port.number());
    let quick = "consumer.billing.backoff.most=200ms";
    let mut process = feed.start_on_input(&[
        "--handler",
        &url,
        "--set",
        &ready_url,
        "--set",
        quick,
        "--listen",
        &listen,
    ]);
    let named = format!("the worker cannot be reached at http://{address}/charge: ");
    until(
        "the probe to name the worker",
        LIMIT,
        async || match answer_of(&port, "/readyz").await {
            (503, body) if body.contains("\"worker_not_ready\"") && body.contains(&named) => Ok(()),
            other => Err(format!("{other:?}\n{}", feed.read("err"))),
        },
    )
    .await;
    assert!(
        feed.read("err")
            .contains("the worker is not ready any more"),
        "{}",
        feed.read("err")
    );
    let worker = RawWorker::start_at(&address, |_| Answer::status(200, "", "")).await;
    assert_eq!(process.end_within(LIMIT).await.code(), Some(0));
    let err = feed.read("err");
    assert!(
        err.contains("the worker is ready again") && !err.contains("s3cret"),
        "{err}"
    );
    assert_eq!(worker.asked().len(), 3, "{err}");
}
