//! The time limit for the first request of a connection.
//!
//! hyper limits the time of a head once it knows the version of the protocol. A client that sends
//! nothing, or a beginning that fits both versions, would hold its connection for ever.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::Sleep;

/// A stream that fails if its first request does not come in time.
pub(super) struct UntilFirst<S> {
    stream: S,
    began: Began,
    limit: Pin<Box<Sleep>>,
}

/// Notes that a request has come.
#[derive(Clone, Debug, Default)]
pub(super) struct Began(Arc<AtomicBool>);

impl Began {
    pub(super) fn note(&self) {
        self.0.store(true, Relaxed);
    }
}

impl<S> UntilFirst<S> {
    pub(super) fn new(stream: S, limit: Duration) -> (Self, Began) {
        let began = Began::default();
        let limited = Self {
            stream,
            began: began.clone(),
            limit: Box::pin(tokio::time::sleep(limit)),
        };
        (limited, began)
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for UntilFirst<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if !self.began.0.load(Relaxed) && self.limit.as_mut().poll(cx).is_ready() {
            return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
        }
        Pin::new(&mut self.stream).poll_read(cx, buffer)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for UntilFirst<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, parts)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}
