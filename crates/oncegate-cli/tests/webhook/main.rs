//! `oncegate serve` with a webhook: events that Stripe's own library signs, over real sockets.

#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "a test that cannot go on has failed"
)]

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::{Request, State};
use axum::http::StatusCode;
use oncegate_testkit::{
    HttpAnswer, HttpClient, HttpServer, LoopbackPort, Process, Sent, process, until,
};
use parking_lot::Mutex;
use tempfile::TempDir;
use tokio_util::sync::CancellationToken;

/// The longest wait for anything.
const LIMIT: Duration = Duration::from_secs(240);

/// Prints the header of Stripe for each body of the list in its first argument.
const SIGN: &str = "
import json, sys
from stripe import WebhookSignature
for body in json.loads(sys.argv[1]):
    print(WebhookSignature.generate_signature_header(body, sys.argv[2]))
";

/// Signs bodies as Stripe does, now.
fn signed(secret: &str, bodies: &[String]) -> Vec<String> {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let python = here.join("../../target/test-servers/webhooks-16.1.0/bin/python3");
    let output = Command::new(&python)
        .args(["-c", SIGN, &serde_json::to_string(bodies).unwrap(), secret])
        .output()
        .unwrap_or_else(|error| {
            panic!(
                "{}: {error}; `scripts/fetch-servers` installs it",
                python.display()
            )
        });
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    let headers = String::from_utf8(output.stdout).unwrap();
    headers.lines().map(str::to_owned).collect()
}

/// A folder with the configuration, the secret and the records of a door.
struct Stage {
    dir: TempDir,
    port: LoopbackPort,
    door: String,
}

impl Stage {
    fn new(door: impl Into<String>) -> Self {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("secret"), "whsec_first\n").unwrap();
        Self {
            dir,
            port: LoopbackPort::reserve(),
            door: door.into(),
        }
    }

    fn secret(&self) -> PathBuf {
        self.dir.path().join("secret")
    }

    fn configuration(&self) -> PathBuf {
        let store = format!("sqlite:{}", self.dir.path().join("records.db").display());
        let door = self
            .door
            .replace("SECRET", &self.secret().display().to_string());
        let port = self.port.number();
        let text = format!(
            "version = 1\nstore = {{ url = {store:?} }}\nstatus = {{ listen = \"off\" }}\n\
             [door.stripe]\nlisten = \"127.0.0.1:{port}\"\n{door}\n"
        );
        let path = self.dir.path().join("oncegate.toml");
        std::fs::write(&path, text).unwrap();
        path
    }

    fn command(&self, verb: &str) -> Command {
        let mut command = process::bound_to_parent(env!("CARGO_BIN_EXE_oncegate"), "KILL");
        for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("ONCEGATE_")) {
            command.env_remove(name);
        }
        command.arg(verb).arg("--config").arg(self.configuration());
        command
    }

    async fn start(&self) -> Process {
        let log = self.dir.path().join("log");
        let mut process = Process::spawn_logged("oncegate serve", self.command("serve"), &log);
        until("the door to open", LIMIT, async || {
            if let Some(status) = process.try_wait() {
                let log = std::fs::read_to_string(&log).unwrap_or_default();
                panic!("it has ended with {status}: {log}");
            }
            let connected = tokio::net::TcpStream::connect(self.address()).await;
            connected.map(drop).map_err(|error| error.to_string())
        })
        .await;
        process
    }

    fn address(&self) -> SocketAddr {
        SocketAddr::from(([127, 0, 0, 1], self.port.number()))
    }

    async fn send(&self, signature: &str, body: &str) -> Result<HttpAnswer, String> {
        let headers = [
            ("content-type", "application/json"),
            ("stripe-signature", signature),
        ];
        let sent = Sent::post("/hooks/stripe", "", body).unkeyed();
        let client = HttpClient::http1(self.address());
        client.try_send(sent.headers(&headers)).await
    }

    /// Sends an event until it is answered by 200, as Stripe does.
    async fn deliver(&self, signature: &str, body: &str) -> HttpAnswer {
        until("the event to be taken", LIMIT, async || {
            let answer = self.send(signature, body).await?;
            if answer.status == StatusCode::OK {
                Ok(answer)
            } else {
                Err(format!("{answer:?}"))
            }
        })
        .await
    }
}

