//! Callers without a right, hostile requests, stores in trouble, and settings that cannot serve.

use std::sync::Arc;

use http::{Request, StatusCode};
use oncegate_core::testing::fault::{FaultStore, Faults};
use oncegate_runtime::MemoryStore;
use oncegate_runtime::gate::AfterUnknown;
use oncegate_serve::api::{Api, ApiError, ApiScope, Caller, function_gate};
use oncegate_serve::{Body, Door as _};
use serde_json::{Value, json};

use super::{OTHER_TOKEN, TOKEN, claimed, job, post, send, server};

// invariant: unprotected-function
#[tokio::test]
async fn tokens_scopes_and_limits_keep_callers_apart() {
    let api = server(&Arc::new(MemoryStore::new()));
    let order = json!({ "scope": "orders", "key": { "order_id": 1 } }).to_string();
    let (status, granted) = send(&api, OTHER_TOKEN, "/v1/claims", order).await;
    assert_eq!(status, StatusCode::CREATED);
    let (status, _) = send(&api, OTHER_TOKEN, "/v1/claims", job("a").to_string()).await;
    assert_eq!(status, StatusCode::FORBIDDEN);
    for token in [
        "",
        "a-token-of-the-caller-cro",
        "a-token-of-the-caller-cron2",
    ] {
        let (status, answer) = send(&api, token, "/v1/claims", job("a").to_string()).await;
        assert_eq!(
            (status, &answer["state"]),
            (StatusCode::UNAUTHORIZED, &json!("unauthorized"))
        );
    }
    // A claim of a scope that the caller may not use is none of its own.
    let claim = claimed(&api, job("a")).await;
    let complete = json!({ "claim": claim }).to_string();
    let (status, _) = send(&api, OTHER_TOKEN, "/v1/claims/complete", complete).await;
    assert_eq!(status, StatusCode::FORBIDDEN);
    let extend = json!({ "claims": [claim, granted["claim"]] }).to_string();
    let (_, extended) = send(&api, OTHER_TOKEN, "/v1/claims/extend", extend).await;
    assert_eq!(extended["claims"][0]["state"], "invalid");
    assert_eq!(extended["claims"][1]["state"], "extended");

    let few = Caller::new("few")
        .token(TOKEN)
        .scopes(["jobs"])
        .max_claims(1);
    let gate = function_gate("jobs", MemoryStore::new());
    let api = Api::new([ApiScope::new(gate)], [few]).unwrap();
    let claim = claimed(&api, job("a")).await;
    let (status, answer) = post(&api, "/v1/claims", job("b")).await;
    assert_eq!(
        (status, &answer["state"]),
        (StatusCode::TOO_MANY_REQUESTS, &json!("caller-overloaded"))
    );
    post(&api, "/v1/claims/complete", json!({ "claim": claim })).await;
    claimed(&api, job("b")).await;
}

