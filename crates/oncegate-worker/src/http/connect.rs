//! Connections without TLS: over TCP, or over a Unix socket.

use std::future::Future;
use std::io;
use std::path::PathBuf;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use hyper::Uri;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tower_service::Service;

/// The time limit for connecting, including the TLS handshake.
pub(super) const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// A connection that is being made.
pub(super) type Connecting<T> = Pin<Box<dyn Future<Output = io::Result<T>> + Send>>;

/// Connects over TCP, in bounded time.
pub(super) fn tcp() -> HttpConnector {
    let mut connector = HttpConnector::new();
    connector.set_connect_timeout(Some(CONNECT_TIMEOUT));
    connector.set_nodelay(true);
    connector
}

/// Connects to a Unix socket, whatever host the request names.
#[derive(Clone, Debug)]
pub(super) struct Socket(pub(super) PathBuf);

impl Service<Uri> for Socket {
    type Response = TokioIo<UnixStream>;
    type Error = io::Error;
    type Future = Connecting<Self::Response>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Uri) -> Self::Future {
        let path = self.0.clone();
        Box::pin(async move { UnixStream::connect(path).await.map(TokioIo::new) })
    }
}
