//! A webhook handles each event once, whatever its provider sends and its handler does.

#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "a test that cannot go on has failed"
)]

use std::convert::Infallible;
use std::fs;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use futures_util::FutureExt as _;
use http::{Request, Response, StatusCode};
use http_body_util::BodyExt as _;
use oncegate_core::key::Key;
use oncegate_core::record::StoreTime;
use oncegate_core::store::MemoryStore;
use oncegate_http::{Attempt, Body, Settle, event_gate};
use oncegate_runtime::AfterUnknown;
use oncegate_serve::Door as _;
use oncegate_serve::webhook::{
    HmacSettings, PlainSettings, Preset, StripeSettings, TimedSettings, Webhook, WebhookError,
};
use parking_lot::Mutex;
use ring::hmac;
use tokio::sync::Notify;

const LEASE: Duration = Duration::from_secs(30);

/// What the handler has got.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Call {
    key: String,
    attempt: u32,
    recovered: bool,
    body: String,
}

type Answer = dyn Fn(usize) -> Response<Body> + Send + Sync;

/// A webhook over a store whose clock the test moves, and a handler that answers as the test says.
struct Bench {
    folder: tempfile::TempDir,
    store: Arc<MemoryStore>,
    /// The store's clock in milliseconds. Each look at it takes one.
    clock: Arc<AtomicU64>,
    calls: Arc<Mutex<Vec<Call>>>,
    webhook: Webhook,
}

impl Bench {
    fn new(
        preset: impl FnOnce(PathBuf) -> Preset,
        answer: impl Fn(usize) -> Response<Body> + Send + Sync + 'static,
    ) -> Self {
        Self::waiting(preset, answer, None)
    }

    /// The handler waits for each to be notified, if there is one.
    fn waiting(
        preset: impl FnOnce(PathBuf) -> Preset,
        answer: impl Fn(usize) -> Response<Body> + Send + Sync + 'static,
        go_on: Option<Arc<Notify>>,
    ) -> Self {
        Self::after_unknown(AfterUnknown::Retry, preset, answer, go_on)
    }

    fn after_unknown(
        after_unknown: AfterUnknown,
        preset: impl FnOnce(PathBuf) -> Preset,
        answer: impl Fn(usize) -> Response<Body> + Send + Sync + 'static,
        go_on: Option<Arc<Notify>>,
    ) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let secret = folder.path().join("secret");
        fs::write(&secret, "whsec_c2VjcmV0\n").unwrap();
        let clock = Arc::new(AtomicU64::new(1_733_027_000_000));
        let ticks = Arc::clone(&clock);
        let store = Arc::new(MemoryStore::with_clock(move || {
            StoreTime::from_millis(ticks.fetch_add(1, Ordering::SeqCst))
        }));
        let calls = Arc::default();
        let seen: Arc<Mutex<Vec<Call>>> = Arc::clone(&calls);
        let answer: Arc<Answer> = Arc::new(answer);
        let handler = tower::service_fn(move |request: Request<Body>| {
            let seen = Arc::clone(&seen);
            let answer = Arc::clone(&answer);
            let go_on = go_on.clone();
            async move {
                let attempt = request.extensions().get::<Attempt>().unwrap().clone();
                let key = request.headers()["idempotency-key"]
                    .to_str()
                    .unwrap()
                    .to_owned();
                let body = request.into_body().collect().await.unwrap().to_bytes();
                let count = {
                    let mut seen = seen.lock();
                    seen.push(Call {
                        key,
                        attempt: attempt.number(),
                        recovered: attempt.recovered(),
                        body: String::from_utf8(body.to_vec()).unwrap(),
                    });
                    seen.len()
                };
                if let Some(go_on) = go_on {
                    go_on.notified().await;
                }
                Ok::<_, Infallible>(answer(count))
            }
        });
        let gate = event_gate("stripe", Arc::clone(&store)).lease(LEASE);
        let gate = gate.after_unknown(after_unknown);
        let webhook = Webhook::new(gate, preset(secret), handler);
        Self {
            folder,
            store,
            clock,
            calls,
            webhook,
        }
    }

    async fn send(&self, request: Request<Body>) -> (StatusCode, http::HeaderMap, String) {
        let response = self.webhook.answer(request).await;
        let (parts, body) = response.into_parts();
        let body = body.collect().await.unwrap().to_bytes();
        (
            parts.status,
            parts.headers,
            String::from_utf8(body.to_vec()).unwrap(),
        )
    }

    async fn status(&self, request: Request<Body>) -> u16 {
        self.send(request).await.0.as_u16()
    }

    fn runs(&self) -> usize {
        self.calls.lock().len()
    }

    fn last(&self) -> Call {
        self.calls.lock().last().unwrap().clone()
    }
}

