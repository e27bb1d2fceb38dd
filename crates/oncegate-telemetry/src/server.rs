//! Serves the router with limits: clients can use up neither the files nor the memory of the
//! consumers beside it.

use std::collections::VecDeque;
use std::io;
use std::time::Duration;

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{AbortHandle, JoinSet};
use tokio::time;
use tracing::warn;

use super::Telemetry;

/// The most connections at a time. A further one ends the oldest, so that a probe is answered
/// however many connections others hold open.
const CONNECTIONS_MOST: usize = 32;
/// The most bytes of a request's head, which is kept in memory.
const HEAD_MAX_BYTES: usize = 16 * 1024;
/// The most headers of a request.
const HEADERS_MOST: usize = 64;
/// Time limit for a request's head to arrive.
const HEAD_LIMIT: Duration = Duration::from_secs(5);
/// Time limit for a connection, with its answer. Each has one request, so none is idle.
const CONNECTION_LIMIT: Duration = Duration::from_secs(30);
/// The wait after an accept that failed, for example because the process has no file left.
const ACCEPT_AGAIN_AFTER: Duration = Duration::from_millis(200);

impl Telemetry {
    /// Serves the [`router_for`](Self::router_for) these host names with limits: 32 connections, of
    /// which a further one ends the oldest, one request each, 16 KiB and 5 seconds for its head,
    /// and 30 seconds for all of it.
    ///
    /// It never returns. When it is dropped, all connections are closed.
    pub async fn serve<H: Into<String>>(
        &self,
        listener: TcpListener,
        hosts: impl IntoIterator<Item = H>,
    ) {
        let router = self.router_for(hosts);
        let mut connections = JoinSet::new();
        let mut oldest_first: VecDeque<AbortHandle> = VecDeque::new();
        loop {
            let stream = tokio::select! {
                accepted = listener.accept() => match accepted {
                    Ok((stream, _)) => stream,
                    Err(error) => {
                        tell(&error);
                        time::sleep(ACCEPT_AGAIN_AFTER).await;
                        continue;
                    }
                },
                Some(_) = connections.join_next() => continue,
            };
            // Finished connections must not count, or a live one would end for them.
            oldest_first.retain(|connection| !connection.is_finished());
            if oldest_first.len() >= CONNECTIONS_MOST
                && let Some(oldest) = oldest_first.pop_front()
            {
                oldest.abort();
            }
            oldest_first.push_back(connections.spawn(answer(stream, router.clone())));
        }
    }
}

/// Logs an accept that failed, unless the client has only gone away.
fn tell(error: &io::Error) {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset};
    if !matches!(
        error.kind(),
        ConnectionAborted | ConnectionRefused | ConnectionReset
    ) {
        warn!(%error, "a connection to the status page could not be accepted; it is tried again");
    }
}

/// Answers one request. A client that breaks off, or is too slow, gets no answer.
async fn answer(stream: TcpStream, router: Router) {
    let connection = http1::Builder::new()
        .keep_alive(false)
        .max_buf_size(HEAD_MAX_BYTES)
        .max_headers(HEADERS_MOST)
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_LIMIT)
        .serve_connection(TokioIo::new(stream), TowerToHyperService::new(router));
    drop(time::timeout(CONNECTION_LIMIT, connection).await);
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::*;

    /// A request that is not finished.
    const HALF: &[u8] = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n";

    /// Serves until the end of the test.
    async fn served() -> (SocketAddr, JoinSet<()>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let telemetry = Telemetry::prometheus().unwrap();
        let mut serving = JoinSet::new();
        serving.spawn(async move { telemetry.serve::<String>(listener, []).await });
        (address, serving)
    }

    async fn sent(address: SocketAddr, bytes: &[u8]) -> TcpStream {
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream.write_all(bytes).await.unwrap();
        stream
    }

    /// Returns the text that arrives until the connection is closed.
    async fn received(mut stream: TcpStream) -> String {
        let mut bytes = Vec::new();
        // A connection that is reset is closed as well.
        drop(stream.read_to_end(&mut bytes).await);
        String::from_utf8(bytes).unwrap()
    }

    #[tokio::test]
    async fn a_probe_is_answered_beside_unfinished_requests() {
        let (address, _serving) = served().await;
        let mut unfinished = VecDeque::new();
        for _ in 0..4 * CONNECTIONS_MOST {
            unfinished.push_back(sent(address, HALF).await);
        }
        let oldest = unfinished.pop_front().unwrap();
        assert_eq!(received(oldest).await, "", "the oldest one is closed");
        let answer = received(sent(address, &[HALF, b"\r\n"].concat()).await).await;
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_head_that_does_not_end_is_not_waited_for() {
        let (address, _serving) = served().await;
        let begun = time::Instant::now();
        let answer = received(sent(address, HALF).await).await;
        assert!(
            answer.is_empty() || answer.starts_with("HTTP/1.1 408"),
            "{answer}"
        );
        assert!(
            begun.elapsed() < CONNECTION_LIMIT,
            "the head's limit ends it"
        );
    }

    #[tokio::test]
    async fn a_head_that_is_too_large_is_not_kept() {
        let (address, _serving) = served().await;
        let large = [HALF, b"x-filler: ", &vec![b'x'; 4 * HEAD_MAX_BYTES]].concat();
        let mut stream = TcpStream::connect(address).await.unwrap();
        // The server closes the connection before it has read everything.
        drop(stream.write_all(&large).await);
        let answer = received(stream).await;
        assert!(
            answer.is_empty() || answer.starts_with("HTTP/1.1 431"),
            "{answer}"
        );
    }
}
