//! The connections: a thread of their own, one lane for bulk and one for heartbeats.
//!
//! deadpool-redis makes and holds the connections. A lane checks one out when it connects and clones it for
//! each batch: a checkout per call would cost the server three times as much. A lane that has lost its
//! connection answers at once that the store is unavailable and connects again by itself.

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use deadpool_redis::{Connection, Pool};
use futures_util::future::BoxFuture;
use futures_util::stream::FuturesUnordered;
use futures_util::{FutureExt as _, StreamExt as _};
use oncegate_core::store::StoreError;
use redis::Value;
use redis::aio::MultiplexedConnection;
use tokio::sync::oneshot;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::flight;
use super::scripts::{Request, Scripts};
use crate::batch::{self, Carrier, Joiner};

/// The most pipelines of a lane that are on their way at once: while one is answered, the next is read.
/// With more of them, each is smaller and costs more.
const MAX_FLIGHTS: usize = 3;

/// How long a lane waits before it tries to connect for the second time; then it doubles.
const FIRST_PAUSE: Duration = Duration::from_millis(50);

/// How long a lane waits at most before it tries to connect again.
const LONGEST_PAUSE: Duration = Duration::from_millis(400);

/// A connection that lasted as long was a good one: after it, the first try follows at once.
const GOOD_CONNECTION: Duration = Duration::from_secs(1);

/// What the server said in one slot of a pipeline; its own errors are values here.
pub(super) type Answer = Result<Value, StoreError>;

/// The callers' end of both lanes. Dropping it stops the thread and waits for it.
#[derive(Debug)]
pub(super) struct Lanes {
    /// For everything but heartbeats.
    pub(super) bulk: Joiner<Request, Answer>,
    /// For heartbeats, which must not queue behind bulk.
    pub(super) heartbeats: Joiner<Request, Answer>,
    stop: CancellationToken,
    thread: Option<JoinHandle<()>>,
}

/// What both lanes share.
#[derive(Clone)]
pub(super) struct Shared {
    pub(super) pool: Pool,
    pub(super) scripts: Arc<Scripts>,
    /// How long a pipeline may take, besides what its size adds.
    pub(super) response_timeout: Duration,
}

impl Lanes {
    /// Starts the thread and connects both lanes.
    ///
    /// # Errors
    /// When a lane cannot connect. Nothing is left running then.
    pub(super) async fn start(shared: Shared) -> Result<Self, StoreError> {
        let (bulk, bulk_carrier) = batch::channel();
        let (heartbeats, heartbeat_carrier) = batch::channel();
        let (bulk_up, bulk_is_up) = oneshot::channel();
        let (heartbeats_up, heartbeats_are_up) = oneshot::channel();
        let stop = CancellationToken::new();
        let stopped = stop.clone();
        let drive = move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            let runtime = match runtime {
                Ok(runtime) => runtime,
                Err(error) => {
                    tracing::error!(%error, "no runtime for the store's connections");
                    return;
                }
            };
            runtime.block_on(async {
                let bulk = Lane::new("bulk", bulk_carrier, shared.clone());
                let heartbeats = Lane::new("heartbeats", heartbeat_carrier, shared);
                let lanes = async { tokio::join!(bulk.run(bulk_up), heartbeats.run(heartbeats_up)) };
                tokio::select! {
                    () = stopped.cancelled() => {}
                    _ = lanes => {}
                }
            });
            // A name that is still being resolved keeps nobody waiting.
            runtime.shutdown_background();
        };
        let thread = std::thread::Builder::new().name("oncegate-redis".to_owned()).spawn(drive);
        let thread = thread.map_err(|error| StoreError::unavailable(format!("no thread: {error}")))?;
        let lanes = Self { bulk, heartbeats, stop, thread: Some(thread) };
        for up in [bulk_is_up, heartbeats_are_up] {
            up.await.unwrap_or_else(|_| Err(StoreError::unavailable("the store's thread ended")))?;
        }
        Ok(lanes)
    }
}

impl Drop for Lanes {
    fn drop(&mut self) {
        self.stop.cancel();
        if let Some(thread) = self.thread.take() {
            // Nobody is left who waits for an answer, so the thread ends at its next wake-up. Whether it
            // had panicked does not matter any more.
            let _ = thread.join();
        }
    }
}

/// One connection and its queue.
struct Lane {
    name: &'static str,
    carrier: Carrier<Request, Answer>,
    shared: Shared,
}

