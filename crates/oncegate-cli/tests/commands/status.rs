//! `oncegate health`, asked of a real server.

use axum::Router;
use axum::http::StatusCode;
use axum::routing::get;
use oncegate_testkit::HttpServer;

use super::oncegate;

#[tokio::test]
async fn a_consumer_that_is_not_ready_says_why() {
    let ready = get(async || r#"{"ready":true}"#);
    let sick = get(async || {
        (
            StatusCode::SERVICE_UNAVAILABLE,
            "the store is away\u{1b}[2J",
        )
    });
    let server =
        HttpServer::start(Router::new().route("/readyz", ready).route("/sick", sick)).await;
    let url = |path: &str| format!("http://{}{path}", server.address());

    let answer = oncegate(&["health", "--json", "--url", &url("/readyz")], b"")
        .await
        .ended(0)
        .json();
    assert_eq!(
        (&answer["ready"], &answer["said"]["ready"]),
        (&true.into(), &true.into())
    );
    let answer = oncegate(&["health", "--url", &url("/sick")], b"").await;
    assert_eq!(
        answer.ended(1).line("not ready"),
        "not ready (503 Service Unavailable)"
    );
    assert!(
        answer.out.contains("the store is away") && !answer.out.contains('\u{1b}'),
        "{answer:?}"
    );
    oncegate(&["health", "--url", "http://127.0.0.1:1/readyz"], b"")
        .await
        .ended(69)
        .says("no answer from");
    oncegate(&["health", "--url", "https://localhost/readyz"], b"")
        .await
        .ended(2)
        .says("http://");
    server.stop().await;
}
