//! An SQS proxy that injects faults: it counts, refuses and delays calls, and loses answers.

#![expect(
    clippy::indexing_slicing,
    reason = "what is missing in JSON is null, and an answer of SQS is an object"
)]

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use serde_json::{Value, json};
use tokio::io::{AsyncWriteExt as _, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;

use crate::http::Frame;
use crate::sqs::Sqs;

/// The longest wait for a call.
const WAIT_LIMIT: Duration = Duration::from_secs(60);

/// What happens to a call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The server executes it, and the connection is closed before the answer reaches the client.
    LoseReply,
    /// It is refused with 400 `ThrottlingException`, and does not reach the server.
    Throttle,
    /// It is refused with 503, and does not reach the server.
    Unavailable,
    /// It is refused with 403 and this code, `AccessDenied` for example, and does not reach the
    /// server.
    Deny(&'static str),
    /// It waits here, on this side of the server, until [`SqsProxy::heal`].
    Hold,
    /// The entries of a batch at these places, counted from 0, do not reach the server and fail
    /// with this code.
    FailEntries {
        /// The places.
        at: Vec<usize>,
        /// The code, `InternalError` or `ReceiptHandleIsInvalid` for example.
        code: &'static str,
        /// Whether the answer blames the sender: then there is no point in trying again.
        senders_fault: bool,
    },
}

/// A proxy before an SQS server; it ends with this value.
///
/// Operations are named as in the protocol: `ReceiveMessage`, `DeleteMessageBatch`,
/// `ChangeMessageVisibilityBatch`.
#[derive(Debug)]
pub struct SqsProxy {
    address: SocketAddr,
    shared: Arc<Shared>,
    _accepting: JoinSet<()>,
}

#[derive(Debug)]
struct Shared {
    server: String,
    state: Mutex<State>,
    /// Rings whenever the state has changed.
    changed: watch::Sender<()>,
}

#[derive(Debug, Default)]
struct State {
    calls: BTreeMap<String, u64>,
    entries: BTreeMap<String, u64>,
    faults: Vec<(String, Times, Fault)>,
    faults_met: u64,
    /// Every message that was handed out, by its body, as the last answer had it.
    seen: BTreeMap<String, Value>,
    /// Messages to hand out once more, whatever the server thinks.
    again: Vec<Value>,
}

#[derive(Clone, Copy, Debug)]
enum Times {
    Left(u64),
    Always,
}

impl SqsProxy {
    /// Starts one before this server.
    ///
    /// # Panics
    /// When no port can be opened.
    pub async fn before(sqs: &Sqs) -> Self {
        let server = sqs.endpoint().trim_start_matches("http://").to_owned();
        let listener = TcpListener::bind("127.0.0.1:0")
            .await
            .expect("a port can be opened");
        let address = listener.local_addr().expect("it has an address");
        let shared = Arc::new(Shared {
            server,
            state: Mutex::default(),
            changed: watch::Sender::new(()),
        });
        let mut accepting = JoinSet::new();
        let of_connections = Arc::clone(&shared);
        accepting.spawn(async move {
            let mut connections = JoinSet::new();
            loop {
                let (client, _) = listener
                    .accept()
                    .await
                    .expect("connections can be accepted");
                client
                    .set_nodelay(true)
                    .expect("a socket takes this option");
                connections.spawn(serve(client, Arc::clone(&of_connections)));
                // Those that have ended would pile up.
                while connections.try_join_next().is_some() {}
            }
        });
        Self {
            address,
            shared,
            _accepting: accepting,
        }
    }

    /// The server as it looks through the proxy.
    #[must_use]
    pub fn sqs(&self) -> Sqs {
        Sqs::at(format!("http://{}", self.address))
    }

    /// The next so many calls of an operation have this fault.
    pub fn next(&self, times: u64, operation: &str, fault: Fault) {
        self.change(|state| {
            state
                .faults
                .push((operation.to_owned(), Times::Left(times), fault));
        });
    }

    /// Every call of an operation has this fault, until [`SqsProxy::heal`].
    pub fn every(&self, operation: &str, fault: Fault) {
        self.change(|state| {
            state
                .faults
                .push((operation.to_owned(), Times::Always, fault));
        });
    }

    /// Removes all faults; calls that are held back go on.
    pub fn heal(&self) {
        self.change(|state| state.faults.clear());
    }

    /// Has the next receive hand out the message of this body once more, with the receipt handle of
    /// its last delivery, even if it is deleted since: a standard queue may do that. A long poll in
    /// progress is answered with it, so the queue should be idle.
    ///
    /// # Panics
    /// When no message of this body was ever received.
    pub fn deliver_again(&self, body: &str) {
        self.change(|state| {
            let message = state
                .seen
                .get(body)
                .expect("the message was delivered before")
                .clone();
            state.again.push(message);
        });
    }

    /// How often an operation was called.
    #[must_use]
    pub fn calls(&self, operation: &str) -> u64 {
        self.shared
            .state()
            .calls
            .get(operation)
            .copied()
            .unwrap_or_default()
    }

    /// How many entries the batches of an operation had.
    #[must_use]
    pub fn entries(&self, operation: &str) -> u64 {
        self.shared
            .state()
            .entries
            .get(operation)
            .copied()
            .unwrap_or_default()
    }

    /// How often each operation was called.
    #[must_use]
    pub fn all_calls(&self) -> BTreeMap<String, u64> {
        self.shared.state().calls.clone()
    }

    /// How many calls have met a fault.
    #[must_use]
    pub fn faults_met(&self) -> u64 {
        self.shared.state().faults_met
    }

    /// Waits until an operation was called `count` times.
    ///
    /// # Panics
    /// When that takes longer than 240 seconds.
    pub async fn until_calls(&self, operation: &str, count: u64) {
        self.until(
            || self.calls(operation) >= count,
            &format!("{count} calls of {operation}"),
        )
        .await;
    }

    /// Waits until `count` calls have met a fault.
    ///
    /// # Panics
    /// When that takes longer than 240 seconds.
    pub async fn until_faults_met(&self, count: u64) {
        self.until(|| self.faults_met() >= count, &format!("{count} faults"))
            .await;
    }

    async fn until(&self, so: impl Fn() -> bool + Send + Sync, what: &str) {
        let mut changed = self.shared.changed.subscribe();
        let reached = async {
            while !so() {
                changed.changed().await.expect("the sender is ours");
            }
        };
        if tokio::time::timeout(WAIT_LIMIT, reached).await.is_err() {
            panic!("waited for {what}; called: {:?}", self.all_calls());
        }
    }

    fn change(&self, change: impl FnOnce(&mut State)) {
        self.shared.change(change);
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state
            .lock()
            .expect("no thread panics while it holds the lock")
    }

    fn change<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        let outcome = change(&mut self.state());
        self.changed.send_replace(());
        outcome
    }

    async fn until<T: Send>(&self, mut so: impl FnMut(&mut State) -> Option<T> + Send) -> T {
        let mut changed = self.changed.subscribe();
        loop {
            if let Some(found) = so(&mut self.state()) {
                return found;
            }
            changed.changed().await.expect("the sender lives in self");
        }
    }
}

