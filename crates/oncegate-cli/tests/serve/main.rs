//! `oncegate serve` as a proxy in front of a service, over real sockets and real stores.

#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "a test that cannot go on has failed"
)]

mod answers;
mod checks;
mod faults;
mod functions;
mod hostile;
mod kills;
mod raw;
mod stop;
mod streams;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Bytes;
use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse as _, Response};
use oncegate_testkit::{
    HttpAnswer, HttpClient, HttpServer, LoopbackPort, Process, Sent, process, unique, until,
};
use parking_lot::Mutex;
use tempfile::TempDir;
use tokio_util::sync::CancellationToken;

/// The longest wait for anything.
const LIMIT: Duration = Duration::from_secs(240);

/// The headers of a JSON request from a caller.
const FROM_ANNE: &[(&str, &str)] = &[("content-type", "application/json"), ("x-user-id", "anne")];

/// A folder with the configuration and the log of a proxy.
struct Stage {
    dir: TempDir,
    port: LoopbackPort,
    /// The end of the table of the door.
    door: String,
    store: String,
    service: String,
    /// The name of the door, which is the scope of its keys.
    scope: String,
    /// The settings of the listeners.
    serve: String,
}

/// A proxy that runs.
struct Proxy {
    process: Process,
    address: SocketAddr,
}

impl Stage {
    /// A proxy before the service at this URL, with records in a file of SQLite. `door` has more
    /// settings than the service, the caller and the first rule.
    fn before(service: impl Into<String>, door: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let store = format!("sqlite:{}", dir.path().join("records.db").display());
        Self {
            dir,
            port: LoopbackPort::reserve(),
            door: door.to_owned(),
            store,
            service: service.into(),
            scope: "payments".to_owned(),
            serve: "drain_timeout = \"60s\"".to_owned(),
        }
    }

    /// The same with records in this Redis, in a scope of its own.
    fn in_redis(mut self, url: impl Into<String>) -> Self {
        self.store = url.into();
        self.scope = unique("serve");
        self
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Writes the configuration of the proxy at this port, and returns its path.
    fn configuration(&self, port: u16) -> PathBuf {
        let Self {
            door,
            store,
            service,
            scope,
            serve,
            ..
        } = self;
        let text = format!(
            r#"
            version = 1
            store = {{ url = {store:?} }}
            status = {{ listen = "off" }}
            serve = {{ {serve} }}
            [door.{scope}]
            listen = "127.0.0.1:{port}"
            upstream = {service:?}
            principal = {{ header = "x-user-id" }}
            {door}
            "#
        );
        let path = self.path(&format!("oncegate-{port}.toml"));
        std::fs::write(&path, text).unwrap();
        path
    }

    fn command(&self, port: u16) -> Command {
        let mut command = process::bound_to_parent(env!("CARGO_BIN_EXE_oncegate"), "KILL");
        for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("ONCEGATE_")) {
            command.env_remove(name);
        }
        command
            .arg("serve")
            .arg("--config")
            .arg(self.configuration(port));
        command
    }

    async fn start(&self) -> Proxy {
        self.start_at(self.port.number()).await
    }

    async fn start_at(&self, port: u16) -> Proxy {
        let process =
            Process::spawn_logged("oncegate serve", self.command(port), &self.path("log"));
        let address = SocketAddr::from(([127, 0, 0, 1], port));
        let mut proxy = Proxy { process, address };
        until("the proxy to listen", LIMIT, async || {
            if let Some(status) = proxy.process.try_wait() {
                panic!("it has ended with {status}: {}", self.log());
            }
            let connected = tokio::net::TcpStream::connect(address).await;
            connected.map(drop).map_err(|error| error.to_string())
        })
        .await;
        proxy
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.path("log")).unwrap_or_default()
    }
}

impl Proxy {
    fn client(&self) -> HttpClient {
        HttpClient::http1(self.address)
    }

    /// Sends a payment, and returns the answer.
    async fn pay(&self, key: &str, body: &str) -> HttpAnswer {
        self.client()
            .send(Sent::post("/pay", key, body).headers(FROM_ANNE))
            .await
    }

    /// Repeats a payment until it has a status other than 409, 502, 503 and 504.
    async fn pay_until_done(&self, key: &str, body: &str) -> HttpAnswer {
        until("the payment to be done", LIMIT, async || {
            let sent = Sent::post("/pay", key, body).headers(FROM_ANNE);
            let answer = self.client().try_send(sent).await?;
            match answer.status.as_u16() {
                409 | 502..=504 => Err(format!("{answer:?}")),
                _ => Ok(answer),
            }
        })
        .await
    }
}

/// A request as the service saw it.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Seen {
    path: String,
    key: String,
    attempt: String,
    downstream: String,
}

/// A service that does what the headers of a request tell it to, and notes each request.
#[derive(Clone, Default)]
struct Service {
    seen: Arc<Mutex<Vec<Seen>>>,
    /// Lets requests with `x-hold` end.
    go: CancellationToken,
}

impl Service {
    async fn start(&self) -> HttpServer {
        HttpServer::start(Router::new().fallback(handle).with_state(self.clone())).await
    }

    fn seen(&self) -> Vec<Seen> {
        self.seen.lock().clone()
    }

    /// The number of times that each key came.
    fn counts(&self) -> BTreeMap<String, usize> {
        let mut counts = BTreeMap::new();
        for seen in self.seen() {
            *counts.entry(seen.key).or_default() += 1;
        }
        counts
    }

    async fn until_seen(&self, requests: usize) {
        until("the service to get requests", LIMIT, async || {
            let seen = self.seen().len();
            if seen >= requests {
                Ok(())
            } else {
                Err(format!("{seen} of {requests}"))
            }
        })
        .await;
    }
}

async fn handle(State(service): State<Service>, request: Request) -> Response {
    let (head, body) = request.into_parts();
    let header = |name: &str| {
        let value = head.headers.get(name).and_then(|value| value.to_str().ok());
        value.unwrap_or_default().to_owned()
    };
    let body: Bytes = axum::body::to_bytes(axum::body::Body::new(body), usize::MAX)
        .await
        .unwrap_or_default();
    let number = {
        let mut seen = service.seen.lock();
        seen.push(Seen {
            path: head.uri.to_string(),
            key: header("idempotency-key").trim_matches('"').to_owned(),
            attempt: header("oncegate-attempt"),
            downstream: header("oncegate-key"),
        });
        seen.len()
    };
    if head.headers.contains_key("x-hold") {
        service.go.cancelled().await;
    }
    let status = header("x-status").parse().unwrap_or(201);
    let headers = [
        ("set-cookie", "session=of-the-first".to_owned()),
        (
            "access-control-allow-origin",
            "https://first.example".to_owned(),
        ),
        ("traceparent", "00-1-1-01".to_owned()),
        ("x-number", number.to_string()),
        ("connection", "x-hop".to_owned()),
        ("x-hop", "1".to_owned()),
    ];
    let status = StatusCode::from_u16(status).unwrap();
    (status, headers, body).into_response()
}
