//! What a client sees, over both versions of HTTP.

use std::sync::Arc;

use axum::Router;
use axum::routing::post;
use oncegate::core::key::{Scope, TenantSource};
use oncegate::http::{IdempotencyLayer, Principal, request_gate};
use oncegate::{Gate, Header, Key, MemoryStore, Message, Origin};
use oncegate_testkit::{HttpServer, Sent};
use tokio::task::JoinSet;

use crate::world::{ORDER, World, headers, told};

const EQUAL_REQUESTS: usize = 100;

#[tokio::test]
async fn a_repetition_gets_the_first_response() {
    let world = World::new().await;
    for (n, client) in [world.http1(), world.http2()].iter().enumerate() {
        let key = format!("key-{n}");
        let first = client.send(Sent::post("/charges", &key, ORDER)).await;
        assert_eq!((first.status.as_u16(), first.is_replayed()), (201, false));
        assert_eq!(first.header("set-cookie"), Some("session=secret"));
        let expires = first
            .header("idempotency-expires")
            .unwrap()
            .strip_prefix('@')
            .unwrap();
        assert!(expires.parse::<u64>().unwrap() > 1_700_000_000);

        // Quoted or not, with a parameter, spelt otherwise: it is the same request.
        let quoted = format!("\"{key}\";v=1");
        let again = client
            .send(Sent::post(
                "/charges",
                &quoted,
                r#"{ "amount": 1e1, "order":"A-7" }"#,
            ))
            .await;
        assert!(again.is_replayed());
        assert_eq!((again.status, &again.body), (first.status, &first.body));
        for kept in [
            "content-type",
            "location",
            "cache-control",
            "idempotency-expires",
            "content-length",
        ] {
            assert_eq!(again.header(kept), first.header(kept), "{kept}");
        }
        assert_eq!(again.header("set-cookie"), None);
        assert_eq!(world.runs().len(), n + 1);
    }
    assert_eq!(
        (
            world.watched.get("answers", "handled"),
            world.watched.get("answers", "replayed")
        ),
        (2, 2)
    );
    assert_eq!(world.watched.total("acks"), 4);
}

#[tokio::test]
async fn a_key_with_another_request_is_refused() {
    let world = World::new().await;
    for client in [world.http1(), world.http2()] {
        client.send(Sent::post("/charges", "k", ORDER)).await;
        let others = [
            Sent::post("/charges", "k", r#"{"order":"A-7","amount":11}"#),
            Sent::post("/charges?x=1", "k", ORDER),
            Sent::post("/refunds", "k", ORDER),
            Sent::post("/charges", "k", ORDER).method("PATCH"),
            Sent::post("/charges", "k", ORDER).headers(&[("content-type", "text/plain")]),
        ];
        for other in others {
            let answer = client.send(other).await;
            assert_eq!(
                (answer.status.as_u16(), answer.problem().as_str()),
                (422, "key-reused"),
                "{other:?}"
            );
            assert_eq!(answer.header("retry-after"), None);
        }
    }
    assert_eq!(world.runs().len(), 1);
}

// invariant: response-to-another
#[tokio::test]
async fn the_same_path_below_another_nest_or_host_is_another_request() {
    let gate = request_gate("payments", MemoryStore::new());
    let layer = IdempotencyLayer::new(gate, Principal::single_tenant());
    let charges = |name: &'static str| {
        Router::new()
            .route("/charges", post(async move || name))
            .layer(layer.clone())
    };
    let app = Router::new()
        .nest("/v1", charges("first"))
        .nest("/v2", charges("second"));
    let server = HttpServer::start(app).await;
    let client = oncegate_testkit::HttpClient::http1(server.address());
    let first = Sent::post("/v1/charges", "k", ORDER);
    assert_eq!(client.send(first).await.body, "first");
    assert!(client.send(first).await.is_replayed());
    let elsewhere = first.headers(&[
        ("content-type", "application/json"),
        ("host", "other.example"),
    ]);
    for other in [Sent::post("/v2/charges", "k", ORDER), elsewhere] {
        let answer = client.send(other).await;
        assert_eq!(
            (answer.status.as_u16(), answer.problem().as_str()),
            (422, "key-reused"),
            "{other:?}"
        );
    }
}

