//! A way to the server that can hold replies back, or lose them.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use oncegate_tests::Redis;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;

/// What happens to replies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
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
}

/// It ends with this value.
pub(crate) struct Proxy {
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
    pub(crate) async fn before(redis: &Redis) -> Self {
        let server = Arc::new(Mutex::new(address(redis)));
        let now = Arc::clone(&server);
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let mode = Arc::new(watch::Sender::new(Mode::Pass));
        let mut accepting = JoinSet::new();
        let last_heard = Arc::new(AtomicUsize::new(0));
        let of_connections = (Arc::clone(&mode), Arc::clone(&last_heard));
        accepting.spawn(async move {
            let mut connections = JoinSet::new();
            for number in 0.. {
                let (client, _) = listener.accept().await.unwrap();
                client.set_nodelay(true).unwrap();
                let (mode, last_heard) = of_connections.clone();
                let server = now.lock().unwrap().clone();
                connections.spawn(connect(number, client, server, mode, last_heard));
            }
        });
        Self { address, mode, last_heard, server, _accepting: accepting }
    }

    /// New connections go to this server.
    pub(crate) fn point_at(&self, redis: &Redis) {
        *self.server.lock().unwrap() = address(redis);
    }

    pub(crate) fn url(&self) -> String {
        format!("redis://{}", self.address)
    }

    pub(crate) fn set(&self, mode: Mode) {
        self.mode.send_replace(mode);
    }

    /// Holds back the replies on the connection that brought the last one.
    pub(crate) fn hold_last(&self) {
        self.set(Mode::Hold(self.last_heard.load(Ordering::SeqCst)));
    }

    /// Holds back the replies on every connection.
    pub(crate) fn hold_all(&self) {
        self.set(Mode::HoldAll);
    }

    /// Waits until a reply has been thrown away; then replies pass again.
    pub(crate) async fn lost(&self) {
        self.mode.subscribe().wait_for(|mode| *mode == Mode::Pass).await.unwrap();
    }
}

async fn connect(
    number: usize,
    client: TcpStream,
    server: String,
    mode: Arc<watch::Sender<Mode>>,
    last_heard: Arc<AtomicUsize>,
) {
    // While the server is down, the client sees its connection closed.
    let Ok(server) = TcpStream::connect(server).await else {
        return;
    };
    server.set_nodelay(true).unwrap();
    let (from_client, to_client) = client.into_split();
    let (from_server, to_server) = server.into_split();
    tokio::select! {
        () = forward(from_client, to_server) => {}
        () = reply(number, from_server, to_client, mode, last_heard) => {}
    }
}

async fn forward(mut from: OwnedReadHalf, mut to: OwnedWriteHalf) {
    // An error is an end.
    let _ = tokio::io::copy(&mut from, &mut to).await;
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
                let _ = to.write_all(&buffer[..length - 1]).await;
                // Nothing lingers: the client sees a reset where the kernel has not delivered everything yet.
                let _ = to.as_ref().set_zero_linger();
                return;
            }
            Mode::Stall => {
                while let Ok(1..) = from.read(&mut buffer).await {}
                return;
            }
            _ => {}
        }
        modes.wait_for(|mode| *mode != Mode::Hold(number) && *mode != Mode::HoldAll).await.unwrap();
        last_heard.store(number, Ordering::SeqCst);
        if to.write_all(&buffer[..length]).await.is_err() {
            return;
        }
    }
}
