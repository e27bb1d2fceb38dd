//! The downstream service by HTTP, for handlers that are other programs.

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use bytes::Bytes;
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use parking_lot::{Mutex, MutexGuard};
use serde_json::{Value, json};
use tokio::net::{TcpListener, TcpStream};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::round::{Downstream, DownstreamError};

/// The longest body of a call, in bytes.
const BODY_MAX_BYTES: usize = 1024 * 1024;
/// The word that precedes the number of a process in a path.
const PROCESS: &str = "process";

/// The downstream service of a trial, by HTTP: `POST …/effects` with a JSON body and the header
/// `Idempotency-Key`.
///
/// `POST …/effects/STEP` names the step, for handlers with several effects. The answer is
/// `{"receipt": …}` with status 200, also for a repeated key. On request of the trial it answers
/// with status 500, late, or not at all.
pub struct Service {
    address: SocketAddr,
    addresses: Arc<Addresses>,
    stop: CancellationToken,
    tasks: TaskTracker,
}

/// The address of the service for one process. Dropping it closes the address: later calls get no
/// answer.
#[derive(Debug)]
pub struct ServiceAddress {
    url: String,
    number: u64,
    addresses: Arc<Addresses>,
}

#[derive(Debug, Default)]
struct Addresses(Mutex<AddressesState>);

#[derive(Debug, Default)]
struct AddressesState {
    next: u64,
    by_number: BTreeMap<u64, Downstream>,
    /// The services that were opened for all processes; the last one counts.
    shared: BTreeMap<u64, Downstream>,
}

impl Addresses {
    fn lock(&self) -> MutexGuard<'_, AddressesState> {
        self.0.lock()
    }
}

impl Service {
    /// Listens on this address; port 0 takes a free one.
    ///
    /// # Errors
    /// When the address cannot be bound.
    pub async fn start(listen: SocketAddr) -> io::Result<Self> {
        let listener = TcpListener::bind(listen).await?;
        let address = listener.local_addr()?;
        let addresses = Arc::default();
        let stop = CancellationToken::new();
        let tasks = TaskTracker::new();
        tasks.spawn(accept(
            listener,
            Arc::clone(&addresses),
            stop.clone(),
            tasks.clone(),
        ));
        Ok(Self {
            address,
            addresses,
            stop,
            tasks,
        })
    }

    /// Opens an address for the process of `downstream` alone.
    pub fn address(&self, downstream: Downstream) -> ServiceAddress {
        let mut state = self.addresses.lock();
        state.next += 1;
        let number = state.next;
        state.by_number.insert(number, downstream);
        let url = format!("http://{}/{PROCESS}/{number}", self.address);
        ServiceAddress {
            url,
            number,
            addresses: Arc::clone(&self.addresses),
        }
    }

    /// Opens the address that all processes share: for a worker that serves them all. Its calls
    /// belong to the process that handles their sample. Only one round may run at a time.
    pub fn shared_address(&self, downstream: Downstream) -> ServiceAddress {
        let mut state = self.addresses.lock();
        state.next += 1;
        let number = state.next;
        state.shared.insert(number, downstream);
        ServiceAddress {
            url: self.url(),
            number,
            addresses: Arc::clone(&self.addresses),
        }
    }

    /// The address that all processes share.
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Closes all connections, and waits for calls that are still late.
    pub async fn stop(&self) {
        self.stop.cancel();
        self.tasks.close();
        self.tasks.wait().await;
    }
}

impl fmt::Debug for Service {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Service")
            .field("address", &self.address)
            .finish_non_exhaustive()
    }
}

impl ServiceAddress {
    /// The URL to put before `/effects`: the value of `ONCEGATE_DOWNSTREAM` for a worker.
    pub fn url(&self) -> &str {
        &self.url
    }
}

impl Drop for ServiceAddress {
    fn drop(&mut self) {
        let mut state = self.addresses.lock();
        state.by_number.remove(&self.number);
        state.shared.remove(&self.number);
    }
}

async fn accept(
    listener: TcpListener,
    addresses: Arc<Addresses>,
    stop: CancellationToken,
    tasks: TaskTracker,
) {
    loop {
        let accepted = tokio::select! {
            () = stop.cancelled() => return,
            accepted = listener.accept() => accepted,
        };
        match accepted {
            Ok((stream, _)) => {
                tasks.spawn(serve(
                    stream,
                    Arc::clone(&addresses),
                    stop.clone(),
                    tasks.clone(),
                ));
            }
            // Too many open files, for example; connections end, so it is tried again.
            Err(_) => tokio::task::yield_now().await,
        }
    }
}

