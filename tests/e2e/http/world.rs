//! A service behind the layer, which does what a request's header `x-do` asks for.

use std::convert::Infallible;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::middleware::{Next, from_fn, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::any;
use axum::{Extension, Router};
use bytes::Bytes;
use futures_util::StreamExt as _;
use oncegate::core::record::{Record, State as RecordState};
use oncegate::core::store::Store;
use oncegate::http::{Attempt, IdempotencyLayer, Principal, Settle, request_gate};
use oncegate::{Gate, MemoryStore};
use oncegate_testkit::{HttpAnswer, HttpClient, HttpServer, Sent, Watched};
use tokio::sync::watch;

/// The longest wait for anything.
pub(crate) const LIMIT: Duration = Duration::from_secs(240);

pub(crate) const ORDER: &str = r#"{"order":"A-7","amount":10}"#;

/// The attempt as the handler saw it: its number, and whether an earlier one crashed.
pub(crate) type Run = (u32, bool);

/// What the handlers have done, and what holds them.
#[derive(Clone, Debug)]
pub(crate) struct Work {
    runs: Arc<Mutex<Vec<Run>>>,
    started: Arc<watch::Sender<usize>>,
    finished: Arc<watch::Sender<usize>>,
    gone: Arc<watch::Sender<usize>>,
    open: Arc<watch::Sender<bool>>,
}

impl Work {
    fn new() -> Self {
        let count = || Arc::new(watch::Sender::new(0));
        Self {
            runs: Arc::default(),
            started: count(),
            finished: count(),
            gone: count(),
            open: Arc::new(watch::Sender::new(false)),
        }
    }

    pub(crate) fn runs(&self) -> Vec<Run> {
        self.runs.lock().unwrap().clone()
    }

    /// Lets the handlers go that hold.
    pub(crate) fn open(&self) {
        self.open.send_replace(true);
    }

    pub(crate) async fn started(&self, count: usize) {
        reached(&self.started, count).await;
    }

    pub(crate) async fn finished(&self, count: usize) {
        reached(&self.finished, count).await;
    }

    /// Waits until the server has seen so many clients go before their response.
    pub(crate) async fn gone(&self, count: usize) {
        reached(&self.gone, count).await;
    }
}

async fn reached(counter: &watch::Sender<usize>, count: usize) {
    let mut counted = counter.subscribe();
    let reached = tokio::time::timeout(LIMIT, counted.wait_for(|now| *now >= count)).await;
    reached.expect("in time").unwrap();
}

/// The user that a request names; stands for authentication.
#[derive(Clone)]
struct User(String);

impl std::fmt::Display for User {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

async fn authenticate(mut request: Request, next: Next) -> Response {
    let name = request
        .headers()
        .get("x-user")
        .map_or("default-user", |name| name.to_str().unwrap());
    if name != "unauthenticated" {
        let user = User(name.to_owned());
        request.extensions_mut().insert(user);
    }
    next.run(request).await
}

/// Counts the responses whose client went away: the server drops their futures.
async fn watch_clients(State(work): State<Work>, request: Request, next: Next) -> Response {
    struct Watch(Option<Arc<watch::Sender<usize>>>);
    impl Drop for Watch {
        fn drop(&mut self) {
            if let Some(gone) = self.0.take() {
                gone.send_modify(|count| *count += 1);
            }
        }
    }
    let mut watch = Watch(Some(work.gone));
    let response = next.run(request).await;
    watch.0 = None;
    response
}

pub(crate) struct World {
    pub(crate) store: Arc<MemoryStore>,
    pub(crate) layer: IdempotencyLayer,
    pub(crate) work: Work,
    pub(crate) watched: Arc<Watched>,
    pub(crate) server: HttpServer,
}

impl World {
    pub(crate) async fn new() -> Self {
        Self::with(|layer| layer).await
    }

    /// With these settings of the layer.
    pub(crate) async fn with(settings: impl FnOnce(IdempotencyLayer) -> IdempotencyLayer) -> Self {
        let store = Arc::new(MemoryStore::new());
        Self::over(Arc::clone(&store), store, |gate| gate, settings).await
    }

    /// Over `gates_store`, which may stand before `store`.
    pub(crate) async fn over(
        store: Arc<MemoryStore>,
        gates_store: impl Store + 'static,
        gate: impl FnOnce(Gate) -> Gate,
        settings: impl FnOnce(IdempotencyLayer) -> IdempotencyLayer,
    ) -> Self {
        let watched = Watched::new();
        let gate = gate(request_gate("payments", gates_store)).observer(Arc::clone(&watched) as _);
        let layer = settings(IdempotencyLayer::new(gate, Principal::extension::<User>()));
        let work = Work::new();
        let server = HttpServer::start(app(&layer, &work)).await;
        Self {
            store,
            layer,
            work,
            watched,
            server,
        }
    }

    pub(crate) fn http1(&self) -> HttpClient {
        HttpClient::http1(self.server.address())
    }

    pub(crate) fn http2(&self) -> HttpClient {
        HttpClient::http2(self.server.address())
    }

    pub(crate) async fn post(&self, key: &str, body: &str) -> HttpAnswer {
        self.http1().send(Sent::post("/charges", key, body)).await
    }

    /// A POST whose handler does `what`.
    pub(crate) async fn told(&self, key: &str, what: &str) -> HttpAnswer {
        self.http1().send(told(key, &headers(what))).await
    }

    /// Sends it until it is no longer in progress.
    pub(crate) async fn settled(&self, key: &str) -> HttpAnswer {
        settled(&self.http1(), told(key, &headers("charge"))).await
    }

    pub(crate) fn runs(&self) -> Vec<Run> {
        self.work.runs()
    }

    /// Waits until every record is RELEASED.
    pub(crate) async fn released(&self) {
        let released = async {
            let is =
                |(_, record): &(_, Record)| matches!(record.state, RecordState::Released { .. });
            while !self.store.records().iter().all(is) {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(LIMIT, released)
            .await
            .expect("in time");
    }

    /// Whether all records are COMPLETED.
    pub(crate) fn all_completed(&self) -> bool {
        self.store
            .records()
            .iter()
            .all(|(_, record)| matches!(record.state, RecordState::Completed { .. }))
    }
}

/// Sends it until the service returns a final answer.
pub(crate) async fn settled(client: &HttpClient, sent: Sent<'_>) -> HttpAnswer {
    let again = async {
        loop {
            let answer = client.send(sent).await;
            // An answer that may be retried soon has `retry-after`.
            if answer.header("retry-after").is_none() {
                return answer;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(LIMIT, again)
        .await
        .expect("it is settled in time")
}

pub(crate) fn headers(what: &str) -> [(&'static str, &str); 2] {
    [("content-type", "application/json"), ("x-do", what)]
}

pub(crate) fn told<'a>(key: &'a str, headers: &'a [(&'a str, &'a str)]) -> Sent<'a> {
    Sent::post("/charges", key, ORDER).headers(headers)
}

pub(crate) fn app(layer: &IdempotencyLayer, work: &Work) -> Router {
    Router::new()
        .route("/charges", any(handle))
        .route("/refunds", any(handle))
        .with_state(work.clone())
        .layer(layer.clone())
        .layer(from_fn(authenticate))
        .layer(from_fn_with_state(work.clone(), watch_clients))
}

async fn handle(
    State(work): State<Work>,
    attempt: Option<Extension<Attempt>>,
    headers: HeaderMap,
    body: Bytes,
) -> Response {
    let number = attempt.as_ref().map_or(0, |attempt| attempt.number());
    let recovered = attempt.as_ref().is_some_and(|attempt| attempt.recovered());
    let run = {
        let mut runs = work.runs.lock().unwrap();
        runs.push((number, recovered));
        runs.len()
    };
    work.started.send_modify(|count| *count += 1);
    let what = headers
        .get("x-do")
        .map_or("charge", |what| what.to_str().unwrap());
    let response = match (what, attempt) {
        ("obey", Some(Extension(attempt))) => {
            attempt.cancelled().await;
            StatusCode::INTERNAL_SERVER_ERROR.into_response()
        }
        ("tell", Some(Extension(attempt))) => {
            let told = format!(
                "{} {}",
                attempt.idempotency_key("charge"),
                attempt.fencing_token().unwrap_or_default()
            );
            (StatusCode::BAD_GATEWAY, told).into_response()
        }
        _ => act(&work, what, run, &body).await,
    };
    work.finished.send_modify(|count| *count += 1);
    response
}

async fn act(work: &Work, what: &str, run: usize, body: &Bytes) -> Response {
    match what {
        "charge" => charged(run),
        "hold" => {
            work.open.subscribe().wait_for(|open| *open).await.unwrap();
            charged(run)
        }
        "panic" => panic!("told to"),
        "echo" => Body::from(body.clone()).into_response(),
        "big" => "x".repeat(100_000).into_response(),
        "endless" => {
            let first = futures_util::stream::iter([Ok::<_, Infallible>(Bytes::from_static(
                b"data: 1\n\n",
            ))]);
            let body = Body::from_stream(first.chain(futures_util::stream::pending()));
            ([(header::CONTENT_TYPE, "text/event-stream")], body).into_response()
        }
        "drip" => {
            let first =
                futures_util::stream::iter([Ok::<_, Infallible>(Bytes::from_static(b"first "))]);
            let open = work.open.clone();
            let last = futures_util::stream::once(async move {
                open.subscribe().wait_for(|open| *open).await.unwrap();
                Ok(Bytes::from_static(b"last"))
            });
            Body::from_stream(first.chain(last)).into_response()
        }
        "break" => {
            let pieces = [
                Ok(Bytes::from_static(b"half")),
                Err(std::io::Error::other("told to")),
            ];
            Body::from_stream(futures_util::stream::iter(pieces)).into_response()
        }
        "break-by-panic" => {
            let pieces = futures_util::stream::iter([true, false]).map(|is_there| {
                assert!(is_there, "told to");
                Ok::<_, Infallible>(Bytes::from_static(b"half"))
            });
            Body::from_stream(pieces).into_response()
        }
        "retry" => (Extension(Settle::Retry), "not yet").into_response(),
        "fail" => (StatusCode::GONE, Extension(Settle::Fail), "never").into_response(),
        "complete" => (
            StatusCode::BAD_GATEWAY,
            Extension(Settle::Complete),
            "final",
        )
            .into_response(),
        status => {
            let status = StatusCode::from_bytes(status.as_bytes()).expect("a status");
            (status, format!("run {run}")).into_response()
        }
    }
}

fn charged(run: usize) -> Response {
    let headers = [
        (header::CONTENT_TYPE, "application/json"),
        (header::LOCATION, "/charges/1"),
        (header::SET_COOKIE, "session=secret"),
        (header::CACHE_CONTROL, "no-store"),
    ];
    (StatusCode::CREATED, headers, format!(r#"{{"run":{run}}}"#)).into_response()
}
