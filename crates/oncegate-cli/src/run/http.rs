//! Calls a worker by HTTP: one request per message.

use std::error::Error;
use std::fmt;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use http_body_util::{BodyExt as _, Full, LengthLimitError, Limited};
use hyper::body::Incoming;
use hyper::header::HeaderValue;
use hyper::{Request, Response, Uri};
use oncegate::Message;
use tokio::time::Instant;
use tracing::warn;

use super::tls::{self, TlsFiles};
use super::tracked::RequestError;
use super::wire::{CONNECT_TIMEOUT, Endpoint, Way};
use super::worker::{AttemptInfo, Call, Reply};
use super::{answer, request};
use crate::config::shape;
use crate::config::values::Secret;

/// Calls a worker by HTTP.
pub(crate) struct Caller {
    pub(super) way: Way,
    /// The readiness URL, requested before the first message.
    ready: Option<Way>,
    pub(super) told: request::RequestParts,
    result_max_bytes: usize,
    pub(super) pacing: Pacing,
}

impl Caller {
    /// The worker that the configuration names.
    ///
    /// # Errors
    /// As text, with the name of the setting.
    pub(crate) fn of(
        handler: &shape::Handler,
        told: request::RequestParts,
        result_max_bytes: usize,
    ) -> Result<Self, String> {
        let allow_remote = handler.allow_remote.unwrap_or(false);
        let http2 = handler.http2.unwrap_or(false);
        let files = TlsFiles::of(handler);
        let way = |url: &str| Way::to(Endpoint::parse(url, allow_remote)?, http2, &files);
        let worker = way(handler.http.as_deref().unwrap_or_default())?;
        let ready = match &handler.ready_url {
            None => None,
            Some(url) => {
                let uri: Uri = url
                    .parse()
                    .map_err(|_| "`ready_url` is no URL".to_owned())?;
                let ready = worker.over_socket(uri).map_or_else(|| way(url), Ok);
                Some(ready.map_err(|why| format!("`ready_url`: {why}"))?)
            }
        };
        Ok(Self {
            way: worker,
            ready,
            told,
            result_max_bytes,
            pacing: Pacing::default(),
        })
    }

    /// Sends the message and waits for the answer.
    pub(super) async fn call(
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
            Ok(body) => answer::ResponseBody::Whole(body.to_bytes()),
            Err(error) if error.is::<LengthLimitError>() => answer::ResponseBody::TooLarge {
                most: self.result_max_bytes,
            },
            Err(error) => answer::ResponseBody::CutShort(error.to_string()),
        };
        let reply = answer::outcome(&head, body, std::time::SystemTime::now());
        self.pacing.note(head.status, &reply);
        reply
    }

    /// Sends a request, for a message or a batch, and waits for the head of the answer.
    ///
    /// # Errors
    /// The reply that takes the answer's place: the worker was given nothing, or it did not answer.
    pub(super) async fn send(
        &self,
        request: Request<Full<Bytes>>,
        call: &Call,
    ) -> Result<Response<Incoming>, Reply> {
        if !call.begin() {
            return Err(Reply::not_run(
                "the run was cancelled before the worker had the request",
            ));
        }
        self.way.request(request).await.map_err(|error| {
            let error = match error {
                RequestError::Client(error) => error,
                RequestError::Ended { was_used: false } => {
                    return Reply::not_run("the connection to the worker ended before the request");
                }
                RequestError::Ended { was_used: true } => {
                    return Reply::unknown(format!("the worker did not answer: {error}"));
                }
            };
            if error.is_connect() {
                return Reply::not_run(format!("the worker cannot be reached: {}", chain(&error)));
            }
            // Said in the handshake, before the worker reads anything.
            if tls::is_refused(&error) {
                return Reply::not_run(format!(
                    "the worker does not accept this client's certificate (`tls_certificate`): {}",
                    chain(&error)
                ));
            }
            if was_never_sent(&error) {
                let why = chain(&error);
                return Reply::not_run(format!(
                    "the connection to the worker ended before the request: {why}"
                ));
            }
            // The request was sent, so it may have arrived.
            Reply::unknown(format!("the worker did not answer: {}", chain(&error)))
        })
    }

    /// Checks that the worker is ready: its readiness URL answers with 2xx or, without one, it
    /// accepts connections.
    pub(crate) async fn is_ready(&self) -> Result<(), String> {
        let Some(ready) = &self.ready else {
            return self.way.accepts().await;
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
            Ok(Ok(response)) => Err(format!("it answers {}", response.status())),
            Ok(Err(error)) => Err(chain(&error)),
            Err(_) => Err("it does not answer".to_owned()),
        }
    }
}