/// A handler of events, which notes each request: the path, the key and the attempt.
#[derive(Clone, Default)]
struct Service {
    seen: Arc<Mutex<Vec<[String; 3]>>>,
    /// Lets events that are to be held end.
    go: CancellationToken,
}

impl Service {
    async fn start(&self) -> HttpServer {
        HttpServer::start(Router::new().fallback(handle).with_state(self.clone())).await
    }

    /// The attempts of each key.
    fn attempts(&self) -> BTreeMap<String, Vec<String>> {
        let mut attempts: BTreeMap<_, Vec<_>> = BTreeMap::new();
        for [path, key, attempt] in self.seen.lock().clone() {
            assert_eq!(path, "/events");
            attempts.entry(key).or_default().push(attempt);
        }
        attempts
    }
}

/// What the type of an event says is what happens to it.
async fn handle(State(service): State<Service>, request: Request) -> StatusCode {
    let (head, body) = request.into_parts();
    let header = |name: &str| {
        let value = head.headers.get(name).and_then(|value| value.to_str().ok());
        value.unwrap_or_default().to_owned()
    };
    let body = axum::body::to_bytes(body, usize::MAX).await.unwrap();
    let event: serde_json::Value = serde_json::from_slice(&body).unwrap();
    let attempt = header("oncegate-attempt");
    service.seen.lock().push([
        head.uri.path().to_owned(),
        header("idempotency-key"),
        attempt.clone(),
    ]);
    match event["type"].as_str() {
        Some("hold") => service.go.cancelled().await,
        Some("fail") if attempt == "1" => return StatusCode::INTERNAL_SERVER_ERROR,
        Some("missing") if attempt == "1" => return StatusCode::NOT_FOUND,
        _ => {}
    }
    StatusCode::OK
}

const DOOR: &str = r#"
path = "/hooks"
webhook = { stripe = { secrets = [{ file = "SECRET" }], tolerance = "1d" } }
"#;

