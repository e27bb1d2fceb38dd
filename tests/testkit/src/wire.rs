//! A PostgreSQL proxy that shows a test every step, and can cut the connection at any of them.

use std::fmt;
use std::sync::Arc;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Notify;
use tokio::task::JoinSet;

/// The most bytes that are passed on at once.
const CHUNK_BYTES: usize = 1 << 16;

/// A step of the exchange. A client sends at most one statement before it reads, unless it
/// pipelines.
#[derive(Clone, Copy, Debug)]
pub enum Step<'a> {
    /// The client has sent this, and the server has not got it.
    Asked(&'a [u8]),
    /// The server has it, and the client does not know what the server has done.
    Sent(&'a [u8]),
    /// The server has answered this, and the client has not got it.
    Answered(&'a [u8]),
}

impl Step<'_> {
    /// Whether it is a client's `COMMIT` that has not reached the server.
    #[must_use]
    pub fn is_commit(&self) -> bool {
        matches!(self, Self::Asked(bytes) if has_commit(bytes))
    }

    /// Whether it is a client's `BEGIN` that has not reached the server, with what is sent behind
    /// it.
    #[must_use]
    pub fn is_begin(&self) -> bool {
        matches!(self, Self::Asked(bytes) if simple_query(bytes).is_some_and(|sql| sql.starts_with(b"BEGIN")))
    }

    /// Whether it is the server's reply that it has committed.
    #[must_use]
    pub fn is_committed(&self) -> bool {
        matches!(self, Self::Answered(bytes) if has_commit(bytes))
    }
}

fn has_commit(bytes: &[u8]) -> bool {
    const COMMIT: &[u8] = b"COMMIT\0";
    bytes.windows(COMMIT.len()).any(|window| window == COMMIT)
}

/// The text of the simple query that these bytes begin with.
fn simple_query(bytes: &[u8]) -> Option<&[u8]> {
    bytes.get(5..simple_query_length(bytes)?)
}

/// The length of the simple query that these bytes begin with.
fn simple_query_length(bytes: &[u8]) -> Option<usize> {
    let Some((b'Q', rest)) = bytes.split_first() else {
        return None;
    };
    let length = rest.first_chunk::<4>()?;
    Some(1 + u32::from_be_bytes(*length) as usize).filter(|length| *length <= bytes.len())
}

/// What a server answers a simple query that was cancelled, outside of a transaction.
fn cancelled() -> Vec<u8> {
    let fields = b"SERROR\0VERROR\0C57014\0Mcanceling statement due to user request\0\0";
    let length = u32::try_from(4 + fields.len()).expect("it is short");
    [&b"E"[..], &length.to_be_bytes(), fields, b"Z\0\0\0\x05I"].concat()
}

/// What becomes of it.
#[derive(Clone, Debug)]
pub enum Then {
    /// It goes on.
    Go,
    /// The simple query at its beginning is answered by an error, as if it was cancelled, and does
    /// not reach the server. What follows it does.
    Cancel,
    /// Both sides lose the connection.
    Cut,
    /// The connection stays, and nothing ever passes it again.
    Silence,
    /// The client loses the connection, and the server gets what was sent when this is notified.
    Late(Arc<Notify>),
}

/// A listener before a server. Its connections end with this value.
pub struct Wire {
    url: String,
    _accepting: JoinSet<()>,
}

impl fmt::Debug for Wire {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Wire")
            .field("url", &self.url)
            .finish_non_exhaustive()
    }
}

type Watch = Arc<dyn Fn(usize, Step<'_>) -> Then + Send + Sync>;

impl Wire {
    /// Starts a proxy before the server of this URL; `watch` decides about every step. Its first
    /// argument is how many times the client has sent something on this connection before: mostly
    /// the number of its statement.
    ///
    /// # Panics
    /// When there is no port to listen on.
    pub async fn before(
        url: &str,
        watch: impl Fn(usize, Step<'_>) -> Then + Send + Sync + 'static,
    ) -> Self {
        let (user, place) = url.split_once('@').expect("the URL names a user");
        let (server, database) = place.split_once('/').expect("the URL names a database");
        let listener = TcpListener::bind("127.0.0.1:0")
            .await
            .expect("a port is free");
        let address = listener.local_addr().expect("it listens");
        let server = server.to_owned();
        let watch: Watch = Arc::new(watch);
        let mut accepting = JoinSet::new();
        accepting.spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((client, _)) = listener.accept().await {
                let Ok(server) = TcpStream::connect(&server).await else {
                    continue;
                };
                connections.spawn(connect(client, server, Arc::clone(&watch)));
            }
        });
        Self {
            url: format!("{user}@{address}/{database}"),
            _accepting: accepting,
        }
    }

    /// The URL for clients.
    #[must_use]
    pub fn url(&self) -> &str {
        &self.url
    }
}

/// Returning closes both sides.
async fn connect(mut client: TcpStream, mut server: TcpStream, watch: Watch) {
    // Statements must not wait for each other's confirmation.
    drop((client.set_nodelay(true), server.set_nodelay(true)));
    let mut asked = vec![0; CHUNK_BYTES];
    let mut answered = vec![0; CHUNK_BYTES];
    let mut number = 0;
    loop {
        tokio::select! {
            read = client.read(&mut asked) => {
                let Ok(length @ 1..) = read else { return };
                let mut asked = asked.get(..length).unwrap_or_default();
                match watch(number, Step::Asked(asked)) {
                    Then::Go => {}
                    Then::Cancel => {
                        let query = simple_query_length(asked).expect("it begins with a simple query");
                        asked = asked.get(query..).unwrap_or_default();
                        if client.write_all(&cancelled()).await.is_err() {
                            return;
                        }
                    }
                    Then::Cut => return,
                    Then::Silence => std::future::pending().await,
                    Then::Late(at) => {
                        drop(client);
                        at.notified().await;
                        // The server closes the connection when it has done what it was asked for.
                        drop(server.write_all(asked).await);
                        drop(server.shutdown().await);
                        drop(server.read_to_end(&mut Vec::new()).await);
                        return;
                    }
                }
                if server.write_all(asked).await.is_err() {
                    return;
                }
                if !matches!(watch(number, Step::Sent(asked)), Then::Go) {
                    return;
                }
                number += 1;
            }
            read = server.read(&mut answered) => {
                let Ok(length @ 1..) = read else { return };
                let answered = answered.get(..length).unwrap_or_default();
                if !matches!(watch(number, Step::Answered(answered)), Then::Go) {
                    return;
                }
                if client.write_all(answered).await.is_err() {
                    return;
                }
            }
        }
    }
}
