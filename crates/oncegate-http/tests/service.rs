//! The layer as a tower service, called without a server.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::future::{pending, poll_fn};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use futures_util::future::BoxFuture;
use http::{HeaderValue, Request, Response, StatusCode};
use http_body::{Body as HttpBody, Frame};
use http_body_util::{BodyExt as _, Empty, Full};
use oncegate::core::rules::{Operation, Reply};
use oncegate::core::store::StoreWrapper;
use oncegate::core::store::{Command, Store, StoreError};
use oncegate::http::{Body, Idempotency, IdempotencyLayer, Principal, request_gate};
use oncegate::{BoxError, MemoryStore};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{advance, timeout};
use tokio_util::sync::PollSemaphore;
use tower_layer::Layer as _;
use tower_service::Service;

/// Responds with the size of the request's body. A permit limits how many do so at once, like
/// tower's `ConcurrencyLimit`.
struct Limited {
    permits: PollSemaphore,
    permit: Option<OwnedSemaphorePermit>,
}

impl Limited {
    fn new(permits: usize) -> Self {
        Self {
            permits: PollSemaphore::new(Arc::new(Semaphore::new(permits))),
            permit: None,
        }
    }
}

impl Clone for Limited {
    fn clone(&self) -> Self {
        Self {
            permits: self.permits.clone(),
            permit: None,
        }
    }
}

impl Service<Request<Body>> for Limited {
    type Response = Response<Body>;
    type Error = BoxError;
    type Future = BoxFuture<'static, Result<Response<Body>, BoxError>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        if self.permit.is_none() {
            self.permit = ready!(self.permits.poll_acquire(context));
        }
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let permit = self.permit.take().expect("it is ready");
        Box::pin(async move {
            let body = request.into_body().collect().await?.to_bytes();
            drop(permit);
            Ok(Response::new(Body::from(Bytes::from(
                body.len().to_string(),
            ))))
        })
    }
}

fn layer() -> IdempotencyLayer {
    IdempotencyLayer::new(
        request_gate("payments", MemoryStore::new()),
        Principal::single_tenant(),
    )
}

fn second() -> Request<Full<Bytes>> {
    post("second", Full::new(Bytes::from_static(b"12345")))
}

// invariant: stalled-upload
#[tokio::test(start_paused = true)]
async fn bodies_beyond_the_memory_are_refused_until_others_have_ended() {
    let service = layer()
        .max_request_bytes(10)
        .max_buffered_bytes(10)
        .layer(Limited::new(1));
    let stalled = Pieces::new(6);
    let sent = Arc::clone(&stalled.sent);
    let end = stalled.end.clone();
    let first = {
        let service = service.clone();
        tokio::spawn(async move { call(&service, post("first", stalled)).await })
    };
    drop(sent.acquire().await.unwrap());
    let refused = call(&service, second()).await;
    assert_eq!(refused.status(), StatusCode::SERVICE_UNAVAILABLE);
    end.add_permits(1);
    assert_eq!(first.await.unwrap().status(), StatusCode::OK);
    assert_eq!(call(&service, second()).await.status(), StatusCode::OK);
}

// invariant: stalled-upload
#[tokio::test(start_paused = true)]
async fn one_caller_cannot_take_the_memory_of_all_others() {
    let principal = Principal::from_fn(|request| {
        Some(request.headers.get("caller")?.to_str().ok()?.to_owned())
    });
    let layer = IdempotencyLayer::new(request_gate("payments", MemoryStore::new()), principal);
    let service = layer
        .max_request_bytes(10)
        .max_buffered_bytes(20)
        .layer(Limited::new(9));
    let stalled = Pieces::new(6);
    let sent = Arc::clone(&stalled.sent);
    let end = stalled.end.clone();
    let first = {
        let service = service.clone();
        let request = of("greedy", post("first", stalled));
        tokio::spawn(async move { call(&service, request).await })
    };
    drop(sent.acquire().await.unwrap());
    // Half of the memory is its share, and half of that is left.
    let refused = call(&service, of("greedy", second())).await;
    assert_eq!(refused.status(), StatusCode::TOO_MANY_REQUESTS);
    assert!(refused.headers().contains_key("retry-after"));
    assert_eq!(
        call(&service, of("other", second())).await.status(),
        StatusCode::OK
    );
    end.add_permits(1);
    assert_eq!(first.await.unwrap().status(), StatusCode::OK);
    assert_eq!(
        call(&service, of("greedy", second())).await.status(),
        StatusCode::OK
    );
}