// invariant: response-to-another
#[tokio::test]
async fn a_message_of_a_topic_named_http_is_no_request() {
    let world = World::new().await;
    world.post("k", ORDER).await;
    let key = Key::header("idempotency-key").tenant(TenantSource::header("principal"));
    let header = |name: &str, value: &str| Header {
        name: name.into(),
        value: Some(value.to_owned().into()),
    };
    let headers = vec![
        header("idempotency-key", "k"),
        header("principal", "named default-user"),
    ];
    let origin = Origin::Other("a topic named http".into());
    let message = Message::new("http", origin, Some(ORDER.into())).with_headers(headers);
    let derive = |key: &Key| {
        key.compile(&Scope::new("payments").unwrap())
            .unwrap()
            .derive("http", &message)
    };
    let [(of_request, _)] = &world.store.records()[..] else {
        panic!("one record")
    };
    assert_ne!(derive(&key).as_ref(), Ok(of_request));
    assert_eq!(
        derive(&key.for_http_requests()).as_ref(),
        Ok(of_request),
        "only the domain differs"
    );
}

// invariant: second-run-of-request
#[tokio::test]
async fn a_hundred_equal_requests_at_once_have_one_effect() {
    for http2 in [false, true] {
        let world = Arc::new(World::new().await);
        let client = if http2 { world.http2() } else { world.http1() };
        let mut requests = JoinSet::new();
        for _ in 0..EQUAL_REQUESTS {
            let client = client.clone();
            requests.spawn(async move { client.send(told("k", &headers("hold"))).await });
        }
        // Everyone but the first is answered while it still runs.
        let mut refused = 0;
        while refused < EQUAL_REQUESTS - 1 {
            let answer = requests.join_next().await.unwrap().unwrap();
            assert_eq!(
                (answer.status.as_u16(), answer.problem().as_str()),
                (409, "in-progress")
            );
            assert_eq!(answer.header("retry-after"), Some("1"));
            refused += 1;
        }
        world.work.open();
        let first = requests.join_next().await.unwrap().unwrap();
        assert_eq!((first.status.as_u16(), first.is_replayed()), (201, false));
        assert!(client.send(told("k", &headers("hold"))).await.is_replayed());
        assert_eq!(world.runs(), [(1, false)]);
    }
}

#[tokio::test]
async fn a_repetition_that_waits_gets_the_first_response() {
    let world = World::with(|layer| layer.wait(crate::world::LIMIT)).await;
    let client = world.http2();
    let mut requests = JoinSet::new();
    for _ in 0..EQUAL_REQUESTS {
        let client = client.clone();
        requests.spawn(async move { client.send(told("k", &headers("hold"))).await });
    }
    world.watched.until("claims", EQUAL_REQUESTS as u64).await;
    world.work.open();
    let answers = requests.join_all().await;
    assert_eq!(
        answers
            .iter()
            .filter(|answer| !answer.is_replayed())
            .count(),
        1
    );
    assert!(
        answers
            .iter()
            .all(|answer| answer.status == 201 && answer.body == answers[0].body)
    );
    assert_eq!(world.runs().len(), 1);
}

// invariant: response-to-another
#[tokio::test]
async fn callers_share_no_keys_and_each_has_one() {
    let world = World::new().await;
    let client = world.http1();
    for user in ["one", "two", "single tenant"] {
        let headers = [("content-type", "application/json"), ("x-user", user)];
        let answer = client
            .send(Sent::post("/charges", "k", ORDER).headers(&headers))
            .await;
        assert!(!answer.is_replayed(), "{user}");
    }
    for user in ["unauthenticated", "", " "] {
        let answer = client
            .send(Sent::post("/charges", "k", ORDER).headers(&[("x-user", user)]))
            .await;
        assert_eq!(
            (answer.status.as_u16(), answer.problem().as_str()),
            (401, "principal-missing")
        );
    }
    assert_eq!(world.runs().len(), 3);
}

