//! The stream of a connection: TCP or TLS, and the frames made readable.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use async_rs::traits::Reactor;
use async_rs::util::RuntimeParts;
use async_rs::{Runtime, Tokio};
use futures_util::Stream;
use futures_util::io::{AsyncRead, AsyncWrite};
use lapin::tcp::{AMQPUriTcpExt as _, OwnedTLSConfig};
use lapin::uri::AMQPUri;
use lapin::{AsyncTcpStream, Connection, ConnectionProperties};

use super::frames::{Frames, SeenFrames};

/// The number of bytes that are read at once.
const READ_BYTES: usize = 16 << 10;

/// Connects, and makes what the broker sends readable for the client.
pub(crate) async fn connect(
    uri: AMQPUri,
    properties: ConnectionProperties,
    tls: OwnedTLSConfig,
    seen: Arc<SeenFrames>,
) -> lapin::Result<Connection> {
    let tokio = Tokio::current();
    let connecting = Runtime::new(tokio.clone());
    let parts = RuntimeParts::new(tokio.clone(), Sockets(tokio));
    Connection::connector(
        uri,
        Runtime::new(parts),
        async move |uri: AMQPUri, _: Runtime<_>| {
            let stream = uri
                .connect_with_config_async(tls.as_ref(), &connecting)
                .await?;
            Ok(AsyncTcpStream::Plain(ReadableStream {
                stream,
                frames: Frames::default(),
                seen: Arc::clone(&seen),
            }))
        },
        properties,
    )
    .await
}

/// A stream of tokio.
type Socket = AsyncTcpStream<<Tokio as Reactor>::TcpStream>;

/// Tokio's sockets as the client asks for them. Its own connects are not used: [`connect`] makes
/// each stream.
#[derive(Clone, Debug)]
struct Sockets(Tokio);

impl Reactor for Sockets {
    type TcpStream = ReadableStream;
    type Sleep = <Tokio as Reactor>::Sleep;

    fn register<H: io::Read + io::Write + Send + 'static>(
        &self,
        _: H,
    ) -> io::Result<impl AsyncRead + AsyncWrite + Send + Unpin + 'static> {
        Err::<ReadableStream, _>(io::ErrorKind::Unsupported.into())
    }

    fn sleep(&self, duration: Duration) -> Self::Sleep {
        self.0.sleep(duration)
    }

    fn interval(&self, duration: Duration) -> impl Stream<Item = Instant> + Send + 'static {
        self.0.interval(duration)
    }

    fn tcp_connect_addr(
        &self,
        address: SocketAddr,
    ) -> impl Future<Output = io::Result<ReadableStream>> + Send + 'static {
        let connecting = self.0.tcp_connect_addr(address);
        async move {
            Ok(ReadableStream {
                stream: AsyncTcpStream::Plain(connecting.await?),
                frames: Frames::default(),
                seen: Arc::default(),
            })
        }
    }
}

/// A stream whose frames the client can read.
struct ReadableStream {
    stream: Socket,
    frames: Frames,
    seen: Arc<SeenFrames>,
}

impl AsyncRead for ReadableStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        to: &mut [u8],
    ) -> Poll<io::Result<usize>> {
        let this = &mut *self;
        if to.is_empty() {
            return Poll::Ready(Ok(0));
        }
        loop {
            let given = this.frames.give(to);
            if given > 0 {
                return Poll::Ready(Ok(given));
            }
            let mut bytes = [0; READ_BYTES];
            let read = ready!(Pin::new(&mut this.stream).poll_read(context, &mut bytes))?;
            if read == 0 {
                this.frames.finish();
                return Poll::Ready(Ok(this.frames.give(to)));
            }
            let bytes = bytes.get(..read).unwrap_or_default();
            this.frames.receive(bytes, &this.seen);
        }
    }
}

impl AsyncWrite for ReadableStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_close(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_close(context)
    }
}