/// Returns whether the connection ended before anything of the request was written: hyper gives the
/// request back then. It happens when a worker closes a new connection at once, as one does that
/// has refused the client's certificate.
fn was_never_sent(error: &(dyn Error + 'static)) -> bool {
    let mut cause = Some(error);
    while let Some(error) = cause {
        if error
            .downcast_ref::<hyper::Error>()
            .is_some_and(hyper::Error::is_canceled)
        {
            return true;
        }
        cause = error.source();
    }
    false
}

impl fmt::Debug for Caller {
    /// Shows no token.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Caller")
            .field("way", &self.way)
            .finish_non_exhaustive()
    }
}

/// The token for a worker. If it is kept in a file, it is read again when the file changes.
pub(crate) struct Token {
    secret: Secret,
    read: Mutex<(HeaderValue, Option<SystemTime>)>,
}

impl Token {
    /// # Errors
    /// As text: the file or variable cannot be read, or is no token.
    pub(crate) fn of(secret: &Secret) -> Result<Self, String> {
        let changed_at = secret.changed_at();
        let header = bearer(&secret.resolve()?)?;
        Ok(Self {
            secret: secret.clone(),
            read: Mutex::new((header, changed_at)),
        })
    }

    /// The header's value. If the file has changed to something unusable, the former one is used.
    pub(crate) fn header(&self) -> HeaderValue {
        let mut read = self.read.lock().unwrap_or_else(PoisonError::into_inner);
        let changed_at = self.secret.changed_at();
        if changed_at != read.1 {
            match self.secret.resolve().and_then(|token| bearer(&token)) {
                Ok(header) => *read = (header, changed_at),
                Err(why) => warn!(why, "the changed token for the worker cannot be used"),
            }
        }
        read.0.clone()
    }
}

impl fmt::Debug for Token {
    /// Shows no token.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.secret.fmt(f)
    }
}

/// A header with a secret value, which never appears in a log.
fn bearer(token: &str) -> Result<HeaderValue, String> {
    let mut value = HeaderValue::try_from(format!("Bearer {}", token.trim()))
        .map_err(|_| "the token has characters that are not allowed in a header".to_owned())?;
    value.set_sensitive(true);
    Ok(value)
}

/// A pause of all messages that a worker has requested: the second `503` with a `Retry-After` in a
/// row concerns the worker, not a message. Runs that wait here keep their permits, which puts
/// back-pressure on the source.
#[derive(Debug, Default)]
pub(super) struct Pacing(Mutex<(u32, Option<Instant>)>);

/// The longest pause that a worker can request.
const PACING_MOST: Duration = Duration::from_secs(60);

impl Pacing {
    pub(super) async fn wait(&self) {
        let until = self.0.lock().unwrap_or_else(PoisonError::into_inner).1;
        if let Some(until) = until {
            tokio::time::sleep_until(until).await;
        }
    }

    pub(super) fn note(&self, status: hyper::StatusCode, reply: &Reply) {
        let mut pacing = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        *pacing = match reply {
            Reply::Retry {
                delay: Some(delay), ..
            } if status == hyper::StatusCode::SERVICE_UNAVAILABLE => {
                let in_a_row = pacing.0.saturating_add(1);
                (
                    in_a_row,
                    (in_a_row >= 2).then(|| Instant::now() + (*delay).min(PACING_MOST)),
                )
            }
            _ => (0, None),
        };
    }
}

/// The text of an error with its causes, each once.
pub(super) fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}
