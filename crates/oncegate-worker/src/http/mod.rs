//! Calls a worker by HTTP: one request per message or batch.
//!
//! | layer | files |
//! |---|---|
//! | what is sent at once | `batches` |
//! | the clients of a worker | `wire`, `trial` |
//! | connections | `tracked`, `tls`, `connect` |

mod batches;
mod connect;
mod tls;
mod tracked;
mod trial;
mod wire;

use std::error::Error;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use http_body_util::{BodyExt as _, Full, LengthLimitError, Limited};
use hyper::body::Incoming;
use hyper::header::HeaderValue;
use hyper::{Request, Response, Uri};
use oncegate_core::settings::TlsFiles;
use oncegate_runtime::Message;
use parking_lot::Mutex;
use tokio::time::Instant;

use self::connect::CONNECT_TIMEOUT;
use self::tracked::was_never_sent;

pub use self::tracked::RequestError;
pub use self::wire::{Endpoint, Way};
use crate::error::WorkerError;
use crate::protocol::answer::{self, ResponseBody};
use crate::protocol::call::{AttemptInfo, Call};
use crate::protocol::reply::Reply;
use crate::protocol::request::{self, RequestParts, Token, TokenSource};
use crate::report::WorkerReport;

/// The content type of messages without one, unless it is set.
const CONTENT_TYPE: &str = "application/octet-stream";

/// The settings of a worker behind HTTP.
#[derive(Clone, Debug, Default)]
pub struct HttpSettings {
    /// Called for each message: `http://127.0.0.1:8080/handle`, `https://worker/handle`, or
    /// `unix:/path/of/socket`.
    pub url: String,
    /// Requested by `GET` until it answers with 2xx, before the first message. Without it, a
    /// connection is tried.
    pub ready_url: Option<String>,
    /// Allows `http` to another machine, which is not encrypted.
    pub allow_remote: bool,
    /// The files of TLS, for `https` URLs.
    pub tls: TlsFiles,
    /// Sent as `Authorization: Bearer …`.
    pub token: Option<Arc<dyn TokenSource>>,
    /// The content type of messages without one; `application/octet-stream` if this is `None`.
    pub content_type: Option<String>,
    /// Uses only HTTP/2. Over TLS, HTTP/2 is used in any case with a worker that supports it.
    pub http2: bool,
    /// Also sends messages that are not CloudEvents as CloudEvents.
    pub cloudevents: bool,
}

/// Calls a worker by HTTP.
pub(crate) struct Caller {
    way: Way,
    /// The readiness URL, requested before the first message.
    ready: Option<Way>,
    told: RequestParts,
    result_max_bytes: usize,
    pacing: Pacing,
    report: WorkerReport,
}

impl Caller {
    /// The worker with these settings. A run begins with this lease, and larger results than
    /// `result_max_bytes` are not kept.
    ///
    /// # Errors
    /// When a setting is wrong, or a file that it names cannot be read.
    pub(crate) fn new(
        settings: &HttpSettings,
        lease: Duration,
        result_max_bytes: usize,
        report: &WorkerReport,
    ) -> Result<Self, WorkerError> {
        let content_type = settings.content_type.as_deref().unwrap_or(CONTENT_TYPE);
        let token = settings.token.clone().map(Token::of).transpose();
        let told = RequestParts {
            content_type: HeaderValue::try_from(content_type)
                .map_err(|_| WorkerError::ContentType(content_type.to_owned()))?,
            token: token.map_err(WorkerError::Settings)?.map(Arc::new),
            lease_ms: lease.as_millis(),
            cloudevents: settings.cloudevents,
        };
        let (way, ready) = ways(settings).map_err(WorkerError::Settings)?;
        Ok(Self {
            way,
            ready,
            told,
            result_max_bytes,
            pacing: Pacing::default(),
            report: report.clone(),
        })
    }

    /// Sends the message and waits for the answer.
    pub(crate) async fn call(
        &self,
        message: &Message,
        attempt: &AttemptInfo,
        call: &Call,
    ) -> Reply {
        self.pacing.wait().await;
        let request = match request::of(message, attempt, self.way.uri(), &self.told) {
            Ok(request) => request,
            Err(error) => {
                return Reply::DeadLetter {
                    reason: format!("it makes no request: {error}"),
                };
            }
        };
        let response = match self.send(request, call).await {
            Ok(response) => response,
            Err(reply) => return reply,
        };
        let (head, body) = response.into_parts();
        let body = Limited::new(body, self.result_max_bytes).collect().await;
        let body = match body {
            Ok(body) => ResponseBody::Whole(body.to_bytes()),
            Err(error) if error.is::<LengthLimitError>() => ResponseBody::TooLarge {
                most: self.result_max_bytes,
            },
            Err(error) => ResponseBody::CutShort(error.to_string()),
        };
        let now = SystemTime::now();
        self.pacing.note(answer::pause(&head, now));
        answer::outcome(&head, body, now)
    }

    /// Sends a request, for a message or a batch, and waits for the head of the answer.
    ///
    /// # Errors
    /// The reply that takes the answer's place: the worker was given nothing, or it did not answer.
    async fn send(
        &self,
        request: Request<Full<Bytes>>,
        call: &Call,
    ) -> Result<Response<Incoming>, Reply> {
        if !call.begin() {
            return Err(Reply::not_run(
                "the run was cancelled before the worker had the request",
            ));
        }
        match self.way.request(request).await {
            Ok(response) => {
                self.report.reached();
                Ok(response)
            }
            Err(error) => Err(self.unanswered(error)),
        }
    }

