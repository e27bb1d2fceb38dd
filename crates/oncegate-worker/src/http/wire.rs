//! Connections to an HTTP worker: over TCP, with or without TLS, or over a Unix socket.

use std::error::Error;
use std::fmt;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::Full;
use hyper::body::{Body, Incoming};
use hyper::{Request, Response, Uri};
use hyper_util::client::legacy::connect::{Connect, HttpConnector};
use hyper_util::client::legacy::{Client, ResponseFuture};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use oncegate_core::settings::TlsFiles;
use tokio::io::AsyncReadExt as _;
use tokio::net::TcpStream;
use tower_service::Service;

use super::connect::{CONNECT_TIMEOUT, Socket, tcp};
use super::tls::{self, Tls};
use super::tracked::{self, RequestError, Reuse, Tracking};
use super::trial::{Part, Trial};

/// The time for which a check of the worker's readiness waits for its refusal of this client's
/// certificate. A refusal that comes later is found with the first message.
const REFUSAL_TIMEOUT: Duration = Duration::from_millis(250);

/// The longest time for which a connection may be idle and be used again: less than servers usually
/// allow. gunicorn closes after 2 s.
const IDLE_TIMEOUT: Duration = Duration::from_secs(1);

/// The address of a worker, or of another service.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Endpoint {
    /// By HTTP without TLS.
    Tcp(Uri),
    /// By HTTPS.
    Tls(Uri),
    /// Over the Unix socket of this path.
    Unix(PathBuf),
}

impl Endpoint {
    /// Reads `http://host:port/path`, `https://host:port/path` or `unix:/path`.
    ///
    /// # Errors
    /// As text: what cannot be parsed, or would be sent to another machine without encryption.
    pub fn parse(text: &str, allow_remote: bool) -> Result<Self, String> {
        if let Some(path) = text.strip_prefix("unix:") {
            let path = path.strip_prefix("//").unwrap_or(path);
            return if path.starts_with('/') {
                Ok(Self::Unix(path.into()))
            } else {
                Err("a socket is unix:/path/of/socket".to_owned())
            };
        }
        let uri: Uri = text
            .parse()
            .map_err(|_| "it is not a URL such as http://127.0.0.1:8080/handle".to_owned())?;
        let encrypted = match uri.scheme_str() {
            Some("http") => false,
            Some("https") => true,
            _ => return Err("it must begin with http://, https:// or unix:".to_owned()),
        };
        if uri
            .authority()
            .is_some_and(|authority| authority.as_str().contains('@'))
        {
            return Err("a name or password does not belong there; use `token`".to_owned());
        }
        let host = host(&uri);
        let address: Option<std::net::IpAddr> = host.parse().ok();
        if host.is_empty() {
            return Err("it names no host".to_owned());
        }
        // A connection within this machine needs no encryption.
        let is_here = host == "localhost" || address.is_some_and(|address| address.is_loopback());
        if !is_here && !encrypted && !allow_remote {
            return Err(format!(
                "{host} is another machine, and http is not encrypted; use https://, or set `allow_remote` to accept it"
            ));
        }
        Ok(if encrypted {
            Self::Tls(uri)
        } else {
            Self::Tcp(uri)
        })
    }
}

fn host(uri: &Uri) -> &str {
    uri.host().unwrap_or_default().trim_matches(['[', ']'])
}

/// The HTTP clients. Redirects are not followed and proxies not used, because neither is built in.
enum Wire<B> {
    Tcp(Clients<HttpConnector, B>),
    Tls(Clients<Tls, B>, Tls),
    Unix(Clients<Socket, B>, Socket),
}

impl<B> Clone for Wire<B> {
    fn clone(&self) -> Self {
        match self {
            Self::Tcp(clients) => Self::Tcp(clients.clone()),
            Self::Tls(clients, tls) => Self::Tls(clients.clone(), tls.clone()),
            Self::Unix(clients, socket) => Self::Unix(clients.clone(), socket.clone()),
        }
    }
}

/// Two clients of the same worker.
struct Clients<C, B> {
    /// Uses its connections again.
    keeping: Client<Tracking<C>, B>,
    /// Makes a connection for each request.
    single: Client<Tracking<C>, B>,
}

impl<C: Clone, B> Clone for Clients<C, B> {
    fn clone(&self) -> Self {
        Self {
            keeping: self.keeping.clone(),
            single: self.single.clone(),
        }
    }
}

