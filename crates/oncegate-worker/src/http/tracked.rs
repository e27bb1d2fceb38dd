//! Connections that tell when they have ended, and whether anything was sent on them.
//!
//! hyper gives a request to its connection through a channel. When the connection ends in the same
//! instant, the request can stay in that channel, where nothing takes it or gives it back, and its
//! response never comes (<https://github.com/hyperium/hyper/issues/4122>): the run would keep its
//! permit and its lease for as long as it may take.

use std::error::Error;
use std::io::{self, IoSlice};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::task::{Context, Poll};
use std::time::Duration;

use futures_util::TryFutureExt as _;
use futures_util::future::MapOk;
use hyper::body::Incoming;
use hyper::rt::{Read, ReadBufCursor, Write};
use hyper::{Request, Response, Uri, Version, http};
use hyper_util::client::legacy::connect::{
    CaptureConnection, Connected, Connection, capture_connection,
};
use hyper_util::client::legacy::{self, ResponseFuture};
use tokio_util::sync::CancellationToken;
use tower_service::Service;

use super::connect::CONNECT_TIMEOUT;
use super::tls;

/// The time for which a request may still be answered after the end of its connection: time for
/// another connection, on which the client repeats what a former one gave back.
const ANSWER_AFTER_END: Duration = CONNECT_TIMEOUT.saturating_mul(2);

/// The reason why a request has no response.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RequestError {
    /// The client's own error.
    #[error(transparent)]
    Client(#[from] legacy::Error),
    /// The connection is gone, and the client says nothing.
    #[error("the connection ended without an answer")]
    Ended {
        /// `true` if anything was written on the connection, which may have been this request.
        was_used: bool,
    },
}

impl RequestError {
    /// Returns whether the server may have read anything of the request. If not, another one with
    /// the same effect does no harm.
    pub fn was_sent(&self) -> bool {
        match self {
            Self::Ended { was_used } => *was_used,
            // A refused certificate ends the handshake, before the server reads anything.
            Self::Client(error) => {
                !error.is_connect() && !tls::is_refused(error) && !was_never_sent(error)
            }
        }
    }
}

/// Returns whether the connection ended before anything of the request was written: hyper gives the
/// request back then. It happens when a server closes a new connection at once, as one does that
/// has refused the client's certificate.
pub(super) fn was_never_sent(error: &(dyn Error + 'static)) -> bool {
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

/// The reasons that end the use of a connection, besides its own end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reuse {
    Always,
    /// A response with a status of 500 or more over HTTP/1: some services close behind those.
    UnlessItFailed,
}

/// Sends a request by `send`, and waits for its response no longer than its connection lives.
/// Returns the connection, too.
pub(super) async fn response<B>(
    mut request: Request<B>,
    reuse: Reuse,
    send: impl FnOnce(Request<B>) -> ResponseFuture,
) -> Result<(Response<Incoming>, Option<Arc<Life>>), RequestError> {
    let mut captured = capture_connection(&mut request);
    let response = wait(&mut captured, pin!(send(request))).await?;
    if reuse == Reuse::UnlessItFailed
        && response.status().is_server_error()
        && response.version() <= Version::HTTP_11
        && let Some(connection) = &*captured.connection_metadata()
    {
        connection.poison();
    }
    let life = current(&captured);
    Ok((response, life))
}

async fn wait(
    captured: &mut CaptureConnection,
    mut response: Pin<&mut ResponseFuture>,
) -> Result<Response<Incoming>, RequestError> {
    loop {
        let life = tokio::select! {
            biased;
            response = &mut response => return Ok(response?),
            life = ended(captured) => life,
        };
        match tokio::time::timeout(ANSWER_AFTER_END, &mut response).await {
            Ok(response) => return Ok(response?),
            // It has been sent again on another connection, which may take longer to answer.
            Err(_) if current(captured).is_some_and(|other| !Arc::ptr_eq(&other, &life)) => {}
            Err(_) => {
                return Err(RequestError::Ended {
                    was_used: life.was_used.load(Relaxed),
                });
            }
        }
    }
}

/// Waits until the request has a connection and that has ended.
async fn ended(captured: &mut CaptureConnection) -> Arc<Life> {
    drop(captured.wait_for_connection_metadata().await);
    match current(captured) {
        Some(life) => {
            life.ended.cancelled().await;
            life
        }
        None => std::future::pending().await,
    }
}

/// The connection that the request was given to last.
fn current(captured: &CaptureConnection) -> Option<Arc<Life>> {
    let mut extras = http::Extensions::new();
    captured
        .connection_metadata()
        .as_ref()?
        .get_extras(&mut extras);
    extras.remove()
}

/// The known facts about a connection.
#[derive(Debug, Default)]
pub(super) struct Life {
    was_used: AtomicBool,
    ended: CancellationToken,
}

impl Life {
    pub(super) fn has_ended(&self) -> bool {
        self.ended.is_cancelled()
    }
}

/// Tracks the connections that `C` makes.
#[derive(Clone, Debug)]
pub(super) struct Tracking<C>(pub(super) C);

impl<C: Service<Uri>> Service<Uri> for Tracking<C> {
    type Response = Tracked<C::Response>;
    type Error = C::Error;
    type Future = MapOk<C::Future, fn(C::Response) -> Tracked<C::Response>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), C::Error>> {
        self.0.poll_ready(cx)
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        self.0.call(uri).map_ok(|stream| Tracked {
            stream,
            life: Arc::default(),
        })
    }
}

