//! The link to one server: one connection for bulk and one for heartbeats, each with its queue.
//!
//! A pipe takes one connection when it connects and clones it for each batch: a checkout from a
//! pool per call would cost the server three times as much. A pipe without a connection answers at
//! once that the store is unavailable, and reconnects by itself.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use futures_util::future::BoxFuture;
use futures_util::stream::FuturesUnordered;
use futures_util::{FutureExt as _, StreamExt as _};
use oncegate_core::store::StoreError;
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::connector::Connector;
use super::direct::Direct;
use super::driver::Jobs;
use super::pipeline::{self, ReadyConnection};
use super::replies::RawReply;
use super::request::Request;
use super::shared::Shared;
use oncegate_store_toolkit::batch::{self, Carrier, CarrierGone, Joiner};

/// The most pipelines of a pipe in flight at once: while one is answered, the next is read.
/// With more of them, each is smaller, and a request costs more.
const MAX_PIPELINES: usize = 3;

/// While a pipeline is in flight, the next one waits for this many calls, or until the pipe has
/// none in flight. Its requests would be answered behind the others on the same connection anyway;
/// sent one by one, each would cost the server, and this process, a packet and a wake-up of its
/// own.
const WORTH_A_PIPELINE: usize = 8;

/// Up to this many requests go in one pipeline. Of more, half can be prepared while the server
/// executes the others.
const UNDIVIDED_REQUESTS: usize = 16;

/// The same while other pipes have pipelines in flight: the thread is busy then, and large
/// pipelines cost less.
const UNDIVIDED_BESIDE_OTHERS: usize = 32;

/// The pause of a pipe before its second try to connect. Then the pause doubles.
const FIRST_PAUSE: Duration = Duration::from_millis(50);

/// The longest pause of a pipe between two tries to connect.
const LONGEST_PAUSE: Duration = Duration::from_millis(400);

/// After a connection that lasted at least this long, the pipe reconnects without a pause.
const GOOD_CONNECTION: Duration = Duration::from_secs(1);

/// A server: a pipe for bulk, and one for heartbeats, which must not queue behind bulk.
///
/// Dropping it ends its pipes.
#[derive(Debug)]
pub(super) struct Node {
    /// `host:port`, or empty when the caller supplied a pool.
    pub(super) address: Arc<str>,
    bulk: Joiner<Request, RawReply>,
    heartbeats: Joiner<Request, RawReply>,
    /// The way past the pipe for bulk.
    direct: Arc<Direct>,
}

/// The pipe of a node that carries a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PipeName {
    Bulk,
    Heartbeats,
}

/// Receives the outcome of a pipe's first try to connect.
pub(super) type Up = oneshot::Receiver<Result<(), StoreError>>;

/// Sends it.
type Connected = oneshot::Sender<Result<(), StoreError>>;

impl Node {
    /// Starts both pipes of a node; they connect by themselves.
    pub(super) fn start(
        jobs: &Jobs,
        address: Arc<str>,
        connector: Connector,
        shared: Shared,
    ) -> (Self, [Up; 2]) {
        let (bulk, carrier) = batch::channel();
        let direct = Direct::new(shared.clone(), Arc::clone(&address), jobs.callers());
        let direct = Arc::new(direct);
        let bulk_pipe = Pipe {
            name: PipeName::Bulk,
            node: Arc::clone(&address),
            carrier,
            connector: connector.clone(),
            shared: shared.clone(),
            direct: Arc::clone(&direct),
        };
        let bulk_pipe = PipeBesideCallers {
            pipe: Some(bulk_pipe),
            jobs: jobs.clone(),
        };
        let (up, bulk_is_up) = oneshot::channel();
        jobs.run_beside_callers(bulk_pipe.run(up));

        let (heartbeats, carrier) = batch::channel();
        let mut heartbeat_pipe = Pipe {
            name: PipeName::Heartbeats,
            node: Arc::clone(&address),
            carrier,
            connector,
            direct: Arc::new(Direct::new(shared.clone(), Arc::clone(&address), None)),
            shared,
        };
        let (up, heartbeats_are_up) = oneshot::channel();
        jobs.run(async move { heartbeat_pipe.run(Some(up)).await });

        let node = Self {
            address,
            bulk,
            heartbeats,
            direct,
        };
        (node, [bulk_is_up, heartbeats_are_up])
    }