impl<C, B> Clients<C, B>
where
    C: Clone,
    Tracking<C>: Connect + Clone,
    B: Body + Send,
    B::Data: Send,
{
    fn of(connector: C, http2: bool) -> Self {
        let mut builder = Client::builder(TokioExecutor::new());
        builder
            .http2_only(http2)
            .pool_idle_timeout(IDLE_TIMEOUT)
            .pool_timer(TokioTimer::new())
            .timer(TokioTimer::new())
            .http2_keep_alive_interval(Duration::from_secs(10))
            .http2_keep_alive_timeout(Duration::from_secs(10));
        let keeping = builder.build(Tracking(connector.clone()));
        let single = builder.pool_max_idle_per_host(0).build(Tracking(connector));
        Self { keeping, single }
    }
}

impl<C, B> Clients<C, B>
where
    Tracking<C>: Connect + Clone + Send + Sync + 'static,
    B: Body + Send + Unpin + 'static,
    B::Data: Send,
    B::Error: Into<Box<dyn Error + Send + Sync>>,
{
    fn request(&self, request: Request<B>, keeps: bool) -> ResponseFuture {
        if keeps {
            self.keeping.request(request)
        } else {
            self.single.request(request)
        }
    }
}

/// A URL, and the client that reaches it with bodies of the type `B`.
///
/// A connection is used again only after one has stayed open behind its answer, and for a second at
/// most: what is sent on a connection that its server closes meanwhile has an unknown outcome.
pub struct Way<B = Full<Bytes>> {
    uri: Uri,
    wire: Wire<B>,
    trial: Arc<Trial>,
    reuse: Reuse,
}

impl<B> Way<B>
where
    B: Body + Send + Unpin + 'static,
    B::Data: Send,
    B::Error: Into<Box<dyn Error + Send + Sync>>,
{
    /// With `http2`, only HTTP/2 is used; over TLS the worker may choose it in any case.
    ///
    /// # Errors
    /// As text: a file holds no certificates or key, or this machine has no authorities.
    pub fn to(endpoint: Endpoint, http2: bool, files: &TlsFiles) -> Result<Self, String> {
        let trial = Arc::new(Trial::new(http2));
        let (uri, wire) = match endpoint {
            Endpoint::Tcp(uri) => (uri, Wire::Tcp(Clients::of(tcp(), http2))),
            Endpoint::Tls(uri) => {
                let tls = Tls::new(http2, files)?;
                (uri, Wire::Tls(Clients::of(tls.clone(), http2), tls))
            }
            Endpoint::Unix(path) => {
                // Every request names a host, and a Unix socket has none.
                let socket = Socket(path);
                let wire = Wire::Unix(Clients::of(socket.clone(), http2), socket);
                (Uri::from_static("http://localhost/"), wire)
            }
        };
        Ok(Self {
            uri,
            wire,
            trial,
            reuse: Reuse::Always,
        })
    }

    /// Never uses a connection of HTTP/1 again that has brought a response with a status of 500 or
    /// more.
    #[must_use]
    pub fn distrusting_failures(mut self) -> Self {
        self.reuse = Reuse::UnlessItFailed;
        self
    }

    /// Another URL of the same worker, over the same Unix socket if the worker has one.
    pub(super) fn over_socket(&self, uri: Uri) -> Option<Self> {
        let wire = self.wire.clone();
        matches!(wire, Wire::Unix(..)).then_some(Self {
            uri,
            wire,
            trial: Arc::clone(&self.trial),
            reuse: self.reuse,
        })
    }

    /// The URL; that of `localhost` for a Unix socket.
    pub fn uri(&self) -> &Uri {
        &self.uri
    }

    /// Sends a request, and returns the response when its head has come.
    ///
    /// # Errors
    /// When there is no response; [`RequestError::was_sent`] says whether the service may have read
    /// the request.
    pub async fn request(&self, request: Request<B>) -> Result<Response<Incoming>, RequestError> {
        let part = self.trial.part();
        let keeps = part != Part::Single;
        let send = |request| match &self.wire {
            Wire::Tcp(clients) => clients.request(request, keeps),
            Wire::Tls(clients, _) => clients.request(request, keeps),
            Wire::Unix(clients, _) => clients.request(request, keeps),
        };
        let answered = tracked::response(request, self.reuse, send).await;
        if part == Part::Trial {
            let life = answered.as_ref().ok().and_then(|(_, life)| life.clone());
            self.trial.answered(life);
        }
        answered.map(|(response, _)| response)
    }

    /// Checks that the address accepts connections; over TLS, with a trusted certificate.
    ///
    /// # Errors
    /// As text: why it does not.
    pub async fn accepts(&self) -> Result<(), String> {
        let connected = async {
            match &self.wire {
                Wire::Tcp(_) => {
                    TcpStream::connect((host(&self.uri), self.uri.port_u16().unwrap_or(80)))
                        .await
                        .map(drop)
                }
                Wire::Tls(_, tls) => {
                    let mut stream = TokioIo::new(tls.clone().call(self.uri.clone()).await?);
                    // A worker that wants another certificate says so only after its own part of
                    // the handshake.
                    match tokio::time::timeout(REFUSAL_TIMEOUT, stream.read(&mut [0])).await {
                        Ok(Err(error)) if tls::is_refused(&error) => {
                            Err(io::Error::other(format!(
                                "the worker does not accept this client's certificate (`tls_certificate`): {error}"
                            )))
                        }
                        _ => Ok(()),
                    }
                }
                Wire::Unix(_, socket) => socket.clone().call(self.uri.clone()).await.map(drop),
            }
        };
        match tokio::time::timeout(CONNECT_TIMEOUT, connected).await {
            Ok(connected) => connected.map_err(|error| error.to_string()),
            Err(_) => Err("no answer".to_owned()),
        }
    }
}

