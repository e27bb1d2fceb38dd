//! Listeners: addresses, connections and their limits, and how a server stops.
//!
//! | layer | files |
//! |---|---|
//! | what goes where | `doors` |
//! | sockets | `address`, `first` |
//!
//! # Not obvious
//!
//! - hyper reads no more of a connection than its door takes: a body that nothing reads puts
//!   back-pressure on its client.
//! - The time limit of a head also ends connections that are idle between two requests.
//! - An error of `accept` concerns one connection, or the process has no file descriptors left: in
//!   either case the next one is accepted, after a moment.

mod address;
mod doors;
mod first;

use std::convert::Infallible;
use std::future::Future;
use std::io;
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use http::Request;
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto::Builder;
use hyper_util::server::graceful::GracefulShutdown;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::JoinSet;
use tracing::{debug, warn};

pub use address::Address;
pub use doors::Doors;

use crate::{Body, Door};
use first::UntilFirst;

/// The pause after a connection could not be accepted.
const ACCEPT_AGAIN_AFTER: Duration = Duration::from_millis(50);

/// The most requests of one connection at once, over HTTP/2.
const STREAMS_MOST: u32 = 200;

/// The time between two signs of life of a connection over HTTP/2, and the wait for an answer.
const KEEP_ALIVE: Duration = Duration::from_secs(20);

/// The most headers of a request.
const HEADERS_MOST: usize = 128;

/// The limits of a listener.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// The most connections at once. Others wait in the system's queue until one ends.
    pub max_connections: usize,
    /// The largest head of a request, in bytes: at least 8 KiB.
    pub max_head_bytes: usize,
    /// The time for the head of a request, and so for a pause between two requests.
    pub head_timeout: Duration,
}

impl Limits {
    /// The defaults: 10,000 connections, heads of 64 KiB that come within 30 s.
    pub const DEFAULT: Self = Self {
        max_connections: 10_000,
        max_head_bytes: 64 * 1024,
        head_timeout: Duration::from_secs(30),
    };
}

impl Default for Limits {
    fn default() -> Self {
        Self::DEFAULT
    }
}

/// The address of the client, as an extension of its request; none for a Unix socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer(pub IpAddr);

/// A socket that accepts connections for doors.
#[derive(Debug)]
pub struct Listener {
    socket: Socket,
    limits: Limits,
}

#[derive(Debug)]
enum Socket {
    Tcp(TcpListener),
    Unix(UnixListener, PathBuf),
}

impl Listener {
    /// Binds the address. A Unix socket that no process listens at is replaced.
    ///
    /// # Errors
    /// When the address is in use, or this process may not bind it.
    pub async fn bind(address: &Address, limits: Limits) -> io::Result<Self> {
        let socket = match address {
            Address::Tcp(address) => Socket::Tcp(TcpListener::bind(address.as_str()).await?),
            Address::Unix(path) => Socket::Unix(address::bind_unix(path).await?, path.clone()),
        };
        Ok(Self { socket, limits })
    }

    /// The address in words, with the port that the system has chosen if it was 0.
    pub fn address(&self) -> String {
        match &self.socket {
            Socket::Tcp(listener) => listener
                .local_addr()
                .map_or_else(|error| error.to_string(), |address| address.to_string()),
            Socket::Unix(_, path) => format!("unix:{}", path.display()),
        }
    }