// invariant: second-run-of-event
// invariant: forged-event
#[tokio::test]
async fn events_of_stripe_are_handled_once() {
    let service = Service::default();
    let server = service.start().await;
    let stage = Stage::new(format!(
        "upstream = \"http://{}/events\"\n{DOOR}",
        server.address()
    ));
    let _process = stage.start().await;
    let bodies: Vec<String> = (0..20)
        .map(|number| {
            let kind = ["charge", "fail", "missing", "charge"][number % 4];
            format!(r#"{{"id":"evt_{number}","type":"{kind}"}}"#)
        })
        .collect();

    // By another secret: nothing.
    for (signature, body) in signed("whsec_other", &bodies).iter().zip(&bodies) {
        let refused = stage.send(signature, body).await.unwrap();
        assert_eq!(refused.problem(), "signature-refused");
    }
    assert_eq!(service.attempts(), BTreeMap::new());

    // Each three times at once, and until it is taken.
    let signatures = signed("whsec_first", &bodies);
    let deliveries = signatures.iter().zip(&bodies).cycle().take(60);
    let deliveries = deliveries.map(|(signature, body)| stage.deliver(signature, body));
    let answers = futures_util::future::join_all(deliveries).await;
    let first = answers.iter().filter(|answer| !answer.is_replayed());
    assert_eq!(first.count(), 20);
    for (number, body) in bodies.iter().enumerate() {
        let attempts = &service.attempts()[&format!("\"evt_{number}\"")];
        let expected: &[&str] = if body.contains("charge") {
            &["1"]
        } else {
            &["1", "2"]
        };
        assert_eq!(attempts, expected, "{body}");
    }

    // Another secret in the file counts at once.
    std::fs::write(stage.secret(), "whsec_second").unwrap();
    let refused = stage.send(&signatures[0], &bodies[0]).await.unwrap();
    assert_eq!(refused.problem(), "signature-refused");
    let signatures = signed("whsec_second", &bodies);
    assert!(
        stage
            .deliver(&signatures[0], &bodies[0])
            .await
            .is_replayed()
    );
}

// invariant: second-run-of-event
#[tokio::test]
async fn an_event_that_a_kill_has_cut_off_runs_again_and_says_so() {
    let service = Service::default();
    let server = service.start().await;
    let stage = Stage::new(format!(
        "upstream = \"http://{}/events\"\nlease = \"5s\"\n{DOOR}",
        server.address()
    ));
    let mut process = stage.start().await;
    let bodies = [
        r#"{"id":"evt_done","type":"charge"}"#.to_owned(),
        r#"{"id":"evt_held","type":"hold"}"#.to_owned(),
    ];
    let signatures = signed("whsec_first", &bodies);
    assert!(
        !stage
            .deliver(&signatures[0], &bodies[0])
            .await
            .is_replayed()
    );
    let cut = async {
        until("the handler to begin", LIMIT, async || {
            let attempts = service.attempts();
            let begun = attempts.get("\"evt_held\"").cloned();
            begun.ok_or_else(|| "it has not".to_owned())
        })
        .await;
        process.kill();
    };
    let (answer, ()) = tokio::join!(stage.send(&signatures[1], &bodies[1]), cut);
    assert!(answer.is_err(), "{answer:?}");
    service.go.cancel();
    let _again = stage.start().await;
    assert!(
        !stage
            .deliver(&signatures[1], &bodies[1])
            .await
            .is_replayed()
    );
    for (signature, body) in signatures.iter().zip(&bodies) {
        assert!(stage.deliver(signature, body).await.is_replayed());
    }
    let attempts = service.attempts();
    assert_eq!(attempts["\"evt_done\""], ["1"]);
    assert_eq!(attempts["\"evt_held\""], ["1", "2; recovered"]);
}

#[test]
fn a_webhook_that_would_not_protect_is_refused_in_words() {
    const UPSTREAM: &str = "upstream = \"http://127.0.0.1:1/in\"";
    const SECRETS: &str = "secrets = [{ file = \"SECRET\" }]";
    let cases = [
        ("webhook = {}".to_owned(), "names no provider"),
        (
            format!("webhook = {{ stripe = {{ {SECRETS} }}, github = {{ {SECRETS} }} }}"),
            "stripe and github",
        ),
        ("webhook = { paypal = {} }".to_owned(), "paypal"),
        ("webhook = { stripe = {} }".to_owned(), "give 1 to 16"),
        (
            format!("webhook = {{ stripe = {{ {SECRETS}, tolerance = \"2d\" }} }}"),
            "between a minute and a day",
        ),
        (
            format!("retention = \"1d\"\nwebhook = {{ stripe = {{ {SECRETS} }} }}"),
            "72 hours",
        ),
        (
            format!("webhook = {{ twilio = {{ {SECRETS} }} }}"),
            "entered at Twilio",
        ),
        (
            format!("webhook = {{ hmac = {{ {SECRETS}, id = {{ json = [\"id\"] }} }} }}"),
            "no name of a header",
        ),
        (
            format!(
                "webhook = {{ hmac = {{ {SECRETS}, header = \"x-s\", id = \"message_id\" }} }}"
            ),
            "no message key or id",
        ),
        (
            format!("principal = \"single-tenant\"\nwebhook = {{ github = {{ {SECRETS} }} }}"),
            "it is for a proxy",
        ),
    ];
    for (door, words) in cases {
        let stage = Stage::new(format!("{UPSTREAM}\n{door}"));
        let checked = stage.command("check").output().unwrap();
        let said = String::from_utf8_lossy(&checked.stderr).into_owned();
        assert_eq!(checked.status.code(), Some(1), "{door}: {said}");
        assert!(said.contains(words), "{door}: {said}");
    }
    for door in [
        format!("webhook = {{ standard = {{ {SECRETS} }} }}"),
        format!("webhook = {{ stripe = {{ {SECRETS}, id = \"object-and-type\" }} }}"),
        format!("webhook = {{ github = {{ {SECRETS} }} }}"),
        format!("webhook = {{ shopify = {{ {SECRETS} }} }}"),
        format!("webhook = {{ slack = {{ {SECRETS} }} }}"),
        format!("webhook = {{ twilio = {{ {SECRETS}, url = \"https://a.example/b\" }} }}"),
        format!(
            "webhook = {{ hmac = {{ {SECRETS}, header = \"x-s\", hash = \"sha512\", \
             encoding = \"base64\", timestamp = {{ header = \"x-t\" }}, id = {{ header = \"x-i\" }} }} }}"
        ),
        "webhook = { none = { id = { json = [\"id\"] } } }".to_owned(),
    ] {
        let stage = Stage::new(format!("{UPSTREAM}\n{door}"));
        let checked = stage.command("check").output().unwrap();
        let said = String::from_utf8_lossy(&checked.stderr).into_owned();
        assert!(checked.status.success(), "{door}: {said}");
        assert_eq!(said.contains("not signed"), door.contains("none"), "{said}");
    }
}
