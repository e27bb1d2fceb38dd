//! A worker behind HTTP: one request per message.

use std::fmt;
use std::future::Future;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::{Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt as _, Full, LengthLimitError, Limited};
use hyper::header::HeaderValue;
use hyper::{Request, Uri};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioIo};
use oncegate::Message;
use tokio::net::UnixStream;
use tokio::time::Instant;

use super::worker::{Begun, Reply};
use super::{answer, request};

/// How long connecting may take.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// How long a connection may idle before it is closed: less than servers usually keep theirs.
const IDLE_TIMEOUT: Duration = Duration::from_secs(4);

/// Where the worker is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Endpoint {
    Tcp(Uri),
    Unix(PathBuf),
}

impl Endpoint {
    /// Reads `http://host:port/path` or `unix:/path`.
    ///
    /// # Errors
    /// In words: what is not understood, or would travel without encryption.
    pub(crate) fn parse(text: &str, allow_remote: bool) -> Result<Self, String> {
        if let Some(path) = text.strip_prefix("unix:") {
            let path = path.strip_prefix("//").unwrap_or(path);
            return if path.starts_with('/') {
                Ok(Self::Unix(path.into()))
            } else {
                Err("a socket is unix:/path/of/socket".to_owned())
            };
        }
        let uri: Uri =
            text.parse().map_err(|_| "it is no URL, as http://127.0.0.1:8080/handle".to_owned())?;
        match uri.scheme_str() {
            Some("http") => {}
            Some("https") => {
                return Err(
                    "TLS is not spoken to workers: put the worker beside, or a proxy that speaks TLS"
                        .to_owned(),
                );
            }
            _ => return Err("it must begin with http:// or unix:".to_owned()),
        }
        if uri.authority().is_some_and(|authority| authority.as_str().contains('@')) {
            return Err("a name or password does not belong there; use `token`".to_owned());
        }
        let host = uri.host().unwrap_or_default().trim_matches(['[', ']']);
        let address: Option<std::net::IpAddr> = host.parse().ok();
        if host.is_empty() {
            return Err("it names no host".to_owned());
        }
        let is_here = host == "localhost" || address.is_some_and(|address| address.is_loopback());
        if !is_here && !allow_remote {
            return Err(format!(
                "{host} is another machine, and nobody encrypts what goes there; if that is fine, set `allow_remote`"
            ));
        }
        Ok(Self::Tcp(uri))
    }

    /// What a request names; a socket has no address of that kind.
    fn uri(&self) -> Uri {
        match self {
            Self::Tcp(uri) => uri.clone(),
            Self::Unix(_) => Uri::from_static("http://localhost/"),
        }
    }

    /// Whether somebody accepts connections there.
    pub(crate) async fn accepts(&self) -> Result<(), String> {
        let connected = async {
            match self {
                Self::Unix(path) => UnixStream::connect(path).await.map(drop),
                Self::Tcp(uri) => {
                    let host = uri.host().unwrap_or_default().trim_matches(['[', ']']);
                    tokio::net::TcpStream::connect((host, uri.port_u16().unwrap_or(80))).await.map(drop)
                }
            }
        };
        match tokio::time::timeout(CONNECT_TIMEOUT, connected).await {
            Ok(connected) => connected.map_err(|error| error.to_string()),
            Err(_) => Err("no answer".to_owned()),
        }
    }
}

/// Connects to a socket of this machine, whatever the request names.
#[derive(Clone, Debug)]
struct Socket(PathBuf);

impl tower_service::Service<Uri> for Socket {
    type Response = TokioIo<UnixStream>;
    type Error = std::io::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Self::Error>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Uri) -> Self::Future {
        let path = self.0.clone();
        Box::pin(async move { UnixStream::connect(path).await.map(TokioIo::new) })
    }
}

/// Over which connections requests go. Redirects are not followed and proxies not asked, for neither is built in.
#[derive(Clone)]
enum Wire {
    Tcp(Client<HttpConnector, Full<Bytes>>),
    Unix(Client<Socket, Full<Bytes>>),
}

impl Wire {
    fn to(endpoint: &Endpoint, http2: bool) -> Self {
        let mut builder = Client::builder(TokioExecutor::new());
        builder
            .http2_only(http2)
            .pool_idle_timeout(IDLE_TIMEOUT)
            .pool_timer(hyper_util::rt::TokioTimer::new());
        match endpoint {
            Endpoint::Tcp(_) => {
                let mut connector = HttpConnector::new();
                connector.set_connect_timeout(Some(CONNECT_TIMEOUT));
                connector.set_nodelay(true);
                Self::Tcp(builder.build(connector))
            }
            Endpoint::Unix(path) => Self::Unix(builder.build(Socket(path.clone()))),
        }
    }

    fn request(&self, request: Request<Full<Bytes>>) -> hyper_util::client::legacy::ResponseFuture {
        match self {
            Self::Tcp(client) => client.request(request),
            Self::Unix(client) => client.request(request),
        }
    }
}

/// Calls a worker by HTTP.
pub(crate) struct Caller {
    endpoint: Endpoint,
    wire: Wire,
    pub(super) told: request::Told,
    result_max_bytes: usize,
    pacing: Pacing,
}