/// Where a lane stands.
enum Standing {
    Up(Connection),
    Down(StoreError),
    Ended,
}

type Flights = FuturesUnordered<BoxFuture<'static, Landing>>;

/// What comes back from a pipeline: why its connection should be replaced, if it should.
struct Landing {
    generation: u64,
    broken: Option<StoreError>,
}

impl Lane {
    fn new(name: &'static str, carrier: Carrier<Request, Answer>, shared: Shared) -> Self {
        Self { name, carrier, shared }
    }

    /// Works until every caller is gone; `up` hears how the first try to connect ended.
    async fn run(mut self, up: oneshot::Sender<Result<(), StoreError>>) {
        let mut up = Some(up);
        let mut flights = Flights::new();
        let mut generation = 0_u64;
        let mut standing = Standing::Down(StoreError::unavailable("not connected yet"));
        // A server that accepts connections and refuses to work must not be flooded with them either.
        let mut pause = Duration::ZERO;
        loop {
            standing = match standing {
                Standing::Ended => return,
                Standing::Down(reason) => self.connect(reason, &mut pause, &mut up, &mut flights).await,
                Standing::Up(connection) => {
                    generation += 1;
                    let since = Instant::now();
                    let next = self.serve(&connection, generation, &mut flights).await;
                    pause =
                        if since.elapsed() < GOOD_CONNECTION { next_pause(pause) } else { Duration::ZERO };
                    if let Standing::Down(reason) = &next {
                        tracing::warn!(lane = self.name, %reason, "the connection to the store is lost");
                    }
                    // Taken out of the pool, so that nobody is handed a dead one.
                    drop(Connection::take(connection));
                    next
                }
            };
        }
    }

    /// Sends batch after batch until the connection breaks.
    async fn serve(
        &mut self,
        connection: &MultiplexedConnection,
        generation: u64,
        flights: &mut Flights,
    ) -> Standing {
        loop {
            tokio::select! {
                biased;
                Some(landing) = flights.next(), if !flights.is_empty() => {
                    if let Some(reason) = landing.broken.filter(|_| landing.generation == generation) {
                        return Standing::Down(reason);
                    }
                }
                batch = self.carrier.next(), if flights.len() < MAX_FLIGHTS => {
                    let Some(batch) = batch else {
                        return Standing::Ended;
                    };
                    let flight = flight::fly(self.shared.clone(), connection.clone(), batch);
                    flights.push(flight.map(move |broken| Landing { generation, broken }).boxed());
                }
            }
        }
    }

    /// Tries to connect until it succeeds; whoever calls meanwhile hears why there is no connection.
    async fn connect(
        &mut self,
        mut reason: StoreError,
        pause: &mut Duration,
        up: &mut Option<oneshot::Sender<Result<(), StoreError>>>,
        flights: &mut Flights,
    ) -> Standing {
        loop {
            let (shared, pause_now) = (self.shared.clone(), *pause);
            let attempt = async move {
                tokio::time::sleep(pause_now).await;
                flight::connect(&shared).await
            };
            tokio::pin!(attempt);
            let outcome = loop {
                tokio::select! {
                    outcome = &mut attempt => break outcome,
                    // What was sent on the old connection is over soon.
                    Some(_) = flights.next(), if !flights.is_empty() => {}
                    batch = self.carrier.next() => match batch {
                        Some(batch) => batch.answer_all(&Err(reason.clone())),
                        None => return Standing::Ended,
                    },
                }
            };
            let first = up.take();
            match outcome {
                Ok(connection) => {
                    if let Some(up) = first {
                        // A caller who gave up connecting has dropped the lanes too.
                        let _ = up.send(Ok(()));
                    } else {
                        tracing::info!(lane = self.name, "connected to the store again");
                    }
                    return Standing::Up(connection);
                }
                Err(error) => {
                    if let Some(up) = first {
                        let _ = up.send(Err(error.clone()));
                    }
                    reason = error;
                }
            }
            *pause = next_pause(*pause);
        }
    }
}

/// Doubles up to a limit, with jitter: many processes lose a server at the same moment.
fn next_pause(pause: Duration) -> Duration {
    let doubled = (pause * 2).clamp(FIRST_PAUSE, LONGEST_PAUSE);
    doubled.mul_f64(0.75 + fastrand::f64() / 2.0)
}
