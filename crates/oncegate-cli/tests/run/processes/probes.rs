//! The probes while no worker is ready.

use oncegate_testkit::{HttpClient, LoopbackPort, Sent, until};

use super::super::LIMIT;
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