/// A store that can be away: then claims get no answer. Counts the claims.
#[derive(Debug, Default)]
struct AwayStore {
    inner: MemoryStore,
    away: AtomicBool,
    claims: AtomicUsize,
}

#[async_trait]
impl StoreWrapper for AwayStore {
    fn inner(&self) -> &dyn Store {
        &self.inner
    }

    async fn execute(&self, commands: Vec<Command>) -> Vec<Result<Reply, StoreError>> {
        if matches!(
            commands.first(),
            Some(Command {
                operation: Operation::Claim { .. },
                ..
            })
        ) {
            self.claims.fetch_add(1, SeqCst);
        }
        if self.away.load(SeqCst) {
            pending::<()>().await;
        }
        self.inner.execute(commands).await
    }
}

#[tokio::test(start_paused = true)]
async fn not_every_request_waits_for_a_store_that_is_away() {
    let store = Arc::new(AwayStore::default());
    let gate = request_gate("payments", Arc::clone(&store)).simulated(1);
    let layer = IdempotencyLayer::new(gate, Principal::single_tenant());
    layer.open().await.unwrap();
    let service = layer.layer(Limited::new(1));
    let status = async |key: &str| call(&service, post(key, Empty::new())).await.status();
    store.away.store(true, SeqCst);
    for n in 0..50 {
        assert_eq!(
            status(&format!("k{n}")).await,
            StatusCode::SERVICE_UNAVAILABLE
        );
    }
    assert_eq!(
        store.claims.load(SeqCst),
        5,
        "requests that waited for the store"
    );
    store.away.store(false, SeqCst);
    assert_eq!(status("early").await, StatusCode::SERVICE_UNAVAILABLE);
    advance(Duration::from_secs(1)).await;
    assert_eq!(status("probe").await, StatusCode::OK);
    assert_eq!(status("next").await, StatusCode::OK);
}

/// Layers outside of this one, such as tower-http's `TimeoutLayer`, require a default of a body.
#[tokio::test]
async fn a_body_has_a_default() {
    async fn status<S, B: Default + HttpBody>(mut service: S) -> usize
    where
        S: Service<Request<Empty<Bytes>>, Response = Response<B>, Error = BoxError>,
    {
        let response = service.call(post("k", Empty::new())).await.unwrap();
        let timed_out = response.map(|_| B::default());
        timed_out
            .into_body()
            .size_hint()
            .exact()
            .and_then(|bytes| usize::try_from(bytes).ok())
            .unwrap()
    }
    assert_eq!(status(layer().layer(Limited::new(1))).await, 0);
}

/// The request of this caller.
fn of<B>(caller: &'static str, mut request: Request<B>) -> Request<B> {
    request
        .headers_mut()
        .insert("caller", HeaderValue::from_static(caller));
    request
}

fn post<B>(key: &str, body: B) -> Request<B> {
    Request::post("/charges")
        .header("idempotency-key", key)
        .body(body)
        .unwrap()
}

async fn call<S, B>(service: &Idempotency<S>, request: Request<B>) -> Response<Body>
where
    S: Service<Request<Body>, Response = Response<Body>, Error = BoxError>
        + Clone
        + Send
        + Sync
        + 'static,
    S::Future: Send + 'static,
    B: HttpBody<Data = Bytes> + Send + 'static,
    B::Error: Into<BoxError>,
{
    let mut service = service.clone();
    poll_fn(|context| Service::<Request<B>>::poll_ready(&mut service, context))
        .await
        .unwrap();
    service.call(request).await.unwrap()
}

/// A body that ends only when the gate is open, after `bytes` pieces of one byte.
struct Pieces {
    left: usize,
    sent: Arc<Semaphore>,
    end: PollSemaphore,
}

impl Pieces {
    fn new(left: usize) -> Self {
        Self {
            left,
            sent: Arc::new(Semaphore::new(0)),
            end: PollSemaphore::new(Arc::new(Semaphore::new(0))),
        }
    }
}

