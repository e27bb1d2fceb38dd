//! The service behind a proxy: what is sent to it, and what its answers mean for a key.
//!
//! # Not obvious
//!
//! - The client gives a request back only if nothing of it was written, and only then sends it
//!   again on another connection. Everything else that breaks is unknown.
//! - 502, 503 and 504 often come from another proxy behind this one, which does not know either
//!   whether the request arrived.
//! - A response whose body breaks off has had its status: the layer records it as done.

use std::convert::Infallible;
use std::fmt;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use futures_util::future::BoxFuture;
use http::header::{CONTENT_LENGTH, HeaderName};
use http::{HeaderValue, Method, Request, Response, StatusCode, Version};
use http_body::Body as _;
use hyper::body::Incoming;
use hyper::upgrade::OnUpgrade;
use oncegate_core::settings::TlsFiles;
use oncegate_http::{Attempt, Settle};
use oncegate_worker::client::{Endpoint, RequestError, Way};
use tower_service::Service;
use tracing::{info, warn};

use super::flowing::{Flowing, Progress};
use super::headers::{HostNames, for_service, remove_hop, uri_at};
use super::tunnel::{self, Tunnels};
use crate::answers::Answer;
use crate::{Body, Peer};

/// Tells the service which attempt of the request this is: `1`, or `2; recovered` when an earlier
/// one may have had its effect.
const ATTEMPT: HeaderName = HeaderName::from_static("oncegate-attempt");

/// A key that is the same for all attempts of a request, and for no other request: for the service
/// to pass on.
const SERVICE_KEY: HeaderName = HeaderName::from_static("oncegate-key");

/// The step that the service's key is for.
const STEP: &str = "upstream";

/// The settings of the service behind a proxy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UpstreamSettings {
    /// `http://127.0.0.1:3000`, `https://service` or `unix:/path/of/socket`, without a path.
    pub url: String,
    /// Allows `http` to another machine, which is not encrypted.
    pub allow_remote: bool,
    /// Uses only HTTP/2. Over TLS, HTTP/2 is used in any case with a service that supports it.
    pub http2: bool,
    /// The files of TLS, for `https`.
    pub tls: TlsFiles,
    /// The time until a response begins. After that it is 504, and the outcome is unknown.
    pub timeout: Duration,
    /// The longest pause within a body that streams through.
    pub idle_timeout: Duration,
    /// The header with the caller of a request, which reaches the service even if `Connection`
    /// names it.
    pub caller_header: Option<HeaderName>,
}

impl UpstreamSettings {
    /// The default of [`timeout`](Self::timeout): a minute.
    pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(60);
    /// The default of [`idle_timeout`](Self::idle_timeout): a minute.
    pub const DEFAULT_IDLE_TIMEOUT: Duration = Duration::from_secs(60);

    /// The service at this URL, with the defaults: no plain HTTP to another machine, the
    /// authorities of this machine for TLS, and a minute for each time limit.
    pub fn at(url: impl Into<String>) -> Self {
        Self {
            url: url.into(),
            allow_remote: false,
            http2: false,
            tls: TlsFiles::NONE,
            timeout: Self::DEFAULT_TIMEOUT,
            idle_timeout: Self::DEFAULT_IDLE_TIMEOUT,
            caller_header: None,
        }
    }
}

/// A tower service that sends requests to the service behind a proxy. Cheap to clone.
#[derive(Clone)]
pub struct Upstream(Arc<Inner>);

struct Inner {
    way: Way<Flowing<Body>>,
    names: HostNames,
    timeout: Duration,
    idle_timeout: Duration,
    caller_header: Option<HeaderName>,
    tunnels: Tunnels,
}

impl Upstream {
    /// The service with these settings. Connects to nothing.
    ///
    /// # Errors
    /// As text: the URL cannot be used, or a file of TLS cannot be read.
    pub fn new(settings: &UpstreamSettings) -> Result<Self, String> {
        let endpoint = Endpoint::parse(&settings.url, settings.allow_remote)?;
        if let Endpoint::Tcp(uri) | Endpoint::Tls(uri) = &endpoint
            && (uri.path() != "/" || uri.query().is_some())
        {
            return Err(
                "it has a path: requests reach the service with the path that the client sends"
                    .to_owned(),
            );
        }
        let names = match &endpoint {
            Endpoint::Tls(_) => HostNames::OfService,
            _ if settings.http2 => HostNames::OfService,
            _ => HostNames::OfClient,
        };
        let way = Way::to(endpoint, settings.http2, &settings.tls)?.distrusting_failures();
        Ok(Self(Arc::new(Inner {
            way,
            names,
            timeout: settings.timeout,
            idle_timeout: settings.idle_timeout,
            caller_header: settings.caller_header.clone(),
            tunnels: Tunnels::default(),
        })))
    }

    /// Closes the connections that have changed their protocol, such as WebSockets.
    pub(super) fn close_tunnels(&self) {
        self.0.tunnels.close();
    }
}

impl Service<Request<Body>> for Upstream {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<'static, Result<Response<Body>, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let inner = Arc::clone(&self.0);
        Box::pin(async move { Ok(inner.send(request).await) })
    }
}