/// A connection that is tracked until it is dropped.
#[derive(Debug)]
pub(super) struct Tracked<S> {
    stream: S,
    life: Arc<Life>,
}

impl<S> Drop for Tracked<S> {
    fn drop(&mut self) {
        self.life.ended.cancel();
    }
}

impl<S: Connection> Connection for Tracked<S> {
    fn connected(&self) -> Connected {
        self.stream.connected().extra(Arc::clone(&self.life))
    }
}

impl<S: Read + Unpin> Read for Tracked<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: ReadBufCursor<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buffer)
    }
}

impl<S: Write + Unpin> Write for Tracked<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.life.was_used.store(true, Relaxed);
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        parts: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.life.was_used.store(true, Relaxed);
        Pin::new(&mut self.stream).poll_write_vectored(cx, parts)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use http_body_util::Full;
    use hyper_util::client::legacy::Client;
    use hyper_util::rt::TokioExecutor;

    use super::*;
    use crate::http::connect::tcp;

    /// As after a refused certificate: the connection ends while the request is on its way to it.
    /// In hyper alone, one of a hundred thousand requests is left without an answer here.
    #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
    async fn every_request_is_answered_though_its_connection_ends_at_once() {
        const REQUESTS: usize = 20_000;
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let is_over = Arc::new(AtomicBool::new(false));
        let seen = Arc::clone(&is_over);
        let closing = std::thread::spawn(move || {
            listener
                .incoming()
                .take_while(|_| !seen.load(Relaxed))
                .for_each(drop);
        });
        let client: Client<_, Full<Bytes>> =
            Client::builder(TokioExecutor::new()).build(Tracking(tcp()));
        let requests = (0..8).map(|_| {
            let client = client.clone();
            tokio::spawn(async move {
                for _ in 0..REQUESTS / 8 {
                    let request = Request::post(format!("http://{address}/"))
                        .body(Full::from("{}"))
                        .unwrap();
                    response(request, Reuse::Always, |request| client.request(request))
                        .await
                        .unwrap_err();
                }
            })
        });
        futures_util::future::try_join_all(requests).await.unwrap();
        is_over.store(true, Relaxed);
        // The thread looks at it when another connection comes.
        drop(std::net::TcpStream::connect(address).unwrap());
        closing.join().unwrap();
    }
}