/// Serves one connection. A call that gets no answer ends it.
async fn serve(
    stream: TcpStream,
    addresses: Arc<Addresses>,
    stop: CancellationToken,
    tasks: TaskTracker,
) {
    let service = service_fn(|request: Request<Incoming>| {
        let addresses = Arc::clone(&addresses);
        let tasks = tasks.clone();
        async move { handle(request, &addresses, &tasks).await }
    });
    let connection =
        hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(stream), service);
    tokio::select! {
        () = stop.cancelled() => {}
        // It ends with an error whenever a call gets no answer.
        _ = connection => {}
    }
}

type Reply = Response<Full<Bytes>>;

/// Answers a request; an error closes the connection without an answer.
async fn handle(
    request: Request<Incoming>,
    addresses: &Addresses,
    tasks: &TaskTracker,
) -> Result<Reply, DownstreamError> {
    let path = request.uri().path().to_owned();
    let Some((downstream, step)) = route(&path, addresses) else {
        // Either the process was killed, or the path is wrong. The second must be told.
        return if path.starts_with(&format!("/{PROCESS}/")) && path.contains("/effects") {
            Err(DownstreamError::NoAnswer)
        } else {
            Ok(reply(
                StatusCode::NOT_FOUND,
                &json!({ "error": "post to $ONCEGATE_DOWNSTREAM/effects" }),
            ))
        };
    };
    if request.method() != Method::POST {
        return Ok(reply(
            StatusCode::METHOD_NOT_ALLOWED,
            &json!({ "error": "the method must be POST" }),
        ));
    }
    let key = request
        .headers()
        .get("idempotency-key")
        .and_then(|key| key.to_str().ok());
    let key = key
        .map(|key| key.trim_matches('"').to_owned())
        .filter(|key| !key.is_empty());
    let Ok(body) = Limited::new(request.into_body(), BODY_MAX_BYTES)
        .collect()
        .await
    else {
        return Ok(reply(
            StatusCode::PAYLOAD_TOO_LARGE,
            &json!({ "error": "the body is too long" }),
        ));
    };
    let Ok(body) = serde_json::from_slice::<Value>(&body.to_bytes()) else {
        return Ok(reply(
            StatusCode::BAD_REQUEST,
            &json!({ "error": "the body must be JSON" }),
        ));
    };
    // A task of its own: a service does what it was asked to, whether or not the caller still
    // waits.
    let calling = tasks.spawn(async move {
        let effect = downstream.of_caller_if_shared(&body);
        let request = effect.effect(&body).step(&step);
        match &key {
            Some(key) => request.idempotency_key(key).send().await,
            None => request.send().await,
        }
    });
    match calling.await {
        Ok(Ok(answer)) => Ok(reply(StatusCode::OK, &answer)),
        Ok(Err(DownstreamError::Refused)) => Ok(reply(
            StatusCode::INTERNAL_SERVER_ERROR,
            &json!({ "error": "a fault of the trial" }),
        )),
        Ok(Err(DownstreamError::NoAnswer)) | Err(_) => Err(DownstreamError::NoAnswer),
    }
}

/// The downstream service of one process, or of whichever process the values of a call belong to.
struct Target {
    downstream: Downstream,
    is_shared: bool,
}

impl Target {
    fn of_caller_if_shared(&self, body: &Value) -> Downstream {
        if self.is_shared {
            self.downstream.of_caller(body)
        } else {
            self.downstream.clone()
        }
    }
}

/// Finds the process and the step of a path: `/process/7/effects/charge`, `/effects`.
fn route(path: &str, addresses: &Addresses) -> Option<(Target, String)> {
    let state = addresses.lock();
    let (target, rest) = match path.strip_prefix(&format!("/{PROCESS}/")) {
        Some(rest) => {
            let (number, rest) = rest.split_once('/')?;
            let downstream = state.by_number.get(&number.parse().ok()?)?.clone();
            (
                Target {
                    downstream,
                    is_shared: false,
                },
                rest,
            )
        }
        None => {
            let (_, downstream) = state.shared.last_key_value()?;
            (
                Target {
                    downstream: downstream.clone(),
                    is_shared: true,
                },
                path.strip_prefix('/')?,
            )
        }
    };
    let step = rest.strip_prefix("effects")?;
    match step.strip_prefix('/') {
        Some(step) => Some((target, step.trim_end_matches('/').to_owned())),
        None => step.is_empty().then(|| (target, String::new())),
    }
}

fn reply(status: StatusCode, body: &Value) -> Reply {
    let mut reply = Response::new(Full::new(Bytes::from(body.to_string())));
    *reply.status_mut() = status;
    let json = hyper::header::HeaderValue::from_static("application/json");
    reply
        .headers_mut()
        .insert(hyper::header::CONTENT_TYPE, json);
    reply
}
