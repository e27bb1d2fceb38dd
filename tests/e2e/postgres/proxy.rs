//! A proxy that cuts or stalls a connection around a commit, or closes.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use oncegate_testkit::Postgres;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;

/// What the server is sent for a commit.
const COMMIT: &[u8] = b"COMMIT\0";

/// How the client's message begins that runs a prepared statement: alone, it commits by itself.
const BIND: u8 = b'B';

/// What the server answers last: it is ready, and in no transaction.
const IDLE: &[u8] = b"Z\0\0\0\x05I";

/// What becomes of a commit's connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cut {
    /// The commit does not reach the server.
    Before,
    /// The server has committed, and its answer is lost.
    After,
    /// The commit does not reach the server, which goes on seeing an open connection.
    Stall,
}

/// It ends with this value.
pub(crate) struct Proxy {
    url: String,
    next: Arc<Mutex<VecDeque<Cut>>>,
    away: watch::Sender<bool>,
    connections: Arc<AtomicUsize>,
    is_pooler: Arc<AtomicBool>,
    _accepting: JoinSet<()>,
}

impl Proxy {
    pub(crate) async fn before(postgres: &Postgres) -> Self {
        let (user, place) = postgres.url().split_once('@').unwrap();
        let (server, database) = place.split_once('/').unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address: SocketAddr = listener.local_addr().unwrap();
        let next = Arc::new(Mutex::default());
        let server = server.to_owned();
        let cuts = Arc::clone(&next);
        let (away, mut is_away) = watch::channel(false);
        let connections = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&connections);
        let is_pooler = Arc::new(AtomicBool::new(false));
        let refuses = Arc::clone(&is_pooler);
        let mut accepting = JoinSet::new();
        accepting.spawn(async move {
            let mut connections = JoinSet::new();
            loop {
                let client = tokio::select! {
                    accepted = listener.accept() => accepted.unwrap().0,
                    changed = is_away.changed() => {
                        if changed.is_err() {
                            return;
                        }
                        connections.abort_all();
                        continue;
                    }
                };
                count.fetch_add(1, Ordering::Relaxed);
                if *is_away.borrow() {
                    continue;
                }
                let mut client = client;
                if refuses.load(Ordering::Relaxed) && begins_with_settings(&client).await {
                    client.write_all(&refusal()).await.unwrap();
                    continue;
                }
                let server = TcpStream::connect(&server).await.unwrap();
                client.set_nodelay(true).unwrap();
                server.set_nodelay(true).unwrap();
                connections.spawn(connect(client, server, Arc::clone(&cuts)));
            }
        });
        let url = format!("{user}@{address}/{database}");
        Self {
            url,
            next,
            away,
            connections,
            is_pooler,
            _accepting: accepting,
        }
    }

    pub(crate) fn url(&self) -> &str {
        &self.url
    }

    /// Cuts all connections, and closes new ones at once.
    pub(crate) fn leave(&self) {
        self.away.send_replace(true);
    }

    /// From now on it takes no connection that begins with settings, as PgBouncer does.
    pub(crate) fn be_a_pooler(&self) {
        self.is_pooler.store(true, Ordering::Relaxed);
    }

    /// Lets connections pass again.
    pub(crate) fn come_back(&self) {
        self.away.send_replace(false);
    }

    /// How many connections were made, in vain or not.
    pub(crate) fn connections(&self) -> usize {
        self.connections.load(Ordering::Relaxed)
    }

    /// Cuts or stalls the connections of the next commits.
    pub(crate) fn cut(&self, cuts: &[Cut]) {
        *self.next.lock().unwrap() = cuts.iter().copied().collect();
    }

    /// How many cuts have not been made yet.
    pub(crate) fn cuts_left(&self) -> usize {
        self.next.lock().unwrap().len()
    }
}

/// Whether a new client's first message has settings for its session.
async fn begins_with_settings(client: &TcpStream) -> bool {
    let mut first = vec![0; 1 << 12];
    let length = client.peek(&mut first).await.unwrap();
    contains(&first[..length], b"\0options\0")
}

/// The answer of a pooler to that.
fn refusal() -> Vec<u8> {
    let fields = b"SFATAL\0VFATAL\0C08P01\0Munsupported startup parameter: options\0\0";
    let length = u32::try_from(4 + fields.len()).unwrap();
    [&b"E"[..], &length.to_be_bytes(), fields].concat()
}

/// Returning closes both sides. The server's end of a transaction that was cut off is a rollback.
async fn connect(mut client: TcpStream, mut server: TcpStream, cuts: Arc<Mutex<VecDeque<Cut>>>) {
    let mut asked = vec![0; 1 << 20];
    let mut answered = vec![0; 1 << 16];
    loop {
        tokio::select! {
            read = client.read(&mut asked) => {
                let Ok(length @ 1..) = read else { return };
                let asked = &asked[..length];
                let commits = contains(asked, COMMIT) || asked.first() == Some(&BIND);
                let cut = if commits { cuts.lock().unwrap().pop_front() } else { None };
                if cut == Some(Cut::Before) {
                    return;
                }
                if cut == Some(Cut::Stall) {
                    std::future::pending::<()>().await;
                }
                server.write_all(asked).await.unwrap();
                if cut == Some(Cut::After) {
                    until_committed(&mut server).await;
                    return;
                }
            }
            read = server.read(&mut answered) => {
                let Ok(length @ 1..) = read else { return };
                if client.write_all(&answered[..length]).await.is_err() {
                    return;
                }
            }
        }
    }
}

async fn until_committed(server: &mut TcpStream) {
    let mut said = Vec::new();
    let mut buffer = vec![0; 1 << 16];
    while !contains(&said, IDLE) {
        let length = server.read(&mut buffer).await.unwrap();
        assert!(
            length > 0,
            "the server closed the connection instead of committing"
        );
        said.extend_from_slice(&buffer[..length]);
    }
}

fn contains(bytes: &[u8], part: &[u8]) -> bool {
    bytes.windows(part.len()).any(|window| window == part)
}