impl Inner {
    async fn send(&self, mut request: Request<Body>) -> Response<Body> {
        if request.method() == Method::CONNECT {
            return Answer::NoTunnel.response();
        }
        let attempt = request.extensions().get::<Attempt>().cloned();
        let protocol = tunnel::wanted(&request).filter(|_| attempt.is_none());
        let upgrade = protocol.is_some().then(|| hyper::upgrade::on(&mut request));
        let Some(mut request) = self.prepared(request, attempt.as_ref()) else {
            return Answer::NoDoor.response();
        };
        if let Some(protocol) = protocol {
            tunnel::put(request.headers_mut(), protocol);
        }
        let (parts, body) = request.into_parts();
        let body = Flowing::new(body, self.idle_timeout);
        let progress = body.progress();
        let sending = self.way.request(Request::from_parts(parts, body));
        let answered = tokio::select! {
            biased;
            answered = sending => Some(answered),
            // The time for a response counts from the end of the request.
            () = progress.rests_for(self.timeout) => None,
        };
        match answered {
            Some(Ok(response)) => self.answered(response, attempt.is_some(), upgrade),
            Some(Err(error)) => self.failed(&error, &progress),
            None => {
                warn!(upstream = %self.way, "the service has not begun to answer in time");
                settled(Answer::TooSlow, Settle::Unknown)
            }
        }
    }

    /// The request as the service gets it; `None` if its address cannot be one there.
    fn prepared(&self, request: Request<Body>, attempt: Option<&Attempt>) -> Option<Request<Body>> {
        let (mut parts, body) = request.into_parts();
        let peer = parts.extensions.get::<Peer>().copied();
        let caller = self.caller_header.as_ref();
        let caller = caller.and_then(|name| Some((name.clone(), parts.headers.get(name)?.clone())));
        for_service(&mut parts.headers, &parts.uri, peer, self.names);
        if let Some((name, value)) = caller
            && !parts.headers.contains_key(&name)
        {
            parts.headers.insert(name, value);
        }
        if let Some(attempt) = attempt {
            let words = if attempt.recovered() {
                "; recovered"
            } else {
                ""
            };
            for (name, value) in [
                (ATTEMPT, format!("{}{words}", attempt.number())),
                (SERVICE_KEY, attempt.idempotency_key(STEP)),
            ] {
                parts
                    .headers
                    .insert(name, HeaderValue::try_from(value).ok()?);
            }
        }
        // The client leaves out the length of an empty body, without which some services refuse.
        let takes_body = matches!(parts.method, Method::POST | Method::PUT | Method::PATCH);
        if takes_body && body.size_hint().exact() == Some(0) {
            let headers = &mut parts.headers;
            headers.insert(CONTENT_LENGTH, HeaderValue::from_static("0"));
        }
        let mut prepared = Request::new(body);
        *prepared.method_mut() = parts.method;
        *prepared.uri_mut() = uri_at(self.way.uri(), &parts.uri)?;
        *prepared.headers_mut() = parts.headers;
        Some(prepared)
    }

    /// The response of the service, with what it means for the key.
    fn answered(
        &self,
        response: Response<Incoming>,
        is_held: bool,
        upgrade: Option<OnUpgrade>,
    ) -> Response<Body> {
        let (mut response, protocol) = self.tunnelled(response, upgrade);
        remove_hop(response.headers_mut());
        if let Some(protocol) = protocol {
            tunnel::put(response.headers_mut(), protocol);
        }
        // That of the connection to the service is not that of the client.
        *response.version_mut() = Version::HTTP_11;
        if is_held
            && matches!(
                response.status(),
                // Of a gateway, or of a server that gave up the connection.
                StatusCode::REQUEST_TIMEOUT
                    | StatusCode::BAD_GATEWAY
                    | StatusCode::SERVICE_UNAVAILABLE
                    | StatusCode::GATEWAY_TIMEOUT
            )
        {
            response.extensions_mut().insert(Settle::Unknown);
        }
        let idle_timeout = self.idle_timeout;
        response.map(|body| Body::stream(Flowing::new(body, idle_timeout)))
    }

    /// Opens the tunnel that the service has agreed to, and returns its protocol.
    fn tunnelled(
        &self,
        mut response: Response<Incoming>,
        upgrade: Option<OnUpgrade>,
    ) -> (Response<Incoming>, Option<HeaderValue>) {
        let protocol = response.headers().get(http::header::UPGRADE).cloned();
        match upgrade {
            Some(client) if response.status() == StatusCode::SWITCHING_PROTOCOLS => {
                let service = hyper::upgrade::on(&mut response);
                self.tunnels.open(client, service);
                (response, protocol)
            }
            _ => (response, None),
        }
    }

    /// The answer to a request that the service has not answered.
    fn failed(&self, error: &RequestError, progress: &Progress) -> Response<Body> {
        // A client that breaks off its own request is no fault of the service. Bodies of requests
        // with keys are complete before they are sent.
        if progress.has_broken() {
            info!(upstream = %self.way, "a client has broken off its request");
            return settled(Answer::RequestBroken, Settle::Unknown);
        }
        let why = chain(error);
        if error.was_sent() {
            warn!(upstream = %self.way, why, "the service did not answer");
            settled(Answer::NotAnswered, Settle::Unknown)
        } else {
            warn!(upstream = %self.way, why, "the service cannot be reached");
            settled(Answer::NotReached, Settle::NotRun)
        }
    }
}

/// A response of the proxy, and what it means for the key of its request.
fn settled(answer: Answer, settle: Settle) -> Response<Body> {
    let mut response = answer.response();
    response.extensions_mut().insert(settle);
    response
}

/// An error with its causes. None of them has a part of the request.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}

impl fmt::Debug for Upstream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Upstream")
            .field("way", &self.0.way)
            .field("timeout", &self.0.timeout)
            .finish_non_exhaustive()
    }
}