impl Caller {
    pub(crate) fn new(endpoint: Endpoint, http2: bool, told: request::Told, result_max_bytes: usize) -> Self {
        let wire = Wire::to(&endpoint, http2);
        Self { endpoint, wire, told, result_max_bytes, pacing: Pacing::default() }
    }

    /// Sends the message and waits for the answer.
    pub(super) async fn call(&self, message: &Message, begun: &Begun) -> Reply {
        self.pacing.wait().await;
        let request = match request::of(message, &self.endpoint.uri(), &self.told) {
            Ok(request) => request,
            Err(error) => return Reply::DeadLetter { reason: format!("it makes no request: {error}") },
        };
        begun.now();
        let response = match self.wire.request(request).await {
            Ok(response) => response,
            Err(error) if error.is_connect() => {
                return Reply::retry(format!("the worker cannot be reached: {}", chain(&error)));
            }
            // It was on its way, so it may have arrived.
            Err(error) => return Reply::unknown(format!("the worker did not answer: {}", chain(&error))),
        };
        let (head, body) = response.into_parts();
        let body = Limited::new(body, self.result_max_bytes).collect().await;
        let body = match body {
            Ok(body) => answer::Body::Whole(body.to_bytes()),
            Err(error) if error.is::<LengthLimitError>() => {
                answer::Body::TooLarge { most: self.result_max_bytes }
            }
            Err(error) => answer::Body::CutShort(error.to_string()),
        };
        let reply = answer::outcome(&head, body, std::time::SystemTime::now());
        self.pacing.note(head.status, &reply);
        reply
    }

    /// Whether the worker may be sent messages: its readiness URL says so, or else it accepts connections.
    pub(crate) async fn is_ready(&self, ready_url: Option<&Uri>) -> Result<(), String> {
        let Some(url) = ready_url else { return self.endpoint.accepts().await };
        let mut request = Request::new(Full::new(Bytes::new()));
        *request.uri_mut() = url.clone();
        if let Some(token) = &self.told.token {
            request.headers_mut().insert(hyper::header::AUTHORIZATION, token.clone());
        }
        let answered = tokio::time::timeout(CONNECT_TIMEOUT, self.wire.request(request)).await;
        match answered {
            Ok(Ok(response)) if response.status().is_success() => Ok(()),
            Ok(Ok(response)) => Err(format!("it answers {}", response.status())),
            Ok(Err(error)) => Err(chain(&error)),
            Err(_) => Err("it does not answer".to_owned()),
        }
    }
}

impl fmt::Debug for Caller {
    /// Shows no token.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Caller").field("endpoint", &self.endpoint).finish_non_exhaustive()
    }
}

/// A header that nobody may read in a log.
pub(crate) fn bearer(token: &str) -> Result<HeaderValue, String> {
    let mut value = HeaderValue::try_from(format!("Bearer {}", token.trim()))
        .map_err(|_| "the token has characters that no header can carry".to_owned())?;
    value.set_sensitive(true);
    Ok(value)
}

/// Waits that a worker has asked for, of everybody: the second `503` with a `Retry-After` in a row means the worker, not
/// a message. Runs that wait here hold their places, so the source is held back.
#[derive(Debug, Default)]
struct Pacing(Mutex<(u32, Option<Instant>)>);

/// The longest that everybody waits because a worker says so.
const PACING_MOST: Duration = Duration::from_secs(60);

impl Pacing {
    async fn wait(&self) {
        let until = self.0.lock().unwrap_or_else(PoisonError::into_inner).1;
        if let Some(until) = until {
            tokio::time::sleep_until(until).await;
        }
    }

    fn note(&self, status: hyper::StatusCode, reply: &Reply) {
        let mut pacing = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        *pacing = match reply {
            Reply::Retry { delay: Some(delay), .. } if status == hyper::StatusCode::SERVICE_UNAVAILABLE => {
                let in_a_row = pacing.0.saturating_add(1);
                (in_a_row, (in_a_row >= 2).then(|| Instant::now() + (*delay).min(PACING_MOST)))
            }
            _ => (0, None),
        };
    }
}

/// An error with its causes, each once.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_nobody_encrypts_stays_on_this_machine() {
        for here in
            ["http://127.0.0.1:8080/handle", "http://localhost:1", "http://[::1]:80/x", "unix:/run/w.sock"]
        {
            assert!(Endpoint::parse(here, false).is_ok(), "{here}");
        }
        for there in ["http://worker:8080", "http://10.0.0.7/", "http://127.0.0.1.example.org/"] {
            assert!(Endpoint::parse(there, false).unwrap_err().contains("allow_remote"), "{there}");
            assert!(Endpoint::parse(there, true).is_ok(), "{there}");
        }
        for wrong in [
            "https://127.0.0.1/",
            "ftp://localhost",
            "127.0.0.1:80",
            "unix:w.sock",
            "",
            "http://a:b@localhost/",
        ] {
            assert!(Endpoint::parse(wrong, true).is_err(), "{wrong}");
        }
    }
}
