//! Claims over HTTP, each test with a store of its own.

#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "a test that cannot go on has failed"
)]

mod trouble;

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::FutureExt as _;
use http::{Request, StatusCode};
use http_body_util::BodyExt as _;
use oncegate_core::key::Key;
use oncegate_core::store::Store;
use oncegate_runtime::MemoryStore;
use oncegate_runtime::backoff::Backoff;
use oncegate_runtime::gate::Gate;
use oncegate_serve::api::{Api, ApiScope, Caller, function_gate};
use oncegate_serve::{Body, Door as _};
use serde_json::{Value, json};

const TOKEN: &str = "a-token-of-the-caller-cron";
const OTHER_TOKEN: &str = "a-token-of-the-caller-agent";
const LEASE: Duration = Duration::from_secs(30);

/// A server over this store.
fn server<S: Store + 'static>(store: &Arc<S>) -> Api {
    let now = Backoff::new(Duration::ZERO, Duration::ZERO);
    let jobs = function_gate("jobs", Arc::clone(store)).lease(LEASE);
    let orders = Gate::new("orders", Key::json(["order_id"]), Arc::clone(store))
        .lease(LEASE)
        .fenced();
    let scopes = [jobs, orders].map(|gate| ApiScope::new(gate).max_attempts(3).backoff(now));
    let cron = Caller::new("cron").token(TOKEN).scopes(["jobs", "orders"]);
    let agent = Caller::new("agent").token(OTHER_TOKEN).scopes(["orders"]);
    Api::new(scopes, [cron, agent]).unwrap()
}

fn request(token: &str, path: &str, body: impl Into<Bytes>) -> Request<Body> {
    Request::post(path)
        .header("authorization", format!("Bearer {token}"))
        .body(Body::from(body.into()))
        .unwrap()
}

async fn send(api: &Api, token: &str, path: &str, body: impl Into<Bytes>) -> (StatusCode, Value) {
    let response = api.answer(request(token, path, body)).await;
    let status = response.status();
    let retry_after = response.headers().contains_key("retry-after");
    let body = response.into_body().collect().await.unwrap().to_bytes();
    let answer: Value = serde_json::from_slice(&body).unwrap();
    assert_eq!(
        retry_after,
        answer.get("retry_in_ms").is_some() && status != 200,
        "{answer}"
    );
    (status, answer)
}

async fn post(api: &Api, path: &str, body: Value) -> (StatusCode, Value) {
    send(api, TOKEN, path, body.to_string()).await
}

async fn claimed(api: &Api, body: Value) -> String {
    let (status, answer) = post(api, "/v1/claims", body).await;
    assert_eq!(status, StatusCode::CREATED, "{answer}");
    answer["claim"].as_str().unwrap().to_owned()
}

fn job(key: &str) -> Value {
    json!({ "scope": "jobs", "key": key })
}

#[tokio::test]
async fn the_first_claim_does_the_work_and_the_others_get_its_result() {
    let api = server(&Arc::new(MemoryStore::new()));
    let results = [
        (
            json!({ "result": { "pages": 12, "big": 9_007_199_254_740_993_u64 } }),
            "result",
        ),
        (json!({ "result_base64": "AP8B" }), "result_base64"),
    ];
    for (at, (result, name)) in results.into_iter().enumerate() {
        let key = job(&format!("night {at}"));
        let (status, granted) = post(&api, "/v1/claims", key.clone()).await;
        assert_eq!(
            (status, &granted["state"]),
            (StatusCode::CREATED, &json!("granted"))
        );
        assert_eq!(
            (&granted["attempt"], &granted["recovered"]),
            (&json!(1), &json!(false))
        );
        assert_eq!(granted["lease_ms"], 30_000);
        let (status, busy) = post(&api, "/v1/claims", key.clone()).await;
        assert_eq!(
            (status, &busy["state"]),
            (StatusCode::CONFLICT, &json!("busy"))
        );
        assert!(busy["retry_in_ms"].as_u64().unwrap() > 29_000);

        let mut completion = result.clone();
        completion["claim"] = granted["claim"].clone();
        for _repeat in 0..2 {
            let (status, done) = post(&api, "/v1/claims/complete", completion.clone()).await;
            assert_eq!(
                (status, &done["state"]),
                (StatusCode::OK, &json!("completed"))
            );
        }
        let (status, again) = post(&api, "/v1/claims", key.clone()).await;
        assert_eq!(
            (status, &again["state"]),
            (StatusCode::OK, &json!("completed"))
        );
        assert_eq!(again[name], result[name]);
        let (_, seen) = post(&api, "/v1/look", key).await;
        assert_eq!(
            (&seen["state"], &seen[name]),
            (&json!("completed"), &result[name])
        );
    }
}

