//! The door for functions: its settings, its path, its tokens and its stop. What clients see is
//! tested by `scripts/clients`, and the API by the tests of `oncegate-serve`.

use std::io;
use std::process::{Command, Output};

use oncegate_testkit::{LoopbackPort, Process, process, until};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use super::LIMIT;

const TOKEN: &str = "a-token-of-the-caller-cron";

/// A folder with a configuration, and a token beside it.
struct Folder {
    dir: TempDir,
    port: LoopbackPort,
}

impl Folder {
    fn new(door: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let port = LoopbackPort::reserve();
        let (listen, store) = (port.number(), dir.path().join("records.db"));
        let text = format!(
            "version = 1\nstore = {{ url = \"sqlite:{}\" }}\nstatus = {{ listen = \"off\" }}\n\
             [door.functions]\nlisten = \"127.0.0.1:{listen}\"\n{door}\n",
            store.display()
        );
        std::fs::write(dir.path().join("oncegate.toml"), text).unwrap();
        std::fs::write(dir.path().join("token"), format!("{TOKEN}\n")).unwrap();
        Self { dir, port }
    }

    fn command(&self, verb: &str) -> Command {
        let mut command = process::bound_to_parent(env!("CARGO_BIN_EXE_oncegate"), "KILL");
        command
            .arg(verb)
            .arg("--config")
            .arg(self.dir.path().join("oncegate.toml"));
        command
    }

    fn check(&self) -> Output {
        self.command("check").output().unwrap()
    }

    async fn serve(&self) -> Process {
        let log = self.dir.path().join("log");
        let mut server = Process::spawn_logged("oncegate serve", self.command("serve"), &log);
        until("the server to listen", LIMIT, async || {
            if let Some(status) = server.try_wait() {
                let log = std::fs::read_to_string(&log).unwrap_or_default();
                panic!("it has ended with {status}: {log}");
            }
            let connected = TcpStream::connect(("127.0.0.1", self.port.number())).await;
            connected.map(drop).map_err(|error| error.to_string())
        })
        .await;
        server
    }

    async fn post(&self, path: &str, token: &str, body: Value) -> (u16, Value) {
        self.try_post(path, token, body).await.unwrap()
    }

    /// Sends a request as `curl` does, and returns its status and its answer.
    async fn try_post(&self, path: &str, token: &str, body: Value) -> io::Result<(u16, Value)> {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port.number())).await?;
        let body = body.to_string();
        let request = format!(
            "POST {path} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {token}\r\n\
             content-length: {}\r\nconnection: close\r\n\r\n{body}",
            body.len()
        );
        stream.write_all(request.as_bytes()).await?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await?;
        let Some((head, body)) = answer.split_once("\r\n\r\n") else {
            return Err(io::ErrorKind::UnexpectedEof.into());
        };
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        Ok((status, serde_json::from_str(body).unwrap()))
    }
}

const API: &str =
    r#"api = { callers = { cron = { token = { file = "token" }, scopes = ["nightly"] } } }"#;

#[test]
fn a_door_for_functions_that_cannot_serve_is_refused_in_words() {
    let callers = |caller: &str| format!("api = {{ callers = {{ cron = {caller} }} }}");
    for (door, words) in [
        ("api = { callers = {} }".to_owned(), "no caller"),
        ("api = {}".to_owned(), "callers"),
        (callers("{ scopes = [\"a\"] }"), "token"),
        (
            callers("{ token = { file = \"token\" }, scopes = [] }"),
            "has no scope",
        ),
        (
            callers("{ token = { file = \"token\" }, scopes = [\"a b\"] }"),
            "a b",
        ),
        (
            callers("{ token = { file = \"token\" }, scopes = [\"a\"], max_buffered = \"1KiB\" }"),
            "one request may have",
        ),
        (format!("{API}\nupstream = \"http://127.0.0.1:1\""), "api"),
        (format!("{API}\nmax_attempts = 255"), "between 1 and 254"),
        (format!("{API}\nlease = \"1ms\""), "between 100 ms"),
        (
            API.replace("api = {", "api = { keys = { daily = \"order_id\" }, "),
            "no caller has this scope",
        ),
    ] {
        let checked = Folder::new(&door).check();
        let said = String::from_utf8_lossy(&checked.stderr).into_owned();
        assert_eq!(checked.status.code(), Some(1), "{door}: {said}");
        assert!(said.contains(words), "{door}: {said}");
    }
    let fine = Folder::new(API).check();
    assert!(fine.status.success(), "{fine:?}");
    let short = Folder::new(API);
    std::fs::write(short.dir.path().join("token"), "short").unwrap();
    let refused = short.command("serve").output().unwrap();
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert_eq!(refused.status.code(), Some(78), "{said}");
    assert!(said.contains("openssl rand"), "{said}");
}

#[tokio::test]
async fn a_door_for_functions_has_a_path_rotates_tokens_and_stops() {
    let folder = Folder::new(&format!("path = \"/once/\"\n{API}"));
    let mut server = folder.serve().await;
    let job = json!({ "scope": "nightly", "key": "a" });
    let (status, granted) = folder.post("/once/v1/claims", TOKEN, job.clone()).await;
    assert_eq!(status, 201, "{granted}");
    assert_eq!(
        folder.post("/once/v1/nothing", TOKEN, json!({})).await.0,
        404
    );
    let done = json!({ "claim": granted["claim"], "result": 12 });

    let token = folder.dir.path().join("token");
    std::fs::write(&token, format!("{TOKEN}\nanother-token-of-the-caller\n")).unwrap();
    until("the new token to be known", LIMIT, async || {
        let look = folder.post("/once/v1/look", "another-token-of-the-caller", job.clone());
        match look.await {
            (200, _) => Ok(()),
            other => Err(format!("{other:?}")),
        }
    })
    .await;

    // One that waits is answered when the server stops, unless its request has not arrived by then.
    let waits = json!({ "scope": "nightly", "key": "a", "wait_ms": 60_000 });
    until("one that waits to be answered", LIMIT, async || {
        let waiting = folder.try_post("/once/v1/claims", TOKEN, waits.clone());
        let stop = async {
            let look = folder.post("/once/v1/look", TOKEN, job.clone());
            assert_eq!(look.await.1["state"], "claimed");
            server.signal("TERM");
            server.end_within(LIMIT).await.code()
        };
        let (waited, ended) = tokio::join!(waiting, stop);
        assert_eq!(ended, Some(0));
        server = folder.serve().await;
        match waited {
            Ok((409, answer)) if answer["state"] == "busy" => Ok(()),
            other => Err(format!("{other:?}")),
        }
    })
    .await;
    assert_eq!(
        folder.post("/once/v1/claims/complete", TOKEN, done).await.0,
        200
    );
    assert_eq!(
        folder.post("/once/v1/claims", TOKEN, job).await.1["result"],
        12
    );
}
