//! A proxy before a DynamoDB: it counts, refuses and loses calls, and changes the time of answers.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use parking_lot::Mutex;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;

/// A fault of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fault {
    /// The server executes it, and the connection is closed before the answer.
    LoseReply,
    /// The call does not reach the server, and is refused with this status and code.
    Refuse(u16, &'static str),
}

#[derive(Debug, Default)]
struct State {
    calls: BTreeMap<String, u64>,
    /// The faults of the next calls of an operation, and their number.
    faults: Vec<(&'static str, u64, Fault)>,
    /// The seconds by which the `Date` of answers is moved.
    date_s: i64,
}

/// A proxy; it ends with this value. Operations are named as in the protocol: `PutItem`.
#[derive(Debug)]
pub(super) struct Proxy {
    address: SocketAddr,
    state: Arc<Mutex<State>>,
    _accepting: JoinSet<()>,
}

impl Proxy {
    pub(super) async fn before(server: &str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let state = Arc::<Mutex<State>>::default();
        let server = server.to_owned();
        let shared = Arc::clone(&state);
        let mut accepting = JoinSet::new();
        accepting.spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((client, _)) = listener.accept().await {
                connections.spawn(serve(client, server.clone(), Arc::clone(&shared)));
            }
        });
        Self {
            address,
            state,
            _accepting: accepting,
        }
    }

    pub(super) fn endpoint(&self) -> String {
        format!("http://{}", self.address)
    }

    /// The next calls of this operation meet the fault.
    pub(super) fn next(&self, operation: &'static str, times: u64, fault: Fault) {
        self.state.lock().faults.push((operation, times, fault));
    }

    /// Returns whether every planned fault has happened.
    pub(super) fn is_spent(&self) -> bool {
        self.state.lock().faults.is_empty()
    }

    pub(super) fn heal(&self) {
        self.state.lock().faults.clear();
    }

    /// Moves the `Date` of every answer.
    pub(super) fn move_dates(&self, seconds: i64) {
        self.state.lock().date_s = seconds;
    }

    /// The number of calls of each operation since the last question.
    pub(super) fn calls(&self) -> BTreeMap<String, u64> {
        std::mem::take(&mut self.state.lock().calls)
    }
}

impl State {
    fn meet(&mut self, operation: &str) -> Option<Fault> {
        *self.calls.entry(operation.to_owned()).or_default() += 1;
        let at = self
            .faults
            .iter()
            .position(|(planned, ..)| *planned == operation)?;
        let (_, times, fault) = &mut self.faults[at];
        let fault = *fault;
        *times -= 1;
        if *times == 0 {
            self.faults.remove(at);
        }
        Some(fault)
    }
}

/// A request or an answer: the lines before the body, and the body.
struct Part {
    head: String,
    body: Vec<u8>,
}

async fn serve(mut client: TcpStream, server: String, state: Arc<Mutex<State>>) {
    let mut upstream = None;
    while let Some(request) = read(&mut client).await {
        let target = header(&request.head, "x-amz-target").unwrap_or_default();
        let operation = target.rsplit('.').next().unwrap_or_default().to_owned();
        let fault = state.lock().meet(&operation);
        let answer = match fault {
            Some(Fault::Refuse(status, code)) => refusal(status, code),
            lost_or_not => {
                let Some(answer) = forward(&mut upstream, &server, &request).await else {
                    return;
                };
                if lost_or_not == Some(Fault::LoseReply) {
                    return;
                }
                answer
            }
        };
        let date_s = state.lock().date_s;
        let head = moved(&answer.head, date_s);
        if client.write_all(head.as_bytes()).await.is_err()
            || client.write_all(&answer.body).await.is_err()
        {
            return;
        }
    }
}

async fn forward(upstream: &mut Option<TcpStream>, server: &str, request: &Part) -> Option<Part> {
    let connection = match upstream {
        Some(connection) => connection,
        none => none.insert(TcpStream::connect(server).await.ok()?),
    };
    connection.write_all(request.head.as_bytes()).await.ok()?;
    connection.write_all(&request.body).await.ok()?;
    read(connection).await
}

async fn read(stream: &mut TcpStream) -> Option<Part> {
    let mut bytes = Vec::new();
    let end = loop {
        if let Some(at) = bytes.windows(4).position(|four| four == b"\r\n\r\n") {
            break at + 4;
        }
        if stream.read_buf(&mut bytes).await.ok()? == 0 {
            return None;
        }
    };
    let mut body = bytes.split_off(end);
    let head = String::from_utf8(bytes).ok()?;
    let length = header(&head, "content-length").map_or(0, |length| length.parse().unwrap());
    while body.len() < length {
        if stream.read_buf(&mut body).await.ok()? == 0 {
            return None;
        }
    }
    Some(Part { head, body })
}

fn header<'a>(head: &'a str, name: &str) -> Option<&'a str> {
    head.lines().find_map(|line| {
        let (found, value) = line.split_once(':')?;
        found.eq_ignore_ascii_case(name).then(|| value.trim())
    })
}

fn refusal(status: u16, code: &str) -> Part {
    let body = format!(
        r#"{{"__type":"com.amazonaws.dynamodb.v20120810#{code}","message":"by the proxy"}}"#
    );
    let head = format!(
        "HTTP/1.1 {status} Refused\r\ncontent-type: application/x-amz-json-1.0\r\ndate: {}\r\ncontent-length: {}\r\n\r\n",
        httpdate::fmt_http_date(SystemTime::now()),
        body.len()
    );
    Part {
        head,
        body: body.into_bytes(),
    }
}

/// The head with another `Date`.
fn moved(head: &str, seconds: i64) -> String {
    let Some(date) = header(head, "date").filter(|_| seconds != 0) else {
        return head.to_owned();
    };
    let at = httpdate::parse_http_date(date).unwrap();
    let at_s = at.duration_since(UNIX_EPOCH).unwrap().as_secs();
    let at_s = at_s.checked_add_signed(seconds).unwrap();
    let other = httpdate::fmt_http_date(UNIX_EPOCH + Duration::from_secs(at_s));
    head.replace(date, &other)
}