    /// Sends requests. Returns one answer for each, in their order.
    pub(super) async fn ask(&self, pipe: PipeName, requests: Vec<Request>) -> Vec<RawReply> {
        let requests = match <[Request; 1]>::try_from(requests) {
            Ok([request]) => return vec![self.ask_one(pipe, request).await],
            Err(requests) => requests,
        };
        let count = requests.len();
        self.pipe(pipe)
            .submit(requests)
            .await
            .unwrap_or_else(|gone| vec![Err(ended(&gone)); count])
    }

    /// Sends one request.
    pub(super) async fn ask_one(&self, pipe: PipeName, request: Request) -> RawReply {
        let request = match pipe {
            PipeName::Heartbeats => request,
            PipeName::Bulk => match self.direct.send(request).await {
                Ok(answer) => return answer,
                Err(request) => request,
            },
        };
        self.pipe(pipe)
            .submit_one(request)
            .await
            .unwrap_or_else(|gone| Err(ended(&gone)))
    }

    fn pipe(&self, name: PipeName) -> &Joiner<Request, RawReply> {
        match name {
            PipeName::Bulk => &self.bulk,
            PipeName::Heartbeats => &self.heartbeats,
        }
    }
}

fn ended(gone: &CarrierGone) -> StoreError {
    let ended = "the store's thread ended";
    if gone.unsent {
        StoreError::unavailable(ended)
    } else {
        StoreError::unknown(ended)
    }
}

/// A connection and its queue.
struct Pipe {
    name: PipeName,
    node: Arc<str>,
    carrier: Carrier<Request, RawReply>,
    connector: Connector,
    shared: Shared,
    direct: Arc<Direct>,
}

/// A pipe on the runtime of its callers. When that runtime ends before the store, the pipe goes on
/// on the driver's thread.
struct PipeBesideCallers {
    /// `None` when the pipe has ended by itself.
    pipe: Option<Pipe>,
    jobs: Jobs,
}

impl PipeBesideCallers {
    async fn run(mut self, up: Connected) {
        if let Some(pipe) = &mut self.pipe {
            pipe.run(Some(up)).await;
        }
        self.pipe = None;
    }
}

impl Drop for PipeBesideCallers {
    fn drop(&mut self) {
        if let Some(mut pipe) = self.pipe.take().filter(|_| !self.jobs.is_stopped()) {
            self.jobs.run(async move { pipe.run(None).await });
        }
    }
}

/// The state of a pipe.
enum Standing {
    Up(ReadyConnection),
    Down(StoreError),
    Ended,
}

type Pipelines = FuturesUnordered<BoxFuture<'static, PipelineResult>>;

/// The number of pipelines of this process in flight, of all stores.
static UNDER_WAY: AtomicUsize = AtomicUsize::new(0);

/// Counts a pipeline while it is in flight.
struct UnderWay;

