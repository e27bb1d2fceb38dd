//! The service killed with SIGKILL in its handler, and between completion and response.

use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use oncegate_testkit::process::bound_to_parent;
use oncegate_testkit::{HttpClient, Ledger, Process, Redis, Sent, unique};

use crate::world::{LIMIT, settled};

pub(crate) struct Service {
    pub(crate) process: Process,
    pub(crate) client: HttpClient,
}

impl Service {
    fn start(arguments: &[String; 3], http2: bool) -> Self {
        Self::start_program(env!("CARGO_BIN_EXE_http_server"), arguments, http2)
    }

    /// Starts a program that writes its address to the standard output.
    pub(crate) fn start_program(program: &str, arguments: &[String; 3], http2: bool) -> Self {
        let mut command = bound_to_parent(program, "KILL");
        command.args(arguments).stdout(Stdio::piped());
        let mut process = Process::spawn("http_server", command);
        let mut line = String::new();
        let output = process.child().stdout.take().unwrap();
        BufReader::new(output).read_line(&mut line).unwrap();
        let address = line.trim().parse().expect("it writes its address");
        let client = if http2 {
            HttpClient::http2(address)
        } else {
            HttpClient::http1(address)
        };
        Self { process, client }
    }
}

pub(crate) async fn until_written(ledger: &Ledger, line: &str) {
    let deadline = Instant::now() + LIMIT;
    while !ledger.counts().contains_key(line) {
        assert!(Instant::now() < deadline, "{line:?} is not in the ledger");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Kills the service where a request holds, starts it again, and sends the request again. Returns
/// the answer's text and whether it is a repetition.
async fn killed_at(store: &str, hold: &str, line: &str, http2: bool) -> (String, bool) {
    let folder = tempfile::tempdir().unwrap();
    let ledger = Ledger::open(folder.path().join("ledger"));
    let arguments = [
        store.to_owned(),
        unique("http-kill"),
        ledger.path().display().to_string(),
    ];
    let mut service = Service::start(&arguments, http2);
    let client = service.client.clone();
    let hold = hold.to_owned();
    let sent = tokio::spawn(async move {
        let headers = [("x-hold", hold.as_str())];
        client
            .try_send(Sent::post("/charges", "k", "A-7").headers(&headers))
            .await
    });
    until_written(&ledger, line).await;
    service.process.kill();
    assert!(
        sent.await.unwrap().is_err(),
        "no response comes out of a killed process"
    );

    let service = Service::start(&arguments, http2);
    let answer = settled(
        &service.client,
        Sent::post("/charges", "k", "A-7").headers(&[]),
    )
    .await;
    assert_eq!(answer.status, 201);
    let charges = ledger.counts()["charged A-7"];
    assert_eq!(charges, 1, "the order was charged {charges} times");
    let again = settled(
        &service.client,
        Sent::post("/charges", "k", "A-7").headers(&[]),
    )
    .await;
    assert_eq!((again.is_replayed(), &again.body), (true, &answer.body));
    (
        String::from_utf8(answer.body.to_vec()).unwrap(),
        answer.is_replayed(),
    )
}

async fn is_safe_against_kills(store: &str, http2: bool) {
    let recovered = ("attempt 2, recovered: true".to_owned(), false);
    assert_eq!(
        killed_at(store, "before", "begun A-7", http2).await,
        recovered
    );
    assert_eq!(
        killed_at(store, "after", "charged A-7", http2).await,
        recovered
    );
    let replayed = ("attempt 1, recovered: false".to_owned(), true);
    assert_eq!(
        killed_at(store, "response", "completed", http2).await,
        replayed
    );
}

// invariant: second-run-of-request
#[tokio::test]
async fn a_killed_service_is_safe_on_redis() {
    let redis = Redis::shared().await;
    is_safe_against_kills(redis.url(), false).await;
}

// invariant: second-run-of-request
#[tokio::test]
async fn a_killed_service_is_safe_on_sqlite() {
    let folder = tempfile::tempdir().unwrap();
    let file: &Path = &folder.path().join("records.db");
    is_safe_against_kills(&file.display().to_string(), true).await;
}