impl State {
    /// Counts a call and returns its fault.
    fn arrives(&mut self, operation: &str, request: &Value) -> Option<Fault> {
        *self.calls.entry(operation.to_owned()).or_default() += 1;
        let entries = request["Entries"].as_array().map_or(0, Vec::len) as u64;
        *self.entries.entry(operation.to_owned()).or_default() += entries;
        let at = self
            .faults
            .iter()
            .position(|(name, ..)| name == operation)?;
        let (_, times, fault) = self.faults.get_mut(at)?;
        let fault = fault.clone();
        let is_last = match times {
            Times::Left(left) => {
                *left -= 1;
                *left == 0
            }
            Times::Always => false,
        };
        // A fault that holds calls back must stay: the waiting calls check whether it is still
        // there.
        if is_last {
            self.faults.remove(at);
        }
        self.faults_met += 1;
        Some(fault)
    }
}

/// One connection: a request, its answer, the next request.
async fn serve(client: TcpStream, shared: Arc<Shared>) {
    let mut client = BufReader::new(client);
    while let Ok(Some(request)) = Frame::read(&mut client).await {
        let answered = tokio::select! {
            answered = answer(request, &shared) => answered,
            // A client that goes away takes its call to the server with it.
            () = gone(client.get_ref()) => None,
        };
        let Some(reply) = answered else { return };
        if client.get_mut().write_all(&reply.to_bytes()).await.is_err() {
            return;
        }
    }
}

async fn gone(client: &TcpStream) {
    let mut byte = [0];
    // A client sends nothing while it waits for an answer: a readable socket means that it has
    // closed.
    _ = client.peek(&mut byte).await;
}