    /// Returns the reply that takes the place of an answer, and notes when the worker is gone.
    fn unanswered(&self, error: RequestError) -> Reply {
        let way = &self.way;
        let error = match error {
            RequestError::Client(error) => error,
            RequestError::Ended { was_used: false } => {
                return Reply::not_run(format!(
                    "the connection to the worker ended before the request ({way})"
                ));
            }
            RequestError::Ended { was_used: true } => {
                return Reply::unknown(format!("the worker did not answer: {error} ({way})"));
            }
        };
        let why = chain(&error);
        if error.is_connect() {
            let why = format!("the worker cannot be reached at {way}: {why}");
            self.report.unreachable(&why);
            return Reply::not_run(why);
        }
        // In the handshake, before the worker reads anything.
        if tls::is_refused(&error) {
            let why = format!(
                "the worker does not accept this client's certificate (`tls_certificate`) at {way}: {why}"
            );
            self.report.unreachable(&why);
            return Reply::not_run(why);
        }
        if was_never_sent(&error) {
            return Reply::not_run(format!(
                "the connection to the worker ended before the request: {why} ({way})"
            ));
        }
        // The request was sent, so it may have arrived.
        Reply::unknown(format!("the worker did not answer: {why} ({way})"))
    }

    /// Checks that the worker is ready: its readiness URL answers with 2xx or, without one, it
    /// accepts connections.
    pub(crate) async fn is_ready(&self) -> Result<(), String> {
        let Some(ready) = &self.ready else {
            let way = &self.way;
            let accepts = way.accepts().await;
            return accepts.map_err(|why| format!("{way} accepts no connection: {why}"));
        };
        let mut request = Request::new(Full::new(Bytes::new()));
        *request.uri_mut() = ready.uri().clone();
        if let Some(token) = &self.told.token {
            request
                .headers_mut()
                .insert(hyper::header::AUTHORIZATION, token.header());
        }
        let answered = tokio::time::timeout(CONNECT_TIMEOUT, ready.request(request)).await;
        match answered {
            Ok(Ok(response)) if response.status().is_success() => Ok(()),
            Ok(Ok(response)) => Err(format!("{ready} answers {}", response.status())),
            Ok(Err(error)) => Err(format!("{ready} does not answer: {}", chain(&error))),
            Err(_) => Err(format!("{ready} does not answer")),
        }
    }
}

/// The ways to a worker: to its URL, and to its readiness URL if it has one.
///
/// # Errors
/// As text, with the name of the setting.
fn ways(settings: &HttpSettings) -> Result<(Way, Option<Way>), String> {
    let worker = way(&settings.url, settings)?;
    let Some(url) = &settings.ready_url else {
        return Ok((worker, None));
    };
    let uri: Uri = url
        .parse()
        .map_err(|_| "`ready_url` is no URL".to_owned())?;
    let ready = worker
        .over_socket(uri)
        .map_or_else(|| way(url, settings), Ok);
    let ready = ready.map_err(|why| format!("`ready_url`: {why}"))?;
    Ok((worker, Some(ready)))
}

fn way(url: &str, settings: &HttpSettings) -> Result<Way, String> {
    let endpoint = Endpoint::parse(url, settings.allow_remote)?;
    Way::to(endpoint, settings.http2, &settings.tls)
}

/// Checks the URL of a worker: `http://host:port/path`, `https://host:port/path` or `unix:/path`.
/// Connects to nothing.
///
/// # Errors
/// When it cannot be parsed, or messages would be sent to another machine without encryption
/// although `allow_remote` is not set.
pub fn check_url(url: &str, allow_remote: bool) -> Result<(), WorkerError> {
    Endpoint::parse(url, allow_remote)
        .map(drop)
        .map_err(WorkerError::Settings)
}

impl fmt::Debug for Caller {
    /// Shows no token.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Caller")
            .field("way", &self.way)
            .finish_non_exhaustive()
    }
}

/// A pause of all messages that a worker has requested: the second `503` with a `Retry-After` in a
/// row concerns the worker, not a message. Runs that wait here keep their permits, which puts
/// back-pressure on the source.
#[derive(Debug, Default)]
struct Pacing(Mutex<(u32, Option<Instant>)>);

/// The longest pause that a worker can request.
const PACING_MOST: Duration = Duration::from_secs(60);

impl Pacing {
    async fn wait(&self) {
        let until = self.0.lock().1;
        if let Some(until) = until {
            tokio::time::sleep_until(until).await;
        }
    }

    /// Notes the pause that an answer requests, if it does.
    fn note(&self, pause: Option<Duration>) {
        let mut pacing = self.0.lock();
        let in_a_row = pause.map_or(0, |_| pacing.0.saturating_add(1));
        let until = pause
            .filter(|_| in_a_row >= 2)
            .map(|pause| Instant::now() + pause.min(PACING_MOST));
        *pacing = (in_a_row, until);
    }
}

/// The text of an error with its causes, each once.
fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}