impl HttpBody for Pieces {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        if let Some(left) = self.left.checked_sub(1) {
            self.left = left;
            return Poll::Ready(Some(Ok(Frame::data(Bytes::from_static(b"x")))));
        }
        self.sent.add_permits(1);
        drop(ready!(self.end.poll_acquire(context)));
        Poll::Ready(None)
    }
}

// invariant: stalled-upload
#[tokio::test(start_paused = true)]
async fn a_stalled_upload_holds_no_permit_of_the_inner_service() {
    let service = layer().layer(Limited::new(1));
    let stalled = Pieces::new(1);
    let sent = Arc::clone(&stalled.sent);
    let slow = {
        let service = service.clone();
        tokio::spawn(async move { call(&service, post("slow", stalled)).await })
    };
    drop(sent.acquire().await.unwrap());
    // Time passes only while nothing else can be done: while this request waits for the upload.
    let other = timeout(
        Duration::from_secs(1),
        call(&service, post("other", Empty::new())),
    )
    .await;
    assert_eq!(other.unwrap().status(), StatusCode::OK);
    slow.abort();
}

/// The memory that this process occupies.
fn resident_bytes() -> usize {
    const PAGE_BYTES: usize = 4096;
    let pages = std::fs::read_to_string("/proc/self/statm").unwrap();
    pages.split(' ').nth(1).unwrap().parse::<usize>().unwrap() * PAGE_BYTES
}

#[tokio::test]
async fn a_body_in_pieces_of_one_byte_takes_the_memory_of_its_bytes() {
    const BODY_BYTES: usize = 1024 * 1024;
    let service = layer().layer(Limited::new(1));
    let pieces = Pieces::new(BODY_BYTES);
    let sent = Arc::clone(&pieces.sent);
    let end = pieces.end.clone();
    let before = resident_bytes();
    let answered = tokio::spawn(async move { call(&service, post("pieces", pieces)).await });
    drop(sent.acquire().await.unwrap());
    let taken = resident_bytes().saturating_sub(before);
    assert!(
        taken < 16 * BODY_BYTES,
        "{taken} bytes for a body of {BODY_BYTES}"
    );
    end.add_permits(1);
    let body = answered
        .await
        .unwrap()
        .into_body()
        .collect()
        .await
        .unwrap()
        .to_bytes();
    assert_eq!(body, BODY_BYTES.to_string());
}

/// Never responds, and counts its calls.
#[derive(Clone, Debug, Default)]
struct Hangs(Arc<AtomicUsize>);

impl Service<Request<Body>> for Hangs {
    type Response = Response<Body>;
    type Error = BoxError;
    type Future = BoxFuture<'static, Result<Response<Body>, BoxError>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Request<Body>) -> Self::Future {
        self.0.fetch_add(1, SeqCst);
        Box::pin(pending())
    }
}

// invariant: outcome-unknown
#[tokio::test(start_paused = true)]
async fn a_request_without_an_outcome_is_not_handled_again() {
    let lease = Duration::from_secs(1);
    let gate = request_gate("payments", MemoryStore::new())
        .lease(lease)
        .max_run(lease)
        .after_unknown(oncegate::AfterUnknown::GiveUp);
    let handler = Hangs::default();
    let service = IdempotencyLayer::new(gate, Principal::single_tenant()).layer(handler.clone());
    let unanswered = call(&service, second()).await;
    assert!(unanswered.status().is_server_error(), "{unanswered:?}");
    advance(lease * 10).await;
    for _ in 0..2 {
        let undecided = call(&service, second()).await;
        assert_eq!(undecided.status(), StatusCode::CONFLICT);
        let body = undecided.into_body().collect().await.unwrap().to_bytes();
        let problem = String::from_utf8(body.to_vec()).unwrap();
        assert!(problem.contains("outcome-undecided"), "{problem}");
    }
    assert_eq!(handler.0.load(SeqCst), 1);
}

#[tokio::test(start_paused = true)]
async fn failing_open_and_giving_up_exclude_each_other() {
    let gate =
        request_gate("payments", MemoryStore::new()).after_unknown(oncegate::AfterUnknown::GiveUp);
    let layer = IdempotencyLayer::new(gate, Principal::single_tenant()).fail_open();
    let refused = call(&layer.layer(Limited::new(1)), second()).await;
    assert_eq!(refused.status(), StatusCode::INTERNAL_SERVER_ERROR);
}