impl<B> fmt::Display for Way<B> {
    /// Shows the URL without its query, which may hold a secret.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Wire::Unix(_, Socket(path)) = &self.wire {
            return write!(f, "unix:{}", path.display());
        }
        let scheme = self.uri.scheme_str().unwrap_or_default();
        let authority = self
            .uri
            .authority()
            .map_or("", |authority| authority.as_str());
        write!(f, "{scheme}://{authority}{}", self.uri.path())
    }
}

impl<B> fmt::Debug for Way<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Way")
            .field("uri", &format_args!("{self}"))
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn plain_http_stays_on_this_machine() {
        for here in [
            "http://127.0.0.1:8080/handle",
            "http://localhost:1",
            "http://[::1]:80/x",
            "unix:/run/w.sock",
        ] {
            assert!(Endpoint::parse(here, false).is_ok(), "{here}");
        }
        for there in [
            "http://worker:8080",
            "http://10.0.0.7/",
            "http://127.0.0.1.example.org/",
        ] {
            assert!(
                Endpoint::parse(there, false)
                    .unwrap_err()
                    .contains("allow_remote"),
                "{there}"
            );
            assert!(Endpoint::parse(there, true).is_ok(), "{there}");
        }
        for encrypted in ["https://worker:8443/handle", "https://127.0.0.1/"] {
            assert!(
                matches!(Endpoint::parse(encrypted, false), Ok(Endpoint::Tls(_))),
                "{encrypted}"
            );
        }
        for wrong in [
            "ftp://localhost",
            "127.0.0.1:80",
            "unix:w.sock",
            "",
            "http://a:b@localhost/",
            "https://a:b@worker/",
        ] {
            assert!(Endpoint::parse(wrong, true).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_way_is_named_without_what_may_be_a_secret() {
        for (url, name) in [
            (
                "http://127.0.0.1:8080/a?token=s3cret",
                "http://127.0.0.1:8080/a",
            ),
            ("http://localhost", "http://localhost/"),
            ("unix:/run/w.sock", "unix:/run/w.sock"),
        ] {
            let endpoint = Endpoint::parse(url, false).unwrap();
            let way: Way = Way::to(endpoint, false, &TlsFiles::default()).unwrap();
            assert_eq!(way.to_string(), name);
            assert!(!format!("{way:?}").contains("s3cret"), "{way:?}");
        }
    }

    #[test]
    fn a_root_that_holds_no_certificate_is_refused_by_its_setting() {
        let endpoint = Endpoint::parse("https://worker/", false).unwrap();
        let refused = |file: &Path| {
            Way::<Full<Bytes>>::to(endpoint.clone(), false, &TlsFiles::trusting(file)).unwrap_err()
        };
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("ca.pem");
        assert!(refused(&file).contains("`tls_root`"), "{}", refused(&file));
        std::fs::write(&file, "no certificate").unwrap();
        assert!(
            refused(&file).contains("no certificate in PEM"),
            "{}",
            refused(&file)
        );
    }
}
