//! The way of a request through a webhook.

use std::fmt;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::{Bytes, BytesMut};
use futures_util::future::BoxFuture;
use http::header::RETRY_AFTER;
use http::{HeaderName, HeaderValue, Method, Request, Response, StatusCode, request};
use http_body::Body as HttpBody;
use http_body_util::BodyExt as _;
use oncegate_core::settings::Finding;
use oncegate_core::store::Checkup;
use oncegate_http::{DoneBefore, IdempotencyLayer, Principal, Settle};
use oncegate_runtime::failure::BoxError;
use oncegate_runtime::gate::{Gate, GateError};
use oncegate_runtime::observe::Event;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, timeout_at};
use tower_layer::Layer as _;
use tower_service::Service;
use tracing::{info, warn};

use super::problem::EventProblem;
use super::secrets::Secrets;
use super::settings::Preset;
use super::signatures::{Delivery, Genuine, Refusal, Secret, verify};
use crate::{Body, Door};

const KEY: HeaderName = HeaderName::from_static("idempotency-key");
/// The layer adds it to what a handler has answered, and to what it repeats.
const KEPT: HeaderName = HeaderName::from_static("idempotency-expires");

/// The time for a body to arrive.
const READ_TIMEOUT: Duration = Duration::from_secs(30);
const DEFAULT_MAX_REQUEST_BYTES: usize = 1024 * 1024;
const DEFAULT_MAX_BUFFERED_BYTES: usize = 256 * 1024 * 1024;
/// The number of attempts that a record can count: a provider ends its retries long before.
const MAX_ATTEMPTS: u32 = 254;
/// The longest key that stands in a header as it is; a longer one becomes a digest.
const MAX_KEY_BYTES: usize = 255;

type Handle = dyn Fn(IdempotencyLayer, Request<Body>) -> BoxFuture<'static, Result<Response<Body>, BoxError>>
    + Send
    + Sync;

/// A door for the events of one provider. Cheap to clone; clones share everything.
#[derive(Clone)]
pub struct Webhook {
    preset: Arc<Preset>,
    secrets: Arc<Secrets>,
    layer: IdempotencyLayer,
    handle: Arc<Handle>,
    max_request_bytes: usize,
    /// The bytes that bodies may still take, before it is known who has sent them.
    memory: Arc<Semaphore>,
}

/// The reason that a webhook does not start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WebhookError {
    /// A setting makes no sense.
    #[error("{}", .0.what)]
    Setting(Finding),
    /// A secret cannot be read. The text has the file, and nothing of what it has.
    #[error("{0}")]
    Secret(String),
    /// The gate cannot be opened.
    #[error(transparent)]
    Gate(#[from] GateError),
}

impl Webhook {
    /// A door over a gate made by [`event_gate`](oncegate_http::event_gate), whose scope is the
    /// name of the door. `handler` gets each event once, with its id as `Idempotency-Key` and the
    /// [`Attempt`](oncegate_http::Attempt) as an extension.
    ///
    /// A handler that answers 2xx has handled the event. With any other status, an error or a panic
    /// it has failed, and the provider's next delivery runs it again. After 408 and 504 it is not
    /// known what it did: the key stays taken until its lease is over, and the next attempt is
    /// [recovered](oncegate_http::Attempt::recovered). A [`Settle`] in the response overrides this.
    pub fn new<S, Out>(gate: Gate, preset: Preset, handler: S) -> Self
    where
        S: Service<Request<Body>, Response = Response<Out>> + Clone + Send + Sync + 'static,
        S::Future: Send + 'static,
        S::Error: Into<BoxError> + Send + 'static,
        Out: HttpBody<Data = Bytes> + Send + 'static,
        Out::Error: Into<BoxError>,
    {
        let secrets = Secrets::new(gate.scope(), &preset);
        // Who has sent an event is what the signature says; all of them share the keys.
        let layer = IdempotencyLayer::new(gate, Principal::single_tenant())
            .max_request_bytes(DEFAULT_MAX_REQUEST_BYTES)
            .max_attempts(MAX_ATTEMPTS);
        Self {
            preset: Arc::new(preset),
            secrets,
            layer,
            handle: around(handler),
            max_request_bytes: DEFAULT_MAX_REQUEST_BYTES,
            memory: Arc::new(Semaphore::new(DEFAULT_MAX_BUFFERED_BYTES)),
        }
    }

