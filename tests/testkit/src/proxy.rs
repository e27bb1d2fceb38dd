//! A proxy that can delay replies of a server, or lose them.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use bytes::BytesMut;
use redis_protocol::resp2::decode::decode_range;
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
    /// The next reply is held back, and whatever follows it on its connection.
    Delay,
    /// The next reply is dropped and its connection closed: the server has executed, the client
    /// cannot know.
    Lose,
    /// The next reply ends in the middle of its frame, and its connection is reset.
    Cut,
    /// The next reply never comes, and its connection stays open.
    Stall,
    /// Every connection is closed, and none is made.
    Refuse,
}

impl Mode {
    fn holds(self, connection: usize) -> bool {
        self == Self::HoldAll || self == Self::Hold(connection)
    }
}

/// What happens to replies, and from which on.
#[derive(Clone, Copy, Debug)]
struct Plan {
    mode: Mode,
    /// So many replies pass before the one that is lost or delayed.
    after: usize,
}

impl Plan {
    const PASS: Self = Self {
        mode: Mode::Pass,
        after: 0,
    };

    /// Whether the plan is for the next reply alone, so that the proxy must separate it from those
    /// that follow.
    fn is_for_one(&self) -> bool {
        matches!(
            self.mode,
            Mode::Delay | Mode::Lose | Mode::Cut | Mode::Stall
        )
    }

    /// What happens to the next reply, which comes on this connection; then it is out of the plan.
    fn strike(&mut self, connection: usize) -> Mode {
        if !self.is_for_one() {
            return Mode::Pass;
        }
        if self.after > 0 {
            self.after -= 1;
            return Mode::Pass;
        }
        let next = if self.mode == Mode::Delay {
            Mode::Hold(connection)
        } else {
            Mode::Pass
        };
        std::mem::replace(&mut self.mode, next)
    }
}

/// What is one reply in a stream of bytes.
#[derive(Clone, Copy, Debug)]
enum Framing {
    /// A frame of RESP, which separates the replies of a pipeline.
    Resp,
    /// Whatever comes with one read.
    Reads,
}

impl Framing {
    /// How long the first reply is, once it is there as a whole.
    fn first(self, received: &[u8]) -> Option<usize> {
        match self {
            Self::Resp => decode_range(received)
                .expect("Redis speaks RESP")
                .map(|(_, length)| length),
            Self::Reads => Some(received.len()).filter(|length| *length > 0),
        }
    }

    /// How long all replies are that are there as a whole.
    fn all(self, received: &[u8]) -> Option<usize> {
        let mut all = 0;
        while let Some(length) = self.first(received.get(all..).unwrap_or_default()) {
            all += length;
        }
        Some(all).filter(|length| *length > 0)
    }
}

/// What stands in replies instead of what the server says. Both texts of a pair are of one length,
/// so that frames stay whole.
type Rewritten = Arc<Mutex<Vec<(&'static str, &'static str)>>>;

/// It ends with this value.
#[derive(Debug)]
pub struct Proxy {
    address: SocketAddr,
    plan: Arc<watch::Sender<Plan>>,
    last_heard: Arc<AtomicUsize>,
    server: Arc<Mutex<String>>,
    rewritten: Rewritten,
    _accepting: JoinSet<()>,
}

fn address(redis: &Redis) -> String {
    redis.url().trim_start_matches("redis://").to_owned()
}

impl Proxy {
    /// Before a Redis that is asked by its clients, not followed by a replica: each frame is a
    /// reply.
    ///
    /// # Panics
    /// When there is no port to listen on.
    pub async fn before(redis: &Redis) -> Self {
        Self::start(address(redis), Framing::Resp).await
    }

    /// Starts a proxy before any server, `host:port`, of any protocol: the bytes of one read are a
    /// reply.
    ///
    /// # Panics
    /// When there is no port to listen on.
    pub async fn before_address(server: impl Into<String>) -> Self {
        Self::start(server.into(), Framing::Reads).await
    }

    async fn start(server: String, framing: Framing) -> Self {
        let server = Arc::new(Mutex::new(server));
        let now = Arc::clone(&server);
        let listener = TcpListener::bind("127.0.0.1:0")
            .await
            .expect("a port is free");
        let address = listener.local_addr().expect("it listens");
        let plan = Arc::new(watch::Sender::new(Plan::PASS));
        let mut accepting = JoinSet::new();
        let last_heard = Arc::new(AtomicUsize::new(0));
        let rewritten = Rewritten::default();
        let of_connections = (
            Arc::clone(&plan),
            Arc::clone(&last_heard),
            Arc::clone(&rewritten),
        );
        accepting.spawn(async move {
            let mut connections = JoinSet::new();
            for number in 0.. {
                let Ok((client, _)) = listener.accept().await else {
                    return;
                };
                drop(client.set_nodelay(true));
                let (plan, last_heard, rewritten) = of_connections.clone();
                let server = now
                    .lock()
                    .expect("no thread panics while it holds the lock")
                    .clone();
                let connection = Connection {
                    number,
                    framing,
                    plan,
                    last_heard,
                    rewritten,
                };
                connections.spawn(connection.run(client, server));
            }
        });
        Self {
            address,
            plan,
            last_heard,
            server,
            rewritten,
            _accepting: accepting,
        }
    }

