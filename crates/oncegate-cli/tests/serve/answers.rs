//! Each key is handled once, as far as nothing fails.

use std::collections::BTreeSet;

use oncegate_testkit::{HttpClient, Redis, Sent};

use super::{FROM_ANNE, Service, Stage};

/// The rules of most tests.
pub(super) const RULES: &str = r#"
headers = ["Idempotency-Key", "X-Idempotency-Key"]
rules = [
    { method = "POST", path = "/pay" },
    { method = "POST", path = "/orders", key = { json = ["order"] } },
    { method = "DELETE", path = "/orders/{id}", key = { parameters = ["id"] } },
    { method = "POST", path = "/metrics", required = false, keep = ["2xx"] },
]
"#;

/// The lease of tests that wait until one is over.
pub(super) const SHORT_LEASE: &str = "lease = \"1s\"\n";

/// A lease for which no test waits: what is held is seen.
pub(super) const LONG_LEASE: &str = "lease = \"1d\"\nmax_run = \"1d\"\n";

async fn equal_requests_have_one_effect(stage: &Stage, service: &Service) {
    let proxy = stage.start().await;
    let first = proxy.pay("k", r#"{"amount":10}"#).await;
    assert_eq!((first.status.as_u16(), first.is_replayed()), (201, false));
    assert!(first.header("set-cookie").is_some() && first.header("x-hop").is_none());
    let second = proxy.pay("k", r#"{ "amount": 1e1 }"#).await;
    assert_eq!((second.status.as_u16(), second.is_replayed()), (201, true));
    assert_eq!(
        (second.header("x-number"), &second.body),
        (Some("1"), &first.body)
    );
    for own in ["set-cookie", "access-control-allow-origin", "traceparent"] {
        assert_eq!(second.header(own), None, "{own}");
    }
    assert_eq!(
        proxy.pay("k", r#"{"amount":11}"#).await.problem(),
        "key-reused"
    );
    // Quotes, and the other header, are the same key; another caller has another.
    let client = proxy.client();
    let anne = [FROM_ANNE, &[("x-idempotency-key", "\"k\"")]].concat();
    let sent = Sent::post("/pay", "", r#"{"amount":10}"#).unkeyed();
    assert!(client.send(sent.headers(&anne)).await.is_replayed());
    let both = [&anne[..], &[("idempotency-key", "other")]].concat();
    assert_eq!(
        client.send(sent.headers(&both)).await.problem(),
        "key-invalid"
    );
    let bert = [("content-type", "application/json"), ("x-user-id", "bert")];
    let sent = Sent::post("/pay", "k", r#"{"amount":10}"#);
    assert!(!client.send(sent.headers(&bert)).await.is_replayed());
    let unnamed = client.send(sent.headers(&[])).await;
    assert_eq!(unnamed.problem(), "principal-missing");
    assert_eq!(service.seen().len(), 2, "{:?}", service.seen());
    assert!(service.seen().iter().all(|seen| seen.attempt == "1"));
}

#[tokio::test]
async fn equal_requests_have_one_effect_with_records_in_a_file() {
    let service = Service::default();
    let server = service.start().await;
    let stage = Stage::before(format!("http://{}", server.address()), RULES);
    equal_requests_have_one_effect(&stage, &service).await;
}

#[tokio::test]
async fn equal_requests_have_one_effect_with_records_in_redis() {
    let service = Service::default();
    let server = service.start().await;
    let stage = Stage::before(format!("http://{}", server.address()), RULES);
    let stage = stage.in_redis(Redis::shared().await.url());
    equal_requests_have_one_effect(&stage, &service).await;
}

#[tokio::test]
async fn a_hundred_equal_requests_at_once_have_one_effect() {
    let service = Service::default();
    let server = service.start().await;
    let door = format!("wait = \"60s\"\n{RULES}");
    let stage = Stage::before(format!("http://{}", server.address()), &door);
    let proxy = stage.start().await;
    let address = proxy.address;
    let all = (0..100).map(|_| async move {
        let client = HttpClient::http1(address);
        client
            .send(Sent::post("/pay", "k", "{}").headers(FROM_ANNE))
            .await
    });
    let answers = futures_util::future::join_all(all).await;
    assert!(
        answers.iter().all(|answer| answer.status == 201),
        "{answers:?}"
    );
    let firsts = answers.iter().filter(|answer| !answer.is_replayed());
    assert_eq!((firsts.count(), service.seen().len()), (1, 1));
}

#[tokio::test]
async fn a_key_is_where_the_rule_says() {
    let service = Service::default();
    let server = service.start().await;
    let stage = Stage::before(format!("http://{}", server.address()), RULES);
    let proxy = stage.start().await;
    let client = proxy.client();
    let post = |path, body| Sent::post(path, "", body).unkeyed().headers(FROM_ANNE);
    // In the body.
    let order = r#"{"order":7}"#;
    assert!(!client.send(post("/orders", order)).await.is_replayed());
    assert!(
        client
            .send(post("/orders/", r#"{ "order": 7 }"#))
            .await
            .status
            == 422
    );
    assert!(
        client
            .send(post("/orders", r#"{ "order": 7 }"#))
            .await
            .is_replayed()
    );
    let other = client.send(post("/orders", r#"{"order":7,"x":1}"#)).await;
    assert_eq!(other.problem(), "key-reused");
    let none = client.send(post("/orders", "{}")).await;
    assert_eq!(
        (none.status.as_u16(), &*none.problem()),
        (400, "key-invalid")
    );
    // In the path.
    let delete = |path| post(path, "").method("DELETE");
    assert!(!client.send(delete("/orders/7")).await.is_replayed());
    assert!(client.send(delete("/orders/7")).await.is_replayed());
    assert!(!client.send(delete("/orders/8")).await.is_replayed());
    // Not needed, and used when it is there; only 2xx is kept.
    for _ in 0..2 {
        assert!(!client.send(post("/metrics", "{}")).await.is_replayed());
    }
    let keyed = Sent::post("/metrics", "m", "{}");
    let refused = [FROM_ANNE, &[("x-status", "404")]].concat();
    assert_eq!(client.send(keyed.headers(&refused)).await.status, 404);
    assert_eq!(client.send(keyed.headers(FROM_ANNE)).await.status, 201);
    assert!(client.send(keyed.headers(FROM_ANNE)).await.is_replayed());
    assert_eq!(
        client.send(post("/pay", "{}")).await.problem(),
        "key-missing"
    );
    // What no rule names passes, with its key and whatever it says of oncegate itself left out.
    let marked = [FROM_ANNE, &[("oncegate-attempt", "7; recovered")]].concat();
    for _ in 0..2 {
        let sent = Sent::post("/other?x=%20", "k", "{}").headers(&marked);
        assert_eq!(client.send(sent).await.status, 201);
    }
    let seen = service.seen();
    assert_eq!(seen.len(), 9, "{seen:?}");
    let last = seen.last().unwrap();
    assert_eq!(
        (&*last.path, &*last.key, &*last.attempt),
        ("/other?x=%20", "k", "")
    );
    let downstream: BTreeSet<&str> = seen.iter().map(|seen| &*seen.downstream).collect();
    // One for each of four keys, and none for what passed.
    assert_eq!(downstream.len(), 5, "{seen:?}");
}

#[tokio::test]
async fn the_proxy_speaks_http_2_with_its_clients() {
    let service = Service::default();
    let server = service.start().await;
    let stage = Stage::before(format!("http://{}", server.address()), RULES);
    let proxy = stage.start().await;
    let client = HttpClient::http2(proxy.address);
    let sent = || Sent::post("/pay", "k", "{}").headers(FROM_ANNE);
    assert!(!client.send(sent()).await.is_replayed());
    assert!(client.send(sent()).await.is_replayed());
    // The host is the same for a client that speaks HTTP/1.
    assert!(proxy.pay("k", "{}").await.is_replayed());
    assert_eq!(service.seen().len(), 1);
}

#[tokio::test]
async fn a_service_may_speak_http_2_alone() {
    let service = Service::default();
    let server = service.start().await;
    let door = format!("http2 = true\n{RULES}");
    let stage = Stage::before(format!("http://{}", server.address()), &door);
    let proxy = stage.start().await;
    assert!(!proxy.pay("k", "{}").await.is_replayed());
    assert!(proxy.pay("k", "{}").await.is_replayed());
    let passed = Sent::post("/x", "", "{}").unkeyed();
    assert_eq!(proxy.client().send(passed).await.status, 201);
    assert_eq!(service.seen().len(), 2);
}