    /// The largest request body: 1 MiB by default, up to 64 MiB. Larger ones get 413.
    #[must_use]
    pub fn max_request_bytes(mut self, bytes: usize) -> Self {
        self.max_request_bytes = bytes;
        self.layer = self.layer.max_request_bytes(bytes);
        self
    }

    /// The most bytes of request bodies in memory at once, before their signatures are known: 256
    /// MiB by default, up to 4 GiB. A request whose body does not fit gets 503. At least
    /// [`max_request_bytes`](Self::max_request_bytes).
    #[must_use]
    pub fn max_buffered_bytes(mut self, bytes: usize) -> Self {
        let most = Semaphore::MAX_PERMITS.min(u32::MAX as usize);
        self.memory = Arc::new(Semaphore::new(bytes.min(most)));
        self.layer = self.layer.max_buffered_bytes(bytes);
        self
    }

    /// The most handlers that run at once: 1,024 by default. Further events get 503.
    #[must_use]
    pub fn max_in_flight(mut self, handlers: usize) -> Self {
        self.layer = self.layer.max_in_flight(handlers);
        self
    }

    /// Returns the name of the door: the scope of its gate.
    pub fn name(&self) -> &str {
        self.layer.gate().scope()
    }

    /// Checks the settings, reads the secrets and opens the gate.
    ///
    /// # Errors
    /// The text names the setting or the file, and what to change.
    pub async fn open(&self) -> Result<Checkup, WebhookError> {
        let retention = self.layer.gate().retention_period();
        if let Some(finding) = self.preset.check(retention).into_iter().next() {
            return Err(WebhookError::Setting(finding));
        }
        self.secrets.check().await.map_err(WebhookError::Secret)?;
        if matches!(*self.preset, Preset::None(_)) {
            warn!(
                door = self.name(),
                "events are not signed: anyone who reaches this address can send them"
            );
        }
        Ok(self.layer.open().await?)
    }

    /// Shuts down: accepts no new events, waits until no handler runs, and cancels those that still
    /// run after `deadline`. Returns how many were cancelled.
    pub async fn drain(&self, deadline: Duration) -> usize {
        self.layer.drain(deadline).await
    }

    async fn serve(&self, request: Request<Body>) -> Response<Body> {
        let version = request.version();
        match self.admit(request).await {
            Ok(Admitted::Event(request, _memory)) => self.handled(*request).await,
            Ok(Admitted::Challenge(text)) => {
                self.note("challenge");
                Response::new(Body::from(Bytes::from(text)))
            }
            Err(problem) => {
                self.note(problem.name());
                problem.response(version)
            }
        }
    }

    /// Verifies a request. Nothing of a request that is refused reaches the store.
    async fn admit(&self, request: Request<Body>) -> Result<Admitted, EventProblem> {
        let (mut parts, body) = request.into_parts();
        // Other methods change nothing by their meaning, and the layer would let them pass.
        if parts.method != Method::POST {
            return Err(EventProblem::MethodNotAllowed);
        }
        let (body, memory) = self.read(body).await?;
        let secrets = self.secrets.current().await;
        if secrets.is_empty() && !matches!(*self.preset, Preset::None(_)) {
            return Err(EventProblem::SecretsMissing);
        }
        let verified = self.verify(&parts, &body, &secrets);
        let door = self.name();
        match verified {
            Ok(Genuine::Event(id)) => {
                let Ok(key) = HeaderValue::try_from(format!("\"{}\"", key(&id))) else {
                    // It is made of ASCII.
                    return Err(EventProblem::EventWithoutId(
                        "its id cannot be a key".to_owned(),
                    ));
                };
                parts.headers.insert(KEY, key);
                let request = Request::from_parts(parts, Body::from(body));
                Ok(Admitted::Event(Box::new(request), memory))
            }
            Ok(Genuine::Challenge(text)) => Ok(Admitted::Challenge(text)),
            Err(Refusal::NotGenuine(reason)) => {
                info!(
                    door,
                    reason, "a request is refused, because its signature is"
                );
                Err(EventProblem::SignatureRefused(reason))
            }
            Err(Refusal::NoId(reason)) => {
                warn!(
                    door,
                    reason, "a genuine event is refused, because it has no id"
                );
                Err(EventProblem::EventWithoutId(reason))
            }
        }
    }