impl UnderWay {
    fn begin() -> Self {
        UNDER_WAY.fetch_add(1, Ordering::Relaxed);
        Self
    }
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        UNDER_WAY.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The result of a pipeline: why its connection should be replaced, if it should.
struct PipelineResult {
    generation: u64,
    broken: Option<StoreError>,
}

impl Pipe {
    /// Runs until every caller is gone. `up` receives the outcome of the first try to connect.
    async fn run(&mut self, mut up: Option<Connected>) {
        let mut pipelines = Pipelines::new();
        let mut generation = 0_u64;
        let mut standing = Standing::Down(StoreError::unavailable("not connected yet"));
        // A server that accepts connections but refuses commands must not be flooded with
        // connections either.
        let mut pause = Duration::ZERO;
        loop {
            standing = match standing {
                Standing::Ended => return,
                Standing::Down(reason) => {
                    self.connect(reason, &mut pause, &mut up, &mut pipelines)
                        .await
                }
                Standing::Up(ready) => {
                    generation += 1;
                    let since = Instant::now();
                    self.direct.open(ready.clone(), generation);
                    let next = self.serve(&ready, generation, &mut pipelines).await;
                    self.direct.close();
                    pause = if since.elapsed() < GOOD_CONNECTION {
                        next_pause(pause)
                    } else {
                        Duration::ZERO
                    };
                    if let Standing::Down(reason) = &next {
                        let node = &*self.node;
                        let pipe = self.name;
                        tracing::warn!(node, ?pipe, %reason, "lost the connection to the store");
                    }
                    next
                }
            };
        }
    }

    /// Sends batch after batch until the connection breaks.
    async fn serve(
        &mut self,
        ready: &ReadyConnection,
        generation: u64,
        pipelines: &mut Pipelines,
    ) -> Standing {
        let direct = Arc::clone(&self.direct);
        let mut broken = std::pin::pin!(direct.broken());
        loop {
            let own = pipelines.len();
            let at_least = if own == 0 { 1 } else { WORTH_A_PIPELINE };
            let undivided = || {
                if UNDER_WAY.load(Ordering::Relaxed) > own {
                    UNDIVIDED_BESIDE_OTHERS
                } else {
                    UNDIVIDED_REQUESTS
                }
            };
            tokio::select! {
                biased;
                Some(result) = pipelines.next(), if !pipelines.is_empty() => {
                    if let Some(reason) = result.broken.filter(|_| result.generation == generation) {
                        return Standing::Down(reason);
                    }
                }
                reason = &mut broken => return Standing::Down(reason),
                batch = self.carrier.next(at_least, undivided), if pipelines.len() < MAX_PIPELINES => {
                    let Some(batch) = batch else {
                        return Standing::Ended;
                    };
                    let in_flight = self.direct.pipe_sends(batch.len());
                    let shared = self.shared.clone();
                    let sending =
                        pipeline::send_pipeline(shared, Arc::clone(&self.node), ready.clone(), batch, pipelines.len());
                    let under_way = (UnderWay::begin(), in_flight);
                    let sent = sending.map(move |broken| {
                        drop(under_way);
                        PipelineResult { generation, broken }
                    });
                    pipelines.push(sent.boxed());
                }
            }
        }
    }

    /// Tries to connect until it succeeds. Calls meanwhile fail with the reason why there is no
    /// connection.
    async fn connect(
        &mut self,
        mut reason: StoreError,
        pause: &mut Duration,
        up: &mut Option<Connected>,
        pipelines: &mut Pipelines,
    ) -> Standing {
        loop {
            let connector = self.connector.clone();
            let shared = self.shared.clone();
            let node = Arc::clone(&self.node);
            let pause_now = *pause;
            let attempt = async move {
                tokio::time::sleep(pause_now).await;
                pipeline::connect(&connector, &shared, &node).await
            };
            tokio::pin!(attempt);
            let outcome = loop {
                tokio::select! {
                    outcome = &mut attempt => break outcome,
                    // Pipelines on the old connection end soon.
                    Some(_) = pipelines.next(), if !pipelines.is_empty() => {}
                    // Calls to a node that is not yet known to be down wait for the first try.
                    batch = self.carrier.next(1, || UNDIVIDED_REQUESTS), if up.is_none() => match batch {
                        Some(batch) => batch.answer_all(&Err(reason.clone())),
                        None => return Standing::Ended,
                    },
                }
            };
            let first = up.take();
            match outcome {
                Ok(ready) => {
                    if let Some(up) = first {
                        // A caller that gave up connecting has dropped the pipes too.
                        let _ = up.send(Ok(()));
                    } else {
                        tracing::info!(node = &*self.node, pipe = ?self.name, "reconnected to the store");
                    }
                    return Standing::Up(ready);
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
