//! A way to a server that can hold replies back, or lose them.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;

use crate::redis::Redis;

/// What happens to replies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// They come.
    Pass,
    /// The replies on the connection of this number are held back, counted from 0.
    Hold(usize),
    /// Nothing is replied any more, on no connection.
    HoldAll,
    /// The next reply is thrown away and its connection closed: the server has executed, nobody knows.
    Lose,
    /// The next reply ends in the middle of a frame, and its connection is reset.
    Cut,
    /// The next reply never comes, and its connection stays open.
    Stall,
    /// Every connection is closed, and none is made.
    Refuse,
}

/// It ends with this value.
#[derive(Debug)]
pub struct Proxy {
    address: SocketAddr,
    mode: Arc<watch::Sender<Mode>>,
    last_heard: Arc<AtomicUsize>,
    server: Arc<Mutex<String>>,
    _accepting: JoinSet<()>,
}

fn address(redis: &Redis) -> String {
    redis.url().trim_start_matches("redis://").to_owned()
}

impl Proxy {
    /// Before a Redis.
    ///
    /// # Panics
    /// When there is no port to listen on.
    pub async fn before(redis: &Redis) -> Self {
        Self::before_address(address(redis)).await
    }

    /// Before any server, `host:port`.
    ///
    /// # Panics
    /// When there is no port to listen on.
    pub async fn before_address(server: impl Into<String>) -> Self {
        let server = Arc::new(Mutex::new(server.into()));
        let now = Arc::clone(&server);
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port is free");
        let address = listener.local_addr().expect("it listens");
        let mode = Arc::new(watch::Sender::new(Mode::Pass));
        let mut accepting = JoinSet::new();
        let last_heard = Arc::new(AtomicUsize::new(0));
        let of_connections = (Arc::clone(&mode), Arc::clone(&last_heard));
        accepting.spawn(async move {
            let mut connections = JoinSet::new();
            for number in 0.. {
                let Ok((client, _)) = listener.accept().await else { return };
                drop(client.set_nodelay(true));
                let (mode, last_heard) = of_connections.clone();
                let server = now.lock().expect("nobody panics with it").clone();
                connections.spawn(connect(number, client, server, mode, last_heard));
            }
        });
        Self { address, mode, last_heard, server, _accepting: accepting }
    }

    /// New connections go to this server.
    ///
    /// # Panics
    /// Never: nobody panics who holds the address.
    pub fn point_at(&self, redis: &Redis) {
        *self.server.lock().expect("nobody panics with it") = address(redis);
    }

    /// The URL for clients, if the server is a Redis.
    #[must_use]
    pub fn url(&self) -> String {
        format!("redis://{}", self.address)
    }

    /// Where it listens.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// From now on.
    pub fn set(&self, mode: Mode) {
        self.mode.send_replace(mode);
    }

    /// Holds back the replies on the connection that brought the last one.
    pub fn hold_last(&self) {
        self.set(Mode::Hold(self.last_heard.load(Ordering::SeqCst)));
    }

    /// Holds back the replies on every connection.
    pub fn hold_all(&self) {
        self.set(Mode::HoldAll);
    }

    /// Waits until a reply has been thrown away; then replies pass again.
    ///
    /// # Panics
    /// Never: the sender is the proxy's own.
    pub async fn lost(&self) {
        self.mode.subscribe().wait_for(|mode| *mode == Mode::Pass).await.expect("the sender is ours");
    }
}

async fn connect(
    number: usize,
    client: TcpStream,
    server: String,
    mode: Arc<watch::Sender<Mode>>,
    last_heard: Arc<AtomicUsize>,
) {
    let mut modes = mode.subscribe();
    if *modes.borrow() == Mode::Refuse {
        return;
    }
    // While the server is down, the client sees its connection closed.
    let Ok(server) = TcpStream::connect(server).await else {
        return;
    };
    drop(server.set_nodelay(true));
    let (from_client, to_client) = client.into_split();
    let (from_server, to_server) = server.into_split();
    tokio::select! {
        () = forward(from_client, to_server) => {}
        () = reply(number, from_server, to_client, Arc::clone(&mode), last_heard) => {}
        _ = modes.wait_for(|mode| *mode == Mode::Refuse) => {}
    }
}

async fn forward(mut from: OwnedReadHalf, mut to: OwnedWriteHalf) {
    // An error is an end.
    drop(tokio::io::copy(&mut from, &mut to).await);
}

async fn reply(
    number: usize,
    mut from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
    mode: Arc<watch::Sender<Mode>>,
    last_heard: Arc<AtomicUsize>,
) {
    let mut buffer = vec![0; 1 << 16];
    let mut modes = mode.subscribe();
    while let Ok(length @ 1..) = from.read(&mut buffer).await {
        let mut fault = Mode::Pass;
        mode.send_if_modified(|mode| {
            let is_for_one = matches!(*mode, Mode::Lose | Mode::Cut | Mode::Stall);
            if is_for_one {
                fault = std::mem::replace(mode, Mode::Pass);
            }
            is_for_one
        });
        match fault {
            Mode::Lose => return,
            Mode::Cut => {
                // All but the last byte of the line end: the frame is nearly whole.
                drop(to.write_all(buffer.get(..length - 1).unwrap_or_default()).await);
                // Nothing lingers: the client sees a reset where the kernel has not delivered everything yet.
                drop(to.as_ref().set_zero_linger());
                return;
            }
            Mode::Stall => {
                while let Ok(1..) = from.read(&mut buffer).await {}
                return;
            }
            _ => {}
        }
        let passes = |mode: &Mode| *mode != Mode::Hold(number) && *mode != Mode::HoldAll;
        if modes.wait_for(passes).await.is_err() {
            return;
        }
        last_heard.store(number, Ordering::SeqCst);
        if to.write_all(buffer.get(..length).unwrap_or_default()).await.is_err() {
            return;
        }
    }
}