// invariant: unprotected-function
#[tokio::test]
async fn a_key_counts_by_its_content_and_by_its_function() {
    let api = server(&Arc::new(MemoryStore::new()));
    let send_key = |key: &str, function: Option<&str>| {
        let function = function.map_or(String::new(), |name| format!(r#","function":"{name}""#));
        let body = format!(r#"{{"scope":"jobs","key":{key}{function}}}"#);
        let api = api.clone();
        async move { send(&api, TOKEN, "/v1/claims", body).await.0 }
    };
    let first = StatusCode::CREATED;
    let again = StatusCode::CONFLICT;
    assert_eq!(send_key(r#"{"job":"a","at":10}"#, None).await, first);
    assert_eq!(
        send_key(r#"{ "at": 10.0, "job": "\u0061" }"#, None).await,
        again
    );
    assert_eq!(
        send_key(r#"{"job":"a","at":10}"#, Some("charge")).await,
        first
    );
    assert_eq!(send_key("9007199254740993", None).await, first);
    assert_eq!(
        send_key("9007199254740992", None).await,
        first,
        "no f64 on the way"
    );
    assert_eq!(send_key(r#""9007199254740993""#, None).await, first);
    assert_eq!(send_key("1e999999999999", None).await, first);
    assert_eq!(send_key("10e999999999998", None).await, again);
    for bad in [
        "null",
        r#""""#,
        "{}",
        r#"{"job":null}"#,
        r#"{"a":1,"a":2}"#,
        "true",
    ] {
        assert_eq!(send_key(bad, None).await, StatusCode::BAD_REQUEST, "{bad}");
    }
    assert_eq!(
        send_key("1", Some("no name")).await,
        StatusCode::BAD_REQUEST
    );
    let (status, _) = post(&api, "/v1/claims", json!({ "scope": "jobs" })).await;
    assert_eq!(status, StatusCode::BAD_REQUEST);
}

#[tokio::test]
async fn a_scope_may_name_the_fields_of_its_key() {
    let api = server(&Arc::new(MemoryStore::new()));
    let first = StatusCode::CREATED;
    let again = StatusCode::CONFLICT;
    let order = |order: Value| json!({ "scope": "orders", "key": order });
    let (status, granted) = post(
        &api,
        "/v1/claims",
        order(json!({ "order_id": 7, "sent": 1 })),
    )
    .await;
    assert_eq!(status, first);
    assert!(granted["fencing_token"].as_u64().unwrap() > 0);
    assert_eq!(
        post(
            &api,
            "/v1/claims",
            order(json!({ "order_id": 7, "sent": 2 }))
        )
        .await
        .0,
        again
    );
    let (status, bad) = post(&api, "/v1/claims", order(json!({ "orderid": 7 }))).await;
    assert_eq!(
        (status, &bad["state"]),
        (StatusCode::BAD_REQUEST, &json!("key-invalid"))
    );
    assert!(
        bad["detail"].as_str().unwrap().contains("order_id"),
        "{bad}"
    );
}

#[tokio::test]
async fn other_arguments_under_one_key_are_a_mismatch() {
    let api = server(&Arc::new(MemoryStore::new()));
    let call = |amount: i64| json!({ "scope": "jobs", "key": "mail 7", "arguments": { "amount": amount } });
    let claim = claimed(&api, call(5)).await;
    for _state in ["claimed", "completed"] {
        let (status, answer) = post(&api, "/v1/claims", call(6)).await;
        assert_eq!(
            (status, &answer["state"]),
            (StatusCode::UNPROCESSABLE_ENTITY, &json!("mismatch"))
        );
        let completion = json!({ "claim": claim, "result": "sent" });
        post(&api, "/v1/claims/complete", completion).await;
    }
    assert_eq!(post(&api, "/v1/claims", call(5)).await.1["result"], "sent");
    // Without arguments there is nothing to compare.
    assert_eq!(
        post(&api, "/v1/claims", job("mail 7")).await.1["result"],
        "sent"
    );
}

#[tokio::test]
async fn failures_are_counted_until_none_is_left_and_stops_are_not() {
    let api = server(&Arc::new(MemoryStore::new()));
    let mut attempts = Vec::new();
    let mut ends = Vec::new();
    for counted in [false, true, false, true, true] {
        let waited = json!({ "scope": "jobs", "key": "a", "wait_ms": 10_000 });
        let (_, granted) = post(&api, "/v1/claims", waited).await;
        attempts.push(granted["attempt"].as_u64().unwrap());
        let release = json!({ "claim": granted["claim"], "counted": counted, "reason": "the bank is closed" });
        let (status, answer) = post(&api, "/v1/claims/release", release).await;
        assert_eq!(status, StatusCode::OK);
        ends.push(answer["state"].as_str().unwrap().to_owned());
    }
    assert_eq!(attempts, [1, 1, 2, 2, 3]);
    assert_eq!(
        ends,
        ["released", "released", "released", "released", "given-up"]
    );
    let (status, answer) = post(&api, "/v1/claims", job("a")).await;
    assert_eq!(
        (status, &answer["reason"]),
        (StatusCode::GONE, &json!("the bank is closed"))
    );

    let claim = claimed(&api, job("b")).await;
    let (status, answer) = post(
        &api,
        "/v1/claims/fail",
        json!({ "claim": claim, "reason": "no such user" }),
    )
    .await;
    assert_eq!(
        (status, &answer["state"]),
        (StatusCode::OK, &json!("given-up"))
    );
    assert_eq!(post(&api, "/v1/claims", job("b")).await.0, StatusCode::GONE);

    let claim = claimed(&api, job("c")).await;
    let later = json!({ "claim": claim, "retry_in_ms": 60_000, "reason": "not yet" });
    assert_eq!(
        post(&api, "/v1/claims/release", later).await.1["retry_in_ms"],
        60_000
    );
    let (_, seen) = post(&api, "/v1/look", job("c")).await;
    assert_eq!(
        (&seen["state"], &seen["reason"]),
        (&json!("released"), &json!("not yet"))
    );
    assert_eq!(
        post(&api, "/v1/look", job("d")).await.1,
        json!({ "state": "absent" })
    );
}

// invariant: claim-of-one-server, stale-owner
#[tokio::test]
async fn any_server_goes_on_with_a_claim_and_refuses_a_stale_owner() {
    let store = Arc::new(MemoryStore::new());
    let first = server(&store);
    let short = json!({ "scope": "jobs", "key": "a", "lease_ms": 100 });
    let stale = claimed(&first, short.clone()).await;
    drop(first);
    let second = server(&store);
    let extended = post(&second, "/v1/claims/extend", json!({ "claims": [stale] }))
        .await
        .1;
    assert_eq!(
        extended["claims"][0],
        json!({ "state": "extended", "lease_ms": 100 })
    );

    // Its owner says nothing any more.
    let mut waited = short;
    waited["wait_ms"] = json!(60_000);
    let (_, taken) = post(&second, "/v1/claims", waited).await;
    assert_eq!(
        (&taken["attempt"], &taken["recovered"]),
        (&json!(2), &json!(true)),
        "{taken}"
    );
    let refused = (StatusCode::CONFLICT, json!("lease-lost"));
    for (path, body) in [
        (
            "/v1/claims/complete",
            json!({ "claim": stale, "result": "late" }),
        ),
        ("/v1/claims/release", json!({ "claim": stale })),
        (
            "/v1/claims/fail",
            json!({ "claim": stale, "reason": "late" }),
        ),
    ] {
        let (status, answer) = post(&second, path, body).await;
        assert_eq!((status, answer["state"].clone()), refused, "{path}");
    }
    let both = json!({ "claims": [stale, taken["claim"], "nonsense"] });
    let extended = post(&second, "/v1/claims/extend", both).await.1;
    let states: Vec<_> = (0..3)
        .map(|at| extended["claims"][at]["state"].clone())
        .collect();
    assert_eq!(states, ["lease-lost", "extended", "invalid"]);
    let done = json!({ "claim": taken["claim"], "result": "in time" });
    assert_eq!(
        post(&second, "/v1/claims/complete", done).await.0,
        StatusCode::OK
    );
    assert_eq!(
        post(&second, "/v1/claims", job("a")).await.1["result"],
        "in time"
    );
}

// invariant: grant-untold
#[tokio::test]
async fn a_claim_without_an_answer_is_sent_again_with_its_nonce() {
    let api = server(&Arc::new(MemoryStore::new()));
    let nonce = "8e03978e-40d5-43e8-bc93-6894a57f9324";
    let body = json!({ "scope": "jobs", "key": "a", "nonce": nonce });
    let (_, first) = post(&api, "/v1/claims", body.clone()).await;
    let (status, again) = post(&api, "/v1/claims", body.clone()).await;
    assert_eq!(
        (status, &again["claim"]),
        (StatusCode::CREATED, &first["claim"])
    );
    assert_eq!(
        (&again["attempt"], &again["recovered"]),
        (&json!(1), &json!(false))
    );
    // Another caller's nonce is another one.
    let mut other = body;
    other["nonce"] = json!("8e03978e-40d5-43e8-bc93-6894a57f9325");
    assert_eq!(
        post(&api, "/v1/claims", other).await.0,
        StatusCode::CONFLICT
    );
}

// invariant: grant-untold
#[tokio::test]
async fn a_caller_that_is_gone_before_its_grant_leaves_no_lease() {
    let api = server(&Arc::new(MemoryStore::new()));
    // The claim is on its way, and its answer has no receiver any more.
    let unread = api.answer(request(TOKEN, "/v1/claims", job("a").to_string()));
    assert!(unread.now_or_never().is_none());
    let waited = json!({ "scope": "jobs", "key": "a", "wait_ms": 60_000 });
    let (_, next) = post(&api, "/v1/claims", waited.clone()).await;
    assert_eq!(
        (&next["state"], &next["attempt"], &next["recovered"]),
        (&json!("granted"), &json!(1), &json!(false))
    );
    // One that waits, and is gone before it is granted, takes nothing.
    let waiting = api.answer(request(TOKEN, "/v1/claims", waited.to_string()));
    assert!(waiting.now_or_never().is_none());
    let release = json!({ "claim": next["claim"], "counted": false });
    post(&api, "/v1/claims/release", release).await;
    let (_, last) = post(&api, "/v1/claims", waited).await;
    assert_eq!(
        (&last["state"], &last["attempt"]),
        (&json!("granted"), &json!(1))
    );
}

#[tokio::test]
async fn one_that_waits_gets_the_result_when_it_is_there() {
    let api = server(&Arc::new(MemoryStore::new()));
    let claim = claimed(&api, job("a")).await;
    let waited = json!({ "scope": "jobs", "key": "a", "wait_ms": 60_000 });
    let waiting: Vec<_> = ["/v1/claims", "/v1/look"]
        .map(|path| {
            let (api, body) = (api.clone(), waited.clone());
            tokio::spawn(async move { post(&api, path, body).await })
        })
        .into();
    post(
        &api,
        "/v1/claims/complete",
        json!({ "claim": claim, "result": 7 }),
    )
    .await;
    for waiting in waiting {
        assert_eq!(
            waiting.await.unwrap().1,
            json!({ "state": "completed", "result": 7 })
        );
    }
}

#[tokio::test]
async fn one_that_waits_is_answered_when_the_server_stops() {
    let api = server(&Arc::new(MemoryStore::new()));
    let claim = claimed(&api, job("a")).await;
    let waited = json!({ "scope": "jobs", "key": "a", "wait_ms": 60_000 });
    let waiting = tokio::spawn({
        let api = api.clone();
        let waited = waited.clone();
        async move { post(&api, "/v1/claims", waited).await }
    });
    api.stop_waiting();
    assert_eq!(waiting.await.unwrap().1["state"], "busy");
    assert_eq!(post(&api, "/v1/claims", waited).await.1["state"], "busy");
    // What does not wait goes on.
    let done = json!({ "claim": claim, "result": 1 });
    assert_eq!(
        post(&api, "/v1/claims/complete", done).await.0,
        StatusCode::OK
    );
    assert_eq!(api.drain(Duration::from_secs(60)).await, 0);
}