/// Returns the answer to a request. `None`: the client gets none.
async fn answer(mut request: Frame, shared: &Shared) -> Option<Frame> {
    let target = request.header("x-amz-target").unwrap_or_default();
    let operation = target.rsplit('.').next().unwrap_or_default().to_owned();
    let body: Value = serde_json::from_slice(request.body()).unwrap_or_default();
    match shared.change(|state| state.arrives(&operation, &body)) {
        None => {}
        Some(Fault::LoseReply) => {
            forward(request, shared).await;
            return None;
        }
        Some(Fault::Throttle) => {
            return Some(refusal(
                "400 Bad Request",
                "ThrottlingException",
                "Rate exceeded",
            ));
        }
        Some(Fault::Unavailable) => {
            return Some(refusal(
                "503 Service Unavailable",
                "ServiceUnavailable",
                "Try again later",
            ));
        }
        Some(Fault::Deny(code)) => {
            return Some(refusal("403 Forbidden", code, "The test does not allow it"));
        }
        Some(Fault::Hold) => {
            shared
                .until(|state| state.is_healed(&operation).then_some(()))
                .await;
        }
        Some(Fault::FailEntries {
            at,
            code,
            senders_fault,
        }) => {
            return fail_entries(
                request,
                body,
                shared,
                &Failing {
                    at,
                    code,
                    senders_fault,
                },
            )
            .await;
        }
    }
    if operation != "ReceiveMessage" {
        return forward(request, shared).await;
    }
    request.set_header("accept-encoding", "identity");
    let again = shared.until(|state| state.again.pop());
    let reply = tokio::select! {
        biased;
        message = again => Frame::reply("200 OK", json!({"Messages": [message]}).to_string().into()),
        reply = forward(request, shared) => reply?,
    };
    remember(&reply, shared);
    Some(reply)
}

impl State {
    fn is_healed(&self, operation: &str) -> bool {
        !self
            .faults
            .iter()
            .any(|(name, _, fault)| name == operation && *fault == Fault::Hold)
    }
}

/// Keeps what a receive has handed out.
fn remember(reply: &Frame, shared: &Shared) {
    let body: Value = serde_json::from_slice(reply.body()).unwrap_or_default();
    let messages = body["Messages"].as_array().into_iter().flatten();
    let mut state = shared.state();
    for message in messages {
        let text = message["Body"].as_str().unwrap_or_default();
        state.seen.insert(text.to_owned(), message.clone());
    }
}

/// Which entries of a batch fail, and how.
struct Failing {
    at: Vec<usize>,
    code: &'static str,
    senders_fault: bool,
}

/// The server gets the other entries; the answer has them all.
async fn fail_entries(
    mut request: Frame,
    mut body: Value,
    shared: &Shared,
    failing: &Failing,
) -> Option<Frame> {
    let entries = body["Entries"].as_array().cloned().unwrap_or_default();
    let (refused, passed): (Vec<_>, Vec<_>) = entries
        .into_iter()
        .enumerate()
        .partition(|(n, _)| failing.at.contains(n));
    let failed = refused.iter().map(|(_, entry)| {
        json!({
            "Id": entry["Id"], "SenderFault": failing.senders_fault, "Code": failing.code,
            "Message": "the test wants it to fail",
        })
    });
    let failed: Vec<Value> = failed.collect();
    if passed.is_empty() {
        return Some(Frame::reply(
            "200 OK",
            json!({"Successful": [], "Failed": failed})
                .to_string()
                .into(),
        ));
    }
    body["Entries"] = passed.into_iter().map(|(_, entry)| entry).collect();
    request.set_body(body.to_string().into());
    let mut reply = forward(request, shared).await?;
    let mut answer: Value = serde_json::from_slice(reply.body()).ok()?;
    let mut all = answer["Failed"].as_array().cloned().unwrap_or_default();
    all.extend(failed);
    answer["Failed"] = all.into();
    reply.set_body(answer.to_string().into());
    Some(reply)
}

/// The server's answer; `None` when it has none.
async fn forward(mut request: Frame, shared: &Shared) -> Option<Frame> {
    let mut server = TcpStream::connect(&shared.server).await.ok()?;
    server.set_nodelay(true).ok()?;
    request.set_header("connection", "close");
    server.write_all(&request.to_bytes()).await.ok()?;
    let mut reply = Frame::read(&mut BufReader::new(server)).await.ok()??;
    reply.set_header("connection", "keep-alive");
    Some(reply)
}

/// An error reply of the protocol.
fn refusal(status: &str, code: &str, text: &str) -> Frame {
    let body = json!({"__type": format!("com.amazonaws.sqs#{code}"), "message": text});
    Frame::reply(status, body.to_string().into())
}