    fn verify(
        &self,
        parts: &request::Parts,
        body: &Bytes,
        secrets: &[Secret],
    ) -> Result<Genuine, Refusal> {
        let url = match &*self.preset {
            Preset::Twilio(twilio) => match parts.uri.query() {
                Some(query) => format!("{}?{query}", twilio.url),
                None => twilio.url.clone(),
            },
            _ => String::new(),
        };
        // A clock before 1970 makes every signed time wrong, and the refusal says so.
        let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH);
        let now_unix_ms = since_1970.map_or(0, |it| u64::try_from(it.as_millis()).unwrap_or(0));
        let delivery = Delivery {
            headers: &parts.headers,
            body,
            url: &url,
            now_unix_ms,
        };
        verify(&self.preset, secrets, &delivery)
    }

    /// Reads the body, as long as there is memory for it.
    async fn read(
        &self,
        mut body: Body,
    ) -> Result<(Bytes, Option<OwnedSemaphorePermit>), EventProblem> {
        let limit_bytes = self.max_request_bytes;
        let too_large = EventProblem::RequestTooLarge { limit_bytes };
        let announced = HttpBody::size_hint(&body).lower();
        if usize::try_from(announced).is_ok_and(|bytes| bytes > limit_bytes) {
            return Err(too_large);
        }
        let deadline = Instant::now() + READ_TIMEOUT;
        let mut whole = BytesMut::new();
        let mut memory: Option<OwnedSemaphorePermit> = None;
        loop {
            let frame = match timeout_at(deadline, body.frame()).await {
                Err(_elapsed) => return Err(EventProblem::RequestTooSlow),
                Ok(None) => return Ok((whole.freeze(), memory)),
                Ok(Some(Err(_))) => return Err(EventProblem::RequestBroken),
                Ok(Some(Ok(frame))) => frame,
            };
            let Ok(data) = frame.into_data() else {
                continue;
            };
            if data.len() > limit_bytes.saturating_sub(whole.len()) {
                return Err(too_large);
            }
            let bytes = u32::try_from(data.len()).map_err(|_| too_large.clone())?;
            let taken = Arc::clone(&self.memory)
                .try_acquire_many_owned(bytes)
                .map_err(|_| EventProblem::Overloaded)?;
            match &mut memory {
                Some(memory) => memory.merge(taken),
                None => memory = Some(taken),
            }
            whole.extend_from_slice(&data);
        }
    }

    /// Handles an event once, and answers so that the provider knows whether to send it again.
    async fn handled(&self, request: Request<Body>) -> Response<Body> {
        let version = request.version();
        let response = match (self.handle)(self.layer.clone(), request).await {
            Ok(response) => response,
            Err(error) => {
                warn!(door = self.name(), %error, "a handler has failed without an answer");
                return EventProblem::HandlerFailed.response(version);
            }
        };
        // What a handler has completed is its own answer.
        if response.status() != StatusCode::CONFLICT || response.headers().contains_key(KEPT) {
            return response;
        }
        if response.headers().contains_key(RETRY_AFTER) {
            // Some providers take a 4xx for final.
            return EventProblem::InProgress.response(version);
        }
        if response.extensions().get::<DoneBefore>().is_some() {
            // What it answered was too large to keep. A provider needs the status.
            return Response::new(Body::empty());
        }
        // Given up, perhaps without an outcome: never a success.
        EventProblem::Undecided.response(version)
    }

    fn note(&self, answer: &'static str) {
        let gate = self.layer.gate();
        gate.observe(Event::Answered {
            scope: gate.scope(),
            answer,
        });
    }
}

/// The handler within a layer, whose settings may still change, with its type left out.
fn around<S, Out>(handler: S) -> Arc<Handle>
where
    S: Service<Request<Body>, Response = Response<Out>> + Clone + Send + Sync + 'static,
    S::Future: Send + 'static,
    S::Error: Into<BoxError> + Send + 'static,
    Out: HttpBody<Data = Bytes> + Send + 'static,
    Out::Error: Into<BoxError>,
{
    Arc::new(move |layer: IdempotencyLayer, request| {
        let mut service = layer.layer(Judged(handler.clone()));
        Box::pin(async move { service.call(request).await.map_err(Into::into) })
    })
}

