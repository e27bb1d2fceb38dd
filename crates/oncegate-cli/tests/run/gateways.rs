//! Workers behind a gateway with a limit of time: its status says nothing of what the worker does.
//! Over SQLite: no other server runs here.

use std::collections::BTreeMap;
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use oncegate_testkit::{LoopbackPort, Process, process, until};
use serde_json::{Value, json};

use super::LIMIT;
use super::raw::{Answer, Asked, RawWorker};
use super::stdin::{Feed, order};

/// A gateway of a few lines: 504 after a second, 502 without an answer.
const SMALL: &str = r#"
import http.client, http.server, sys
class Gateway(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        to = http.client.HTTPConnection(sys.argv[2], timeout=1)
        headers = {name: value for name, value in self.headers.items() if name.lower() not in ("host", "connection")}
        try:
            to.request("POST", self.path, body, headers)
            answer = to.getresponse()
            status, data = answer.status, answer.read()
        except TimeoutError:
            status, data = 504, b"upstream request timeout"
        except (OSError, http.client.HTTPException):
            status, data = 502, b"bad gateway"
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
    def log_message(self, *_): pass
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Gateway).serve_forever()
"#;

/// A server between oncegate and the worker.
#[derive(Clone, Copy, Debug)]
enum Gateway {
    Small,
    Nginx,
}

impl Gateway {
    /// Starts it in front of the worker. Returns its URL.
    async fn start(self, feed: &Feed, worker: &RawWorker) -> (Process, String) {
        let port = LoopbackPort::reserve();
        let upstream = worker.address;
        let command = match self {
            Self::Small => {
                std::fs::write(feed.path("gateway.py"), SMALL).unwrap();
                let mut command = process::bound_to_parent("python3", "KILL");
                command.arg(feed.path("gateway.py"));
                command.args([port.number().to_string(), upstream.to_string()]);
                command
            }
            Self::Nginx => nginx(feed, port.number(), &upstream.to_string()),
        };
        let url = format!("http://127.0.0.1:{}/charge", port.number());
        let started = Process::spawn("a gateway", command);
        until(
            "the gateway to listen",
            LIMIT,
            async || match tokio::net::TcpStream::connect(("127.0.0.1", port.number())).await {
                Ok(_) => Ok(()),
                Err(error) => Err(error.to_string()),
            },
        )
        .await;
        (started, url)
    }
}

fn nginx(feed: &Feed, port: u16, upstream: &str) -> Command {
    let dir = feed.path("nginx");
    std::fs::create_dir(&dir).unwrap();
    let folder = dir.display();
    let temporary: String = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"]
        .map(|name| format!("{name}_temp_path {folder}/{name}; "))
        .concat();
    let config = format!(
        "daemon off; master_process off; pid {folder}/pid; error_log stderr; events {{}}\n\
         http {{ access_log off; {temporary}\n\
         server {{ listen 127.0.0.1:{port}; location / {{ proxy_pass http://{upstream}; proxy_read_timeout 1s; }} }} }}\n"
    );
    std::fs::write(dir.join("nginx.conf"), config).unwrap();
    // Debian keeps it out of a user's path.
    let mut command = process::bound_to_parent("/usr/sbin/nginx", "KILL");
    command.args(["-e", "stderr", "-p"]).arg(&dir);
    command.arg("-c").arg(dir.join("nginx.conf"));
    command
}

/// A call of the worker for an order.
#[derive(Clone, Debug)]
struct Run {
    attempt: u64,
    recovered: bool,
    /// The number of messages in its batch.
    together: usize,
    at: Instant,
}

type Runs = BTreeMap<String, Vec<Run>>;

/// Notes a request; each is a message or a batch.
fn note(runs: &Mutex<Runs>, asked: &Asked) -> Vec<Value> {
    let messages: Vec<Value> = match serde_json::from_str(&asked.body).unwrap() {
        Value::Array(messages) => messages,
        _ => vec![json!({
            "payload": asked.body,
            "attempt": asked.attempt(),
            "recovered": asked.recovered(),
        })],
    };
    for message in &messages {
        let payload: Value = serde_json::from_str(message["payload"].as_str().unwrap()).unwrap();
        let run = Run {
            attempt: message["attempt"].as_u64().unwrap(),
            recovered: message["recovered"].as_bool().unwrap(),
            together: messages.len(),
            at: Instant::now(),
        };
        let mut runs = runs.lock().unwrap();
        runs.entry(payload["order_id"].as_str().unwrap().to_owned())
            .or_default()
            .push(run);
    }
    messages
}

