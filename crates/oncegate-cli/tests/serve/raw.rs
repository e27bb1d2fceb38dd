//! Raw connections, for what no client and no server does by itself.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;

/// A service that answers the connection of each number in its own way. Connections and requests
/// are counted.
pub(super) struct RawService {
    pub(super) address: SocketAddr,
    pub(super) heads: Arc<parking_lot::Mutex<Vec<String>>>,
    pub(super) connections: Arc<AtomicUsize>,
    serving: JoinHandle<()>,
}

/// The way in which a raw service answers a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Act {
    /// Answers 201, and keeps the connection.
    Answer,
    /// Answers 201, and closes the connection without a word.
    AnswerAndClose,
    /// Closes the connection with no answer.
    Close,
    /// Never answers.
    Stall,
    /// Answers with a part of a body that was announced longer, and closes.
    Break,
}

impl RawService {
    /// `act` gets the number of the request, from 0.
    pub(super) async fn start(act: impl Fn(usize) -> Act + Send + Sync + 'static) -> Self {
        Self::start_at("127.0.0.1:0", act).await
    }

    pub(super) async fn start_at(
        address: &str,
        act: impl Fn(usize) -> Act + Send + Sync + 'static,
    ) -> Self {
        let listener = TcpListener::bind(address).await.unwrap();
        let address = listener.local_addr().unwrap();
        let heads = Arc::<parking_lot::Mutex<Vec<String>>>::default();
        let connections = Arc::<AtomicUsize>::default();
        let act: Arc<dyn Fn(usize) -> Act + Send + Sync> = Arc::new(act);
        let (noted, made) = (Arc::clone(&heads), Arc::clone(&connections));
        let serving = tokio::spawn(async move {
            let mut running = tokio::task::JoinSet::new();
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                made.fetch_add(1, Relaxed);
                running.spawn(serve(stream, Arc::clone(&noted), Arc::clone(&act)));
            }
        });
        Self {
            address,
            heads,
            connections,
            serving,
        }
    }

    pub(super) fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// The value of this header in each request so far.
    pub(super) fn header(&self, name: &str) -> Vec<String> {
        let heads = self.heads.lock();
        let value = |head: &String| {
            let line = head.lines().find_map(|line| {
                let (found, value) = line.split_once(':')?;
                found
                    .eq_ignore_ascii_case(name)
                    .then(|| value.trim().to_owned())
            });
            line.unwrap_or_default()
        };
        heads.iter().map(value).collect()
    }
}

impl Drop for RawService {
    fn drop(&mut self) {
        self.serving.abort();
    }
}

async fn serve(
    mut stream: TcpStream,
    heads: Arc<parking_lot::Mutex<Vec<String>>>,
    act: Arc<dyn Fn(usize) -> Act + Send + Sync>,
) {
    while let Some(head) = read_request(&mut stream).await {
        let number = {
            let mut heads = heads.lock();
            heads.push(head);
            heads.len() - 1
        };
        let act = act(number);
        let answer: &[u8] = match act {
            Act::Answer | Act::AnswerAndClose => {
                b"HTTP/1.1 201 Created\r\ncontent-length: 2\r\n\r\n{}"
            }
            Act::Break => b"HTTP/1.1 201 Created\r\ncontent-length: 100\r\n\r\n{}",
            Act::Close => return,
            Act::Stall => std::future::pending().await,
        };
        if stream.write_all(answer).await.is_err() || act != Act::Answer {
            return;
        }
    }
}

/// Reads a request with its body, and returns its head.
async fn read_request(stream: &mut TcpStream) -> Option<String> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(stream.read_u8().await.ok()?);
    }
    let head = String::from_utf8_lossy(&head).into_owned();
    let length = head.lines().find_map(|line| {
        let (name, value) = line.split_once(':')?;
        let is_length = name.eq_ignore_ascii_case("content-length");
        is_length.then(|| value.trim().parse::<usize>().unwrap())
    });
    if head.to_lowercase().contains("transfer-encoding: chunked") {
        read_chunks(stream).await?;
    }
    let mut body = vec![0; length.unwrap_or_default()];
    stream.read_exact(&mut body).await.ok()?;
    Some(head)
}

/// Reads a body in chunks, without trailers.
async fn read_chunks(stream: &mut TcpStream) -> Option<()> {
    loop {
        let mut line = Vec::new();
        while !line.ends_with(b"\r\n") {
            line.push(stream.read_u8().await.ok()?);
        }
        let line = String::from_utf8(line).unwrap();
        let size = usize::from_str_radix(line.trim_end(), 16).unwrap();
        let mut chunk = vec![0; size + 2];
        stream.read_exact(&mut chunk).await.ok()?;
        if size == 0 {
            return Some(());
        }
    }
}

/// Sends these bytes, and returns all that comes back until the other side closes. `None` if it
/// breaks the connection without an answer.
pub(super) async fn exchange(address: SocketAddr, sent: &[u8]) -> Option<String> {
    let mut stream = TcpStream::connect(address).await.unwrap();
    // The other side may refuse before everything is sent.
    let _ = stream.write_all(sent).await;
    let _ = stream.shutdown().await;
    let mut answer = Vec::new();
    let read = stream.read_to_end(&mut answer).await;
    let has_answer = read.is_ok() || !answer.is_empty();
    has_answer.then(|| String::from_utf8_lossy(&answer).into_owned())
}