#[tokio::test]
async fn methods_and_missing_keys() {
    let world = World::new().await;
    let client = world.http1();
    for method in ["POST", "PATCH"] {
        let answer = client
            .send(Sent::post("/charges", "", ORDER).unkeyed().method(method))
            .await;
        assert_eq!(
            (answer.status.as_u16(), answer.problem().as_str()),
            (400, "key-missing"),
            "{method}"
        );
    }
    assert_eq!(world.runs().len(), 0);
    // Not safe, and harmless to repeat: a key is honoured, and not asked for.
    for (n, method) in ["PUT", "DELETE"].into_iter().enumerate() {
        let before = world.runs().len();
        let sent = Sent::post("/charges", "", ORDER).unkeyed().method(method);
        client.send(sent).await;
        client.send(sent).await;
        assert_eq!(world.runs().len(), before + 2, "{method}");
        let key = format!("k{n}");
        let sent = Sent::post("/charges", &key, ORDER).method(method);
        client.send(sent).await;
        assert!(client.send(sent).await.is_replayed(), "{method}");
        assert_eq!(world.runs().len(), before + 3, "{method}");
    }
    // Safe: keys mean nothing, not even a broken one.
    for method in ["GET", "OPTIONS", "HEAD"] {
        let before = world.runs().len();
        let sent = Sent::post("/charges", "a,b", "").method(method);
        assert_eq!(client.send(sent).await.status, 201);
        assert_eq!(client.send(sent).await.status, 201);
        assert_eq!(world.runs().len(), before + 2, "{method}");
    }
}

#[tokio::test]
async fn what_is_no_key_is_refused() {
    let world = World::new().await;
    let client = world.http1();
    let long = "k".repeat(256);
    for key in ["", "\"\"", "\"  \"", "a,b", "a b", "\"open", &long] {
        let answer = client.send(Sent::post("/charges", key, ORDER)).await;
        assert_eq!(
            (answer.status.as_u16(), answer.problem().as_str()),
            (400, "key-invalid"),
            "{key:?}"
        );
    }
    let twice = [
        ("idempotency-key", "k"),
        ("content-type", "application/json"),
    ];
    let answer = client
        .send(Sent::post("/charges", "k", ORDER).headers(&twice))
        .await;
    assert_eq!(answer.problem(), "key-invalid");
    assert_eq!(world.runs().len(), 0);
}

#[tokio::test]
async fn optional_and_strict_are_choices() {
    let world = World::with(|layer| layer.optional().strict()).await;
    let client = world.http1();
    let unkeyed = Sent::post("/charges", "", ORDER).unkeyed();
    assert_eq!(client.send(unkeyed).await.status, 201);
    assert_eq!(client.send(unkeyed).await.status, 201);
    assert_eq!(world.runs(), [(0, false), (0, false)]);
    assert_eq!(
        client
            .send(Sent::post("/charges", "bare", ORDER))
            .await
            .problem(),
        "key-invalid"
    );
    client
        .send(Sent::post("/charges", "\"quoted\"", ORDER))
        .await;
    assert!(
        client
            .send(Sent::post("/charges", "\"quoted\"", ORDER))
            .await
            .is_replayed()
    );
}

#[tokio::test]
async fn json_that_cannot_be_compared_counts_by_its_bytes() {
    let world = World::new().await;
    for (n, body) in ["{", "", r#"{"a":1,"a":2}"#, "\u{feff}{}"]
        .into_iter()
        .enumerate()
    {
        let key = format!("k{n}");
        assert_eq!(world.post(&key, body).await.status, 201, "{body:?}");
        assert!(world.post(&key, body).await.is_replayed(), "{body:?}");
        assert_eq!(
            world.post(&key, &format!("{body} ")).await.problem(),
            "key-reused",
            "{body:?}"
        );
    }
}

#[tokio::test]
async fn problems_lie_where_the_service_says() {
    let world = World::with(|layer| layer.problems_at("https://api.example.com/problems/")).await;
    let answer = world
        .http1()
        .send(Sent::post("/charges", "", ORDER).unkeyed())
        .await;
    let details: serde_json::Value = serde_json::from_slice(&answer.body).unwrap();
    assert_eq!(
        details["type"],
        "https://api.example.com/problems/key-missing"
    );
}

#[tokio::test]
async fn a_gate_with_another_key_serves_no_request() {
    let gate = Gate::new("payments", Key::json(["order"]), MemoryStore::new());
    let layer = IdempotencyLayer::new(gate, Principal::single_tenant());
    assert!(
        layer
            .open()
            .await
            .unwrap_err()
            .to_string()
            .contains("request_gate")
    );
    let app = axum::Router::new().fallback(async || "ran").layer(layer);
    let server = HttpServer::start(app).await;
    let client = oncegate_testkit::HttpClient::http1(server.address());
    let answer = client.send(Sent::post("/charges", "k", ORDER)).await;
    assert_eq!(
        (answer.status.as_u16(), answer.problem().as_str()),
        (500, "misconfigured")
    );
}
