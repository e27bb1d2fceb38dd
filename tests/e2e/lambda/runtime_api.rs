//! An environment of Lambda: the runtime API that a function polls, and its process.

use std::ffi::OsStr;
use std::net::SocketAddr;
use std::path::Path;
use std::process::Stdio;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use axum::Router;
use axum::extract::{Path as UrlPath, State};
use axum::http::{HeaderMap, HeaderValue, StatusCode};
use axum::routing::{get, post};
use serde_json::Value;
use tokio::process::{Child, Command};
use tokio::sync::{Mutex, mpsc};
use tokio::time::{sleep, timeout};

/// The fault of one invocation.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Fault {
    None,
    /// The environment is killed after this time.
    KillAfter(Duration),
    /// The environment is frozen after this time, for so long.
    FreezeAfter(Duration, Duration),
}

/// The end of an invocation.
#[derive(Debug)]
pub(crate) enum Outcome {
    Answered(Value),
    Failed(Value),
    /// The environment is gone: killed, or out of time.
    Ended,
}

struct Api {
    invocations: Mutex<mpsc::Receiver<Invocation>>,
    answers: mpsc::Sender<(String, bool, Value)>,
}

struct Invocation {
    id: String,
    event: Value,
    deadline_ms: u128,
}

/// A process of a function, and the runtime API that it polls.
pub(crate) struct Environment {
    process: Child,
    invocations: mpsc::Sender<Invocation>,
    answers: mpsc::Receiver<(String, bool, Value)>,
    invoked: u64,
    server: tokio::task::JoinHandle<()>,
}

impl Environment {
    pub(crate) async fn start(program: &Path, arguments: &[&Path]) -> Self {
        let (invocations, to_invoke) = mpsc::channel(1);
        let (to_answer, answers) = mpsc::channel(1);
        let api = Arc::new(Api {
            invocations: Mutex::new(to_invoke),
            answers: to_answer,
        });
        let app = Router::new()
            .route("/2018-06-01/runtime/invocation/next", get(next))
            .route(
                "/2018-06-01/runtime/invocation/{id}/response",
                post(response),
            )
            .route("/2018-06-01/runtime/invocation/{id}/error", post(error))
            .route("/2018-06-01/runtime/init/error", post(init_error))
            .with_state(api);
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address: SocketAddr = listener.local_addr().unwrap();
        let server = tokio::spawn(async move { axum::serve(listener, app).await.unwrap() });
        let process = Command::new(program)
            .args(arguments.iter().map(AsRef::<OsStr>::as_ref))
            .env("AWS_LAMBDA_RUNTIME_API", address.to_string())
            .env("AWS_LAMBDA_FUNCTION_NAME", "orders")
            .env("AWS_LAMBDA_FUNCTION_MEMORY_SIZE", "128")
            .env("AWS_LAMBDA_FUNCTION_VERSION", "1")
            .env("AWS_LAMBDA_LOG_STREAM_NAME", "s")
            .env("AWS_LAMBDA_LOG_GROUP_NAME", "g")
            .stdin(Stdio::null())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        Self {
            process,
            invocations,
            answers,
            invoked: 0,
            server,
        }
    }

    /// Invokes the function once, for at most `limit`: what still runs then is killed, as Lambda
    /// does.
    pub(crate) async fn invoke(&mut self, event: &Value, limit: Duration, fault: Fault) -> Outcome {
        self.invoked += 1;
        let id = self.invoked.to_string();
        let ends = SystemTime::now() + limit;
        let since_epoch = ends.duration_since(SystemTime::UNIX_EPOCH).unwrap();
        let invocation = Invocation {
            id: id.clone(),
            event: event.clone(),
            deadline_ms: since_epoch.as_millis(),
        };
        self.invocations.send(invocation).await.unwrap();
        match fault {
            Fault::None => {}
            Fault::KillAfter(after) => {
                sleep(after).await;
                return self.end().await;
            }
            Fault::FreezeAfter(after, duration) => {
                sleep(after).await;
                self.signal("STOP").await;
                sleep(duration).await;
                self.signal("CONT").await;
            }
        }
        let left = ends.duration_since(SystemTime::now()).unwrap_or_default();
        match timeout(left, self.answers.recv()).await {
            Ok(Some((answered, succeeded, answer))) if answered == id && succeeded => {
                Outcome::Answered(answer)
            }
            Ok(Some((answered, _, answer))) if answered == id => Outcome::Failed(answer),
            Ok(other) => panic!("an answer to no invocation: {other:?}"),
            Err(_elapsed) => self.end().await,
        }
    }

    async fn end(&mut self) -> Outcome {
        self.process.kill().await.unwrap();
        Outcome::Ended
    }

    async fn signal(&self, signal: &str) {
        let Some(pid) = self.process.id() else { return };
        let sent = Command::new("kill")
            .args(["-s", signal, &pid.to_string()])
            .status()
            .await;
        assert!(sent.unwrap().success());
    }
}

impl Drop for Environment {
    fn drop(&mut self) {
        self.server.abort();
    }
}

async fn next(State(api): State<Arc<Api>>) -> (HeaderMap, String) {
    let Some(invocation) = api.invocations.lock().await.recv().await else {
        return std::future::pending().await;
    };
    let mut headers = HeaderMap::new();
    for (name, value) in [
        ("lambda-runtime-aws-request-id", invocation.id),
        (
            "lambda-runtime-deadline-ms",
            invocation.deadline_ms.to_string(),
        ),
        (
            "lambda-runtime-invoked-function-arn",
            "arn:aws:lambda:eu-central-1:1:function:orders".to_owned(),
        ),
    ] {
        headers.insert(name, HeaderValue::from_str(&value).unwrap());
    }
    (headers, invocation.event.to_string())
}

async fn response(
    State(api): State<Arc<Api>>,
    UrlPath(id): UrlPath<String>,
    body: String,
) -> StatusCode {
    answered(&api, id, true, &body).await
}

async fn error(
    State(api): State<Arc<Api>>,
    UrlPath(id): UrlPath<String>,
    body: String,
) -> StatusCode {
    answered(&api, id, false, &body).await
}

async fn answered(api: &Api, id: String, succeeded: bool, body: &str) -> StatusCode {
    let body = serde_json::from_str(body).unwrap();
    _ = api.answers.send((id, succeeded, body)).await;
    StatusCode::ACCEPTED
}

async fn init_error(body: String) -> StatusCode {
    panic!("the function cannot start: {body}")
}