// invariant: unprotected-function
#[tokio::test]
async fn hostile_requests_get_a_problem_and_claim_nothing() {
    let api = server(&Arc::new(MemoryStore::new()));
    let too_large = format!(r#"{{"scope":"jobs","key":"{}"}}"#, "k".repeat(300_000));
    let (status, answer) = send(&api, TOKEN, "/v1/claims", too_large).await;
    assert_eq!(
        (status, &answer["state"]),
        (StatusCode::PAYLOAD_TOO_LARGE, &json!("request-too-large"))
    );
    let nested = format!(
        r#"{{"scope":"jobs","key":{}1{}}}"#,
        "[".repeat(10_000),
        "]".repeat(10_000)
    );
    for body in [
        String::new(),
        "{".to_owned(),
        "[]".to_owned(),
        nested,
        r#"{"scope":"jobs","key":"a","lease_ms":99}"#.to_owned(),
        r#"{"scope":"jobs","key":"a","lease_ms":30001}"#.to_owned(),
        r#"{"scope":"jobs","key":"a","retention_ms":1}"#.to_owned(),
        r#"{"scope":"jobs","key":"a","wait_ms":60001}"#.to_owned(),
        r#"{"scope":"jobs","key":"a","wait_ms":-1}"#.to_owned(),
        r#"{"scope":"jobs","key":"a","nonce":"cron"}"#.to_owned(),
        r#"{"scope":"jobs","key":"a","kye":"b"}"#.to_owned(),
        r#"{"scope":"jobs","scope":"jobs","key":"a"}"#.to_owned(),
    ] {
        let (status, answer) = send(&api, TOKEN, "/v1/claims", body.clone()).await;
        assert_eq!(status, StatusCode::BAD_REQUEST, "{body:.80} {answer}");
    }
    for claim in ["", "nonsense", &"A".repeat(200)] {
        let (status, answer) = post(&api, "/v1/claims/complete", json!({ "claim": claim })).await;
        assert_eq!(
            (status, &answer["state"]),
            (StatusCode::BAD_REQUEST, &json!("claim-invalid"))
        );
    }
    let claim = claimed(&api, job("b")).await;
    for (field, value) in [
        ("result_base64", json!("AP8_")),
        ("without_result", json!(true)),
    ] {
        let mut body = json!({ "claim": claim, "result": 1 });
        body[field] = value;
        assert_eq!(
            post(&api, "/v1/claims/complete", body).await.0,
            StatusCode::BAD_REQUEST
        );
    }
    let many = json!({ "claims": vec!["x"; 1_001] });
    assert_eq!(
        post(&api, "/v1/claims/extend", many).await.0,
        StatusCode::BAD_REQUEST
    );
    assert_eq!(
        post(&api, "/v1/nothing", json!({})).await.0,
        StatusCode::NOT_FOUND
    );
    let get = Request::get("/v1/claims").body(Body::empty()).unwrap();
    assert_eq!(
        api.answer(get).await.status(),
        StatusCode::METHOD_NOT_ALLOWED
    );
    assert_eq!(post(&api, "/v1/look", job("a")).await.1["state"], "absent");
}

#[tokio::test]
async fn a_result_that_is_too_large_is_recorded_as_done_without_it() {
    let store = Arc::new(MemoryStore::new());
    let api = server(&store);
    let large = "r".repeat(100_000);
    for completion in [
        json!({ "result": large }),
        json!({ "without_result": true }),
    ] {
        let key = job(&completion.to_string().len().to_string());
        let mut completion = completion;
        completion["claim"] = json!(claimed(&api, key.clone()).await);
        let (status, done) = post(&api, "/v1/claims/complete", completion).await;
        assert_eq!(
            (status, &done["state"]),
            (StatusCode::OK, &json!("completed"))
        );
        assert!(done["result_lost"].is_string(), "{done}");
        let (status, again) = post(&api, "/v1/claims", key).await;
        assert_eq!(
            (status, &again["state"]),
            (StatusCode::OK, &json!("completed"))
        );
        assert!(
            again["result_lost"].is_string() && again["result"].is_null(),
            "{again}"
        );
    }
}

/// What the store leaves unanswered is never a grant, and a repeat with the same claim is applied.
// invariant: grant-untold
#[tokio::test(start_paused = true)]
async fn a_lost_answer_is_no_grant_and_an_end_is_repeated() {
    let lossy = Faults {
        reply_lost: 0.4,
        request_lost: 0.2,
        unavailable: 0.2,
        ..Faults::default()
    };
    for seed in 0..20 {
        let store = FaultStore::new(Arc::new(MemoryStore::new()), lossy.clone(), seed);
        let store = Arc::new(store);
        let api = server(&store);
        while api.open().await.is_err() {}
        let nonce = format!("8e03978e-40d5-43e8-bc93-{seed:012}");
        let body = json!({ "scope": "jobs", "key": "a", "nonce": nonce });
        let claim = until(StatusCode::CREATED, &api, "/v1/claims", body).await["claim"].clone();
        let extend = json!({ "claims": [claim] });
        while post(&api, "/v1/claims/extend", extend.clone()).await.1["claims"][0]["state"]
            == "unknown"
        {}
        let done = json!({ "claim": claim, "result": seed });
        until(StatusCode::OK, &api, "/v1/claims/complete", done.clone()).await;
        until(StatusCode::OK, &api, "/v1/claims/complete", done).await;
        let again = until(StatusCode::OK, &api, "/v1/claims", job("a")).await;
        assert_eq!(again, json!({ "state": "completed", "result": seed }));
        let injected = store.injected();
        assert!(
            injected.reply_lost + injected.unavailable > 0,
            "seed {seed}"
        );
    }
}

/// Repeats a request while its outcome is unknown, or the store is away.
async fn until(status: StatusCode, api: &Api, path: &str, body: Value) -> Value {
    loop {
        let (got, answer) = post(api, path, body.clone()).await;
        if got == status {
            return answer;
        }
        assert_eq!(got, StatusCode::SERVICE_UNAVAILABLE, "{answer}");
    }
}

#[tokio::test]
async fn a_scope_may_give_up_after_an_unknown_outcome() {
    let gate = function_gate("jobs", MemoryStore::new()).after_unknown(AfterUnknown::GiveUp);
    let caller = Caller::new("cron").token(TOKEN).scopes(["jobs"]);
    let api = Api::new([ApiScope::new(gate)], [caller]).unwrap();
    let short = json!({ "scope": "jobs", "key": "a", "lease_ms": 100, "wait_ms": 60_000 });
    // Its owner says nothing any more.
    claimed(&api, short.clone()).await;
    for _repeat in 0..2 {
        let (status, answer) = post(&api, "/v1/claims", short.clone()).await;
        assert_eq!(status, StatusCode::GONE, "{answer}");
        let reason = answer["reason"].as_str().unwrap();
        assert!(reason.starts_with("outcome unknown"), "{reason}");
    }
}

#[test]
fn an_api_that_could_not_serve_is_refused_in_words() {
    let scope = || ApiScope::new(function_gate("jobs", MemoryStore::new()));
    let caller = || Caller::new("cron").token(TOKEN).scopes(["jobs"]);
    let refused =
        |scopes: Vec<ApiScope>, callers: Vec<Caller>| Api::new(scopes, callers).unwrap_err();
    assert!(matches!(refused(vec![scope()], vec![]), ApiError::NoCaller));
    assert!(matches!(
        refused(vec![scope(), scope()], vec![caller()]),
        ApiError::Twice { .. }
    ));
    assert!(matches!(
        refused(vec![scope()], vec![caller(), caller()]),
        ApiError::Twice { .. }
    ));
    assert!(matches!(
        refused(vec![], vec![caller()]),
        ApiError::UnknownScope { .. }
    ));
    let no_scope = Caller::new("cron").token(TOKEN);
    assert!(matches!(
        refused(vec![scope()], vec![no_scope]),
        ApiError::NoScope { .. }
    ));
    assert!(matches!(
        refused(vec![scope().max_attempts(0)], vec![caller()]),
        ApiError::Attempts { .. }
    ));
    assert!(matches!(
        refused(vec![scope()], vec![caller().max_bytes(9)]),
        ApiError::TooFewBytes { .. }
    ));
    let shown = format!("{:?}", caller());
    assert!(!shown.contains(TOKEN), "{shown}");
}