    /// Answers requests by `door` until `stop` resolves. Then no connection is accepted, and those
    /// that are there end behind their current requests: for `deadline` at most, after which they
    /// are cut. Returns how many were cut.
    pub async fn run_until(
        self,
        door: Arc<dyn Door>,
        stop: impl Future<Output = ()> + Send,
        deadline: Duration,
    ) -> usize {
        let Self { socket, limits } = self;
        let room = Arc::new(Semaphore::new(
            limits.max_connections.clamp(1, Semaphore::MAX_PERMITS),
        ));
        let graceful = GracefulShutdown::new();
        let mut connections = JoinSet::new();
        let mut stop = std::pin::pin!(stop);
        loop {
            let accepted = tokio::select! {
                biased;
                () = &mut stop => break,
                // What has ended makes room for others; nothing is kept of it.
                Some(_) = connections.join_next() => continue,
                accepted = accept(&socket, &room) => accepted,
            };
            let Some((stream, peer, permit)) = accepted else {
                continue;
            };
            let connection = Connection {
                door: Arc::clone(&door),
                peer,
                limits,
            };
            let watcher = graceful.watcher();
            connections.spawn(async move {
                connection.serve(stream, watcher).await;
                drop(permit);
            });
        }
        // Clients that come from now on are refused at once, and not left waiting.
        drop(socket);
        let ended = tokio::time::timeout(deadline, graceful.shutdown()).await;
        let cut = if ended.is_ok() { 0 } else { connections.len() };
        connections.shutdown().await;
        cut
    }
}

/// Removes the file of a Unix socket when its listener ends.
impl Drop for Socket {
    fn drop(&mut self) {
        if let Self::Unix(_, path) = self {
            // It may be gone already.
            drop(std::fs::remove_file(path));
        }
    }
}

trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}
impl<S: AsyncRead + AsyncWrite + Send + Unpin> Stream for S {}

type Accepted = (Box<dyn Stream>, Option<Peer>, OwnedSemaphorePermit);

/// Accepts a connection when there is room for it. `None` if that failed.
async fn accept(socket: &Socket, room: &Arc<Semaphore>) -> Option<Accepted> {
    // Never closed.
    let permit = Arc::clone(room).acquire_owned().await.ok()?;
    let accepted = match socket {
        Socket::Tcp(listener) => listener.accept().await.map(|(stream, peer)| {
            // A response leaves at once.
            drop(stream.set_nodelay(true));
            let stream: Box<dyn Stream> = Box::new(stream);
            (stream, Some(Peer(peer.ip())))
        }),
        Socket::Unix(listener, _) => listener.accept().await.map(|(stream, _)| {
            let stream: Box<dyn Stream> = Box::new(stream);
            (stream, None)
        }),
    };
    match accepted {
        Ok((stream, peer)) => Some((stream, peer, permit)),
        Err(error) => {
            warn!(%error, "a connection cannot be accepted");
            tokio::time::sleep(ACCEPT_AGAIN_AFTER).await;
            None
        }
    }
}

/// A connection, and what answers its requests.
struct Connection {
    door: Arc<dyn Door>,
    peer: Option<Peer>,
    limits: Limits,
}

impl Connection {
    async fn serve(self, stream: Box<dyn Stream>, watcher: hyper_util::server::graceful::Watcher) {
        let Self { door, peer, limits } = self;
        let head_bytes = limits.max_head_bytes.max(8 * 1024);
        let mut builder = Builder::new(TokioExecutor::new());
        builder
            .http1()
            .timer(TokioTimer::new())
            .header_read_timeout(limits.head_timeout)
            .max_buf_size(head_bytes)
            .max_headers(HEADERS_MOST)
            .half_close(false);
        builder
            .http2()
            .timer(TokioTimer::new())
            .max_header_list_size(u32::try_from(head_bytes).unwrap_or(u32::MAX))
            .max_concurrent_streams(STREAMS_MOST)
            .keep_alive_interval(KEEP_ALIVE)
            .keep_alive_timeout(KEEP_ALIVE);
        let (stream, began) = UntilFirst::new(stream, limits.head_timeout);
        let service = service_fn(move |request: Request<Incoming>| {
            began.note();
            let mut request = request.map(Body::stream);
            if let Some(peer) = peer {
                request.extensions_mut().insert(peer);
            }
            let answered = door.answer(request);
            async move { Ok::<_, Infallible>(answered.await) }
        });
        let connection = builder
            .serve_connection_with_upgrades(TokioIo::new(stream), service)
            .into_owned();
        if let Err(error) = watcher.watch(connection).await {
            // A client that disconnects, or does not speak HTTP.
            debug!(error, "a connection has ended");
        }
    }
}
