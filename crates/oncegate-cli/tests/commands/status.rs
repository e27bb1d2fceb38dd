//! `oncegate status`, asked of real servers.

use axum::Router;
use axum::http::StatusCode;
use axum::routing::get;
use oncegate::sqs::SqsSource;
use oncegate::telemetry::Telemetry;
use oncegate::{Attempt, Consumer, Failure, Gate, Key, MemoryStore, Message};
use oncegate_testkit::HttpServer;

use super::{oncegate, oncegate_with};

#[tokio::test]
async fn what_the_page_of_a_consumer_knows_is_printed() {
    let telemetry = Telemetry::prometheus().expect("a page");
    let server = HttpServer::start(telemetry.router()).await;
    let url = format!("http://{}", server.address());
    let idle = oncegate(&["status", "--url", &url], b"").await;
    assert!(idle.ended(0).out.contains("acknowledged"), "{idle:?}");

    let gate = Gate::new("billing", Key::json(["order_id"]), MemoryStore::new());
    let handler = async |_: Message, _: Attempt| Ok::<(), Failure>(());
    let source = SqsSource::new("http://127.0.0.1:1/orders");
    let _starting = telemetry.watch(Consumer::new(source, gate, handler));
    let shown = oncegate(&["status", "--url", &format!("{url}/")], b"").await;
    assert_eq!(shown.ended(1).line("consumer"), "consumer billing");
    assert!(shown.line("state").contains("not ready"), "{shown:?}");

    let dir = tempfile::tempdir().expect("a folder");
    let config = dir.path().join("oncegate.toml");
    let text = format!("[status]\nlisten = \"{}\"\n", server.address());
    std::fs::write(&config, text).expect("it is written");
    let named = [
        "status",
        "--json",
        "--config",
        config.to_str().expect("text"),
    ];
    let document = oncegate(&named, b"").await.ended(1).json();
    assert_eq!(document["schema"], "oncegate.status/1");
    assert_eq!(document["consumers"][0]["name"], "billing");

    let off = [("ONCEGATE_STATUS__LISTEN", "off")];
    oncegate_with(&["status"], &off, b"")
        .await
        .ended(78)
        .says("status.listen");
    server.stop().await;
}

#[tokio::test]
async fn a_consumer_that_is_not_ready_says_why() {
    let ready = get(async || r#"{"ready":true}"#);
    let sick = get(async || {
        (
            StatusCode::SERVICE_UNAVAILABLE,
            "the store is away\u{1b}[2J",
        )
    });
    let router = Router::new()
        .route("/readyz", ready)
        .route("/sick/readyz", sick)
        .route("/sick/status.json", get(async || r#"{"schema":"other/1"}"#));
    let server = HttpServer::start(router).await;
    let url = format!("http://{}", server.address());
    let sick = format!("{url}/sick");

    let answer = oncegate(&["status", "--probe", "--json", "--url", &url], b"")
        .await
        .ended(0)
        .json();
    assert_eq!(
        (&answer["ready"], &answer["said"]["ready"]),
        (&true.into(), &true.into())
    );
    let answer = oncegate(&["status", "--probe", "--url", &sick], b"").await;
    assert_eq!(
        answer.ended(1).line("not ready"),
        "not ready (503 Service Unavailable)"
    );
    assert!(
        answer.out.contains("the store is away") && !answer.out.contains('\u{1b}'),
        "{answer:?}"
    );
    for (url, code, words) in [
        ("http://127.0.0.1:1", 69, "no answer from"),
        ("https://localhost", 2, "http://"),
        (url.as_str(), 69, "404"),
        (sick.as_str(), 65, "no status page"),
    ] {
        oncegate(&["status", "--url", url], b"")
            .await
            .ended(code)
            .says(words);
    }
    server.stop().await;
}