/// A genuine request.
enum Admitted {
    /// The event, with its id as `Idempotency-Key`, and the memory that its body takes.
    Event(Box<Request<Body>>, Option<OwnedSemaphorePermit>),
    Challenge(String),
}

impl Door for Webhook {
    fn answer(&self, request: Request<Body>) -> BoxFuture<'static, Response<Body>> {
        let this = self.clone();
        Box::pin(async move { this.serve(request).await })
    }
}

impl fmt::Debug for Webhook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Webhook")
            .field("preset", &self.preset.name())
            .field("layer", &self.layer)
            .finish_non_exhaustive()
    }
}

/// The key of an event: the parts of its id with commas between them. What could be mistaken for a
/// comma is escaped, so different ids have different keys.
fn key(id: &[String]) -> String {
    const PLAIN: &AsciiSet = &NON_ALPHANUMERIC
        .remove(b'-')
        .remove(b'_')
        .remove(b'.')
        .remove(b'/')
        .remove(b'~');
    let parts: Vec<String> = id
        .iter()
        .map(|part| utf8_percent_encode(part, PLAIN).to_string())
        .collect();
    let key = parts.join(",");
    if key.len() <= MAX_KEY_BYTES {
        key
    } else {
        // A colon is escaped above, so no id is equal to a digest.
        format!("blake3:{}", blake3::hash(key.as_bytes()).to_hex())
    }
}

/// A handler whose answers say what becomes of the event.
#[derive(Clone)]
struct Judged<S>(S);

impl<S, Out> Service<Request<Body>> for Judged<S>
where
    S: Service<Request<Body>, Response = Response<Out>> + Clone + Send + 'static,
    S::Future: Send + 'static,
{
    type Response = Response<Out>;
    type Error = S::Error;
    type Future = BoxFuture<'static, Result<Response<Out>, S::Error>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.0.poll_ready(context)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let answer = self.0.call(request);
        Box::pin(async move { answer.await.map(judged) })
    }
}

/// Marks a failure as one, and gives it a status that makes the provider send the event again.
fn judged<Out>(mut response: Response<Out>) -> Response<Out> {
    let status = response.status();
    let word = response.extensions().get::<Settle>().copied();
    if status.is_success() || matches!(word, Some(Settle::Complete | Settle::Fail)) {
        return response;
    }
    let status = match status {
        // What it did is not known, in either case.
        StatusCode::REQUEST_TIMEOUT => StatusCode::GATEWAY_TIMEOUT,
        StatusCode::GONE | StatusCode::TOO_MANY_REQUESTS => status,
        _ if status.is_server_error() => status,
        _ => StatusCode::BAD_GATEWAY,
    };
    *response.status_mut() = status;
    if word.is_none() && status != StatusCode::GATEWAY_TIMEOUT {
        response.extensions_mut().insert(Settle::Retry);
    }
    response
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    #[test]
    fn different_ids_have_different_keys() {
        let id = |parts: &[&str]| parts.iter().map(ToString::to_string).collect::<Vec<_>>();
        assert_eq!(key(&id(&["evt_1"])), "evt_1");
        assert_eq!(
            key(&id(&["shop.example", "orders/paid", "a-1"])),
            "shop.example,orders/paid,a-1"
        );
        let long = "a".repeat(300);
        let all = [
            id(&["a", "b"]),
            id(&["a,b"]),
            id(&["a%2Cb"]),
            id(&["a", "", "b"]),
            id(&["ab"]),
            id(&["a\"b"]),
            id(&["ä"]),
            id(&["a\0b"]),
            id(&[&long]),
            id(&[&long, "a"]),
            id(&[&format!("{long}a")]),
            vec![key(&id(&[&long]))],
        ];
        let keys: HashMap<String, usize> = all
            .iter()
            .enumerate()
            .map(|(place, id)| (key(id), place))
            .collect();
        assert_eq!(keys.len(), all.len());
        for key in keys.keys() {
            assert!(
                key.len() <= MAX_KEY_BYTES
                    && key
                        .bytes()
                        .all(|it| it.is_ascii_graphic() && it != b'"' && it != b'\\'),
                "{key}"
            );
        }
    }
}