/// A worker that says nothing to the first attempts up to this one, or breaks the connection.
async fn worker(silent: u64) -> (RawWorker, Arc<Mutex<Runs>>) {
    let runs: Arc<Mutex<Runs>> = Arc::default();
    let noted = Arc::clone(&runs);
    let worker = RawWorker::start(move |asked| {
        let messages = note(&noted, asked);
        if messages[0]["attempt"].as_u64().unwrap() <= silent {
            return if asked.body.contains("A-2") && messages.len() == 1 {
                Answer::Bytes(String::new())
            } else {
                Answer::Silence
            };
        }
        let answers: Vec<Value> = messages
            .iter()
            .map(|message| json!({"id": message["id"], "outcome": "complete"}))
            .collect();
        Answer::status(200, "", &Value::from(answers).to_string())
    })
    .await;
    (worker, runs)
}

fn orders(count: usize) -> Feed {
    let orders: Vec<String> = (1..=count).map(|n| order(&format!("A-{n}"))).collect();
    Feed::of(&orders.iter().map(String::as_str).collect::<Vec<_>>())
}

const LEASE: Duration = Duration::from_secs(2);

/// Checks that an order ran twice: again when the lease of the first run had lapsed, and recovered.
fn check_runs(runs: &Runs, count: usize, together: usize, what: &str) {
    assert_eq!(runs.len(), count, "{what}: {runs:?}");
    for (order, runs) in runs {
        let told: Vec<(u64, bool)> = runs
            .iter()
            .map(|run| (run.attempt, run.recovered))
            .collect();
        assert_eq!(told, [(1, false), (2, true)], "{what}: {order}");
        assert_eq!(runs[0].together, together, "{what}: {order}");
        let between = runs[1].at - runs[0].at;
        // The lease begins with the claim, a moment before the request.
        assert!(
            between >= LEASE * 3 / 4,
            "{what}: {order} again after {between:?}"
        );
    }
}

const FLAGS: [&str; 4] = ["--lease", "2s", "--dead-letters", "dead.jsonl"];

async fn one_by_one(gateway: Gateway) {
    let feed = orders(3);
    let (worker, runs) = worker(1).await;
    let (_gateway, url) = gateway.start(&feed, &worker).await;
    let ended = feed
        .run(&[&["--handler", &url, "--set", "max_attempts=4"][..], &FLAGS].concat())
        .await;
    assert_eq!(ended.code, Some(0), "{ended:?}");
    check_runs(&runs.lock().unwrap(), 3, 1, &format!("{gateway:?}"));
    assert!(
        ended.err.contains("504") && ended.err.contains("502"),
        "{ended:?}"
    );
    assert_eq!(feed.read("dead.jsonl"), "");
}

const BATCHED: [&str; 4] = ["--batch-messages", "8", "--set", "batch.wait=2s"];

async fn batched(gateway: Gateway) {
    let feed = orders(8);
    let (worker, runs) = worker(1).await;
    let (_gateway, url) = gateway.start(&feed, &worker).await;
    let ended = feed
        .run(
            &[
                &["--handler", &url, "--set", "max_attempts=4"][..],
                &BATCHED,
                &FLAGS,
            ]
            .concat(),
        )
        .await;
    assert_eq!(ended.code, Some(0), "{ended:?}");
    check_runs(&runs.lock().unwrap(), 8, 8, &format!("{gateway:?}"));
    assert_eq!(feed.read("dead.jsonl"), "");
}

// invariant: gateway-unknown
#[tokio::test]
async fn a_small_gateways_status_is_not_the_workers() {
    one_by_one(Gateway::Small).await;
    batched(Gateway::Small).await;
}

// invariant: gateway-unknown
#[tokio::test]
async fn the_status_of_nginx_is_not_the_workers() {
    one_by_one(Gateway::Nginx).await;
    batched(Gateway::Nginx).await;
}

/// No run is quick enough for the gateway, and no order runs more often than it may.
// invariant: gateway-unknown
#[tokio::test]
async fn no_order_of_a_batch_behind_a_gateway_runs_too_often() {
    let feed = orders(8);
    let (worker, runs) = worker(u64::MAX).await;
    let (_gateway, url) = Gateway::Nginx.start(&feed, &worker).await;
    let ended = feed
        .run(
            &[
                &["--handler", &url, "--set", "max_attempts=2"][..],
                &BATCHED,
                &FLAGS,
            ]
            .concat(),
        )
        .await;
    assert_eq!(ended.code, Some(0), "{ended:?}");
    let runs = runs.lock().unwrap();
    assert!(runs.values().all(|runs| runs.len() == 2), "{runs:?}");
    check_runs(&runs, 8, 8, "for ever");
    assert_eq!(feed.read("dead.jsonl").lines().count(), 8, "{ended:?}");
}