    /// From now on, `instead` stands in every reply where the server says `said`.
    ///
    /// # Panics
    /// When the texts differ in length.
    pub fn rewrite(&self, said: &'static str, instead: &'static str) {
        assert_eq!(said.len(), instead.len(), "a frame names its length");
        self.rewritten
            .lock()
            .expect("no thread panics while it holds the lock")
            .push((said, instead));
    }

    /// New connections go to this server.
    ///
    /// # Panics
    /// Never: no thread panics while it holds the address.
    pub fn point_at_address(&self, server: impl Into<String>) {
        *self
            .server
            .lock()
            .expect("no thread panics while it holds the lock") = server.into();
    }

    /// New connections go to this Redis.
    ///
    /// # Panics
    /// Never: no thread panics while it holds the address.
    pub fn point_at(&self, redis: &Redis) {
        *self
            .server
            .lock()
            .expect("no thread panics while it holds the lock") = address(redis);
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
        self.set_after(0, mode);
    }

    /// The same for a mode that is for one reply: so many others pass before it.
    pub fn set_after(&self, replies: usize, mode: Mode) {
        self.plan.send_replace(Plan {
            mode,
            after: replies,
        });
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
        self.plan
            .subscribe()
            .wait_for(|plan| plan.mode == Mode::Pass)
            .await
            .expect("the sender is ours");
    }
}

/// One of a client's connections.
struct Connection {
    /// Which one, counted from 0.
    number: usize,
    framing: Framing,
    plan: Arc<watch::Sender<Plan>>,
    last_heard: Arc<AtomicUsize>,
    rewritten: Rewritten,
}

impl Connection {
    async fn run(self, client: TcpStream, server: String) {
        let mut plans = self.plan.subscribe();
        if plans.borrow().mode == Mode::Refuse {
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
            () = self.reply(from_server, to_client) => {}
            _ = plans.wait_for(|plan| plan.mode == Mode::Refuse) => {}
        }
    }

    async fn reply(&self, mut from: OwnedReadHalf, mut to: OwnedWriteHalf) {
        let mut received = BytesMut::new();
        while let Ok(1..) = from.read_buf(&mut received).await {
            while let Some((reply, fate)) = self.next(&mut received) {
                match fate {
                    Mode::Lose => return,
                    Mode::Cut => {
                        // All but the last byte of the line end: the frame is nearly whole.
                        drop(
                            to.write_all(reply.split_last().map_or(&[], |(_, most)| most))
                                .await,
                        );
                        // Nothing lingers: the client sees a reset where the kernel has not
                        // delivered everything yet.
                        drop(to.as_ref().set_zero_linger());
                        return;
                    }
                    Mode::Stall => {
                        received.clear();
                        while let Ok(1..) = from.read_buf(&mut received).await {
                            received.clear();
                        }
                        return;
                    }
                    _ => {}
                }
                let passes = |plan: &Plan| !plan.mode.holds(self.number);
                if self.plan.subscribe().wait_for(passes).await.is_err() {
                    return;
                }
                self.last_heard.store(self.number, Ordering::SeqCst);
                let reply = self.rewritten(reply);
                if to.write_all(&reply).await.is_err() {
                    return;
                }
            }
        }
    }

    fn rewritten(&self, mut reply: BytesMut) -> BytesMut {
        for (said, instead) in self
            .rewritten
            .lock()
            .expect("no thread panics while it holds the lock")
            .iter()
        {
            let places = reply.windows(said.len()).enumerate();
            let places: Vec<usize> = places
                .filter(|(_, text)| *text == said.as_bytes())
                .map(|(at, _)| at)
                .collect();
            for at in places {
                reply
                    .get_mut(at..at + said.len())
                    .expect("it was found there")
                    .copy_from_slice(instead.as_bytes());
            }
        }
        reply
    }

    /// What is next, and what happens to it: one reply if it may be meant, and otherwise all that
    /// are there.
    fn next(&self, received: &mut BytesMut) -> Option<(BytesMut, Mode)> {
        let mut next = None;
        self.plan.send_if_modified(|plan| {
            let framing = self.framing;
            let length = if plan.is_for_one() {
                framing.first(received)
            } else {
                framing.all(received)
            };
            let Some(length) = length else { return false };
            let fate = plan.strike(self.number);
            next = Some((received.split_to(length), fate));
            fate != Mode::Pass
        });
        next
    }
}

async fn forward(mut from: OwnedReadHalf, mut to: OwnedWriteHalf) {
    // An error is an end.
    drop(tokio::io::copy(&mut from, &mut to).await);
}