fn ok() -> Response<Body> {
    status(200)
}

fn status(status: u16) -> Response<Body> {
    let mut response = Response::new(Body::from(Bytes::from_static(b"answer")));
    *response.status_mut() = StatusCode::from_u16(status).unwrap();
    response
}

fn stripe(secret: PathBuf) -> Preset {
    Preset::Stripe(StripeSettings::new([secret]))
}

/// A request of Stripe that is signed now.
fn event_by(secret: &str, body: &str) -> Request<Body> {
    let now = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap()
        .as_secs();
    let key = hmac::Key::new(hmac::HMAC_SHA256, secret.as_bytes());
    let tag = hmac::sign(&key, format!("{now}.{body}").as_bytes());
    let signature: String = tag
        .as_ref()
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect();
    Request::post("https://example.com/hooks/stripe")
        .header("stripe-signature", format!("t={now},v1={signature}"))
        .header("idempotency-key", "of-the-provider")
        .body(Body::from(Bytes::copy_from_slice(body.as_bytes())))
        .unwrap()
}

fn event(body: &str) -> Request<Body> {
    event_by("whsec_c2VjcmV0", body)
}

// invariant: second-run-of-event
#[tokio::test]
async fn an_event_is_handled_once_and_its_repetition_is_answered() {
    let bench = Bench::new(stripe, |_| ok());
    bench.webhook.open().await.unwrap();
    let (first, headers, body) = bench.send(event(r#"{"id":"evt_1"}"#)).await;
    assert_eq!((first, body.as_str()), (StatusCode::OK, "answer"));
    assert!(!headers.contains_key("idempotent-replayed"));
    assert_eq!(
        bench.last(),
        Call {
            key: "\"evt_1\"".to_owned(),
            attempt: 1,
            recovered: false,
            body: r#"{"id":"evt_1"}"#.to_owned(),
        }
    );
    // Sent again: signed anew, to another host, with what counts the deliveries changed.
    let mut again = event(r#"{"id":"evt_1","pending_webhooks":0}"#);
    *again.uri_mut() = "https://other.example.com/hooks".parse().unwrap();
    let (status, headers, body) = bench.send(again).await;
    assert_eq!((status, body.as_str()), (StatusCode::OK, "answer"));
    assert_eq!(headers["idempotent-replayed"], "true");
    assert_eq!(bench.runs(), 1);
    // Another event, and the same one after the retention.
    assert_eq!(bench.status(event(r#"{"id":"evt_2"}"#)).await, 200);
    assert_eq!(bench.runs(), 2);
    let week_ms = 7 * 86_400_000 + 60_000;
    bench.clock.fetch_add(week_ms, Ordering::SeqCst);
    assert_eq!(bench.status(event(r#"{"id":"evt_1"}"#)).await, 200);
    assert_eq!(bench.runs(), 3);
}

// invariant: forged-event
#[tokio::test]
async fn what_is_refused_leaves_nothing() {
    let bench = Bench::new(stripe, |_| ok());
    bench.webhook.open().await.unwrap();
    let mut unsigned = event(r#"{"id":"evt_1"}"#);
    unsigned.headers_mut().remove("stripe-signature");
    let mut get = event("");
    *get.method_mut() = http::Method::GET;
    let mut put = event(r#"{"id":"evt_1"}"#);
    *put.method_mut() = http::Method::PUT;
    for (request, status, name) in [
        (
            event_by("other", r#"{"id":"evt_1"}"#),
            401,
            "signature-refused",
        ),
        (unsigned, 401, "signature-refused"),
        (event("{}"), 422, "event-without-id"),
        (event("not JSON"), 422, "event-without-id"),
        (get, 405, "method-not-allowed"),
        (put, 405, "method-not-allowed"),
        (
            event(&"x".repeat(1024 * 1024 + 1)),
            413,
            "request-too-large",
        ),
    ] {
        let (got, headers, body) = bench.send(request).await;
        assert_eq!(got.as_u16(), status, "{body}");
        assert_eq!(headers["content-type"], "application/problem+json");
        assert!(body.contains(&format!("#{name}")), "{body}");
        assert!(!body.contains("evt_1") && !body.contains("whsec"), "{body}");
    }
    assert_eq!(bench.runs(), 0);
    assert_eq!(bench.store.records(), []);
    // The event itself is new.
    assert_eq!(bench.status(event(r#"{"id":"evt_1"}"#)).await, 200);
    assert_eq!(bench.last().attempt, 1);
    assert_eq!(bench.store.records().len(), 1);
}

#[tokio::test]
async fn an_event_that_is_being_handled_is_to_come_again() {
    let go_on = Arc::new(Notify::new());
    let bench = Bench::waiting(stripe, |_| ok(), Some(Arc::clone(&go_on)));
    let first = tokio::spawn(bench.webhook.answer(event(r#"{"id":"evt_1"}"#)));
    while bench.runs() == 0 {
        tokio::task::yield_now().await;
    }
    let (status, headers, body) = bench.send(event(r#"{"id":"evt_1"}"#)).await;
    assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(headers["retry-after"], "1");
    assert!(body.contains("#in-progress"), "{body}");
    go_on.notify_one();
    assert_eq!(first.await.unwrap().status(), 200);
    assert_eq!(bench.status(event(r#"{"id":"evt_1"}"#)).await, 200);
    assert_eq!(bench.runs(), 1);
}

#[tokio::test]
async fn a_provider_that_hangs_up_does_not_stop_the_handler() {
    let go_on = Arc::new(Notify::new());
    let bench = Bench::waiting(stripe, |_| ok(), Some(Arc::clone(&go_on)));
    let mut first = bench.webhook.answer(event(r#"{"id":"evt_1"}"#));
    while bench.runs() == 0 {
        assert!((&mut first).now_or_never().is_none());
        tokio::task::yield_now().await;
    }
    drop(first);
    go_on.notify_one();
    assert_eq!(bench.webhook.drain(Duration::MAX).await, 0);
    // It stops, so no new event is taken; what it has done is recorded.
    assert_eq!(bench.status(event(r#"{"id":"evt_2"}"#)).await, 503);
    let records = bench.store.records();
    assert_eq!((records.len(), bench.runs()), (1, 1));
    let (_, record) = &records[0];
    assert!(format!("{record:?}").contains("Completed"), "{record:?}");
}

// invariant: failed-event-kept
#[tokio::test]
async fn every_failure_runs_again_at_the_next_delivery() {
    for (answered, seen) in [
        (500, 500),
        (503, 503),
        (429, 429),
        (410, 410),
        // Providers give up at some of these, and a page that is not there yet is no reason.
        (400, 502),
        (404, 502),
        (409, 502),
        (302, 502),
    ] {
        let bench = Bench::new(stripe, move |run| match run {
            1 => status(answered),
            _ => ok(),
        });
        let body = r#"{"id":"evt_1"}"#;
        assert_eq!(bench.status(event(body)).await, seen, "{answered}");
        assert_eq!(bench.status(event(body)).await, 200, "{answered}");
        assert_eq!(bench.status(event(body)).await, 200, "{answered}");
        assert_eq!(bench.runs(), 2, "{answered}");
        let last = bench.last();
        assert_eq!((last.attempt, last.recovered), (2, false), "{answered}");
    }
}

#[tokio::test]
async fn a_panic_is_a_failure_too() {
    let bench = Bench::new(
        stripe,
        |run| if run == 1 { panic!("told to") } else { ok() },
    );
    assert_eq!(bench.status(event(r#"{"id":"evt_1"}"#)).await, 500);
    assert_eq!(bench.status(event(r#"{"id":"evt_1"}"#)).await, 200);
    assert_eq!(bench.runs(), 2);
}

// invariant: second-run-of-event
#[tokio::test]
async fn what_is_unknown_is_not_run_again_before_its_lease_is_over() {
    for unknown in [
        || status(408),
        || status(504),
        || {
            let mut response = status(502);
            response.extensions_mut().insert(Settle::Unknown);
            response
        },
    ] {
        let bench = Bench::new(stripe, move |run| if run == 1 { unknown() } else { ok() });
        let body = r#"{"id":"evt_1"}"#;
        assert!(bench.status(event(body)).await >= 502);
        assert_eq!(bench.status(event(body)).await, 503);
        assert_eq!(bench.runs(), 1);
        let lease_ms = u64::try_from(LEASE.as_millis()).unwrap();
        bench.clock.fetch_add(2 * lease_ms, Ordering::SeqCst);
        assert_eq!(bench.status(event(body)).await, 200);
        let last = bench.last();
        assert_eq!((last.attempt, last.recovered), (2, true));
    }
}

/// An event whose outcome is unknown, and that is given up, is no success: its provider keeps it.
#[tokio::test]
async fn what_is_given_up_without_an_outcome_is_never_acknowledged() {
    let give_up = AfterUnknown::GiveUp;
    let bench = Bench::after_unknown(give_up, stripe, |_| status(504), None);
    let body = r#"{"id":"evt_1"}"#;
    assert_eq!(bench.status(event(body)).await, 504);
    let lease_ms = u64::try_from(LEASE.as_millis()).unwrap();
    bench.clock.fetch_add(2 * lease_ms, Ordering::SeqCst);
    for _ in 0..2 {
        assert_eq!(bench.status(event(body)).await, 503);
    }
    assert_eq!(bench.runs(), 1);
}

#[tokio::test]
async fn an_answer_that_was_too_large_to_keep_is_still_a_success() {
    let bench = Bench::new(stripe, |_| {
        Response::new(Body::from(Bytes::from(vec![b'x'; 100_000])))
    });
    let (status, _, body) = bench.send(event(r#"{"id":"evt_1"}"#)).await;
    assert_eq!((status.as_u16(), body.len()), (200, 100_000));
    let (status, _, body) = bench.send(event(r#"{"id":"evt_1"}"#)).await;
    assert_eq!((status.as_u16(), body.len()), (200, 0));
    assert_eq!(bench.runs(), 1);
}

#[tokio::test]
async fn a_secret_is_rotated_without_a_restart() {
    let bench = Bench::new(stripe, |_| ok());
    bench.webhook.open().await.unwrap();
    assert_eq!(
        bench.status(event_by("new", r#"{"id":"evt_1"}"#)).await,
        401
    );
    fs::write(bench.folder.path().join("secret"), "new").unwrap();
    assert_eq!(
        bench.status(event_by("new", r#"{"id":"evt_1"}"#)).await,
        200
    );
    assert_eq!(bench.status(event(r#"{"id":"evt_1"}"#)).await, 401);
}

#[tokio::test]
async fn slack_gets_its_challenge_back_and_nothing_is_recorded() {
    let bench = Bench::new(
        |secret| Preset::Slack(TimedSettings::new([secret])),
        |_| ok(),
    );
    let body = r#"{"type":"url_verification","challenge":"3eZbrw"}"#;
    let now = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap()
        .as_secs();
    let request = |secret: &str| {
        let key = hmac::Key::new(hmac::HMAC_SHA256, secret.as_bytes());
        let tag = hmac::sign(&key, format!("v0:{now}:{body}").as_bytes());
        let signature: String = tag
            .as_ref()
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect();
        Request::post("/")
            .header("x-slack-request-timestamp", now.to_string())
            .header("x-slack-signature", format!("v0={signature}"))
            .body(Body::from(Bytes::from_static(body.as_bytes())))
            .unwrap()
    };
    let (status, _, answer) = bench.send(request("whsec_c2VjcmV0")).await;
    assert_eq!((status.as_u16(), answer.as_str()), (200, "3eZbrw"));
    let (status, _, answer) = bench.send(request("other")).await;
    assert!(
        status.as_u16() == 401 && !answer.contains("3eZbrw"),
        "{answer}"
    );
    assert_eq!((bench.runs(), bench.store.records().len()), (0, 0));
}

#[tokio::test]
async fn bodies_take_no_more_memory_than_they_may() {
    // The signature is not known yet, so the bound is one for all.
    let bench = Bench::new(stripe, |_| ok());
    let webhook = bench
        .webhook
        .clone()
        .max_request_bytes(100)
        .max_buffered_bytes(100);
    let (sender, body) = tokio::sync::mpsc::channel::<Bytes>(1);
    let body = futures_util::stream::unfold(body, async |mut body| {
        let data = body.recv().await?;
        let frame = http_body::Frame::data(data);
        Some((Ok::<_, Infallible>(frame), body))
    });
    let slow = Request::post("/")
        .body(Body::stream(http_body_util::StreamBody::new(Box::pin(
            body,
        ))))
        .unwrap();
    let mut slow = webhook.answer(slow);
    sender.send(Bytes::from(vec![b'x'; 60])).await.unwrap();
    assert!((&mut slow).now_or_never().is_none());
    let answer = webhook.answer(event(&"x".repeat(60))).await;
    assert_eq!(answer.status(), 503);
    assert_eq!(answer.headers()["connection"], "close");
    assert_eq!(webhook.answer(event(&"x".repeat(101))).await.status(), 413);
    drop(slow);
    assert_eq!(
        webhook.answer(event(r#"{"id":"evt_1"}"#)).await.status(),
        200
    );
}

#[tokio::test]
async fn a_wrong_setting_is_refused_before_the_first_event() {
    let text = |error: WebhookError| error.to_string();
    let bench = Bench::new(stripe, |_| ok());
    let handler = tower::service_fn(async |_: Request<Body>| Ok::<_, Infallible>(ok()));
    let gate = || event_gate("door", oncegate_runtime::MemoryStore::new());
    let at = |preset| Webhook::new(gate(), preset, handler);

    let error = text(
        at(Preset::Github(PlainSettings::new([])))
            .open()
            .await
            .unwrap_err(),
    );
    assert!(error.contains("`secrets`"), "{error}");
    let missing = bench.folder.path().join("missing");
    let error = text(at(stripe(missing.clone())).open().await.unwrap_err());
    assert!(error.contains("missing"), "{error}");
    // It may be mounted a moment later.
    let webhook = at(stripe(missing.clone()));
    assert_eq!(
        webhook.answer(event(r#"{"id":"evt_1"}"#)).await.status(),
        503
    );
    fs::write(missing, "whsec_c2VjcmV0").unwrap();
    assert_eq!(
        webhook.answer(event(r#"{"id":"evt_1"}"#)).await.status(),
        200
    );

    let secret = bench.folder.path().join("secret");
    let brief = gate().retention(Duration::from_secs(3_600));
    let webhook = Webhook::new(brief, stripe(secret.clone()), handler);
    let error = text(webhook.open().await.unwrap_err());
    assert!(error.contains("72 hours"), "{error}");
    let nowhere = HmacSettings::new([secret], "x signature", Key::message_id());
    let findings = Preset::Hmac(nowhere).check(LEASE);
    let wrong: Vec<_> = findings.iter().map(|finding| finding.setting).collect();
    assert_eq!(wrong, ["header", "id"]);
}

// invariant: second-run-of-event
#[tokio::test]
async fn a_thousand_deliveries_of_a_hundred_events() {
    let failures = Arc::new(AtomicUsize::new(0));
    let failed = Arc::clone(&failures);
    let bench = Bench::new(stripe, move |run| {
        if run % 7 == 0 {
            failed.fetch_add(1, Ordering::SeqCst);
            status(500)
        } else {
            ok()
        }
    });
    let seed = fastrand::u64(..);
    println!("seed {seed}");
    let mut rng = fastrand::Rng::with_seed(seed);
    let mut due: Vec<usize> = (0..1_000).map(|count| count % 100).collect();
    rng.shuffle(&mut due);
    // A provider sends again what was not answered by 2xx, beside everything else.
    while !due.is_empty() {
        let batch: Vec<usize> = due.drain(..due.len().min(32)).collect();
        let answers = batch.iter().map(|number| {
            let body = format!(r#"{{"id":"evt_{number}"}}"#);
            bench.webhook.answer(event(&body))
        });
        let answers = futures_util::future::join_all(answers).await;
        for (number, answer) in batch.iter().zip(answers) {
            match answer.status().as_u16() {
                200 => {}
                500 | 503 => due.push(*number),
                other => panic!("{other}"),
            }
        }
    }
    assert_eq!(bench.runs(), 100 + failures.load(Ordering::SeqCst));
    assert_eq!(bench.store.records().len(), 100);
}
