//! An HTTP client over real sockets, and a server for an axum application.

use std::net::SocketAddr;

use axum::Router;
use bytes::Bytes;
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use hyper::{HeaderMap, Request, Response, StatusCode};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use serde::Deserialize;
use tokio::net::TcpListener;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

/// A client of one server, in one version of HTTP.
#[derive(Clone, Debug)]
pub struct HttpClient {
    client: Client<HttpConnector, Full<Bytes>>,
    address: SocketAddr,
}

/// A response that has been read to its end.
#[derive(Clone, Debug)]
pub struct HttpAnswer {
    /// The status.
    pub status: StatusCode,
    /// The headers.
    pub headers: HeaderMap,
    /// The whole body.
    pub body: Bytes,
}

impl HttpClient {
    /// Speaks HTTP/1.1.
    #[must_use]
    pub fn http1(address: SocketAddr) -> Self {
        Self {
            client: Client::builder(TokioExecutor::new()).build_http(),
            address,
        }
    }

    /// Speaks HTTP/2 at once, with prior knowledge of the server.
    #[must_use]
    pub fn http2(address: SocketAddr) -> Self {
        Self {
            client: Client::builder(TokioExecutor::new())
                .http2_only(true)
                .build_http(),
            address,
        }
    }

    /// Sends a request and returns its response as soon as its head is there.
    ///
    /// # Errors
    /// When there is no response, in words.
    pub async fn begin(&self, sent: Sent<'_>) -> Result<Response<Incoming>, String> {
        let mut request = Request::builder()
            .method(sent.method)
            .uri(format!("http://{}{}", self.address, sent.path));
        for (name, value) in sent.headers {
            request = request.header(*name, *value);
        }
        if let Some(key) = sent.key {
            request = request.header("idempotency-key", key);
        }
        let request = request.body(Full::new(Bytes::copy_from_slice(sent.body.as_bytes())));
        let request = request.expect("the test's request is well-formed");
        self.client
            .request(request)
            .await
            .map_err(|error| format!("{error:?}"))
    }

    /// Sends a request and reads its response to the end.
    ///
    /// # Errors
    /// When there is no response, or only a part of one, in words.
    pub async fn try_send(&self, sent: Sent<'_>) -> Result<HttpAnswer, String> {
        let (head, body) = self.begin(sent).await?.into_parts();
        let body = body
            .collect()
            .await
            .map_err(|error| format!("{error:?}"))?
            .to_bytes();
        Ok(HttpAnswer {
            status: head.status,
            headers: head.headers,
            body,
        })
    }

    /// Like [`try_send`](Self::try_send).
    ///
    /// # Panics
    /// When there is no whole response.
    pub async fn send(&self, sent: Sent<'_>) -> HttpAnswer {
        self.try_send(sent)
            .await
            .unwrap_or_else(|error| panic!("no response: {error}"))
    }
}

/// A request to send.
#[derive(Clone, Copy, Debug)]
pub struct Sent<'a> {
    method: &'a str,
    path: &'a str,
    key: Option<&'a str>,
    headers: &'a [(&'a str, &'a str)],
    body: &'a str,
}

impl<'a> Sent<'a> {
    /// A POST of JSON under this key.
    #[must_use]
    pub fn post(path: &'a str, key: &'a str, body: &'a str) -> Self {
        let headers = &[("content-type", "application/json")];
        Self {
            method: "POST",
            path,
            key: Some(key),
            headers,
            body,
        }
    }

    /// With another method.
    #[must_use]
    pub fn method(mut self, method: &'a str) -> Self {
        self.method = method;
        self
    }

    /// Without a key.
    #[must_use]
    pub fn unkeyed(mut self) -> Self {
        self.key = None;
        self
    }

    /// With these headers instead of the content type.
    #[must_use]
    pub fn headers(mut self, headers: &'a [(&'a str, &'a str)]) -> Self {
        self.headers = headers;
        self
    }
}

/// The members that every problem document has.
#[derive(Debug, Deserialize)]
struct Details {
    r#type: String,
    title: String,
    status: u16,
    detail: String,
}

impl HttpAnswer {
    /// A header's text, if it is there.
    #[must_use]
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).and_then(|value| value.to_str().ok())
    }

    /// Whether it is marked as a replay.
    #[must_use]
    pub fn is_replayed(&self) -> bool {
        self.header("idempotent-replayed") == Some("true")
    }

    /// The name of the problem that it describes: the end of its type.
    ///
    /// # Panics
    /// When it describes none, or names another status than it has.
    #[must_use]
    pub fn problem(&self) -> String {
        assert_eq!(
            self.header("content-type"),
            Some("application/problem+json"),
            "{self:?}"
        );
        let details: Details =
            serde_json::from_slice(&self.body).expect("problem details are JSON");
        assert_eq!(details.status, self.status.as_u16(), "{details:?}");
        assert!(
            !details.title.is_empty() && !details.detail.is_empty(),
            "{details:?}"
        );
        details
            .r#type
            .rsplit(['#', '/'])
            .next()
            .unwrap_or_default()
            .to_owned()
    }
}

/// An axum application on its own socket; it ends when this value is dropped, or gracefully by
/// [`stop`](Self::stop).
#[derive(Debug)]
pub struct HttpServer {
    address: SocketAddr,
    stop: Option<oneshot::Sender<()>>,
    serving: JoinHandle<()>,
}

impl HttpServer {
    /// Serves HTTP/1.1 and HTTP/2.
    ///
    /// # Panics
    /// When there is no free port.
    pub async fn start(app: Router) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("it is bound");
        let (stop, stopped) = oneshot::channel::<()>();
        let serving = tokio::spawn(async move {
            let stopped = async { drop(stopped.await) };
            axum::serve(listener, app)
                .with_graceful_shutdown(stopped)
                .await
                .expect("it never fails");
        });
        Self {
            address,
            stop: Some(stop),
            serving,
        }
    }

    /// Where it is.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Accepts nothing more, and waits for the connections to end.
    ///
    /// # Panics
    /// When the server has panicked.
    pub async fn stop(mut self) {
        drop(self.stop.take());
        (&mut self.serving).await.expect("it does not panic");
    }
}

impl Drop for HttpServer {
    fn drop(&mut self) {
        self.serving.abort();
    }
}
